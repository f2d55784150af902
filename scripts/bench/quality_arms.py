"""The arms of the study of quality: models made from one source in several ways, on the same examples in one order.

Models, examples and micro-batches are the product's own. Losses are kept by example, so that two arms are compared on
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from quality_source import Size, Steps, muon
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ds_encdec.base.types import IGNORE_INDEX, Batch, Example
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.shares import Budgets
from ds_encdec.data.build import build_data
from ds_encdec.data.loader import collate
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.source import resolve_model
from ds_encdec.model.weights import random_weights
from ds_encdec.objectives.protocol import layout_of
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.tokenizer.load import load_tokenizer

SENTINELS = 32
SOURCE = "source, by transformers"
Losses = dict[str, np.ndarray]
"""By example: `sums` of token losses in nats, target `tokens`, `kinds` (numbers of denoisers). `exact`: the share of
examples each of whose target tokens was given more than half of the probability: a greedy decoder gives those."""


def as_one_text(batch: Batch) -> Batch:
    """[input ; start ; target] on the decoder's side alone, with loss on the target: what a plain decoder reads."""
    return _rebuilt(batch, lambda encoder, decoder: (encoder[:0], torch.cat([encoder, decoder])))


def without_input(batch: Batch) -> Batch:
    """The targets alone."""
    return _rebuilt(batch, lambda encoder, decoder: (encoder[:0], decoder))


def _rebuilt(batch: Batch, rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Batch:
    """`rule` maps one example's input and decoder tokens to the new ones; labels are the last ones' of the decoder."""
    encoders = batch.encoder_ids[: batch.encoder_tokens].split(batch.encoder_lengths)
    sides = (batch.decoder_input_ids, batch.labels, batch.denoiser_ids)
    decoders, labels, kinds = (ids[: batch.target_tokens].split(batch.decoder_lengths) for ids in sides)
    pairs = [rule(*pair) for pair in zip(encoders, decoders, strict=True)]
    fronts = [len(new) - len(old) for (_, new), old in zip(pairs, decoders, strict=True)]
    changed: dict[str, Any] = {}
    for name, value, parts in (("labels", IGNORE_INDEX, labels), ("denoiser_ids", 0, kinds)):
        padded = [part.new_full((front,), value) for part, front in zip(parts, fronts, strict=True)]
        changed[name] = torch.cat([piece for both in zip(padded, parts, strict=True) for piece in both])
    for ids, rows in zip(("encoder_ids", "decoder_input_ids"), zip(*pairs, strict=True), strict=True):
        side, lengths = ids.split("_")[0], tuple(map(len, rows))
        changed |= {ids: torch.cat(rows), f"{side}_lengths": lengths}
        changed[f"{side}_cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(batch.encoder_cu_seqlens)
        changed[f"{side}_positions"] = torch.cat([torch.arange(length) for length in lengths]).to(batch.labels)
    return replace(batch, **changed)


class Arm(NamedTuple):
    """A form of cross-attention with its positions. `view`: how the model is given a batch."""

    form: str
    positions: str
    is_random: bool = False
    view: Callable[[Batch], Batch] = lambda batch: batch


ARMS = {
    "aligned": Arm("aligned", "prefix"),
    "renormed": Arm("renormed", "prefix"),
    "final": Arm("final", "unrotated"),
    "decoder": Arm("aligned", "prefix", view=as_one_text),
    "scratch aligned": Arm("aligned", "prefix", is_random=True),
    "scratch final": Arm("final", "unrotated", is_random=True),
}
UNTRAINED = {
    **{name: arm for name, arm in ARMS.items() if not arm.is_random},
    "aligned, unrotated": Arm("aligned", "unrotated"),
    "renormed, unrotated": Arm("renormed", "unrotated"),
    "final, prefix": Arm("final", "prefix"),
    "aligned, input hidden": Arm("aligned", "prefix", view=without_input),
}


def by_denoiser(losses: Losses) -> dict[str, float]:
    """Nats a target token by denoiser, and as `all` their mean by the mixture's share of target tokens."""
    kinds = losses["kinds"]
    here = {name: kinds == number for number, name in enumerate(DENOISERS) if (kinds == number).any()}
    means = {name: float(losses["sums"][one].sum() / losses["tokens"][one].sum()) for name, one in here.items()}
    return {**means, "all": mixture(losses)}


def mixture(losses: Losses, chosen: np.ndarray | slice = slice(None)) -> float:
    """The mean loss of UL2's mixture, on the `chosen` examples: denoisers weighed by their weight and their tokens in
    an example."""
    sums, tokens, kinds = (losses[name][chosen] for name in ("sums", "tokens", "kinds"))
    total = weight = 0.0
    for number, row in enumerate(DENOISERS.values()):
        if (here := kinds == number).any():
            share = row.weight * tokens[here].mean()
            total += share * sums[here].sum() / tokens[here].sum()
            weight += share
    return float(total / weight)


class Study:
    """All that the arms share: the source, the settings, the examples."""

    def __init__(self, size: Size, source: Path, train: Path, held_out: Path, device: str = "cpu") -> None:
        """`train`, `held_out`: JSON lines with a `text`, or plain text."""
        self.size, self.device = size, torch.device(device)
        kind = "json" if held_out.suffix == ".jsonl" else "text"
        self._settings = [
            f"model.model_name_or_path={source}",
            f"model.num_sentinel_tokens={SENTINELS}",
            f"data.dataset_name={kind}",
            f"data.data_files={train}",
            f"data.eval_files={held_out}",
            "data.streaming=false",
            *(f"data.max_{name}_length={size.chunk}" for name in ("seq", "encoder", "decoder")),
            "data.num_lanes=1",
            "data.preprocessing_num_workers=0",
            *(f"training.per_device_{name}_batch_size={size.batch_examples}" for name in ("train", "eval")),
            f"training.eval_samples={size.eval_examples}",
            "training.gradient_accumulation_steps=1",
            "training.report_to=none",
            "infra.device=cpu",
            "infra.num_gpus=1",
        ]
        self.source = source
        self.tokenizer, self.vocabulary = load_tokenizer(self._config().model, builtin_texts=list, mode_tokens=False)

    def _config(self, *settings: str) -> FullConfig:
        return load_config(None, [*self._settings, *settings])

    def _data(self, *settings: str) -> Any:
        return build_data(self._config(*settings), self.tokenizer, self.vocabulary, rank=0, world_size=1, num_lanes=1)

    @cached_property
    def evaluation(self) -> list[Batch]:
        """Held-out examples, about equally many of each denoiser."""
        return [batch.to(self.device) for batch in self._data("data.ul2_task_weights=[1,1,1,1,1]").eval_batches()]

    def batches(self, seed: int, *settings: str) -> Iterator[Batch]:
        """The micro-batches of a seed, without end; all arms see them in the same order."""
        loader = self._data(f"training.seed={seed}", *settings).loader
        while True:
            for batch in next(loader):
                yield batch.to(self.device)

    def model(self, arm: Arm, seed: int) -> Qwen3ForSeq2SeqLM:
        """A new model; the seed draws the sentinels' rows, or all weights."""
        form = [f"model.cross_attention={arm.form}", f"model.encoder_positions={arm.positions}"]
        source = resolve_model(self._config(*form).model, self.vocabulary, seed)
        weights = random_weights(source.config, seed) if arm.is_random else source.weights
        model = Qwen3ForSeq2SeqLM(source.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name))
        return model.to(self.device).train()

    def collated(self, rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
        """Inputs and targets as one micro-batch."""
        pairs = [[np.array(ids, np.int32) for ids in row] for row in rows]
        examples = [Example(*pair, denoiser="S", document=str(number)) for number, pair in enumerate(pairs)]
        budgets = Budgets(*(sum(map(len, side)) for side in zip(*pairs, strict=True)), len(rows))
        return collate(examples, budgets, self.vocabulary.pad_id).to(self.device)

    @torch.no_grad()
    def source_losses(self, converted: Qwen3ForSeq2SeqLM) -> Losses:
        """Transformers' own class on [input ; start ; target], with the sentinels' rows of `converted`."""
        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32).to(self.device)
        model.resize_token_embeddings(converted.shared.num_embeddings)
        model.get_input_embeddings().weight.copy_(converted.shared.weight)
        model.get_output_embeddings().weight.copy_(converted.lm_head.weight)

        def losses_of(batch: Batch) -> Tensor:
            pieces = [ids.split(batch.decoder_lengths) for ids in (batch.decoder_input_ids, batch.labels)]
            logits = (model(input_ids=ids[None]).logits[0].float() for ids in pieces[0])
            return torch.cat([cross_entropy(*pair, reduction="none") for pair in zip(logits, pieces[1], strict=True)])

        return evaluate(model, as_one_text, self.evaluation, losses_of)


class CausalEncoder(PackedLayout):
    """A layout in which the encoder looks back alone, as the source does."""

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as the parent does, under a causal mask."""
        return self.kernel.attend(q, k, v, self.encoder, True, self.dropout)


def packed_losses(model: Qwen3ForSeq2SeqLM, batch: Batch, *, is_causal: bool = False) -> Any:
    """The model's answer to a packed batch: `loss`, the sum, and `token_losses`."""
    layout = layout_of(batch)
    return model(
        input_ids=batch.encoder_ids,
        decoder_input_ids=batch.decoder_input_ids,
        labels=batch.labels,
        packing=CausalEncoder(**vars(layout)) if is_causal else layout,
    )


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    view: Callable[[Batch], Batch],
    batches: Iterable[Batch],
    losses_of: Callable[[Batch], Tensor] | None = None,
) -> Losses:
    """The losses of all examples in `batches`. `losses_of`: float32 [Td] of a batch, 0 where the label is -100."""
    model.eval()
    found = []
    for batch in map(view, batches):
        losses = losses_of(batch) if losses_of else packed_losses(model, batch).token_losses
        parts = (losses.cpu(), batch.labels.cpu() != IGNORE_INDEX, batch.denoiser_ids.cpu())
        pieces = [part[: sum(batch.decoder_lengths)].split(batch.decoder_lengths) for part in parts]
        for losses, is_target, kinds in zip(*pieces, strict=True):
            some = losses[is_target].double()
            found.append((some.sum().item(), len(some), kinds[is_target][0].item(), (some < np.log(2)).all().item()))
    model.train()
    sums, tokens, kinds, exact = map(np.array, zip(*found, strict=True))
    return {"sums": sums, "tokens": tokens, "kinds": kinds, "exact": exact.mean()}


def stepper(model: Qwen3ForSeq2SeqLM, arm: Arm, path: Path | None = None) -> Steps:
    """AdamW for a model that starts from the source, with weight decay for matrices; the source's own optimizers for
    one that starts from random weights, where AdamW learns next to nothing in as many tokens."""
    if arm.is_random:
        return Steps(model, muon(model, model.shared.weight), path)
    parts = [[weight for weight in model.parameters() if (weight.ndim > 1) is is_wide] for is_wide in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.01, 0.0), strict=True)]
    return Steps(model, [torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), fused=True)], path)


def train(
    model: Qwen3ForSeq2SeqLM,
    arm: Arm,
    steps: Steps,
    rate: Callable[[], float],
    batches: Iterator[Batch],
    marks: Sequence[int],
    at_mark: Callable[[int], None],
) -> None:
    """Train until the last mark of tokens; `at_mark(tokens)` at each. `batches` begin with the first, also in a
    training that goes on."""
    left = sorted(marks)
    for batch in islice(batches, steps.taken, None):
        while left and steps.seen >= left[0]:
            at_mark(left.pop(0))
        if not left:
            break
        loss = packed_losses(model, arm.view(batch)).loss / batch.target_tokens
        steps.take(loss, rate(), batch.encoder_tokens + batch.target_tokens)
