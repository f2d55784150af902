"""What the process that waits for a phase says about its run."""

from __future__ import annotations

from pathlib import Path

from ds_encdec.config.schema import load_config
from ds_encdec.monitor.sinks import JsonlSink
from ds_encdec.phase_runs.progress import Progress
from ds_encdec.phases import TrainingPhase, plan_phase

QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"


def test_each_step_is_said_once_and_again_after_a_rollback(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = tmp_path / "metrics.jsonl"

    def train(sink: JsonlSink, *steps: int) -> list[str]:
        said.clear()
        for step in steps:
            sink.log(step, {"train/loss": float(step), "perf/step_time_s": 2.0})
        progress.look()
        return [line.removeprefix("step ").partition("/40 | loss")[0] for line in said]

    sink = JsonlSink(metrics)
    sink.log(1, {"train/loss": 1.0})
    planned = plan_phase(load_config(QUICKSTART), TrainingPhase.SANITY_CHECK, max_steps=40)
    assert planned.config.training.eval_steps // 10 == 4
    progress = Progress(metrics, planned, said.append)
    assert train(sink) == []
    assert train(sink, 2, 3, 4, 5, 8) == ["2", "4", "8"]
    assert said[0] == "step 2/40 | loss 2.0000 | ETA 0:01:16"
    sink.go_back(3, 1)
    assert train(sink) == []
    assert train(sink, 4, 5) == ["4"]
    sink.close()
    with metrics.open("a") as file:
        file.write('{"step": 8, "train/lo')  # a line that is being written
    assert train(JsonlSink(tmp_path / "other.jsonl")) == []
    with metrics.open("a") as file:
        file.write('ss": 8.0}\n')
    assert train(JsonlSink(tmp_path / "other.jsonl")) == ["8"]
