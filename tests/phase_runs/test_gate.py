"""The gate reads what a completed run has left, and says why it fails."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from finished_runs import finish_run

from ds_encdec.base.types import CheckpointError
from ds_encdec.commands.phases.execute import judge
from ds_encdec.commands.phases.plan import PlannedPhase, TrainingPhase, plan_phase
from ds_encdec.config.schema import load_config

QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"
FALLING = [8.3 - 0.06 * step for step in range(40)]


def planned(tmp_path: Path, *overrides: str) -> PlannedPhase:
    own = ["phases.validation.max_loss_after_warmup=8.2", "phases.validation.min_loss_decrease=1.0"]
    config = load_config(QUICKSTART, [f"infra.output_dir={tmp_path}", *own, *overrides])
    return plan_phase(config, TrainingPhase.VALIDATION, max_steps=40)


def failed(verdict: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["message"] for check in verdict["checks"] if not check["passed"]}


def test_a_run_that_learns_passes(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, FALLING)
    verdict = judge(phase, None)
    assert verdict["passed"], verdict["checks"]
    assert verdict["pipeline_initial_loss"] == 8.3
    assert (verdict["steps"], verdict["tokens_seen"]) == (40, 1000)
    assert verdict["eval"] == {"eval/loss": 5.0, "eval/perplexity": 2.0}
    assert verdict["summary"]["loss"]["after_warmup"] == FALLING[4]  # 4 steps of warm-up
    assert len(verdict["checkpoint_sha256"]) == 64


def test_the_decrease_is_measured_from_the_first_loss_of_the_pipeline(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, [5.0] * 40)  # starts where the phase before ended
    assert "loss_decrease" in failed(judge(phase, None))
    verdict = judge(phase, 8.3)
    assert verdict["passed"]
    assert verdict["summary"]["loss"]["decrease"] == pytest.approx(3.3)
    assert verdict["pipeline_initial_loss"] == 8.3


def test_a_phase_that_ended_in_its_warmup_says_so(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, FALLING[:3])
    why = failed(judge(phase, None))["logged_after_warmup"]
    assert "ended at step 3, and its warm-up has 4: set phases.validation.warmup_steps" in why


def test_a_phase_without_a_finite_loss_after_its_warmup_says_so(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, [*FALLING[:4], *[math.nan] * 36])
    why = failed(judge(phase, None))
    assert "none of the 36 steps after the warm-up had a finite loss" in why["logged_after_warmup"]
    assert "train/loss is not finite at step 5 (36 such values)" in why["logged_losses"]


def test_a_phase_without_any_finite_loss(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, [math.nan] * 40)
    verdict = judge(phase, None)
    assert failed(verdict).keys() >= {"loss_decrease", "logged_after_warmup", "logged_losses"}
    assert verdict["pipeline_initial_loss"] is None
    json.dumps(verdict, allow_nan=False)  # the alerts' values are NaN


def test_an_evaluation_that_is_not_finite(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, FALLING, eval_loss=math.inf)
    assert "eval/loss is not finite at step 40" in failed(judge(phase, None))["logged_losses"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no line has train/loss"),
        ("", "no line has train/loss"),
        ('{"step": 1, "eval/loss": 2.0}\n', "no line has train/loss"),
        ('{"step": 1, "train/loss": NaN}\n', "train/loss is not finite at step 1"),
        ('{"step": 1, "train/loss": 2.0}\nnonsense\n', "metrics.jsonl: 1 lines cannot be read"),
        ('{"step": 1, "train/loss": 2.0, "note": "\xe9"}\n', "metrics.jsonl: 1 lines cannot be read"),
        ("[1]\n", "metrics.jsonl: 1 lines cannot be read"),
    ],
)
def test_metrics_that_cannot_be_used(tmp_path: Path, content: Any, why: str) -> None:
    phase = planned(tmp_path)
    finish_run(phase, FALLING)
    metrics = phase.folder / "metrics.jsonl"
    metrics.unlink() if content is None else metrics.write_text(content, encoding="latin-1")
    assert why in failed(judge(phase, None))["logged_losses"]


def test_a_torn_last_line_is_no_reason(tmp_path: Path) -> None:
    phase = planned(tmp_path)
    finish_run(phase, FALLING)
    with (phase.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "tra')
    assert judge(phase, None)["passed"]


def test_a_final_checkpoint_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its final checkpoint cannot be read"):
        judge(planned(tmp_path), None)
