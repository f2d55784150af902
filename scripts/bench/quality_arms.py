"""The arms of the study of quality: models made from one source in several ways, on the same examples in the same order.

Models, examples and micro-batches are the product's own. Losses are kept by example, so that two arms are compared on
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_sizes import Size
from quality_source import SAVED_EVERY, apply, optimizers, share_of_rate
from torch import Tensor

from ds_encdec.base.types import IGNORE_INDEX, Batch, Example
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.build import build_data
from ds_encdec.data.loader import collate
from ds_encdec.engine.sharded_engine import layout_of
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.source import resolve_model
from ds_encdec.model.weights import random_weights
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.tokenizer.load import load_tokenizer

SENTINELS = 32
WARM_UP = 10  # steps; the rate is constant behind them
RANDOM_RATE = 4  # times the rates of arms from a source, for those from random weights
MIXTURES = {"ul2": None, "S": "data.ul2_task_weights=[0,0,0,0,1]"}


def as_one_text(batch: Batch) -> Batch:
    """[input ; start ; target] on the decoder's side alone, with loss on the target: what a plain decoder reads."""
    return _rebuilt(batch, lambda encoder, decoder: (encoder[:0], torch.cat([encoder, decoder])))


def without_input(batch: Batch) -> Batch:
    """The targets alone."""
    return _rebuilt(batch, lambda encoder, decoder: (encoder[:0], decoder))


def _rebuilt(batch: Batch, rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Batch:
    """`rule` maps one example's input and decoder tokens to the new ones; labels are the last ones' of the decoder."""
    encoders = batch.encoder_ids.split([*batch.encoder_lengths, len(batch.encoder_ids) - batch.encoder_tokens])
    rest = len(batch.labels) - sum(batch.decoder_lengths)
    decoders, labels, kinds = (
        ids.split([*batch.decoder_lengths, rest]) for ids in (batch.decoder_input_ids, batch.labels, batch.denoiser_ids)
    )
    pairs = [rule(*pair) for pair in zip(encoders[:-1], decoders[:-1], strict=True)]
    fronts = [len(new) - len(old) for (_, new), old in zip(pairs, decoders, strict=False)]
    lengths = [tuple(map(len, side)) for side in zip(*pairs, strict=True)]
    padded = lambda rows, value: torch.cat(  # noqa: E731
        [torch.nn.functional.pad(row, (front, 0), value=value) for row, front in zip(rows, fronts, strict=False)]
    )
    boundaries = [torch.tensor([0, *side]).cumsum(0).to(batch.encoder_cu_seqlens) for side in lengths]
    positions = [torch.cat([torch.arange(length) for length in side]).to(batch.labels.device) for side in lengths]
    return replace(
        batch,
        encoder_ids=torch.cat([encoder for encoder, _ in pairs]),
        decoder_input_ids=torch.cat([decoder for _, decoder in pairs]),
        labels=padded(labels, IGNORE_INDEX),
        denoiser_ids=padded(kinds, 0),
        encoder_lengths=lengths[0],
        decoder_lengths=lengths[1],
        encoder_cu_seqlens=boundaries[0],
        decoder_cu_seqlens=boundaries[1],
        encoder_positions=positions[0],
        decoder_positions=positions[1],
    )


@dataclass(frozen=True)
class Arm:
    """A form of cross-attention with its positions. `view`: how the model is given a batch."""

    form: str
    positions: str
    is_random: bool = False
    view: Callable[[Batch], Batch] = field(default=lambda batch: batch)


ARMS = {
    "aligned": Arm("aligned", "prefix"),
    "renormed": Arm("renormed", "prefix"),
    "final": Arm("final", "unrotated"),
    "decoder": Arm("aligned", "prefix", view=as_one_text),
    "scratch aligned": Arm("aligned", "prefix", is_random=True),
    "scratch final": Arm("final", "unrotated", is_random=True),
}
UNTRAINED = {
    "aligned, unrotated": Arm("aligned", "unrotated"),
    "renormed, unrotated": Arm("renormed", "unrotated"),
    "final, prefix": Arm("final", "prefix"),
    "aligned, input hidden": Arm("aligned", "prefix", view=without_input),
}


@dataclass(frozen=True)
class Losses:
    """Sums of token losses in nats by example, target tokens, denoisers (numbers of their rows), and the share of
    examples each of whose target tokens was given more than half of the probability: a greedy decoder copies those."""

    sums: np.ndarray
    tokens: np.ndarray
    kinds: np.ndarray
    exact: float

    def by_denoiser(self) -> dict[str, float]:
        """Nats a target token by denoiser, and as `all` their mean by the mixture's share of target tokens."""
        return {**{name: self.of(number) for number, name in self._present()}, "all": mixture(self)}

    def of(self, kind: int) -> float:
        """Nats a target token of one denoiser."""
        return float(self.sums[self.kinds == kind].sum() / self.tokens[self.kinds == kind].sum())

    def _present(self) -> list[tuple[int, str]]:
        return [(number, name) for number, name in enumerate(DENOISERS) if (self.kinds == number).any()]

    def save(self, path: Path) -> None:
        """Keep the losses of all examples."""
        np.savez(path, sums=self.sums, tokens=self.tokens, kinds=self.kinds, exact=self.exact)

    @classmethod
    def load(cls, path: Path) -> Losses:
        """What `save` has written."""
        with np.load(path) as arrays:
            return cls(arrays["sums"], arrays["tokens"], arrays["kinds"], float(arrays["exact"]))


def mixture(losses: Losses, chosen: np.ndarray | None = None) -> float:
    """The mean loss of UL2's mixture: denoisers weighed by their weight and their tokens in an example; with `chosen`
    of these examples alone."""
    sums, tokens, kinds = losses.sums, losses.tokens, losses.kinds
    if chosen is not None:
        sums, tokens, kinds = sums[chosen], tokens[chosen], kinds[chosen]
    total = weight = 0.0
    for number, row in enumerate(DENOISERS.values()):
        if (here := kinds == number).any():
            share = row.weight * tokens[here].mean()
            total += share * sums[here].sum() / tokens[here].sum()
            weight += share
    return float(total / weight)


class Study:
    """All that the arms share: the source, the settings, the examples."""

    def __init__(self, size: Size, source: Path, files: dict[str, Path], kind: str, device: str) -> None:
        """`files`: those to train on (`ul2`) and to evaluate on (`eval`), of a `kind` that `data.dataset_name` knows."""
        self.size, self.device = size, torch.device(device)
        self.source, self._files, self._kind = source, files, kind
        self.tokenizer, self.vocabulary = load_tokenizer(self.config().model, builtin_texts=list, mode_tokens=False)
        self._held: dict[tuple[str, int], tuple[list[Batch], Iterator[Batch]]] = {}

    def config(self, *settings: str) -> FullConfig:
        """The product's configuration of a run on one process."""
        size = self.size
        return load_config(
            None,
            [
                f"model.model_name_or_path={self.source}",
                f"model.num_sentinel_tokens={SENTINELS}",
                f"data.dataset_name={self._kind}",
                f"data.data_files={self._files['ul2']}",
                f"data.eval_files={self._files['eval']}",
                "data.streaming=false",
                f"data.max_seq_length={size.chunk}",
                f"data.max_encoder_length={size.chunk}",
                f"data.max_decoder_length={size.chunk}",
                "data.num_lanes=1",
                "data.preprocessing_num_workers=0",
                f"training.per_device_train_batch_size={size.batch_examples}",
                f"training.per_device_eval_batch_size={size.batch_examples}",
                f"training.eval_samples={size.eval_examples}",
                "training.gradient_accumulation_steps=1",
                "training.report_to=none",
                "infra.device=cpu",
                "infra.num_gpus=1",
                *settings,
            ],
        )

    @cached_property
    def evaluation(self) -> list[Batch]:
        """Held-out examples, about equally many of each denoiser."""
        return [batch.to(self.device) for batch in self._data("data.ul2_task_weights=[1,1,1,1,1]").eval_batches()]

    def stream(self, mixture: str, seed: int) -> Iterator[Batch]:
        """The micro-batches of a seed, without end."""
        weights = MIXTURES[mixture]
        loader = self._data(f"training.seed={seed}", *([weights] if weights else [])).loader
        while True:
            yield from next(loader)

    def batches(self, mixture: str, seed: int) -> Iterator[Batch]:
        """The same, kept: all arms see them in the same order."""
        held, stream = self._held.setdefault((mixture, seed), ([], self.stream(mixture, seed)))
        number = 0
        while True:
            while number >= len(held):
                held.append(next(stream))
            yield held[number].to(self.device)
            number += 1

    def _data(self, *settings: str) -> Any:
        config = self.config(*settings)
        return build_data(config, self.tokenizer, self.vocabulary, rank=0, world_size=1, num_lanes=1)

    def model(self, arm: Arm, seed: int) -> Qwen3ForSeq2SeqLM:
        """A new model; the seed draws the sentinels' rows, or all weights."""
        form = [f"model.cross_attention={arm.form}", f"model.encoder_positions={arm.positions}"]
        source = resolve_model(self.config(*form).model, self.vocabulary, seed)
        weights = random_weights(source.config, seed) if arm.is_random else source.weights
        model = Qwen3ForSeq2SeqLM(source.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name))
        return model.to(self.device).train()

    def collated(self, rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
        """Inputs and targets as one micro-batch."""
        examples = [
            Example(np.array(given, np.int32), np.array(target, np.int32), denoiser="S", document=str(number))
            for number, (given, target) in enumerate(rows)
        ]
        budgets = Budgets(sum(len(given) for given, _ in rows), sum(len(target) for _, target in rows), len(rows))
        return collate(examples, budgets, self.vocabulary.pad_id).to(self.device)


def packed_losses(model: Qwen3ForSeq2SeqLM, batch: Batch) -> Any:
    """The model's answer to a packed batch: `loss`, the sum, and `token_losses`."""
    return model(
        input_ids=batch.encoder_ids,
        decoder_input_ids=batch.decoder_input_ids,
        labels=batch.labels,
        packing=layout_of(batch),
    )


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    view: Callable[[Batch], Batch],
    batches: Iterable[Batch],
    losses_of: Callable[[Any, Batch], Tensor] = lambda model, batch: packed_losses(model, batch).token_losses,
) -> Losses:
    """The losses of all examples in `batches`. `losses_of`: float32 [Td] of a batch, 0 where the label is -100."""
    model.eval()
    found, exact = [], []
    for batch in map(view, batches):
        parts = (losses_of(model, batch).cpu(), (batch.labels != IGNORE_INDEX).cpu(), batch.denoiser_ids.cpu())
        pieces = [part[: sum(batch.decoder_lengths)].split(batch.decoder_lengths) for part in parts]
        for losses, is_target, kinds in zip(*pieces, strict=True):
            found.append((losses.double().sum().item(), is_target.sum().item(), kinds[is_target][0].item()))
            exact.append(bool((losses[is_target] < np.log(2)).all()))
    model.train()
    return Losses(*map(np.array, zip(*found, strict=True)), exact=float(np.mean(exact)))


@dataclass
class Training:
    """One arm in training: AdamW at a constant rate, or with `total_tokens` the source's own recipe at its rate, with a
    cosine that ends there. `state`: a file from which a long training goes on."""

    model: Qwen3ForSeq2SeqLM
    arm: Arm
    rate: float
    total_tokens: int = 0
    state: Path | None = None
    seen: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if self.total_tokens:
            self._optimizers = optimizers(self.model, self.model.shared.weight)
        else:
            groups = [
                {
                    "params": [weight for weight in self.model.parameters() if (weight.ndim > 1) is wide],
                    "weight_decay": decay,
                }
                for wide, decay in ((True, 0.01), (False, 0.0))
            ]
            self._optimizers = [torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.98), fused=True)]
        if self.state is not None and self.state.exists():
            self._load(torch.load(self.state, map_location=self.model.device))

    def run(self, batches: Iterator[Batch], marks: Sequence[int], at_mark: Callable[[int], None]) -> None:
        """Train until the last mark; `at_mark(tokens)` at each. `batches` begin with the first, also in a training that
        goes on."""
        left = [mark for mark in sorted(marks) if mark >= self.seen]
        for batch in islice(batches, self.steps, None):
            while left and self.seen >= left[0]:
                at_mark(left.pop(0))
            if not left:
                break
            self._step(batch)
            if self.state is not None and self.steps % SAVED_EVERY == 0:
                self._save()

    def _step(self, batch: Batch) -> None:
        loss = packed_losses(self.model, self.arm.view(batch)).loss / batch.target_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.total_tokens:
            share = share_of_rate(self.steps, self.total_tokens * (self.steps + 1) // max(1, self.seen))
        else:
            share = min(1, (self.steps + 1) / WARM_UP)
        apply(self._optimizers, self.rate * share)
        self.seen += batch.encoder_tokens + batch.target_tokens
        self.steps += 1

    def _save(self) -> None:
        state = {"seen": self.seen, "steps": self.steps, "model": self.model.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        torch.save(state, self.state.with_suffix(".tmp"))
        self.state.with_suffix(".tmp").replace(self.state)

    def _load(self, state: dict[str, Any]) -> None:
        self.seen, self.steps = state["seen"], state["steps"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
