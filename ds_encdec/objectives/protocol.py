"""The protocol between the engines and the objectives, which turn a step's micro-batches into losses."""

from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ds_encdec.base.types import Batch, LossSum
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.modeling import PackedLossOutput
from ds_encdec.registry.objectives import COLUMNS, OBJECTIVES

# Calls the model, as the engine has wrapped it, in its packed form; draws the batch's masks of dropout.
Run: TypeAlias = Callable[[Batch], PackedLossOutput]


class Losses(Protocol):
    """The losses of an objective. Called with all micro-batches of a rank's optimizer step, on the device, it yields
    the loss of each in turn, and is resumed after its backward pass; in evaluation, without gradients, with all of a
    set. Every rank calls `run` equally often."""

    def __call__(self, run: Run, batches: Sequence[Batch]) -> Iterator[LossSum]:
        """Yield a `LossSum` for each of `batches`."""


def losses_of(config: FullConfig, collectives: HostCollectives) -> Losses:
    """Return the losses of `config`'s objective."""
    made: Losses = resolve_name(OBJECTIVES[config.data.objective].losses)(config, collectives)
    return made


def run_packed(model: nn.Module, batch: Batch, **more: Any) -> PackedLossOutput:
    """Return the outputs for `batch` (on the device) of a Qwen3ForSeq2SeqLM, or of an engine's wrapper of one, which is
    given `more`."""
    output: PackedLossOutput = model(
        input_ids=batch.encoder_ids,
        decoder_input_ids=batch.decoder_input_ids,
        labels=batch.labels if len(batch.labels) else None,  # an encoder's states may have none
        packing=layout_of(batch),
        **more,
    )
    return output


def layout_of(batch: Batch) -> PackedLayout:
    """Return the packed layout of the segments of `batch`."""
    return PackedLayout.build(
        batch.encoder_cu_seqlens,
        batch.decoder_cu_seqlens,
        batch.encoder_lengths,
        batch.decoder_lengths,
        batch.encoder_positions,
        batch.decoder_positions,
    )


def example_losses(total: Tensor, batch: Batch, columns: dict[str, Tensor]) -> LossSum:
    """Return the `LossSum` of `batch`, with a loss and figures for each of its examples. `columns`: by task or figure
    float32 [examples]."""
    sums, counts = torch.zeros(2, len(COLUMNS), device=total.device)
    for name, values in columns.items():
        sums[COLUMNS.index(name)] = values.detach().sum()
        counts[COLUMNS.index(name)] = len(values)
    return LossSum(total, sums, counts)
