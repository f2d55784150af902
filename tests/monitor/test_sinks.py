"""What the sinks leave behind, read back with each tool's own reader or format."""

import io
import json
import logging
import math
import re
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_calls import Call, recorded
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.monitor import sinks
from ds_encdec.monitor.sinks import (
    ConsoleSink,
    GuardedSink,
    JsonlSink,
    Sample,
    Sink,
    TensorBoardSink,
    WandbSink,
    open_sinks,
)

METRICS = {
    "train/loss": 3.25,
    "train/learning_rate": 1e-4,
    "train/grad_norm": 0.5,
    "perf/tokens_per_sec": 12345.0,
    "perf/step_time_s": 2.0,
}


def lines_of(path: Path) -> list[dict[str, object]]:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


class TestJsonl:
    def test_one_object_a_line_without_nan(self, tmp_path: Path) -> None:
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.log(1, {"data_step": 2, "train/loss": 1 / 3, "train/grad_norm": math.inf, "eval/loss": math.nan})
        assert lines_of(tmp_path / "metrics.jsonl") == [  # before close: a line is never held back
            {"step": 1, "data_step": 2, "train/loss": 1 / 3, "train/grad_norm": None, "eval/loss": None}
        ]
        sink.close()

    @pytest.mark.parametrize(("start_step", "kept"), [(0, []), (10, [10]), (20, [10, 20, 20]), (99, [10, 20, 20, 30])])
    def test_resume_cuts_later_steps(self, tmp_path: Path, start_step: int, kept: list[int]) -> None:
        path = tmp_path / "metrics.jsonl"
        whole = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in (10, 20, 20, 30))
        path.write_text(whole + '{"step": 2, "train/lo')  # a torn line is cut, too
        sink = JsonlSink(path, start_step=start_step)
        sink.log(start_step + 1, {"train/loss": 2.0})
        sink.close()
        assert [line["step"] for line in lines_of(path)] == [*kept, start_step + 1]
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_a_line_without_room_is_an_error_and_leaves_no_part_of_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        sink = JsonlSink(path)
        sink.log(1, METRICS)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for step in (2, 3):
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))  # Python ignores its signal
            try:
                sink.log(step, METRICS)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sink.log(4, METRICS)
        assert [line["step"] for line in lines_of(path)] == [1, 4]
        assert [entry.levelno for entry in caplog.records] == [logging.ERROR] * 2

    def test_a_file_that_was_deleted_is_missed_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.log(1, METRICS)
        (tmp_path / "metrics.jsonl").unlink()
        for step in (2, 3):
            sink.log(step, METRICS)
        assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [2, 3]
        assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
        assert "metrics.jsonl was deleted, and begins again" in caplog.text

    def test_lines_that_are_put_aside_are_durable_before_they_are_cut(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        sink = JsonlSink(path)
        for step in (1, 2):
            sink.log(step, METRICS)
        done = recorded(monkeypatch)
        sink.go_back(1, rollback=1)
        aside = Call("fsync", tmp_path / "metrics.abandoned.jsonl")
        assert done.index(aside) < done.index(Call("replace", path))

    def test_a_rollback_that_cannot_put_lines_aside_costs_an_error_and_no_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        sink = JsonlSink(path)
        for step in (1, 2, 3):
            sink.log(step, {"train/loss": 1.0})
        (tmp_path / "metrics.abandoned.jsonl").mkdir()
        with path.open("ab") as file:
            file.write(b'{"step": 4, "tr')  # a torn line is none
        sink.go_back(1, rollback=1)
        assert [entry.levelno for entry in caplog.records] == [logging.ERROR]
        (tmp_path / "metrics.abandoned.jsonl").rmdir()
        sink.go_back(1, rollback=2)
        sink.log(2, {"train/loss": 2.0})
        sink.close()
        assert [(line["step"], line["train/loss"]) for line in lines_of(path)] == [(1, 1.0), (2, 2.0)]
        aside = lines_of(tmp_path / "metrics.abandoned.jsonl")
        assert [(line["step"], line["rollback"]) for line in aside] == [(2, 2), (3, 2)]


def test_resumes_and_rollbacks_hide_the_steps_that_are_run_again_from_tensorboard(tmp_path: Path) -> None:
    for start_step, value in ((0, 1.0), (20, 2.0)):
        sink = TensorBoardSink(tmp_path, FullConfig(), start_step=start_step)
        for step in range(start_step + 10, 50, 10):
            sink.log(step, {"train/loss": value})
        if start_step:
            sink.go_back(30, rollback=1)
            sink.log(40, {"train/loss": 3.0})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 3.0)]


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("API_KEY", "PROJECT", "DIR", "RUN_ID", "MODE", "BASE_URL", "IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def wandb_records(path: Path) -> Iterator[object]:
    """Records of a .wandb file: a 7-byte header, then LevelDB's log format (32 KiB blocks of framed fragments)."""
    from wandb.proto import wandb_internal_pb2

    data, position, payload = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):  # still being written
            return
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last fragment
            yield wandb_internal_pb2.Record.FromString(payload)
            payload = b""


def wandb_history(path: Path) -> list[dict[str, object]]:
    """The points of a finished run. W&B's own process may still be writing its last records when `finish` returns."""
    deadline = time.monotonic() + 10.0
    while not any(record.HasField("exit") for record in wandb_records(path)) and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.05)
    items = [record.history.item for record in wandb_records(path) if record.HasField("history")]  # type: ignore[attr-defined]
    rows = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in items]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


@pytest.mark.usefixtures("logged_out")
class TestWandb:
    def test_without_login_offline_with_one_warning_and_the_same_run_after_a_resume(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = load_config(None, ["wandb_project=tests", "wandb_run_name=a run", "training.seed=7"])
        for first_step in (10, 30):
            sink = WandbSink(tmp_path / "logs", config)
            sink.log(first_step, {"train/loss": 60.0 / first_step})
            sink.log(first_step + 10, {"train/loss": 1.5, "eval/loss": math.inf})
            sink.close()
            warnings = [entry for entry in caplog.records if entry.name == "ds_encdec.monitor.sinks"]
            assert len(warnings) == 1
            assert "offline" in warnings[0].getMessage()
            caplog.clear()
        files = sorted(tmp_path.glob("logs/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
        run_id = (tmp_path / "logs/wandb_run_id").read_text().strip()
        assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
        assert wandb_history(files[0]) == [
            {"step": 10, "train/loss": 6.0},
            {"step": 20, "train/loss": 1.5, "eval/loss": math.inf},
        ]
        assert [row["step"] for row in wandb_history(files[1])] == [30, 40]
        (run,) = [record.run for record in wandb_records(files[0]) if record.HasField("run")]  # type: ignore[attr-defined]
        assert (run.project, run.display_name) == ("tests", "a run")
        assert json.loads({item.key: item.value_json for item in run.config.update}["training"])["seed"] == 7

    def test_unreachable_server_goes_offline(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key, folder = "0123456789abcdef" * 3, str(tmp_path)
        variables = {"API_KEY": key, "BASE_URL": "http://127.0.0.1:9", "PROJECT": "of-the-shell", "DIR": folder}
        for name, value in {**variables, "RUN_ID": "abcd1234"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        monkeypatch.setattr(sinks, "WANDB_INIT_TIMEOUT_S", 2.0)
        sink = WandbSink(tmp_path / "logs", load_config(None))
        sink.log(1, {"train/loss": 2.0})
        sink.close()
        assert "no connection" in caplog.text
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert file.name == "run-abcd1234.wandb"
        assert wandb_history(file) == [{"step": 1, "train/loss": 2.0}]
        (run,) = [record.run for record in wandb_records(file) if record.HasField("run")]  # type: ignore[attr-defined]
        assert run.project == "of-the-shell"
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]

    def test_a_damaged_id_is_none_and_a_kept_one_is_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = tmp_path / "wandb_run_id"
        done = recorded(monkeypatch)
        first = sinks._wandb_run_id(tmp_path)
        assert [call.name for call in done] == ["fsync", "replace", "fsync"]
        assert done[1:] == [Call("replace", kept), Call("fsync", tmp_path)]
        assert sinks._wandb_run_id(tmp_path) == first
        for damaged in (b"", bytes(20), b"\xff\xfe\n", b"a b\n"):
            kept.write_bytes(damaged)
            assert re.fullmatch(r"[0-9a-f]{8}", made := sinks._wandb_run_id(tmp_path))
            assert kept.read_text() == f"{made}\n"
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
        assert sinks._wandb_run_id(tmp_path) == "mine" == kept.read_text().strip()


class Failing(Sink):
    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def log(self, step: int, metrics: object) -> None:
        self.calls += 1
        raise self.error

    def close(self, exit_code: int = 0) -> None:
        self.calls += 1


class TestGuard:
    @pytest.mark.parametrize("error", [RuntimeError("the tracker is gone"), SystemExit(1)])
    def test_failing_sink_is_dropped_with_one_warning(
        self, caplog: pytest.LogCaptureFixture, error: BaseException
    ) -> None:
        failing = Failing(error)
        sink = GuardedSink("tracker", lambda: failing)
        for step in range(3):
            sink.log(step, METRICS)
        sink.close()
        assert failing.calls == 1
        assert caplog.text.count("tracker has failed and is dropped") == 1
        assert type(error).__name__ in caplog.text

    def test_a_second_ctrl_c_is_no_failure(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            GuardedSink("tracker", lambda: Failing(KeyboardInterrupt())).log(1, METRICS)


class TestConsole:
    def test_plain_lines_without_a_terminal(self) -> None:
        out = io.StringIO()
        sink = ConsoleSink(110, console=Console(file=out))
        sink.log(10, {**METRICS, "perf/mfu": 0.413, "train/skipped_steps": 0})
        sink.log(10, {"eval/loss": 3.0, "eval/perplexity": 20.0855})
        sink.log(10, {"ckpt/blocked_s": 1.0})
        sink.log(11, {"train/loss": math.nan, "train/skipped_steps": 2})
        sink.close()
        assert out.getvalue().splitlines() == [
            "step 10/110 | loss 3.2500 | lr 1.00e-04 | grad norm 0.500 | tokens/s 12,345 | MFU 41.3% | ETA 3 min 20 s",
            "step 10/110 | eval loss 3.0000 | perplexity 20.09",
            "step 11/110 | loss nan | skipped 2",
        ]

    @pytest.mark.parametrize(
        ("width", "fit"),
        [
            (60, "loss 3.2500"),
            (120, "loss 3.2500 | lr 1.00e-04 | grad norm 0.500 | tokens/s 12,345"),
        ],
    )
    def test_step_bar_and_eta_at_any_width(self, width: int, fit: str) -> None:
        out = io.StringIO()
        sink = ConsoleSink(100_000, start_step=5, console=Console(file=io.StringIO(), force_terminal=True))
        sink.log(50_000, {**METRICS, "perf/step_time_s": 9.0, "perf/mfu": 0.4})
        sink.close()
        Console(file=out, width=width).print(sink)
        (last,) = out.getvalue().splitlines()
        assert re.fullmatch(r"step 50000/100000 ━{4,} +ETA 5.21 days " + re.escape(fit), last.rstrip())
        assert len(last) <= width


class TestOpenSinks:
    def test_other_ranks_have_none_and_touch_nothing(self, tmp_path: Path) -> None:
        config = FullConfig.model_validate({"training": {"report_to": ("wandb", "tensorboard")}})
        assert open_sinks(config, tmp_path, rank=1) == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.usefixtures("logged_out")
    def test_rank_0_writes_what_is_configured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = FullConfig.model_validate(
            {"training": {"report_to": ("tensorboard", "wandb"), "eval_generate_samples": 2, "seed": 7}}
        )
        samples = [Sample("a | b\n<c>", "yes", "no"), Sample("", "x", "")]
        for sink in open_sinks(config, tmp_path, rank=0):
            sink.log(10, METRICS)
            sink.show(10, samples)
            sink.close(0)
        assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 10, **METRICS}]
        assert lines_of(tmp_path / "samples.jsonl") == [{"step": 10, **sample._asdict()} for sample in samples]
        events = EventAccumulator(str(tmp_path / "logs/tensorboard")).Reload()

        def text(tag: str) -> bytes:
            (event,) = events.Tensors(tag)
            return bytes(event.tensor_proto.string_val[0])

        assert b"\n| a &#124; b<br>&lt;c&gt; | yes | no |\n" in text("eval/samples/text_summary")
        assert b"\n      seed: 7\n" in text("configuration/text_summary")
        (file,) = tmp_path.glob("logs/wandb/offline-run-*/*.wandb")
        assert wandb_history(file)[1]["eval/samples/nrows"] == 2
        assert "loss 3.2500" in capsys.readouterr().out
