"""The gate reads what a completed run has left, and says why it fails."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from finished_runs import FALLING, QUICKSTART, finish_run, watch

from ds_encdec.base.types import CheckpointError
from ds_encdec.commands.phases.execute import judge
from ds_encdec.commands.phases.plan import (
    PHASE_CONFIGS,
    PhaseConfig,
    PlannedPhase,
    TrainingPhase,
    phase_config,
    plan_phase,
)
from ds_encdec.config.schema import load_config

CURVES = Path(__file__).with_name("curves")


@pytest.fixture
def phase(tmp_path: Path) -> PlannedPhase:
    own = ["phases.validation.max_loss_after_warmup=8.2", "phases.validation.min_loss_decrease=1.0"]
    return plan_phase(load_config(QUICKSTART, [f"infra.output_dir={tmp_path}", *own]), TrainingPhase.VALIDATION, 40)


def failed(verdict: dict[str, Any]) -> dict[str, str]:
    assert verdict["passed"] == all(check["passed"] for check in verdict["checks"])
    return {check["name"]: check["message"] for check in verdict["checks"] if not check["passed"]}


def test_a_run_that_learns_passes(phase: PlannedPhase) -> None:
    finish_run(phase, FALLING)
    with (phase.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "tra')  # a torn last line is no reason to fail
    verdict = judge(phase, None)
    assert failed(verdict) == {}
    assert verdict["pipeline_initial_loss"] == 8.3
    assert (verdict["steps"], verdict["tokens_seen"]) == (40, 1000)
    assert verdict["eval"] == {"eval/loss": 5.0, "eval/perplexity": 2.0}
    assert verdict["summary"]["loss"]["after_warmup"] == FALLING[4]  # 4 steps of warm-up
    assert len(verdict["checkpoint_sha256"]) == 64


def test_the_decrease_is_measured_from_the_first_loss_of_the_pipeline(phase: PlannedPhase) -> None:
    finish_run(phase, [5.0] * 40)  # starts where the phase before ended
    assert "loss_decrease" in failed(judge(phase, None))
    verdict = judge(phase, 8.3)
    assert failed(verdict) == {}
    assert verdict["summary"]["loss"]["decrease"] == pytest.approx(3.3)
    assert verdict["pipeline_initial_loss"] == 8.3


@pytest.mark.parametrize(
    ("losses", "eval_loss"),
    [(FALLING[:3], 5.0), ([math.nan] * 40, 5.0), (FALLING, math.inf)],
)
def test_why_a_run_fails(
    phase: PlannedPhase, golden: Callable[[object], None], losses: list[float], eval_loss: float
) -> None:
    finish_run(phase, losses, eval_loss=eval_loss)
    verdict = judge(phase, None)
    golden("\n".join(f"{name}: {message}" for name, message in failed(verdict).items()))
    assert verdict["pipeline_initial_loss"] == (None if math.isnan(losses[0]) else losses[0])
    json.dumps(verdict, allow_nan=False)  # the alerts' values may be NaN


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"step": 1, "eval/loss": 2.0}\n', "no line has train/loss"),
        ('{"step": 1, "train/loss": 2.0}\nnonsense\n', "metrics.jsonl: 1 lines cannot be read"),
    ],
)
def test_metrics_that_cannot_be_used(phase: PlannedPhase, content: str, why: str) -> None:
    finish_run(phase, FALLING)
    (phase.folder / "metrics.jsonl").write_text(content)
    assert why in failed(judge(phase, None))["logged_losses"]


def test_a_final_checkpoint_that_is_gone(phase: PlannedPhase) -> None:
    with pytest.raises(CheckpointError, match="its final checkpoint cannot be read"):
        judge(phase, None)


def failures(losses: Sequence[float], settings: PhaseConfig, *, warmup_steps: int, initial: float) -> set[str]:
    monitor = watch(losses, warmup_steps=warmup_steps)
    monitor.initial_loss = initial
    return failed(monitor.validate_phase(settings)).keys()


@pytest.mark.parametrize(
    ("file", "curve", "gates", "phase", "expected"),
    [
        ("quickstart", "sanity_check", "default", "sanity_check", set()),
        # It learns, but no 1.1 M parameters are near 5 after 80 steps.
        ("quickstart", "full", "default", "full", {"loss_after_warmup"}),
        *(("quickstart", phase, "own", phase, set()) for phase in TrainingPhase),
        # A phase that was handed nothing begins where the first one did.
        *(("quickstart", "sanity_check", "own", phase, {"loss_after_warmup"}) for phase in list(TrainingPhase)[1:]),
        ("too_low_rate", "sanity_check", "default", "sanity_check", {"loss_decrease"}),  # it learns nothing
        # The rate is a hundred times too high. It comes back as the rate falls, but the mean of its losses does not;
        # the limit of 15 lets its warm-up pass.
        ("too_high_rate", "sanity_check", "default", "sanity_check", {"loss_decrease"}),
        ("too_high_rate", "sanity_check", "own", "sanity_check", {"loss_after_warmup", "loss_decrease"}),
    ],
)
def test_recorded_curves(file: str, curve: str, gates: str, phase: str, expected: set[str]) -> None:
    recorded: dict[str, Any] = json.loads((CURVES / f"{file}.json").read_text())["phases"]
    losses, initial = recorded[curve]["losses"], recorded["sanity_check"]["losses"][0]
    named = TrainingPhase(phase)
    settings = PHASE_CONFIGS[named] if gates == "default" else phase_config(load_config(QUICKSTART), named)
    found = failures(losses, settings, warmup_steps=recorded[curve]["warmup_steps"], initial=initial)
    assert found >= expected if curve != phase and gates == "own" else found == expected
