"""The trace against engines that really train, and the arithmetic against the trace."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tracked import tracking

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.breakdown import Breakdown, Count
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, Sizes, make_job
from ds_encdec.memory.trace import _batch, _model_config, as_on_device, trace_memory

CPU = torch.device("cpu")
WIDE = Sizes(
    vocab_size=1000,
    hidden_size=512,
    num_hidden_layers=2,
    num_encoder_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=1022,
    tie_word_embeddings=True,
)
OF_TRAINING = ("bf16", "activation_checkpointing", "loss", "optimizer")
ENGINE = ("weights", "master_weights", "gradients", "optimizer", "communication")


def job_of(*, world_size: int = 1, device: Any = "cuda", micro_batches: int = 2, **fields: Any) -> Job:
    """A job of `WIDE`, with micro-batches of 192 tokens. `fields`: of `training` and `infra`."""
    training = {"gradient_accumulation_steps": micro_batches, "per_device_train_batch_size": 1}
    training |= {name: fields.pop(name) for name in OF_TRAINING if name in fields}
    infra = {
        "sharding_stage": "zero3",
        "offload_optimizer": "none",
        "distributed_type": "fsdp",
        "device": "cpu",
        **fields,
    }
    lengths = {"max_encoder_length": 128, "max_decoder_length": 64, "max_examples_per_micro_batch": 4}
    config = FullConfig.model_validate({"training": training, "infra": infra, "data": lengths})
    return make_job(config, WIDE, "fsdp", world_size=world_size, ranks_per_node=4, device=device)


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
    job = job_of(device="cpu", activation_checkpointing=checkpointing)
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
        (8, {"sharding_stage": "zero3_hybrid"}),
        (64, {"fsdp_reduce_every_micro_batch": True}),
        (8, {"offload_optimizer": "cpu"}),
        (8, {"sharding_stage": "zero0", "distributed_type": "ddp"}),
    ],
)
def test_the_arithmetic_is_what_the_trace_finds(world_size: int, infra: dict[str, Any]) -> None:
    """The engine's part is compared, at the worst moment; on GPUs of any number."""
    job = job_of(world_size=world_size, activation_checkpointing="full", **infra)
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
    config = job_of(offload_optimizer="cpu").config
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
        trace_memory(job_of(**fields)).peak
        for fields in ({}, {"loss": "traced_loss:squared", "optimizer": "torch.optim:Adam"})
    )
    assert own == plain  # the most is held in the backward pass, and Adam keeps what AdamW does
