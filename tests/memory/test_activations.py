"""The formulas of activations against new traces, and against what autograd saves in real layers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import memory_formulas
import pytest
import torch
from jobs import job_of, small_sizes
from pass_trace import watched_pass
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_encdec.config.data_sections import EvalSet
from ds_encdec.config.schema import ArchitectureConfig
from ds_encdec.engine.sharded_engine import regularize
from ds_encdec.memory.estimate import TABLE, Layer, MicroBatch, engine_memory, step_parts
from ds_encdec.memory.job import Job
from ds_encdec.model import precision
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import rotary_tables
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

SIZES = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 3}
LENGTHS = (128, 64)
"""Encoder and decoder tokens of every document: as many as allowed, as the formula assumes on a CPU."""
DOCUMENTS = 3
Side = Literal["encoder", "decoder"]
BOTH = pytest.mark.parametrize("side", ["encoder", "decoder"])


def cpu_job(numbers: str, mode: str = "none", **training: float) -> Job:
    lengths = {"max_encoder_length": LENGTHS[0], "max_decoder_length": LENGTHS[1]}
    own = {"per_device_train_batch_size": DOCUMENTS, "bf16": numbers != "float32", "activation_checkpointing": mode}
    job = job_of(
        "fsdp",
        sizes=ArchitectureConfig(**SIZES),
        world_size=1,
        device="cpu",
        sections={"model": {"loss_chunk_tokens": 64}, "data": lengths, "training": own | training},
        make={"emulates_bf16": numbers == "emulated", "ratio": LENGTHS[0] / LENGTHS[1]},
    )
    assert (job.encoder_tokens, job.decoder_tokens) == (DOCUMENTS * LENGTHS[0], DOCUMENTS * LENGTHS[1])
    return job


@pytest.fixture(params=["float32", "bfloat16", "emulated"])
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the CPU multiplies, whatever this one can."""
    emulated = frozenset({torch.bfloat16}) if request.param == "emulated" else frozenset()
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    return request.param


def bytes_saved(side: Side, job: Job, mode: str) -> int:
    """Bytes that autograd saves in one layer: unique storages that are no parameter and not shared by all layers."""
    dtype = torch.float32 if job.compute_bytes == 4 else torch.bfloat16
    config = Qwen3Seq2SeqConfig(**SIZES)
    model = Qwen3ForSeq2SeqLM(config).to(dtype)
    apply_activation_checkpointing(model, mode, random=True)  # type: ignore[arg-type]
    regularize(model, job.config.training)
    boundaries = [torch.arange(DOCUMENTS + 1, dtype=torch.int32) * length for length in LENGTHS]
    lengths = [(length,) * DOCUMENTS for length in LENGTHS]
    packed = PackedLayout.build(*boundaries, *lengths, *(torch.arange(length).repeat(DOCUMENTS) for length in LENGTHS))
    packed = dataclasses.replace(packed, dropout=model.attention_dropout)
    states = [torch.randn(DOCUMENTS * n, config.hidden_size, dtype=dtype, requires_grad=True) for n in LENGTHS]
    positions = packed.encoder_positions if side == "encoder" else packed.decoder_positions
    rotary = rotary_tables(positions, config, dtype)
    calls = packed.merged.calls(True, torch.float32, torch.device("cpu"), joins=not packed.dropout)
    masks = [call.mask for call in calls]  # of all layers
    shared = [*rotary, packed.split_index, *masks, *model.parameters(), *packed.encoder.varying()]
    shared += packed.merged.varying()
    if side == "decoder":
        shared.append(states[0])
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor.detach()  # a layer's output itself would keep its own graph alive, for ever

    layer = (model.encoder if side == "encoder" else model.decoder).layers[1]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(*(states[:1] if side == "encoder" else reversed(states)), rotary=rotary, layout=packed)
    return sum(storage.nbytes() for storage in saved.values())


def layer_of(job: Job, side: Side, index: int = 0) -> Layer:
    """The layer of that number in the stack."""
    (layer,) = (layer for layer in MicroBatch(job).layers() if layer.name == f"{side} layer {index}")
    return layer


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] * kind.startswith("cpu bf16")) for kind in memory_formulas.KINDS],
)
def test_the_table_is_what_traces_give(kind: str) -> None:
    """If this fails, the model or torch has changed: run scripts/dev/memory_formulas.py."""
    table = json.loads(TABLE.read_text())
    assert {mode: memory_formulas.formulas(kind, mode) for mode in table[kind]} == table[kind]
    if kind in ("cuda bf16", "cpu fp32"):  # of the others by `scripts/dev/memory_formulas.py --check`
        assert memory_formulas.formulas(f"{kind} lora dropout", "full") == table[f"{kind} lora dropout"]["full"]


@pytest.mark.parametrize("field", ["", "residual_dropout", "attention_dropout"])
@BOTH
def test_a_layer_keeps_what_autograd_saves(side: Side, numbers: str, field: str) -> None:
    job = cpu_job(numbers, **({field: 0.1} if field else {}))
    kept = layer_of(job, side).kept
    assert kept == pytest.approx(bytes_saved(side, job, "none"), rel=0.02 if field else 0.01)
    assert (kept > layer_of(cpu_job(numbers), side).kept) is bool(field)


@BOTH
def test_a_layer_that_recomputes_keeps_its_input(side: Side, numbers: str) -> None:
    job = cpu_job(numbers, "full")
    assert layer_of(job, side).kept == bytes_saved(side, job, "full")


def test_every_nth_layer_recomputes() -> None:
    """The first of two layers does."""
    job = cpu_job("bfloat16", "every_n")
    for index, mode in enumerate(("full", "none")):
        assert layer_of(job, "decoder", index).kept == layer_of(cpu_job("bfloat16", mode), "decoder").kept


def test_attention_without_a_flash_kernel_keeps_scores() -> None:
    """On a GPU: the softmax of each document, and keys and values as wide as the queries."""
    job = dataclasses.replace(cpu_job("bfloat16"), device="cuda")
    model = job.config.model.model_copy(update={"use_flash_attention": False})
    without = dataclasses.replace(job, config=job.config.model_copy(update={"model": model}))
    (tokens, _), heads = LENGTHS, SIZES["num_attention_heads"]
    scores = DOCUMENTS * tokens * heads * (tokens + 2 * SIZES["head_dim"]) * 2
    with_flash, kept = (layer_of(each, "encoder").kept for each in (job, without))
    assert kept - with_flash == scores


FLAT = small_sizes(256, 768, layers=3, vocab=128, head_dim=32)


def full_job(device: str, numbers: str, mode: str, ratio: float) -> Job:
    """Wide micro-batches of full documents, beside which the weights are small."""
    lengths = {"max_encoder_length": 512, "max_decoder_length": int(512 / ratio), "max_examples_per_micro_batch": 4}
    training = {"per_device_train_batch_size": 4, "bf16": numbers != "float32", "activation_checkpointing": mode}
    return job_of(
        "fsdp",
        sizes=FLAT,
        world_size=1,
        accumulation=32,
        device="cpu",
        sections={"model": {"loss_chunk_tokens": 16}, "data": lengths, "training": training},
        make={"device": device, "ratio": ratio, "emulates_bf16": numbers == "emulated"},
    )


@pytest.mark.parametrize(
    ("device", "numbers", "mode", "ratio"),
    [
        ("cpu", "float32", "none", 1.0),
        ("cpu", "bfloat16", "selective", 2.0),
        ("cpu", "emulated", "full", 4.0),
        ("cuda", "bfloat16", "none", 1.0),
        ("cuda", "bfloat16", "every_n", 4.0),
    ],
)
def test_activations_at_their_worst(
    device: str, numbers: str, mode: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the encoder or in the decoder, as the tokens are shared out, or behind the head."""
    emulated = frozenset({torch.bfloat16}) if numbers == "emulated" else frozenset()
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    job = full_job(device, numbers, mode, ratio)
    changes = (change for _, purpose, change in watched_pass(job).changes() if purpose == "activations")
    found = max(accumulate(changes))
    moments = step_parts(job, engine_memory(job))
    expected = max(held.activations + held.logits for name, held in moments if name != "evaluation")
    assert 0.995 * found < expected < 1.015 * found


def test_generating_in_evaluations_takes_a_second_model_and_a_cache() -> None:
    job = full_job("cuda", "bfloat16", "full", 1.0)
    training = job.config.training.model_copy(update={"eval_generate_samples": 8})
    generating = replace(job, config=job.config.model_copy(update={"training": training}))
    parts = [dict(step_parts(one, engine_memory(one))) for one in (job, generating)]
    added = parts[1].pop("generation").total - engine_memory(job).resting.total
    row = job.config.data.max_encoder_length + training.generation_max_new_tokens
    tokens = max(row, min(8 * row, 16_384))
    cache = 2 * FLAT.num_hidden_layers * FLAT.num_key_value_heads * FLAT.head_dim * tokens * 2
    assert (parts[0], added) == (parts[1], 2 * job.parameters + cache)
    sets = {"law": EvalSet(eval_files=["law.jsonl"]), "code": EvalSet(eval_files=["code.jsonl"])}  # have losses alone
    data = job.config.data.model_copy(update={"eval_sets": sets})
    more = replace(generating, config=generating.config.model_copy(update={"data": data}))
    assert dict(step_parts(more, engine_memory(more)))["generation"].total == engine_memory(job).resting.total + added
