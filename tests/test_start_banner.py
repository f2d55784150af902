"""What a run says of itself before its first step, which must be what `plan` and the estimate said before it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from ds_encdec.base.quantities import GIB
from ds_encdec.commands.plan import plan_run
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.job import run_sizes
from ds_encdec.memory.library import Capacity
from ds_encdec.memory.question import planned_job
from ds_encdec.training import run
from ds_encdec.training.run import start_banner


def test_its_lines_are_aligned_and_agree_with_the_plan(golden: Callable[[object], None]) -> None:
    infra = {"offload_params": "cpu", "output_dir": "/tmp/runs/one"}
    config = FullConfig.model_validate({"model": {"lora": {"r": 8}}, "infra": infra})
    job = planned_job(config, run_sizes(config), nodes=1)
    context = RunContext(World(world_size=8), torch.device("cpu"), "deepspeed", cast(HostCollectives, None))
    lines = start_banner(job, context, ExpectedMemory(job, estimate(job)), start_step=1000, epochs=None)
    assert len({len(line) - len(line[11:].lstrip()) for line in lines}) == 1
    said = {line[:11].rstrip(): line[11:].lstrip() for line in lines}
    plan = plan_run(config)
    golden("\n".join(line for line in lines if not line.startswith("memory")))
    assert said["a step"] == (
        f"{plan['sequences_per_step']:,} sequences in 64 micro-batches, {plan['tokens_per_step']:,} tokens with padding"
    )
    assert said["memory"].startswith("estimated peak per ")
    fewer = RunContext(World(world_size=2), torch.device("cpu"), "deepspeed", cast(HostCollectives, None))
    lines = start_banner(job, fewer, None, start_step=0, epochs=3.0)
    assert "2 on 1 node, cpu (the configuration was planned for 8)" in str(lines)


def test_on_gpus_it_names_a_faster_setting_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    context = RunContext(World(world_size=8), torch.device("cuda"), "deepspeed", cast(HostCollectives, None))
    monkeypatch.setattr(run, "attention_kernel", lambda *what: ("flash", None))

    job = planned_job(FullConfig(), run_sizes(FullConfig()), nodes=1)
    zero2 = "infra.sharding_stage=zero2 infra.offload_optimizer=none training.activation_checkpointing=none"
    for size, named in ((80, [f"{zero2} fits by the estimate, in 43.2 GiB per GPU"]), (6, [])):
        room = Capacity(size * GIB, size * GIB)
        monkeypatch.setattr(run, "device_capacity", lambda device, room=room: room)
        lines = start_banner(job, context, None, start_step=0, epochs=None)
        assert [line.split(None, 1)[1] for line in lines if line.startswith("faster")] == named


def test_on_gpus_it_says_what_no_compiler_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'one.c:1: Python.h: No such file' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(run, "attention_kernel", lambda *what: ("flash", None))
    monkeypatch.setattr(run, "device_capacity", lambda device: Capacity(GIB, GIB))
    job = planned_job(FullConfig(), run_sizes(FullConfig()), nodes=1)
    for device in ("cpu", "cuda"):
        context = RunContext(World(world_size=8), torch.device(device), "deepspeed", cast(HostCollectives, None))
        lines = start_banner(job, context, None, start_step=0, epochs=None)
        slower = [line for line in lines if line.startswith("slower")]
        assert bool(slower) is (device == "cuda")
    assert re.search("Python.h: No such file; install gcc .* five times as long", slower[0])
