"""The recorder over a run that is interrupted between two lines of metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.launch.agreement import Agreement
from ds_encdec.monitor.ledger import Ledger
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import JsonlSink
from ds_encdec.types import Batch, LossSum, StepResult, TrainingState

TOKENS_PER_STEP = 30
MEASURED = ("perf/", "mem/", "ckpt/", "health/slow", "health/late")


def batch() -> Batch:
    """Only its lengths are looked at."""
    nothing = torch.zeros(0)
    return Batch(*[nothing] * 8, encoder_lengths=(4, 6), decoder_lengths=(20,))  # type: ignore[arg-type]


def make_recorder(path: Path, start_step: int) -> Recorder:
    return Recorder(
        device=torch.device("cpu"),
        agreement=Agreement(),
        warmup_steps=2,
        settings=MonitorConfig(),
        monitor=TrainingMonitor(),
        ledger=Ledger(None),
        sinks=[JsonlSink(path, start_step=start_step)],
        batch_flops=lambda _: 6e9,
        peak_flops=1e12,
    )


def run(recorder: Recorder, first: int, last: int, *, every: int = 4) -> TrainingState:
    state = TrainingState(global_step=first, data_step=first)
    for step in range(first + 1, last + 1):
        with recorder.waiting_for_data():
            losses = torch.tensor([step / 3, 0, 0, 0, 100 / step])
        recorder.add(LossSum(losses.sum(), losses, torch.tensor([5.0, 0, 0, 0, 15.0])), batch())
        state = dataclasses.replace(state, global_step=step, data_step=step)
        recorder.end_step(state, StepResult(True, torch.tensor(0.5), 1e-3))
        if step % every == 0:
            recorder.log(state)
    return state


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(make_recorder(whole, 0), 0, 12)

    first = make_recorder(cut, 0)
    run(first, 0, 6)
    checkpoint = json.dumps(first.state_dict())
    run(first, 6, 9)  # went on to step 9, then died
    resumed = make_recorder(cut, 6)
    resumed.load_state_dict(json.loads(checkpoint))
    run(resumed, 6, 12)

    def unmeasured(path: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines(path)]

    assert unmeasured(cut) == unmeasured(whole)
    assert [line["step"] for line in lines(cut)] == [4, 8, 12]


def test_throughput_after_a_resume_counts_only_what_this_process_did(tmp_path: Path) -> None:
    first = make_recorder(tmp_path / "metrics.jsonl", 0)
    run(first, 0, 3)
    resumed = make_recorder(tmp_path / "metrics.jsonl", 3)
    resumed.load_state_dict(first.state_dict())
    run(resumed, 3, 4)
    (line,) = lines(tmp_path / "metrics.jsonl")
    tokens = line["perf/tokens_per_sec"] * line["perf/step_time_s"]  # one step was timed
    assert round(tokens) == TOKENS_PER_STEP
    flops = line["perf/mfu"] * 1e12 * line["perf/step_time_s"]
    assert round(flops / 1e9) == 6


def test_time_in_checkpoints_comes_with_the_next_line_only(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "metrics.jsonl", 0)
    recorder.log_save(blocked_seconds=1.5, seconds=4.0)
    run(recorder, 0, 8)
    found = lines(tmp_path / "metrics.jsonl")
    assert [(line.get("ckpt/blocked_s"), line.get("ckpt/total_s")) for line in found] == [(1.5, 4.0), (None, None)]
