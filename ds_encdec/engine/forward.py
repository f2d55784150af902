"""The forward pass of every engine: run the model on it and sum its losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.model.attention import PackedLayout
from ds_encdec.types import DENOISERS, IGNORE_INDEX, Batch, LossSum


def backward_seed(loss_sum: LossSum, scale: float) -> Tensor:
    """The scalar to call backward on: the loss times `scale`, with a NaN gradient where the loss itself is not finite.

    A loss may be infinite with finite gradients. The step must be skipped then, on all ranks, and the gradient's norm
    is what all of them see. Does not wait for the device.
    """
    total = loss_sum.total
    return total * torch.where(torch.isfinite(total.detach()), scale, torch.nan)


def packed_forward(model: nn.Module, batch: Batch) -> LossSum:
    """The loss of `batch` (on the device). `model`: a Qwen3ForSeq2SeqLM, or an engine's wrapper of one."""
    output = model(
        input_ids=batch.encoder_ids,
        decoder_input_ids=batch.decoder_input_ids,
        labels=batch.labels,
        packing=PackedLayout.build(
            batch.encoder_cu_seqlens,
            batch.decoder_cu_seqlens,
            batch.encoder_lengths,
            batch.decoder_lengths,
            batch.encoder_positions,
            batch.decoder_positions,
        ),
    )
    return split_by_denoiser(output.loss, output.token_losses, batch)


def split_by_denoiser(total: Tensor, token_losses: Tensor, batch: Batch) -> LossSum:
    """Split the loss of a batch by denoiser. `token_losses`: float32 [Td], 0 where the label is -100."""
    has_loss = (batch.labels != IGNORE_INDEX).float()
    zeros = torch.zeros(len(DENOISERS), device=token_losses.device)
    return LossSum(
        total=total,
        by_denoiser=zeros.index_add(0, batch.denoiser_ids, token_losses),
        tokens_by_denoiser=zeros.index_add(0, batch.denoiser_ids, has_loss),
    )


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """The dtype of activations, and of the parameters that layers compute with."""
    if training.bf16:
        return torch.bfloat16
    return torch.float16 if training.fp16 else torch.float32
