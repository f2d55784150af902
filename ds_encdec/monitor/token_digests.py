"""Digests of the token ids that a run has read, for its ledger: `ds-encdec compare` finds by them where runs part."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

from ds_encdec.base.types import Batch


class TokenDigests:
    """Adds digests of micro-batches up until the next entry of the ledger: for each step 32 bits of the sum over all
    lanes, which any number of ranks gives, and for each lane of this rank 16 bits of a sum over these steps."""

    def __init__(self) -> None:
        self.lanes: dict[int, int] = {}
        self._steps: list[str] = []
        self._last = 0

    def add(self, data_step: int, total: int, micro_batches: Iterable[Batch]) -> None:
        """Add a step that was taken: the sum over all lanes, and this rank's micro-batches."""
        self._last = data_step
        self._steps.append(f"{total % 2**32:08x}")
        for batch in micro_batches:  # odd weights: each bit counts, and steps that were exchanged give another sum
            self.lanes[batch.lane] = (self.lanes.get(batch.lane, 0) + (2 * data_step + 1) * batch.digest) % 2**16

    def take(self, everyones: Iterable[Mapping[int, int]]) -> dict[str, Any]:
        """Return the facts of an entry, {} if no step was added, and begin anew. `everyones`: the `lanes` of all ranks;
        without them the entry has none."""
        steps, lanes = self._steps, sorted(item for of_rank in everyones for item in of_rank.items())
        self._steps, self.lanes = [], {}
        shown = {"steps": " ".join(steps), "lanes": " ".join(f"{digest:04x}" for _, digest in lanes)}
        return {"data_step": self._last, "first": self._last + 1 - len(steps), **shown} if steps else {}


class StepDigest(NamedTuple):
    """The digest of a data step, those of the lanes over the steps from `first` to `last`, and the number of ranks."""

    digest: str
    first: int
    last: int
    lanes: tuple[str, ...]
    ranks: int


def read_digests(ledger: Iterable[Mapping[str, Any]]) -> dict[int, StepDigest]:
    """Return the digests by data step; of a step that a resume took again, that of the last time."""
    found, ranks = dict[int, StepDigest](), 0
    for line in ledger:
        with suppress(KeyError, AttributeError, TypeError, ValueError):  # it may come from another program
            if line["kind"] == "start":
                ranks = index(line["world_size"])
            elif line["kind"] == "tokens":
                first, steps, lanes = index(line["first"]), line["steps"].split(), tuple(line["lanes"].split())
                around = (first, first + len(steps) - 1, lanes, ranks)
                found |= {number: StepDigest(digest, *around) for number, digest in enumerate(steps, first)}
    return found
