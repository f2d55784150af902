"""Dropout and loss settings of a run, which no `config.json` saves.

torch's generators are seeded for each micro-batch with the run's seed and the micro-batch's lane and number, and
restored afterwards: masks are equal on any number of ranks, in any engine, in a resumed run, and in recomputed layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_encdec.base.types import Batch
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.training_sections import CROSS_ENTROPY, TrainingConfig
from ds_encdec.engine.user_loss import load_loss
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import keyed_seed


def draws_masks(config: FullConfig) -> bool:
    """Return whether a forward pass in training mode draws random numbers."""
    adapters = config.model.lora
    return bool(
        config.training.residual_dropout
        or config.training.attention_dropout
        or (adapters is not None and adapters.lora_dropout)
    )


def prepare_for_training(model: Qwen3ForSeq2SeqLM, config: FullConfig) -> None:
    """Set up recomputation, offload, compilation and dropout as configured, before an engine wraps `model`."""
    training = config.training
    apply_activation_checkpointing(
        model,
        training.recomputation,
        every_n=training.activation_checkpointing_every_n,
        offload=training.activation_offload,
        compile_layers=training.torch_compile is True,  # not while it is `auto`
        random=draws_masks(config),
    )
    regularize(model, training)


def regularize(model: Qwen3ForSeq2SeqLM, training: TrainingConfig) -> None:
    """Set the dropout and loss settings that `model` follows in training mode and in its packed form."""
    model.attention_dropout = training.attention_dropout
    model.lm_head.label_smoothing, model.lm_head.z_loss = training.label_smoothing, training.z_loss
    model.lm_head.own_loss = None if training.loss == CROSS_ENTROPY else load_loss(training.loss)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.residual_dropout = training.residual_dropout


@contextmanager
def masks_of(batch: Batch, seed: int) -> Iterator[None]:
    """Seed torch by `seed` and `batch`, on the CPU and on the device of `batch`, and restore both afterwards."""
    device = batch.labels.device
    key = keyed_seed(seed, f"dropout:{batch.lane}:{batch.number}")
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng(devices=[] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        torch.default_generator.manual_seed(key)
        if not on_cpu:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(key)
        yield
