"""A run of two ranks that is ended at a random moment, and what it must have left (for kill_saves.py)."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what is imported next
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch")]

# Everything is imported before the ranks are forked, also what the engines import late.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
from tiny_run import QUICKSTART, environment, free_port, launcher, overrides  # noqa: E402

from ds_encdec import train  # noqa: E402
from ds_encdec.checkpoint.folder import committed_steps  # noqa: E402
from ds_encdec.checkpoint.manifest import verify_checkpoint  # noqa: E402
from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: E402, F401
from ds_encdec.training import build  # noqa: E402, F401

WORLD_SIZE = 2
ENGINES = ("deepspeed", "fsdp")
SAVE_STEPS = 4
LATEST_KILL = 1.5
"""A kill comes at most this long after a save has begun, in lengths of the save before it."""
LATEST_STOP_SECONDS = 3.0
EARLY = 0.25
"""The part of the stops under a launcher that comes while the ranks are starting."""
BETWEEN_RANKS_SECONDS = 0.02
PATIENCE_SECONDS = 120.0
LARGE_BATCH = 160
"""So many examples of 128 tokens, of 4 bytes each, are more than the 64 KB that a pipe holds."""

T = TypeVar("T")


class CheckFailedError(Exception):
    """A run left, or went on with, something that is not as it must be."""


@dataclass
class Tally:
    """The results of one way of ending runs.

    `unfinished`: ends that left a `step-N.tmp`, so they hit a save before its commit. `lost`: of each end, the
    finished steps since the newest visible checkpoint.
    """

    ends: int = 0
    unfinished: int = 0
    verified: int = 0
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """How a start trains and saves, and is ended: by a signal, or None for SIGKILL in the middle of a save."""

    engine: str
    async_save: bool
    stop: signal.Signals | None = None

    @property
    def most_lost(self) -> int:
        """Steps that an end may lose. In the background the next interval is trained while a save is written."""
        if self.stop is not None:
            return 0
        return 2 * SAVE_STEPS if self.async_save else SAVE_STEPS

    def __str__(self) -> str:
        saves = "in the background" if self.async_save else "at once"
        return f"{self.engine}, {self.stop.name if self.stop else saves}"


class Victim:
    """A run of one engine, of forked ranks or under a launcher, watched through its log and its folder, and ended."""

    def __init__(self, folder: Path, engine: str, options: argparse.Namespace, rng: random.Random) -> None:
        self.engine = engine
        self.compared = 0
        self._options = options
        self._rng = rng
        self._folder = folder
        self._run = folder / engine
        self._checkpoints = self._run / "checkpoints"
        self._log = folder / f"{engine}.log"
        self._log.touch()

    def end_once(self, way: Way, tally: Tally) -> None:
        """Start or resume, end it, check. Raises CheckFailedError or CheckpointError."""
        newest = self._newest()
        arguments = self._arguments(self._run, way.engine, way.async_save)
        early = False
        if self._options.launcher:
            early = self._rng.random() < EARLY
            self._end_launched(arguments, way, early=early)
        else:
            ranks = self._fork(arguments)
            try:
                if way.stop is None:
                    self._wait_for_a_save(ranks, newest)
                else:
                    self._wait_for_work(ranks)
                    os.killpg(ranks[0], way.stop)
                    self._await_codes(ranks, 75)
            finally:
                self._kill(ranks)
        if not early and self._first_step() != newest:
            raise CheckFailedError(f"went on from step {self._first_step()}, but the newest checkpoint was {newest}")
        tally.ends += 1
        self._check(newest, way, tally, early=early)

    def compare(self) -> None:
        """Train as far without an interruption, and compare every step; then go on with the other engine."""
        trained = self._trained()
        whole = self._folder / f"{self.engine}-whole"
        ranks = self._fork(self._arguments(whole, self.engine, True))
        try:
            self._await(ranks, lambda: self._trained(whole) >= trained, f"step {trained}", patience=trained)
        finally:
            self._kill(ranks)
        expected, found = _steps(whole), _steps(self._run)
        for step in range(1, trained + 1):
            if found.get(step) != expected[step]:
                raise CheckFailedError(f"step {step} was {found.get(step)}, uninterrupted {expected[step]}")
        self.compared = trained
        (other,) = set(ENGINES) - {self.engine}
        newest = self._newest()
        ranks = self._fork([*self._arguments(self._run, other, False), f"training.save_steps={SAVE_STEPS}"])
        try:
            self._await(ranks, lambda: self._newest() > newest, f"a checkpoint of {other} after step {newest}")
        finally:
            self._kill(ranks)

    def log_tail(self) -> str:
        """The end of what the ranks of the last start have printed."""
        return self._log.read_text()[-3000:]

    def _wait_for_a_save(self, ranks: list[int], newest: int) -> None:
        self._await(ranks, self._first_step, "its first step")
        self._await(ranks, lambda: self._begun() > newest, f"a save after step {newest}")
        began = time.monotonic()
        self._await(ranks, lambda: self._newest() > newest, f"a checkpoint after step {newest}")
        save_seconds = time.monotonic() - began
        self._await(ranks, lambda: self._begun() > self._newest(), "another save")
        time.sleep(self._rng.uniform(0.0, LATEST_KILL * save_seconds))

    def _wait_for_work(self, ranks: list[int]) -> None:
        """Until a random moment after the first data worker has started, or in mid-run."""
        if self._options.workers and self._rng.random() < 0.5:
            self._await(ranks, lambda: any(map(_is_worker, _below(ranks))), "a data worker")
        else:
            self._await(ranks, lambda: re.search(r"^step \d+/", self._log.read_text(), re.MULTILINE), "a step")
        time.sleep(self._rng.uniform(0.0, LATEST_STOP_SECONDS))

    def _end_launched(self, arguments: list[str], way: Way, *, early: bool) -> None:
        assert way.stop is not None
        self._log.write_text("")
        with open(self._log, "a") as log:
            process = subprocess.Popen(
                [*launcher(self._options.launcher), *arguments],
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        everyone: list[psutil.Process] = []
        try:
            if early:
                self._await([process.pid], lambda: any(map(_is_rank, _below([process.pid]))), "a rank")
                time.sleep(self._rng.uniform(0.0, LATEST_STOP_SECONDS))
            else:
                self._wait_for_work([process.pid])
            everyone = _below([process.pid])
            if way.stop is signal.SIGKILL:
                process.kill()
            else:
                os.killpg(process.pid, way.stop)
            process.wait(PATIENCE_SECONDS)
            _, left = psutil.wait_procs(everyone, timeout=PATIENCE_SECONDS)
            if left:
                raise CheckFailedError(f"{left} still run {PATIENCE_SECONDS:.0f} s after {way.stop.name}")
        finally:
            process.kill()
            for left_over in everyone:
                with suppress(psutil.NoSuchProcess):
                    left_over.kill()
        if not early:
            status = json.loads((self._run / "run.json").read_text())
            if (status["state"], status["exit_code"]) != ("preempted", 75):
                raise CheckFailedError(f"run.json says {status}")

    def _check(self, resumed: int, way: Way, tally: Tally, *, early: bool) -> None:
        for path in committed_steps(self._checkpoints).values():
            verify_checkpoint(path)
            tally.verified += 1
        tally.unfinished += bool(self._unfinished())
        lost = self._trained() - self._newest()
        tally.lost.append(lost)
        if lost > way.most_lost or self._newest() < resumed or (way.stop and not early and self._newest() == resumed):
            raise CheckFailedError(
                f"resumed at {resumed}, trained to {self._trained()}, and the newest checkpoint is {self._newest()}"
            )

    def _arguments(self, run: Path, engine: str, async_save: bool) -> list[str]:
        settings = {
            "infra__distributed_type": engine,
            "data__dataset_name": "random",
            "data__preprocessing_num_workers": self._options.workers,
            "data__num_lanes": WORLD_SIZE * max(1, self._options.workers),
            "training__per_device_train_batch_size": LARGE_BATCH if self._options.large else 2,
            "training__async_save": str(async_save).lower(),
            # A stop is to save more than what was saved anyway.
            "training__save_steps": 1000 if self._options.stops else SAVE_STEPS,
            "training__logging_steps": 1,
            "training__num_train_steps": 1_000_000,
            "training__eval_samples": 0,
            "training__save_total_limit": 3,
            "training__report_to": "none",
        }
        return ["--config", QUICKSTART, *overrides(run, **settings), "--resume", "auto"]

    def _fork(self, arguments: list[str]) -> list[int]:
        """The process ids of ranks that train until they are ended; they are a process group, with all they start."""
        self._log.write_text("")
        port = free_port()
        ranks: list[int] = []
        for rank in range(WORLD_SIZE):
            ranks.append(os.fork() or _be_rank(rank, port, arguments, self._log))
            os.setpgid(ranks[rank], ranks[0])
        return ranks

    def _kill(self, ranks: list[int]) -> None:
        for pid in self._rng.sample(ranks, len(ranks)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(self._rng.uniform(0.0, BETWEEN_RANKS_SECONDS))
        for pid in reversed(ranks):
            os.waitpid(pid, 0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _group_lives(ranks[0]):
            if time.monotonic() > deadline:
                raise CheckFailedError("processes of the run are left over")
            time.sleep(0.02)

    def _await(self, pids: list[int], seen: Callable[[], T], what: str, *, patience: float = 0.0) -> T:
        """Ask `seen` often until its answer is neither None nor False. `patience`: seconds more than usual."""
        deadline = time.monotonic() + PATIENCE_SECONDS + patience
        while (value := seen()) is None or value is False:
            if time.monotonic() > deadline:
                raise CheckFailedError(f"no sign of {what}")
            if any(map(_ended, pids)):
                raise CheckFailedError(f"a process ended before {what}")
            time.sleep(0.002)
        return value

    def _await_codes(self, ranks: list[int], code: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(map(_ended, ranks)):
            if time.monotonic() > deadline:
                raise CheckFailedError(f"a rank still runs {PATIENCE_SECONDS:.0f} s after its signal")
            time.sleep(0.02)
        codes = [status.si_status for pid in ranks if (status := _ended(pid))]
        if codes != [code] * len(ranks):
            raise CheckFailedError(f"the ranks ended with {codes}")

    def _first_step(self) -> int | None:
        """The step that the run says it starts from; by then it has cleared what the last end left."""
        found = re.search(r"steps (\d+) to", self._log.read_text())
        return int(found[1]) if found else None

    def _newest(self) -> int:
        return max(committed_steps(self._checkpoints), default=0)

    def _trained(self, run: Path | None = None) -> int:
        """The newest step that was finished."""
        return max(_steps(run or self._run), default=0)

    def _begun(self) -> int:
        """The newest step that is being saved, or has been."""
        return max(self._unfinished(), default=self._newest())

    def _unfinished(self) -> list[int]:
        return [int(path.stem.removeprefix("step-")) for path in self._checkpoints.glob("step-*.tmp")]


def _steps(run: Path) -> dict[int, tuple[float, ...]]:
    """Loss, norm and rate of every step that was finished; a line that a kill has torn is not counted."""
    names = ("train/loss", "train/grad_norm", "train/learning_rate")
    whole = (json.loads(line) for line in _lines(run / "metrics.jsonl") if line.endswith(b"\n"))
    return {line["step"]: tuple(line[name] for name in names) for line in whole if names[0] in line}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _ended(pid: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _below(pids: list[int]) -> list[psutil.Process]:
    """All that run below these processes."""
    found = []
    for pid in pids:
        try:
            found += psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            continue
    return found


def _is_worker(process: psutil.Process) -> bool:
    return "ds_encdec.data.workers" in _words(process)


def _is_rank(process: psutil.Process) -> bool:
    return "ds_encdec/train.py --" in _words(process) and "launch" not in _words(process)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _be_rank(rank: int, port: int, arguments: list[str], log: Path) -> NoReturn:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(WORLD_SIZE),
            LOCAL_WORLD_SIZE=str(WORLD_SIZE),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        code = train.main(arguments)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)
