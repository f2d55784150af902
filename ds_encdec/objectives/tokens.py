"""The loss of objectives that learn tokens: the cross-entropy of each label."""

import torch
from torch import nn

from ds_encdec.base.types import IGNORE_INDEX, Batch, LossSum
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.modeling import PackedLossOutput
from ds_encdec.objectives.protocol import Losses, run_packed
from ds_encdec.registry.objectives import COLUMNS, TEACHERS_FIGURE


def token_losses(_config: FullConfig, _collectives: HostCollectives) -> Losses:
    """Return the `Losses` of tokens, whose micro-batches do not depend on each other."""
    return lambda run, batches: (split_by_task(run(batch), batch) for batch in batches)


def packed_forward(model: nn.Module, batch: Batch) -> LossSum:
    """Return the loss of `batch` (on the device) by a Qwen3ForSeq2SeqLM, or an engine's wrapper of one."""
    return split_by_task(run_packed(model, batch), batch)


def split_by_task(output: PackedLossOutput, batch: Batch) -> LossSum:
    """Split the loss of a batch by the tasks of its labels."""
    assert output.loss is not None
    assert output.token_losses is not None
    zeros = torch.zeros(len(COLUMNS), device=output.token_losses.device)
    sums = zeros.index_add(0, batch.denoiser_ids, output.token_losses)
    counts = zeros.index_add(0, batch.denoiser_ids, (batch.labels != IGNORE_INDEX).float())
    if output.divergences is not None:
        sums[COLUMNS.index(TEACHERS_FIGURE)] = output.divergences.sum()
        counts[COLUMNS.index(TEACHERS_FIGURE)] = len(output.divergences)
    return LossSum(output.loss, sums, counts)
