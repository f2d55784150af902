"""Packing of examples into micro-batches with two token budgets, one for each side.

Examples wait in a small pool, which can always be drained in order of arrival within `max_wait_batches`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ds_encdec.config.shares import Budgets

Item = TypeVar("Item")

# Free share of either side below which best fit, and no longer the order of arrival, fills a batch.
BEST_FIT_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Item]):
    """An item in the pool, its tokens on each side, and the number of batches packed without it."""

    item: Item
    encoder_tokens: int
    decoder_tokens: int
    waited_batches: int = 0


class _Plan(NamedTuple):
    """The space left in the last batch (number `turn`) if batches are filled strictly in order of arrival (next fit).
    Next fit is monotone: removing examples never makes a later one leave later, so best fit keeps a plan's promise."""

    turn: int
    encoder_room: int
    decoder_room: int
    examples_room: int


class Packer(Generic[Item]):
    """Fills micro-batches from a pool; the result depends on the pool and the arrivals alone."""

    def __init__(self, budgets: Budgets, *, pool_examples: int, max_wait_batches: int) -> None:
        self._budgets = budgets
        self._capacity = np.array([budgets.encoder_tokens, budgets.decoder_tokens])
        self._scale = self._capacity.clip(1)  # a side may have no tokens
        self._pool_examples = pool_examples
        self._max_wait_batches = max_wait_batches
        # The pool, in order of arrival; assign to it to restore an earlier state.
        self.waiting: list[Waiting[Item]] = []

    def pack(self, arrivals: Iterator[Waiting[Item]]) -> list[Item]:
        """Return the next micro-batch, taking `arrivals` as needed; empty once they and the pool are exhausted."""
        plan = _Plan(0, self._budgets.encoder_tokens, self._budgets.decoder_tokens, self._budgets.max_examples)
        is_overdue, first = False, 0  # the examples that the plan puts into this batch
        for entry in self.waiting:
            plan = self._planned(plan, entry)
            is_overdue |= entry.waited_batches + 1 + plan.turn > self._max_wait_batches
            first += plan.turn == 0
        chosen: list[Item] = []
        room = self._capacity.copy()
        while len(chosen) < self._budgets.max_examples:
            best: int | None = 0
            if not is_overdue or len(chosen) >= first:
                while len(self.waiting) < self._pool_examples and plan.turn < self._max_wait_batches - 1:
                    if (arrived := next(arrivals, None)) is None:
                        break
                    plan = self._planned(plan, arrived)
                    self.waiting.append(arrived)
                best = self._best_fit(room)
            if best is None:
                break
            entry = self.waiting.pop(best)
            chosen.append(entry.item)
            room -= (entry.encoder_tokens, entry.decoder_tokens)
        self.waiting = [replace(entry, waited_batches=entry.waited_batches + 1) for entry in self.waiting]
        return chosen

    def _planned(self, plan: _Plan, entry: Waiting[Item]) -> _Plan:
        turn, encoder_room, decoder_room, examples_room = plan
        if entry.encoder_tokens > encoder_room or entry.decoder_tokens > decoder_room or not examples_room:
            turn, examples_room = turn + 1, self._budgets.max_examples
            encoder_room, decoder_room = self._budgets.encoder_tokens, self._budgets.decoder_tokens
        return _Plan(turn, encoder_room - entry.encoder_tokens, decoder_room - entry.decoder_tokens, examples_room - 1)

    def _best_fit(self, room: np.ndarray) -> int | None:
        """Return the index of the next waiting example to take, or None if none fits into `room`. Order of arrival
        fills the first half of a batch, so that the pool keeps examples of all shapes (best fit from the start: 96 %
        fill instead of 98 %). Then the example, or the pair, that fills the worse side best is taken."""
        sizes = np.array([[entry.encoder_tokens, entry.decoder_tokens] for entry in self.waiting]).reshape(-1, 2).T
        left = room[:, None] - sizes
        fits = (left >= 0).all(axis=0)
        if not fits.any():
            return None
        if ((room > self._capacity * BEST_FIT_BELOW) | (self._capacity == 0)).all():
            return int(fits.argmax())
        single = self._worse_side(left)
        pair = self._worse_side(left[:, :, None] - sizes[:, None, :])
        np.fill_diagonal(pair, np.inf)
        if single.min() <= pair.min():
            return int(single.argmin())
        first, second = (int(index) for index in np.unravel_index(pair.argmin(), pair.shape))
        return first if single[first] <= single[second] else second

    def _worse_side(self, left: np.ndarray) -> np.ndarray:
        """Return the free share of the emptier side, [...], of `left` tokens [2, ...]; infinite if a side overflows."""
        encoder_left, decoder_left = left
        share = np.maximum(encoder_left / self._scale[0], decoder_left / self._scale[1])
        share[(encoder_left < 0) | (decoder_left < 0)] = np.inf
        return share
