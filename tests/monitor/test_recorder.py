"""The recorder over a run that is interrupted between two lines of metrics."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_encdec.base.types import Batch, LossSum, StepResult, TrainingState
from ds_encdec.config.schema import FullConfig, MonitorConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.monitor.metrics_file import EventLog
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.recorder import Actions, Recorder
from ds_encdec.monitor.sinks import JsonlSink
from ds_encdec.registry.objectives import COLUMNS

TOKENS_PER_STEP = 30
MEASURED = ("perf/", "mem/", "ckpt/", "health/slow", "health/late")


def batch() -> Batch:
    """Only its lengths are looked at."""
    nothing = torch.zeros(0)
    return Batch(*[nothing] * 8, encoder_lengths=(4, 6), decoder_lengths=(20,))  # type: ignore[arg-type]


def columns(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (len(COLUMNS) - len(values))])


def make_recorder(path: Path, start_step: int, **settings: Any) -> Recorder:
    config = FullConfig(monitor=MonitorConfig(**settings))
    return Recorder(
        device=torch.device("cpu"),
        collectives=HostCollectives(),
        state=TrainingState(global_step=start_step, data_step=start_step),
        warmup_steps=2,
        settings=config.monitor,
        monitor=TrainingMonitor.from_config(config),
        events=EventLog(path.with_name("ledger.jsonl")),
        sinks=[JsonlSink(path, start_step=start_step)],
        batch_flops=lambda _: 6e9,
        peak_flops=1e12,
    )


def run(recorder: Recorder, first: int, last: int, *, every: int = 4) -> TrainingState:
    state = TrainingState(global_step=first, data_step=first)
    for step in range(first + 1, last + 1):
        with recorder.clock.spent_on("data"):
            losses = columns(step / 3, 0, 0, 0, 100 / step)
        recorder.add(LossSum(losses.sum(), losses, columns(5.0, 0, 0, 0, 15.0)), batch())
        state = dataclasses.replace(state, global_step=step, data_step=step)
        recorder.end_step(state, StepResult(True, torch.tensor(0.5), 1e-3))
        if step % every == 0:
            recorder.log(state)
    return state


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_performance_is_that_of_all_devices_and_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks that have the same figures."""
    path = tmp_path / "metrics.jsonl"
    recorder = make_recorder(path, 0)
    monkeypatch.setattr(recorder.collectives, "gather", lambda record: [record] * 4)
    run(recorder, 0, 4)
    recorder.peak_flops = None
    run(recorder, 4, 8)
    known, unknown = lines(path)
    seconds = known["perf/step_time_s"]
    assert known["perf/tokens_per_sec"] == 4 * known["perf/tokens_per_sec_per_gpu"]
    assert known["perf/tokens_per_sec"] * seconds == pytest.approx(TOKENS_PER_STEP)
    assert known["perf/mfu"] * 1e12 * seconds == pytest.approx(6e9)
    assert 0 < known["perf/data_wait_frac"] < 1
    assert "perf/mfu" not in unknown


def test_a_resumed_run_logs_what_an_uninterrupted_one_does_and_times_its_own_steps(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(make_recorder(whole, 0), 0, 12)

    first = make_recorder(cut, 0)
    run(first, 0, 7)
    checkpoint = json.dumps(first.state_dict())
    run(first, 7, 9)  # went on to step 9, then died
    resumed = make_recorder(cut, 7)
    resumed.load_state_dict(json.loads(checkpoint))
    run(resumed, 7, 12)

    def unmeasured(path: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines(path)]

    assert unmeasured(cut) == unmeasured(whole)
    assert [line["step"] for line in lines(cut)] == [4, 8, 12]
    seconds = lines(cut)[1]["perf/step_time_s"]  # of one step
    assert round(lines(cut)[1]["perf/tokens_per_sec"] * seconds) == TOKENS_PER_STEP
    assert round(lines(cut)[1]["perf/mfu"] * 1e12 * seconds / 1e9) == 6


def test_saves_and_what_the_engine_holds_come_with_the_next_line_only_or_at_the_end(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0)
    recorder.log_save(blocked_seconds=1.5, seconds=4.0)
    for step in range(4):
        recorder.measure_held(lambda: {"weights": 8})
        run(recorder, 2 * step, 2 * step + 2, every=2)
    recorder.log_save(blocked_seconds=2.0, seconds=5.0)
    recorder.close(0)
    names = ("step", "ckpt/blocked_s", "ckpt/total_s", "mem/weights_bytes")
    assert [tuple(map(line.get, names)) for line in lines(tmp_path / "metrics.jsonl")] == [
        (2, 1.5, 4.0, None), (4, None, None, 8), (6, None, None, None), (8, None, None, None), (8, 2.0, 5.0, None),
    ]  # fmt: skip


def step(recorder: Recorder, state: TrainingState, loss: float, norm: float = 0.5) -> TrainingState:
    """One step of one target token, skipped if the recorder wants it."""
    recorder.add(LossSum(torch.tensor(loss), columns(loss), columns(1.0)), batch())
    skipped = not math.isfinite(norm) or (recorder.veto is not None and recorder.veto(torch.tensor(norm)))
    state = dataclasses.replace(state, global_step=state.global_step + (not skipped), data_step=state.data_step + 1)
    recorder.end_step(state, StepResult(not skipped, torch.tensor(norm), 0.0))
    return state


QUIET = {"loss_spike_min_values": 2, "window_size": 4, "on_learning_rate_off": "warn"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, {}),
        ({"on_loss_spike": "rollback"}, {"rollback": "loss_spike"}),
        (
            {"on_loss_spike": "rollback", "on_grad_explosion": "stop"},
            {"rollback": "loss_spike", "stop": "grad_explosion"},
        ),
        ({"on_learning_rate_off": "stop"}, {"stop": "learning_rate_off"}),
        (  # a machine that has to be left is not forgotten for a rollback
            {"on_loss_spike": "rollback", "on_data_wait": "stop", "data_wait_threshold": 0.01},
            {"rollback": "loss_spike", "leave": "data_wait"},
        ),
    ],
)
def test_actions_follow_the_answers(tmp_path: Path, answers: dict[str, Any], expected: dict[str, str]) -> None:
    recorder, state = make_recorder(tmp_path / "metrics.jsonl", 0, **{**QUIET, **answers}), TrainingState()
    for loss in (2.0, 2.0, 5.0):
        with recorder.clock.spent_on("data"):
            time.sleep(0.05)
        state = step(recorder, state, loss, norm=20.0 if loss > 2 else 0.5)
        actions, _ = recorder.log(state)
    found = dataclasses.asdict(actions)
    assert {name: alert["type"] for name, alert in found.items() if alert is not None} == expected


def test_a_step_without_targets_is_no_trouble(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0, on_non_finite="stop", on_grad_explosion="skip_step")
    nothing = columns()
    recorder.add(LossSum(nothing.sum(), nothing, nothing), batch())
    assert recorder.veto is not None
    assert not recorder.veto(torch.tensor(0.0))
    state = TrainingState(global_step=1, data_step=1)
    recorder.end_step(state, StepResult(True, torch.tensor(0.0), 2e-7))
    assert recorder.judge() == Actions()
    assert recorder.monitor.alerts == []


@pytest.mark.parametrize("non_finite", ["skip_step", "rollback"])
def test_a_veto_judges_the_very_step_and_leaves_it_out_of_the_windows(tmp_path: Path, non_finite: str) -> None:
    answers = {"on_loss_spike": "skip_step", "on_non_finite": non_finite}
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0, **answers, **QUIET)
    state = TrainingState()
    for loss in (2.0, 2.0, 5.0, 2.0, math.nan, 3.5):
        state = step(recorder, state, loss)
        recorder.judge()
    assert (state.global_step, state.data_step) == (4, 6)
    assert list(recorder.monitor.loss_window.values) == [2.0, 2.0, 2.0, 3.5]
    assert make_recorder(tmp_path / "other.jsonl", 0).veto is None  # by default nothing waits for the device


def test_the_ledger_has_alerts_once_and_why_a_run_ended(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0, **QUIET)
    state = TrainingState()
    for loss in (2.0, 2.0, 5.0, 7.0):  # the second spike of an interval is only counted
        state = step(recorder, state, loss)
    recorder.judge()
    recorder.log(state)
    state = step(recorder, state, 2.0, norm=math.inf)
    recorder.log(state)
    recorder.close(7, "why")
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    told = [
        (entry["kind"], entry["step"], entry["data_step"], entry.get("type"), entry.get("action")) for entry in entries
    ]
    assert [entry for entry in told if entry[3] != "learning_rate_off"] == [
        ("alert", 3, 3, "loss_spike", "warn"),
        ("alert", 4, 5, "non_finite", "skip_step"),
        ("stop", 4, 5, None, None),
    ]
    assert entries[-1]["message"] == "why"
    assert [line["health/alerts"] for line in lines(tmp_path / "metrics.jsonl")] == [3, 1]


@pytest.mark.parametrize("kind", ["non_finite_state", "non_finite_evaluation"])
@pytest.mark.parametrize(("action", "demanded"), [("skip_step", set()), ("rollback", {"rollback"}), ("stop", {"stop"})])
def test_an_alert_of_the_loop_has_the_answer_of_its_field(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, action: str, demanded: set[str]
) -> None:
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0, on_non_finite=action)
    state = TrainingState(global_step=4, data_step=6)
    actions = recorder.alert(state, kind, math.nan, math.inf, "exp_avg of a.weight is nan")
    assert {name for name, alert in dataclasses.asdict(actions).items() if alert is not None} == demanded
    assert f"{kind}: step 4: exp_avg of a.weight is nan ({action})" in caplog.text
    (entry,) = lines(tmp_path / "ledger.jsonl")
    assert (entry["kind"], entry["step"], entry["data_step"], entry["action"]) == ("alert", 4, 6, action)
    (saved,) = json.loads(json.dumps(recorder.state_dict()))["monitor"]["alerts"]
    assert (saved["type"], saved["value"]) == (kind, "nan")


def test_going_back_restores_windows_and_keeps_alerts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = make_recorder(path, 0, **QUIET)
    state = TrainingState()
    for _ in range(3):
        state = step(recorder, state, 2.0)
    recorder.judge()
    saved, then = json.loads(json.dumps(recorder.state_dict())), state
    state = step(recorder, state, 2.0)
    recorder.log(state)
    state = step(recorder, state, 9.0)
    recorder.log(state)
    recorder.go_back(saved, dataclasses.replace(then, data_step=state.data_step, rollbacks=1))
    assert list(recorder.monitor.loss_window.values) == [2.0, 2.0, 2.0]
    assert "loss_spike" in [alert["type"] for alert in recorder.monitor.alerts]
    assert lines(path) == []
    assert [(line["step"], line["rollback"]) for line in lines(tmp_path / "metrics.abandoned.jsonl")] == [
        (4, 1),
        (5, 1),
    ]
    state = step(recorder, dataclasses.replace(then, data_step=5), 1.0)
    recorder.log(state)
    (line,) = lines(path)
    assert (line["step"], line["data_step"], line["train/loss"]) == (4, 6, 7 / 4)  # the interval's four, none abandoned
