"""The plan of a step; the loop and its saves, with an engine without a model: which are believed, which end a run."""

import dataclasses
import errno
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_encdec.base.types import (
    Batch,
    Callback,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    DsEncDecError,
    LossSum,
    Preempted,
    StepResult,
    TrainingState,
)
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.checkpoint.manifest import MANIFEST, verify_checkpoint
from ds_encdec.config.schema import DataConfig, FullConfig, TrainingConfig
from ds_encdec.data.workers import WorkerKilledError
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.peers import Watchdog
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.run_folder import RunFolder, RunFolderGoneError
from ds_encdec.launch.world import discover
from ds_encdec.monitor.metrics_file import EventLog
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.recorder import Actions, Recorder
from ds_encdec.monitor.sinks import JsonlSink
from ds_encdec.training import build
from ds_encdec.training import trainer as trainer_module
from ds_encdec.training.build import _open_callbacks, _train_and_close
from ds_encdec.training.loop_state import Trainer
from ds_encdec.training.step_plan import StepPlan, StepTotals, advance, after_evaluation, is_best, is_over
from ds_encdec.training.trainer import train

TOTALS = StepTotals(target_tokens=70, encoder_tokens=50, epoch=2)


def result(applied: bool) -> StepResult:
    return StepResult(applied=applied, grad_norm=torch.tensor(1.0), learning_rate=0.1)


def test_counters_keep_applied_and_consumed_steps_apart() -> None:
    state = TrainingState()
    for applied in (True, False, True):
        state = advance(state, result(applied), TOTALS)
    assert (state.global_step, state.data_step, state.skipped_steps) == (2, 3, 1)
    assert (state.encoder_tokens_seen, state.target_tokens_seen, state.total_tokens_seen) == (150, 210, 360)
    assert state.epoch == 2
    assert TrainingState(**state.to_dict()) == state


PLAN = TrainingConfig(num_train_steps=100, warmup_steps=1, logging_steps=2, eval_steps=4, save_steps=6)


@pytest.mark.parametrize(
    ("step", "changes", "expected"),
    [
        (1, {}, StepPlan()),
        (4, {}, StepPlan(log=True, judge=True, evaluate=True)),
        (6, {}, StepPlan(log=True, judge=True, evaluate=True, save=True)),  # a checkpoint could be the best
        (6, {"eval_samples": 0}, StepPlan(log=True, judge=True, save=True)),
        (6, {"applied": False}, StepPlan(judge=True)),  # what was due at step 6 happened when that was applied
        (5, {"save_steps": 5}, StepPlan(judge=True, evaluate=True, save=True)),  # no state is saved unjudged
        (6, {"save_strategy": "best"}, StepPlan(log=True, judge=True)),  # evaluations decide, every 4 steps
        (1, {"save_due": True}, StepPlan(judge=True, save=True)),  # by the clock
        (1, {"every_step": True}, StepPlan(judge=True)),
        (99, {"num_train_steps": 99}, StepPlan(log=True, judge=True, evaluate=True, save=True)),  # the last step
        (99, {"num_train_steps": 99, "applied": False, "save_due": True}, StepPlan(judge=True, save=True)),
    ],
)
def test_what_is_due_after_a_step(step: int, changes: dict[str, Any], expected: StepPlan) -> None:
    changes = dict(changes)
    applied, every_step = changes.pop("applied", True), changes.pop("every_step", False)
    totals = dataclasses.replace(TOTALS, **{name: changes.pop(name) for name in {"save_due"} & changes.keys()})
    training = PLAN.model_copy(update=changes)
    assert StepPlan.after(TrainingState(step), result(applied), totals, training, every_step=every_step) == expected


def test_another_metric_forgets_the_best() -> None:
    state = TrainingState(global_step=9, best_value=2.0, best_step=8, leading_value=1.5, evaluations_since_leading=3)
    assert state.with_best_by(TrainingConfig().best_by) == state
    other = TrainingConfig(metric_for_best_model="chrf").best_by
    assert state.with_best_by(other) == TrainingState(global_step=9, best_by=other)


def test_a_figure_may_be_better_when_greater() -> None:
    training = TrainingConfig(metric_for_best_model="exact_match")
    assert [is_best(TrainingState(best_value=0.3), value, training) for value in (0.2, 0.4)] == [False, True]
    state = after_evaluation(TrainingState(leading_value=0.3), 0.4, training)
    assert (state.leading_value, state.evaluations_since_leading) == (0.4, 0)


def test_early_stopping_counts_evaluations_that_are_not_lower_by_the_threshold() -> None:
    training = TrainingConfig(early_stopping_patience=2, early_stopping_threshold=0.5)
    state = TrainingState(global_step=1)
    seen = []
    for loss in (4.0, 3.6, 3.4, 3.3, None, math.nan, 3.0):
        state = after_evaluation(state, loss, training)
        seen.append((state.leading_value, state.evaluations_since_leading, is_over(state, training)))
    assert seen == [
        *((4.0, 0, False), (4.0, 1, False)),  # lower, but not by the threshold
        *((3.4, 0, False), (3.4, 1, False), (3.4, 1, False)),  # no evaluation
        *((3.4, 2, True), (3.4, 3, True)),  # not finite: not lower
    ]
    assert not is_over(state, TrainingConfig())
    assert is_over(TrainingState(global_step=100_000), TrainingConfig())


def test_best_is_lower_than_every_saved_one() -> None:
    for best, loss in ((None, 3.0), (3.0, 2.9), (3.0, 3.0), (None, math.nan), (None, None)):
        assert is_best(TrainingState(best_value=best), loss, TrainingConfig()) is (loss in (2.9, 3.0) and best != loss)


class ScriptedEngine:
    """An engine without a model. `writing[step]` is called where the checkpoint of that step is written."""

    device = torch.device("cpu")

    def __init__(self, writing: dict[int, Callable[[], object]]) -> None:
        self.writing = writing
        self.step_number = 0

    def losses(self, batches: list[Batch]) -> list[LossSum]:
        assert not batches
        return []

    def step(self, veto: object = None) -> StepResult:
        self.step_number += 1
        time.sleep(0.02)
        return result(applied=True)

    def held_bytes(self) -> dict[str, int]:
        return {}

    def replica_digest(self) -> None: ...

    def stage(self, folder: Path, *, copy: bool) -> StagedSave:
        step = self.step_number

        def write() -> list[Path]:
            (folder / "weights").write_text(str(step))
            self.writing.get(step, lambda: None)()
            return [folder / "weights"]

        return StagedSave(1, lambda: None, write)


class EmptyLoader:
    """Steps without a micro-batch. `ending[step]` is called when that step's are asked for."""

    epoch = 0
    bad_rows: Sequence[int] = ()

    def __init__(self) -> None:
        self.asked = 0
        self.ending: dict[int, Callable[[], object]] = {}

    def __next__(self) -> list[Batch]:
        self.asked += 1
        self.ending.get(self.asked, lambda: None)()
        return []

    def state(self) -> list[dict[str, Any]]:
        return [{"lane": 0, "batches": self.asked, "bad_rows": self.bad_rows, "last_bad_row": [1, "the row"]}]

    def close(self) -> None:
        pass


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "weights")


def divide() -> float:
    return 1 / 0


def make_run(folder: Path, engine: ScriptedEngine, **training: Any) -> Trainer:
    own = {"num_train_steps": 8, "save_steps": 2, "logging_steps": 1, "eval_steps": 2, "warmup_steps": 1}
    config = FullConfig(training=TrainingConfig(**own | training))
    collectives = HostCollectives()
    folder.mkdir(exist_ok=True)
    checkpoints = CheckpointManager(folder, collectives, engine_name="test", keep=None)
    checkpoints.prepare()

    def run_files(state: TrainingState, *rest: Any) -> Callable[[Path], None]:
        _, lanes, facts = rest
        texts = {"trainer": json.dumps(state.to_dict()), "data": json.dumps(lanes), "facts": json.dumps(facts)}

        def write(path: Path) -> None:
            for name, text in texts.items():
                (path / f"{name}.json").write_text(text)

        return write

    recorder = Recorder(
        device=torch.device("cpu"),
        collectives=collectives,
        state=TrainingState(),
        warmup_steps=0,
        settings=config.monitor,
        monitor=TrainingMonitor(),
        events=EventLog(None),
        sinks=[JsonlSink(folder.with_suffix(".jsonl"))],
        batch_flops=lambda batch: 0.0,
        peak_flops=None,
    )
    return Trainer(
        config=config,
        engine=engine,  # type: ignore[arg-type]
        loader=EmptyLoader(),  # type: ignore[arg-type]
        eval_sets={"": list},
        collectives=collectives,
        recorder=recorder,
        checkpoints=checkpoints,
        stop=StopRequest(discover({}), poll_seconds=0.02),
        run_files=run_files,
        state=TrainingState(),
    )


@pytest.fixture
def eval_losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    losses = [1.0]

    def evaluate(*_: Any) -> dict[str, float]:
        return {"eval/loss": losses.pop(0) if len(losses) > 1 else losses[0]}

    monkeypatch.setattr(trainer_module, "evaluate", evaluate)
    return losses


def reasons(folder: Path) -> dict[int, str]:
    steps = committed_steps(folder)
    return {step: json.loads((path / "facts.json").read_text())["reason"] for step, path in steps.items()}


def saved_state(folder: Path, name: str) -> TrainingState:
    return TrainingState(**json.loads((folder / name / "trainer.json").read_text()))


def test_a_checkpoint_has_the_data_behind_its_step_however_far_the_loader_has_read(
    tmp_path: Path, eval_losses: list[float]
) -> None:
    train(make_run(tmp_path / "checkpoints", ScriptedEngine({})))
    for step, path in committed_steps(tmp_path / "checkpoints").items():
        (lane,) = json.loads((path / "data.json").read_text())
        assert lane["batches"] == step


class SkippingEngine(ScriptedEngine):
    """Does not apply the data steps `skipped`."""

    def __init__(self, skipped: set[int]) -> None:
        super().__init__({})
        self.skipped = skipped

    def step(self, veto: object = None) -> StepResult:
        super().step()
        return result(applied=self.step_number not in self.skipped)


def test_only_skips_in_a_row_end_a_run(tmp_path: Path, eval_losses: list[float]) -> None:
    limit = {"max_consecutive_skipped_steps": 3}
    assert train(make_run(tmp_path / "apart", SkippingEngine({2, 3, 5, 7, 8}), **limit)).skipped_steps == 5
    with pytest.raises(DivergedError, match=r"^3 steps in a row were skipped .* data step 6 \(applied step 3\)"):
        train(make_run(tmp_path / "in a row", SkippingEngine({4, 5, 6}), **limit))


def test_a_folder_that_is_deleted_ends_the_run_at_its_next_line_of_metrics(
    tmp_path: Path, eval_losses: list[float]
) -> None:
    engine = ScriptedEngine({})
    run = make_run(tmp_path / "checkpoints", engine, logging_steps=2, save_steps=8)

    def require_folder() -> bool:
        if engine.step_number >= 3:
            raise RunFolderGoneError("it was deleted")
        return True

    run.require_folder = require_folder
    with pytest.raises(RunFolderGoneError):
        train(run)
    assert engine.step_number == 4


def test_a_best_checkpoint_that_was_deleted_with_all_others_is_best_no_more(
    tmp_path: Path, eval_losses: list[float]
) -> None:
    eval_losses[:] = [1.0, 2.0, 3.0, 2.5]
    engine = ScriptedEngine({})
    run = make_run(tmp_path / "checkpoints", engine)
    run.require_folder = lambda: engine.step_number != 4
    state = train(run)
    assert (state.best_step, state.best_value) == (4, 2.0)
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000004"


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_is_not_believed_and_the_next_one_is(
    tmp_path: Path, eval_losses: list[float], caplog: pytest.LogCaptureFixture, async_save: bool
) -> None:
    eval_losses[:] = [4.0, 1.0, 3.0, 5.0]
    folder = tmp_path / "checkpoints"
    run = make_run(folder, ScriptedEngine({4: fail}), async_save=async_save)
    state = train(run)
    assert reasons(folder) == {2: "interval", 6: "interval", 8: "end"}
    assert (state.best_step, state.best_value) == (6, 3.0)  # 1.0 was step 4's
    assert (folder / "best").resolve().name == "step-00000006"
    assert saved_state(folder, "step-00000008").best_step == 6
    (message,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert message.startswith("step 4 was not saved: rank 0: [Errno 28] No space left on device: 'weights'.")
    assert "The newest is step 2's. Training goes on" in message


def test_only_what_is_better_is_saved_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_losses: list[float]
) -> None:
    matches, evaluated_again = [0.0, 0.2, 0.1, 0.5, 0.5, 0.4], threading.Event()

    def evaluate(*_: Any) -> dict[str, float]:
        if len(matches) == 2:
            evaluated_again.set()
        return {"eval/loss": 1.0, "eval/exact_match": matches.pop(0)}

    monkeypatch.setattr(trainer_module, "evaluate", evaluate)
    folder = tmp_path / "checkpoints"
    chosen = {"metric_for_best_model": "exact_match", "eval_generate_samples": 4, "save_strategy": "best"}
    run = make_run(
        folder, ScriptedEngine({8: evaluated_again.wait}), **chosen, early_stopping_patience=2, num_train_steps=50
    )
    state = train(run)
    assert sorted(committed_steps(folder)) == [2, 4, 8, 12]  # 12 is where it was over
    assert (state.best_step, state.best_value, (folder / "best").resolve().name) == (8, 0.5, "step-00000008")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(StopRequest, "_end", lambda _, why: reasons.append(why))
    return reasons


def be_slow_and_asked_to_stop() -> None:
    """By the time of the signal the loop waits for this, be it in the background."""
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)


@pytest.mark.parametrize(
    ("step", "async_save", "error", "steps"),
    [(8, True, None, 8), (4, False, Preempted, 8), (20, True, Preempted, 80)],
    ids=["the last save", "a save at once", "asked between two saves"],
)
def test_sigterm_lets_a_slow_save_end(
    tmp_path: Path, eval_losses: list[float], ended: list[str], step: int, async_save: bool, error: Any, steps: int
) -> None:
    silent_seconds: list[float] = []

    def save() -> None:
        be_slow_and_asked_to_stop()
        silent_seconds.append(run.stop.heartbeat.silent_seconds)

    engine, settings = ScriptedEngine({step: save}), {"num_train_steps": steps, "save_steps": steps // 4}
    run = make_run(tmp_path / "checkpoints", engine, async_save=async_save, **settings)
    run.stop.stuck_seconds = 0.3
    with run.stop, pytest.raises(error) if error else nullcontext():
        train(run)
    assert not ended
    assert silent_seconds == [0.0]  # or the other ranks would take it for stuck
    assert step in committed_steps(run.checkpoints.folder)


def test_sigterm_lets_the_save_end_that_closing_waits_for(
    tmp_path: Path, ended: list[str], eval_losses: list[float]
) -> None:
    run = make_run(tmp_path / "checkpoints", ScriptedEngine({2: be_slow_and_asked_to_stop}))
    run.loader.ending = {4: divide}  # type: ignore[attr-defined]
    run.stop.stuck_seconds = 0.3
    with run.stop, pytest.raises(DsEncDecError, match="ZeroDivisionError"):
        _train_and_close(run)
    assert not ended
    assert sorted(committed_steps(run.checkpoints.folder)) == [2]


@pytest.mark.parametrize(
    ("settings", "writing", "saved"),
    [
        # What the clock asked for before a save, while that step was made, is not asked for again after it.
        ({"save_steps": 1000, "save_interval_hours": 1e-9, "async_save": False}, {}, [1, 3, 5, 7, 8]),
        # A save slower than the interval holds the next one up, and none is lost.
        ({"save_steps": 1}, dict.fromkeys(range(9), partial(time.sleep, 0.2)), [*range(1, 9)]),
    ],
    ids=["by the clock", "one under way"],
)
def test_when_it_is_saved(
    tmp_path: Path, eval_losses: list[float], settings: dict[str, Any], writing: dict[int, Any], saved: list[int]
) -> None:
    train(make_run(tmp_path / "checkpoints", ScriptedEngine(writing), **settings))
    assert sorted(committed_steps(tmp_path / "checkpoints")) == saved


def test_a_last_save_that_fails_ends_the_run_with_an_error(tmp_path: Path, eval_losses: list[float]) -> None:
    run = make_run(tmp_path / "checkpoints", ScriptedEngine({8: fail}))
    with pytest.raises(CheckpointError, match=r"step 8 was not saved: .*No space left.*--resume auto"):
        train(run)
    assert sorted(committed_steps(run.checkpoints.folder)) == [2, 4, 6]
    for path in committed_steps(run.checkpoints.folder).values():
        verify_checkpoint(path)


def test_a_save_on_being_stopped_is_written_before_the_run_ends_which_no_evaluation_delays(
    tmp_path: Path, eval_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for writing, saved, error in (({}, [2, 3], Preempted), ({3: fail}, [2], CheckpointError)):
        engine = ScriptedEngine(writing)
        eval_losses[:] = [3.0, 2.0, 1.0]
        run = make_run(tmp_path / error.__name__, engine, eval_steps=3)
        monkeypatch.setattr(StopRequest, "requested", property(lambda _, engine=engine: engine.step_number == 2))
        with pytest.raises(error):
            train(run)
        assert reasons(run.checkpoints.folder) == {step: {2: "interval", 3: "stop"}[step] for step in saved}
        assert eval_losses == [2.0, 1.0]  # that of step 2 was made


def test_what_goes_wrong_in_the_background_ends_the_run_at_a_later_step(
    tmp_path: Path, eval_losses: list[float]
) -> None:
    engine = ScriptedEngine({2: divide})
    run = make_run(tmp_path / "checkpoints", engine, num_train_steps=1000)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        train(run)
    assert engine.step_number <= 4
    assert not committed_steps(run.checkpoints.folder)


@pytest.mark.parametrize(("killed_at", "saved"), [(1, []), (4, [2, 3])])
def test_data_that_ends_costs_no_step_and_is_an_error_unless_a_worker_was_killed_in_a_stop(
    tmp_path: Path, eval_losses: list[float], caplog: pytest.LogCaptureFixture, killed_at: int, saved: list[int]
) -> None:
    def be_killed() -> None:
        raise WorkerKilledError("a data worker (process 1) was killed by SIGKILL. SIGKILL usually means memory")

    def be_killed_in_a_stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        be_killed()

    run = make_run(tmp_path / "stopped", ScriptedEngine({}), async_save=False)
    run.loader.ending = {killed_at: be_killed_in_a_stop}  # type: ignore[attr-defined]
    told = "state saved; go on with --resume auto" if saved else "no step was taken, so there was nothing to save"
    with run.stop, pytest.raises(Preempted, match=rf"stopped at step {killed_at - 1} by SIGTERM; {told}"):
        train(run)
    assert sorted(committed_steps(tmp_path / "stopped")) == saved

    written: list[int] = []
    noted = {step: partial(written.append, step) for step in (1, 2, 3)}
    for name, writing, left in (("alone", noted, saved), ("disk", {3: fail}, saved[:1])):
        run = make_run(tmp_path / name, ScriptedEngine(writing), async_save=False)
        run.loader.ending = {killed_at: be_killed}  # type: ignore[attr-defined]
        with run.stop, caplog.at_level("ERROR"), pytest.raises(DataError):
            train(run)
        assert sorted(committed_steps(tmp_path / name)) == left
        assert "killed by SIGKILL" in caplog.text
        caplog.clear()
    assert written == saved

    run = make_run(tmp_path / "diverged", ScriptedEngine({}), async_save=False)
    run.loader.ending = {killed_at: be_killed}  # type: ignore[attr-defined]
    alert = {"type": "loss_spike", "message": "too high"}
    run.recorder.judge = lambda: Actions(stop=alert) if run.loader.asked == killed_at else Actions()  # type: ignore
    with run.stop, pytest.raises(DivergedError, match="loss_spike: too high"):
        train(run)


def test_the_limit_of_bad_rows_is_one_of_each_pass(tmp_path: Path) -> None:
    run = make_run(tmp_path / "checkpoints", ScriptedEngine({}), num_train_steps=2, eval_samples=0)
    run.config = run.config.model_copy(update={"data": DataConfig(on_bad_row="skip")})
    run.loader.bad_rows = [600, 0, 700]  # type: ignore[attr-defined]
    assert train(run).bad_rows == 700
    run.state, run.loader.bad_rows = TrainingState(), [600, 1001]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=1000 .* the row"):
        train(run)


def test_a_hang_has_the_last_word_before_another_ending_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []

    class Watching(Watchdog):
        def __exit__(self, *error: object) -> None:
            found.append(folder.read_status())
            super().__exit__(*error)

    folder, world = RunFolder(tmp_path / "run"), discover({})
    context = RunContext(world, torch.device("cpu"), "fsdp", HostCollectives())
    monkeypatch.setattr(build, "Watchdog", Watching)
    monkeypatch.setattr(build, "join_ranks", lambda *_, **met: context)
    values = {"model": {"model_name_or_path": "/gone"}, "infra": {"output_dir": str(folder.root)}}
    config = FullConfig.model_validate(values)
    with StopRequest(world) as stop, pytest.raises(DsEncDecError, match="/gone"):
        build.run_training(config, stop)
    assert (found, folder.read_status()["state"]) == ([{}], "failed")


class Told(Callback):
    def __init__(self, fails_at: tuple[str, int] | None = None) -> None:
        self.moments: list[tuple[str, int]] = []
        self._fails_at = fails_at

    def _keep(self, moment: str, state: TrainingState) -> None:
        self.moments.append((moment, state.global_step))
        if self.moments[-1] == self._fails_at:
            raise KeyError("mine")

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        self._keep("step", state)

    def after_evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        self._keep("evaluation", state)

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        assert (checkpoint / MANIFEST).exists()
        self._keep("save", state)


def test_what_is_no_callback_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"training\.callbacks: <object object .*> is not a ds_encdec\.Callback"):
        _open_callbacks(FullConfig(), [Told(), object()], HostCollectives())  # type: ignore[list-item]


def test_callbacks_are_told_of_three_moments_in_the_order_of_the_loop(tmp_path: Path, eval_losses: list[float]) -> None:
    run = make_run(tmp_path / "checkpoints", ScriptedEngine({2: fail}), async_save=False, num_train_steps=4)
    run.callbacks = [first, second] = [Told(), Told()]
    train(run)
    evaluated = [("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("step", 4), ("evaluation", 4)]
    assert first.moments == second.moments == [*evaluated, ("save", 4)]  # the save of step 2 failed


@pytest.mark.parametrize("moment", [("step", 3), ("save", 2)])
def test_what_a_callback_raises_ends_the_run_by_its_name(
    tmp_path: Path, eval_losses: list[float], moment: tuple[str, int]
) -> None:
    run = make_run(tmp_path / "checkpoints", ScriptedEngine({}), async_save=False)
    run.callbacks = [Told(moment)]
    name, step = moment
    with pytest.raises(DsEncDecError, match=f"the callback Told.after_{name} failed at step {step}: KeyError: 'mine'"):
        train(run)
    assert run.engine.step_number == step  # type: ignore[attr-defined]
