"""The formulas of activations against what autograd saves in the real layers, and in the loss head."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker

from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.activations import LayerMemory, head_memory, layer_memory, layers_memory
from ds_encdec.memory.gpu_stand_ins import as_on_device
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.trace import _StorageWatch
from ds_encdec.model import precision
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.loss import linear_cross_entropy
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM, rotary_tables

SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "intermediate_size": 256,
}
LENGTHS = (128, 64)
"""Encoder and decoder tokens of every document: as many as allowed, as the formula assumes on a CPU."""
DOCUMENTS = 3
PRECISIONS = ["float32", "bfloat16", "emulated"]


def job_of(numbers: str, mode: str = "none", chunk_tokens: int = 64) -> Job:
    config = FullConfig.model_validate(
        {
            "model": {"architecture": SIZES, "tokenizer_name_or_path": "builtin", "loss_chunk_tokens": chunk_tokens},
            "data": {"max_encoder_length": LENGTHS[0], "max_decoder_length": LENGTHS[1]},
            "training": {
                "per_device_train_batch_size": DOCUMENTS,
                "bf16": numbers != "float32",
                "activation_checkpointing": mode,
            },
            "infra": {"device": "cpu", "distributed_type": "fsdp", "offload_optimizer": "none"},
        }
    )
    job = make_job(
        config,
        config.model.architecture,
        "fsdp",
        world_size=1,
        ranks_per_node=1,
        device="cpu",
        emulates_bf16=numbers == "emulated",
        ratio=LENGTHS[0] / LENGTHS[1],
    )
    assert (job.encoder_tokens, job.decoder_tokens) == (DOCUMENTS * LENGTHS[0], DOCUMENTS * LENGTHS[1])
    return job


@pytest.fixture(params=PRECISIONS)
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the CPU multiplies, whatever this one can."""
    emulated = frozenset({torch.bfloat16}) if request.param == "emulated" else frozenset()
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    return request.param


def layout() -> PackedLayout:
    boundaries = [torch.arange(DOCUMENTS + 1, dtype=torch.int32) * length for length in LENGTHS]
    positions = [torch.arange(length).repeat(DOCUMENTS) for length in LENGTHS]
    lengths = [(length,) * DOCUMENTS for length in LENGTHS]
    return PackedLayout.build(*boundaries, *lengths, *positions)


def bytes_saved(side: Literal["encoder", "decoder"], job: Job, mode: str) -> int:
    """What autograd saves in one layer: unique storages that are no parameter and not shared by all layers."""
    dtype = torch.float32 if job.compute_bytes == 4 else torch.bfloat16
    config = Qwen3Seq2SeqConfig(**SIZES)
    model = Qwen3ForSeq2SeqLM(config).to(dtype)
    apply_activation_checkpointing(model, mode)  # type: ignore[arg-type]
    packed = layout()
    states = [torch.randn(DOCUMENTS * n, config.hidden_size, dtype=dtype, requires_grad=True) for n in LENGTHS]
    positions = packed.encoder_positions if side == "encoder" else packed.decoder_positions
    rotary = rotary_tables(positions, config, dtype)
    shared = [*rotary, packed.merge_index, *model.parameters()]
    if side == "decoder":
        shared.append(states[0])
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor.detach()  # a layer's output itself would keep its own graph alive, for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        if side == "encoder":
            output = model.encoder.layers[1](states[0], rotary=rotary, layout=packed)
        else:
            output = model.decoder.layers[1](states[1], states[0], rotary=rotary, layout=packed)
    del output
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_layer_keeps_what_autograd_saves(side: Literal["encoder", "decoder"], numbers: str) -> None:
    job = job_of(numbers)
    assert layer_memory(job, side).kept == pytest.approx(bytes_saved(side, job, "none"), rel=0.01)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_layer_that_recomputes_keeps_its_input(side: Literal["encoder", "decoder"], numbers: str) -> None:
    job = job_of(numbers, "full")
    layer = layers_memory(job, side)[1]
    assert layer.kept == layer.input == bytes_saved(side, job, "full")


def worst_of_backward(side: Literal["encoder", "decoder"], job: Job) -> int:
    """The most that is held in the backward pass of the first of two layers, beside what is not the layer's.

    That is: weights, whose gradients are the engine's, and what all layers share. Both layers recompute, or neither.
    """
    dtype = torch.float32 if job.compute_bytes == 4 else torch.bfloat16
    with FakeTensorMode() if job.device == "cuda" else nullcontext(), as_on_device(job):
        config = Qwen3Seq2SeqConfig(**SIZES, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        model = Qwen3ForSeq2SeqLM._from_config(config, dtype=dtype)
        apply_activation_checkpointing(model, job.config.training.activation_checkpointing)
        packed = layout()
        ends = [torch.ones(DOCUMENTS * n, config.hidden_size, dtype=dtype, requires_grad=True) for n in LENGTHS]
        positions = packed.encoder_positions if side == "encoder" else packed.decoder_positions
        rotary = rotary_tables(positions, config, dtype)
        first, second = getattr(model, side).layers
        watch, begins = _StorageWatch(), []
        watch.claim([*model.parameters(), *rotary, *ends], "weights")
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda weight: watch.claim([weight.grad], "gradients"))
        with watch:
            encoded, decoded = (end * 1 for end in ends)  # no leaves: their gradients are on their way
            inputs = [encoded] if side == "encoder" else [decoded, encoded]
            watch.claim(inputs[1:], "weights")
            hidden_states = first(*inputs, rotary=rotary, layout=packed)
            hidden_states.register_hook(lambda _: begins.append(len(watch.log)))
            loss = second(hidden_states, *inputs[1:], rotary=rotary, layout=packed).sum()
            del encoded, decoded, inputs, hidden_states
            loss.backward()
    return watch.log.peak(begins[0], counted=("activations",))[0]["activations"]


def waiting(side: Literal["encoder", "decoder"], job: Job) -> float:
    """The second decoder layer's gradient of the encoder's output."""
    return layer_memory(job, "encoder").input if side == "decoder" else 0.0


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_worst_moment_of_a_layers_backward_pass(
    side: Literal["encoder", "decoder"], numbers: str, mode: str
) -> None:
    """It is the SwiGLU's: all is kept still, and beside its own gradients only that of the layer's output is there."""
    job = job_of(numbers, mode)
    expected = layers_memory(job, side)[0].working + waiting(side, job)
    assert worst_of_backward(side, job) == pytest.approx(expected, abs=64)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(("side", "kernel_is_worst"), [("encoder", False), ("decoder", True)])
def test_the_worst_moment_on_a_gpu(side: Literal["encoder", "decoder"], kernel_is_worst: bool, mode: str) -> None:
    """It may be attention's, when SwiGLU is done, and the gradient of its output stands in for what followed it."""
    job = dataclasses.replace(job_of("bfloat16", mode), device="cuda")
    data = job.config.data.model_copy(update={"max_examples_per_micro_batch": DOCUMENTS})
    job = dataclasses.replace(job, config=job.config.model_copy(update={"data": data}))
    tokens = DOCUMENTS * LENGTHS[1]
    softmax_d = 4 * (tokens + 128 * (DOCUMENTS + 1)) * SIZES["num_attention_heads"]  # inside the kernel, not traced
    expected = layers_memory(job, side)[0].working + waiting(side, job) - (softmax_d if kernel_is_worst else 0)
    assert worst_of_backward(side, job) == pytest.approx(expected, abs=512)


def test_every_nth_layer_recomputes() -> None:
    job = job_of("bfloat16", "every_n")
    whole, recomputing = layer_memory(job, "decoder"), layer_memory(job, "decoder", recomputes=True)
    assert layers_memory(job, "decoder") == [recomputing, whole]  # of two layers
    assert recomputing.kept == recomputing.input


def test_selective_is_between_none_and_full() -> None:
    def kept(mode: str) -> float:
        layer: LayerMemory = layers_memory(job_of("bfloat16", mode), "decoder")[0]
        return layer.kept

    assert kept("full") < kept("selective") < 0.5 * kept("none")


@pytest.mark.parametrize("chunk_tokens", [16, 1024])
def test_the_loss_head(numbers: str, chunk_tokens: int) -> None:
    job = job_of(numbers, chunk_tokens=chunk_tokens)
    dtype = torch.float32 if job.compute_bytes == 4 else torch.bfloat16
    hidden = torch.randn(job.decoder_tokens, 96, dtype=dtype, requires_grad=True)
    weight = torch.randn(512, 96, dtype=dtype, requires_grad=True)
    tracker, cpu = MemTracker(), torch.device("cpu")
    tracker.track_external(hidden, weight)
    given = hidden.nbytes + weight.nbytes
    with tracker:
        loss, token_losses = linear_cross_entropy(
            hidden, weight, torch.zeros(len(hidden), dtype=torch.long), chunk_tokens
        )
        after = tracker.get_tracker_snapshot("current")[cpu]["Total"] - given
        peak = tracker.get_tracker_snapshot("peak")[cpu]["Total"] - given
    head = head_memory(job)
    small = 16 * len(hidden)  # labels, token losses
    assert head.kept <= after <= head.kept + small
    assert head.kept + head.chunk <= peak <= 1.05 * (head.kept + head.chunk) + 2 * small
    del loss, token_losses
