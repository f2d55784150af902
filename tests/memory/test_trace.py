"""The trace against engines that really train, and the arithmetic of engines and activations against the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import job_of, small_sizes
from tracked import tracking

from ds_encdec.config.data_sections import EvalSet
from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.breakdown import Breakdown, Count
from ds_encdec.memory.estimate import engine_memory, step_parts
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.trace import _batch, _model_config, as_on_device, trace_memory, watched_pass
from ds_encdec.model import precision

CPU = torch.device("cpu")
WIDE = small_sizes(512, 1022)
ENGINE = ("weights", "master_weights", "gradients", "optimizer", "communication")


def wide_job(*, world_size: int = 1, device: str = "cuda", training: dict[str, Any] | None = None, **infra: Any) -> Job:
    """A job of `WIDE`, with micro-batches of 192 tokens."""
    lengths = {"max_encoder_length": 128, "max_decoder_length": 64, "max_examples_per_micro_batch": 4}
    return job_of(
        "fsdp",
        sizes=WIDE,
        world_size=world_size,
        accumulation=2,
        sections={"data": lengths, "training": {"per_device_train_batch_size": 1, **(training or {})}},
        make={"ranks_per_node": 4, "device": device},
        **{"device": "cpu", "stage": "zero3", **infra},
    )


@pytest.fixture
def one_rank() -> Iterator[World]:
    """A real process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield World(0, 0, 1, 1, 0, 1, "localhost", 0, "python")
    dist.destroy_process_group()


def measured_bytes(job: Job, world: World) -> int:
    """The peak of an engine that really trains, beyond what earlier tests left in this process."""
    with tracking(torch.nn.Module(), None, CPU) as before:
        pass
    engine = FSDP2Engine(job.config, RunContext(world, CPU, "fsdp", HostCollectives()), _model_config(job), None)
    for parameter in engine.model.parameters():
        torch.nn.init.constant_(parameter, 1 / 16)
    batch, micro_batches = _batch(job), job.gradient_accumulation_steps
    with as_on_device(job), tracking(engine.model, engine.optimizer, CPU) as tracked:
        for index in range(micro_batches):
            engine.backward(engine.forward(batch), target_tokens=1, last=index == micro_batches - 1)
        tracked.end_phase("micro-batches")
    engine.close()
    return tracked.peak_bytes - before.resting_bytes


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_trace_is_what_an_engine_holds(one_rank: World, checkpointing: str) -> None:
    """On a CPU, where both can be had."""
    job = wide_job(device="cpu", training={"activation_checkpointing": checkpointing})
    found = measured_bytes(job, one_rank)
    dist.destroy_process_group()
    try:
        assert trace_memory(job).peak.total == pytest.approx(found, rel=0.01)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("world_size", "infra"),
    [
        (8, {}),
        (8, {"stage": "zero3_hybrid"}),
        (64, {"fsdp_reduce_every_micro_batch": True}),
        (8, {"offload_optimizer": "cpu"}),
        (8, {"stage": "zero0", "distributed_type": "ddp"}),
    ],
)
def test_the_arithmetic_is_what_the_trace_finds(world_size: int, infra: dict[str, Any]) -> None:
    """The engine's part is compared, at the worst moment; on GPUs of any number."""
    job = wide_job(world_size=world_size, training={"activation_checkpointing": "full"}, **infra)
    traced = trace_memory(job)
    held = sum(getattr(traced.peak, name) for name in ENGINE)
    assert traced.moment.startswith("backward pass, decoder.layers.")
    memory, layer = fsdp_memory(job), job.model.layers["decoder layer 0"]
    first, later = (memory.resting + memory.backward(done, layer) for done in (Count(0, 0), layer))
    # The tied head's gradient, which waits for the embedding's.
    waiting = job.compute_bytes * job.embedding_parameters
    # The moments that hold most of the engine's and most of all need not be the same.
    assert 0.97 < (max(first.total, later.total) + waiting) / held < 1.1


def test_remarks_name_what_is_left_out() -> None:
    config = wide_job(offload_optimizer="cpu").config
    job = make_job(config, WIDE, "deepspeed", world_size=8, ranks_per_node=8)
    traced = trace_memory(job)
    assert "DeepSpeed's engine cannot be traced" in traced.remark
    assert traced.categories == ("activations", "logits")
    assert traced.peak == Breakdown(activations=traced.peak.activations, logits=traced.peak.logits)


def test_a_loss_and_an_optimizer_of_the_users_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are tried with real numbers, of which the tensors of a trace have none."""
    (tmp_path / "traced_loss.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def squared(logits, labels):\n    return cross_entropy(logits, labels, reduction='none') ** 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain, own = (
        trace_memory(wide_job(training=training)).peak
        for training in ({}, {"loss": "traced_loss:squared", "optimizer": "torch.optim:Adam"})
    )
    assert own == plain  # the most is held in the backward pass, and Adam keeps what AdamW does


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
    held, _ = watched_pass(job).peak(("activations", "logits"))
    found = sum(held.values())
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
