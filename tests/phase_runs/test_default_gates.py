"""The default gates (`PHASE_CONFIGS`) against recorded curves of losses by step (curves/)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from finished_runs import QUICKSTART, watch

from ds_encdec.commands.phases.plan import PHASE_CONFIGS, PhaseConfig, TrainingPhase, phase_config
from ds_encdec.config.schema import load_config

CURVES = Path(__file__).with_name("curves")


def recorded(name: str) -> dict[str, Any]:
    phases: dict[str, Any] = json.loads((CURVES / name).read_text())["phases"]
    return phases


def failures(losses: Sequence[float], settings: PhaseConfig, *, warmup_steps: int, initial: float) -> set[str]:
    """The checks that a phase with these losses fails, in a pipeline that began at `initial`."""
    monitor = watch(losses, warmup_steps=warmup_steps)
    monitor.initial_loss = initial
    return {check["name"] for check in monitor.validate_phase(settings)["checks"] if not check["passed"]}


@pytest.mark.parametrize(
    ("phase", "failed"),
    [
        ("sanity_check", set()),
        ("validation", set()),
        ("medium", {"loss_after_warmup"}),  # it learns, but no 1.3 M parameters are near 5 after 80 steps
        ("full", {"loss_after_warmup"}),
    ],
)
def test_the_quickstart_by_the_gates_of_the_large_run(phase: str, failed: set[str]) -> None:
    curves = recorded("quickstart.json")
    curve, initial = curves[phase], curves["sanity_check"]["losses"][0]
    settings = PHASE_CONFIGS[TrainingPhase(phase)]
    assert failures(curve["losses"], settings, warmup_steps=curve["warmup_steps"], initial=initial) == failed


@pytest.mark.parametrize("phase", list(TrainingPhase))
def test_the_quickstart_by_its_own_gates(phase: TrainingPhase) -> None:
    curves = recorded("quickstart.json")
    curve, initial = curves[phase], curves["sanity_check"]["losses"][0]
    settings = phase_config(load_config(QUICKSTART), phase)
    assert failures(curve["losses"], settings, warmup_steps=curve["warmup_steps"], initial=initial) == set()
    # A phase that was handed nothing begins where the first one did.
    anew = curves["sanity_check"]
    handed_nothing = failures(anew["losses"], settings, warmup_steps=anew["warmup_steps"], initial=initial)
    assert ("loss_after_warmup" in handed_nothing) == (phase is not TrainingPhase.SANITY_CHECK)


def test_a_run_that_learns_nothing_ends_at_the_first_gate() -> None:
    curve = recorded("too_low_rate.json")["sanity_check"]
    settings = PHASE_CONFIGS[TrainingPhase.SANITY_CHECK]
    found = failures(curve["losses"], settings, warmup_steps=curve["warmup_steps"], initial=curve["losses"][0])
    assert found == {"loss_decrease"}


def test_a_run_that_blows_up_does_not_pass_the_first_gate_by_its_last_step() -> None:
    """Its rate is a hundred times too high; it comes back as the rate falls, but the mean of its losses does not. The
    limit of 15 lets its warm-up pass; that of the second phase, and the quickstart's own, do not."""
    curve = recorded("too_high_rate.json")["sanity_check"]

    def found(settings: PhaseConfig) -> set[str]:
        losses = curve["losses"]
        return failures(losses, settings, warmup_steps=curve["warmup_steps"], initial=losses[0])

    assert found(PHASE_CONFIGS[TrainingPhase.SANITY_CHECK]) == {"loss_decrease"}
    assert found(PHASE_CONFIGS[TrainingPhase.VALIDATION]) == {"loss_after_warmup", "loss_decrease"}
    assert found(phase_config(load_config(QUICKSTART), TrainingPhase.SANITY_CHECK)) == {
        "loss_after_warmup",
        "loss_decrease",
    }


def test_spikes() -> None:
    losses = [2.6 + 0.8 * (1 + step / 50) ** -0.7 for step in range(2000)]
    for step in range(200, 1400, 200):
        losses[step] *= 4
    assert failures(losses, PHASE_CONFIGS[TrainingPhase.MEDIUM], warmup_steps=1, initial=6.1) == {"loss_spikes"}
    losses[200] /= 4  # five are allowed
    assert failures(losses, PHASE_CONFIGS[TrainingPhase.MEDIUM], warmup_steps=1, initial=6.1) == set()
