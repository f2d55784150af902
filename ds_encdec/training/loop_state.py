"""The state of a run's training loop: its parts, which build.py supplies, and its counters."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_encdec.base.plugins import whose_fault
from ds_encdec.base.types import Batch, Callback, DsEncDecError, TrainingState
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.loader import LaneLoader
from ds_encdec.engine.protocol import Engine, ReplicaDigest
from ds_encdec.launch.host_collectives import HostCollectives, Reduction
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import Sample
from ds_encdec.training.step_plan import StepTotals, is_over

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NextStep:
    """This rank's micro-batches of the next step, or its error, and the exchange of all ranks' sums, under way.
    `lanes`: the records of the steps before. `last_save`: the time of the last save when the exchange began. `digest`:
    of the state `behind` it, if it is due; `lowest`: the epoch, and numbers that compare the digests."""

    micro_batches: list[Batch]
    error: Exception | None
    lanes: list[dict[str, Any]]
    last_save: float
    behind: TrainingState
    digest: ReplicaDigest | None
    sums: Reduction
    lowest: Reduction

    def totals(self) -> StepTotals:
        """Return the sums over all ranks, and wait for them."""
        return StepTotals(*self.sums.result().tolist(), *self.lowest.result()[:1].tolist())


@dataclass(kw_only=True)
class Trainer:
    """A run with all its parts. `state` is the current one, `start` the one with which this process began. `eval_sets`:
    by name, "" for the held-out split. `run_files` takes a checkpoint's content beside the engine's files, as it is now
    (state, records of the recorder and the lanes, facts of the save), and returns a function that rank 0 calls later to
    write it. `require_folder` raises if the run's folder is gone, and returns whether it has its checkpoints.
    `before_steps` does what an objective needs once, before the first evaluation or step: a collective. `judge` returns
    figures of generated texts, and some of the texts. `rehearses`: try evaluation and saves before the first step, as
    on accelerators."""

    config: FullConfig
    engine: Engine
    loader: LaneLoader
    eval_sets: Mapping[str, Callable[[], Sequence[Batch]]]
    collectives: HostCollectives
    recorder: Recorder
    checkpoints: CheckpointManager
    stop: StopRequest
    run_files: Callable[[TrainingState, dict[str, Any], list[dict[str, Any]], dict[str, Any]], Callable[[Path], None]]
    state: TrainingState
    require_folder: Callable[[], bool] = lambda: True
    judge: Callable[[], tuple[dict[str, float], list[Sample]]] | None = None
    callbacks: Sequence[Callback] = ()
    before_steps: Callable[[], None] = lambda: None
    rehearses: bool = False
    ahead: NextStep | None = field(default=None, init=False)
    skipped_in_a_row: int = field(default=0, init=False)
    replicas_equal_at: int | None = field(default=None, init=False)  # the step of the last comparison

    def __post_init__(self) -> None:
        self.training, self.start = self.config.training, self.state
        self.saved_data_step = self.state.data_step  # of the newest whole checkpoint, or of the start
        self.last_save = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if no step follows."""
        return is_over(self.state, self.training)

    @property
    def has_stepped(self) -> bool:
        """True once this process has taken a step, applied or not."""
        return self.state.data_step > self.start.data_step

    @property
    def lanes(self) -> list[dict[str, Any]]:
        """The records of this rank's data lanes after the last step taken, even if the loader has read further."""
        return self.loader.state() if self.ahead is None else self.ahead.lanes


def run_callbacks(run: Trainer, moment: str, state: TrainingState, fact: object) -> None:
    """Call the method `moment` of the callbacks that have one; all ranks raise the error of any. A collective."""

    def call(callback: Callback) -> None:
        try:
            getattr(callback, moment)(state, fact)
        except DsEncDecError:
            raise
        except Exception as error:
            name = f"{type(callback).__qualname__}.{moment}"
            logger.exception("%s failed:", name)
            raise DsEncDecError(
                f"the callback {name} failed at step {state.global_step}: {whose_fault(error, or_library=False)}"
            ) from error

    listening = [one for one in run.callbacks if getattr(type(one), moment) is not getattr(Callback, moment)]
    if listening:
        # They may take as long as they like.
        with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
            for callback in listening:
                run.collectives.on_every_rank(partial(call, callback))
