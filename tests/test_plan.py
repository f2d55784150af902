"""`ds-encdec plan`: what a run takes."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ds_encdec.cli import main
from ds_encdec.config.schema import load_config
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import checkpoint_bytes_per_parameter, run_sizes
from ds_encdec.memory.question import planned_job

PARAMETERS = 1_020_785_408
TOKENS_PER_STEP = 8 * 8 * 4 * (4096 + 2048)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(text(capsys, "--json", *arguments))


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_default_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--tokens-per-second", "400000", "--price-per-gpu-hour", "2.5")
    assert (found["steps"], found["tokens_per_step"]) == (100_000, TOKENS_PER_STEP)
    assert found["tokens"] == 100_000 * TOKENS_PER_STEP
    days = 100_000 * TOKENS_PER_STEP / 400_000 / 86_400
    assert (found["time"]["days"], found["usd"]) == pytest.approx((days, days * 24 * 8 * 2.5))
    assert found["disk"] == {
        "checkpoint": 12 * PARAMETERS,  # ZeRO-3
        "checkpoint_bytes_per_parameter": 12,
        "checkpoints": 5 + 1 + 1,  # kept, best, being written
        "abandoned_checkpoints": 0,
        "averaged": 0,  # a model that no run evaluates is made on request only
        "exported": 4 * PARAMETERS,
        "total": 7 * 12 * PARAMETERS + 4 * PARAMETERS,
        "export": {"float32": 4 * PARAMETERS, "bfloat16": 2 * PARAMETERS},
    }


def test_steps_for_tokens_are_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--tokens", "500B")
    assert (found["steps"], found["num_tokens"]) == (-(-500_000_000_000 // TOKENS_PER_STEP), 500_000_000_000)
    printed = text(capsys, "--tokens", "5e11")
    assert f"Set training.num_train_steps={found['steps']}" in printed
    assert "How long this takes is not known" in printed


def test_more_gpus_make_larger_steps_and_share_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--gpus", "64", "--nodes", "8")
    assert found["tokens_per_step"] == 8 * TOKENS_PER_STEP
    config = load_config(None, ["infra.num_gpus=64"])
    held = estimate(planned_job(config, run_sizes(config), 8))
    assert (found["host_bytes_per_node"], found["nvme_bytes_per_node"]) == (8 * held.host.total, 0)


@pytest.mark.parametrize(
    ("infra", "expected"),
    [
        ("sharding_stage=zero3", 12),
        ("sharding_stage=zero2", 14),
        ("sharding_stage=zero1 training.bf16=false", 16),
        ("sharding_stage=zero0 infra.offload_optimizer=none training.bf16=false", 12),
        ("distributed_type=fsdp infra.sharding_stage=zero2 training.bf16=false", 12),
    ],
)
def test_bytes_of_a_checkpoint(infra: str, expected: int) -> None:
    config = load_config(None, f"infra.{infra}".split())
    assert checkpoint_bytes_per_parameter(planned_job(config, run_sizes(config), 1)) == expected


@pytest.mark.parametrize(
    ("overrides", "checkpoints", "abandoned", "averages"),
    [
        ("training.num_train_steps=2000 training.warmup_steps=10", 2, 0, False),
        ("training.save_total_limit=null", 100, 0, True),
        ("training.eval_samples=0", 6, 0, True),
        ("monitor.on_loss_spike=rollback", 7, 5, True),
        ("training.save_interval_hours=1 training.save_steps=100000", 7, 0, True),
        ("training.save_strategy=best training.eval_steps=50000", 2, 0, False),
    ],
)
def test_how_many_checkpoints(
    capsys: pytest.CaptureFixture[str], overrides: str, checkpoints: int, abandoned: int, averages: bool
) -> None:
    disk = plan(capsys, "training.average_checkpoints=5", *overrides.split())["disk"]
    found = (disk["checkpoints"], disk["abandoned_checkpoints"], bool(disk["averaged"]))
    assert found == (checkpoints, abandoned, averages)


REFUSED = "--gpus=8 --nodes=3; data.num_lanes=63; --measured=/nowhere; --tokens=0.5; --tokens=B; --tokens=inf"


def test_bad_input(capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]) -> None:
    for case in REFUSED.split("; "):
        assert main(["plan", *case.split()]) == 2
    golden(re.sub(r"(?m)^(.{160}).+", r"\1...", capsys.readouterr().err))
