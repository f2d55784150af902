"""Kills training at random moments of its saves, resumes it, and checks what is left each time.

    python scripts/kill_saves.py                             100 kills: both engines, in the background and at once
    python scripts/kill_saves.py --kills 10 --engine fsdp --async

Two gloo ranks run the real program on a tiny model and save every few steps. Both are killed (SIGKILL, one shortly
after the other) at a random time after a save has begun. Then every visible checkpoint must verify, the steps trained
since the newest one (metrics.jsonl has a line for every step) must be no more than an interval, or two where saves are
written in the background, and the next start must go on from it: with the other engine, or the other way of saving, in
turn.

A start takes one to three seconds instead of ten because ranks are forked from this process, which has imported
everything. Needs the `dev` extra: the run is the tests' own (tests/launch/tiny_run.py). Exit code 1 where a check
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what is imported next
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch")]

# Everything is imported before the ranks are forked, also what the engines import late.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
from tiny_run import QUICKSTART, free_port, overrides  # noqa: E402

from ds_encdec.build import run_training  # noqa: E402
from ds_encdec.checkpoint.folder import committed_steps  # noqa: E402
from ds_encdec.checkpoint.manifest import verify_checkpoint  # noqa: E402
from ds_encdec.config.load import load_config  # noqa: E402
from ds_encdec.config.schema import FullConfig  # noqa: E402
from ds_encdec.engine import deepspeed_zero, fsdp2  # noqa: E402, F401

WORLD_SIZE = 2
SAVE_STEPS = 4
LATEST_KILL = 1.5
"""A kill comes at most this long after a save has begun, in lengths of the save before it."""
BETWEEN_RANKS_SECONDS = 0.02
PATIENCE_SECONDS = 60.0

T = TypeVar("T")


class CheckFailedError(Exception):
    """What a killed run left, or how it went on, is not as it must be."""


@dataclass
class Tally:
    """What was seen of one way.

    `unfinished`: kills that left a `step-N.tmp`, so they hit a save before its commit. `lost`: of each kill, the
    finished steps since the newest visible checkpoint.
    """

    kills: int = 0
    unfinished: int = 0
    verified: int = 0
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """How a start trains and saves."""

    engine: str
    async_save: bool

    @property
    def most_lost(self) -> int:
        """Steps that a kill may lose. In the background the next interval is trained while a save is written."""
        return 2 * SAVE_STEPS if self.async_save else SAVE_STEPS

    def __str__(self) -> str:
        return f"{self.engine}, {'in the background' if self.async_save else 'at once'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="in all (default 100)")
    parser.add_argument("--engine", choices=("deepspeed", "fsdp"), help="(default both)")
    parser.add_argument("--async", dest="async_save", action="store_const", const=True, help="in the background only")
    parser.add_argument("--sync", dest="async_save", action="store_const", const=False, help="at once only")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are killed on the way out
    engines = (options.engine,) if options.engine else ("deepspeed", "fsdp")
    modes = (True, False) if options.async_save is None else (options.async_save,)
    ways = [Way(engine, mode) for mode in modes for engine in engines]
    began = time.monotonic()
    tallies = {way: Tally() for way in ways}
    with TemporaryDirectory(prefix="kill-saves-") as scratch:
        victim = Victim(Path(scratch), random.Random(options.seed))
        failed = not all(kill_once(victim, way, tallies[way]) for way in islice(cycle(ways), options.kills))
    print("| engine, saves | kills | before the commit | checkpoints verified | steps lost: mean | at most |")
    print("|---|---|---|---|---|---|")
    for way, tally in tallies.items():
        mean, most = (f"{fmean(tally.lost):.1f}", max(tally.lost)) if tally.lost else ("", "")
        print(f"| {way} | {tally.kills} | {tally.unfinished} | {tally.verified} | {mean} | {most} |")
    kills = sum(tally.kills for tally in tallies.values())
    print(f"{kills} kills in {time.monotonic() - began:.0f} s, seed {options.seed}, a save every {SAVE_STEPS} steps")
    return int(failed)


def kill_once(victim: Victim, way: Way, tally: Tally) -> bool:
    """Whether everything was as it must be; otherwise what was not is printed."""
    try:
        victim.kill_once(way, tally)
    except Exception:
        print(f"{way}:\n{traceback.format_exc()}{victim.log_tail()}", file=sys.stderr, flush=True)
        return False
    return True


class Victim:
    """A run of forked ranks, watched through its log and its folder of checkpoints, and killed."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._run = folder / "run"
        self._checkpoints = self._run / "checkpoints"
        self._log = folder / "ranks.log"
        self._rng = rng

    def kill_once(self, way: Way, tally: Tally) -> None:
        """Start or resume, kill while it saves, check. Raises CheckFailedError or CheckpointError."""
        newest = self._newest()
        ranks = self._start(way)
        try:
            resumed = self._await(ranks, self._first_step, "its first step")
            self._await(ranks, lambda: self._begun() > newest, f"a save after step {newest}")
            began = time.monotonic()
            self._await(ranks, lambda: self._newest() > newest, f"a checkpoint after step {newest}")
            save_seconds = time.monotonic() - began
            self._await(ranks, lambda: self._begun() > self._newest(), "another save")
            time.sleep(self._rng.uniform(0.0, LATEST_KILL * save_seconds))
        finally:
            self._kill(ranks)
        if resumed != newest:
            raise CheckFailedError(f"went on from step {resumed}, but the newest checkpoint was step {newest}")
        tally.kills += 1
        self._check(newest, way, tally)

    def log_tail(self) -> str:
        """The end of what the ranks of the last start have printed."""
        return self._log.read_text()[-3000:]

    def _check(self, resumed: int, way: Way, tally: Tally) -> None:
        for path in committed_steps(self._checkpoints).values():
            verify_checkpoint(path)
            tally.verified += 1
        tally.unfinished += bool(self._unfinished())
        lost = self._trained() - self._newest()
        tally.lost.append(lost)
        if lost > way.most_lost or self._newest() < resumed:
            raise CheckFailedError(
                f"resumed at {resumed}, trained to {self._trained()}, and the newest checkpoint is {self._newest()}"
            )

    def _start(self, way: Way) -> list[int]:
        settings = {
            "infra__distributed_type": way.engine,
            "data__dataset_name": "random",
            "training__async_save": str(way.async_save).lower(),
            "training__save_steps": SAVE_STEPS,
            "training__logging_steps": 1,
            "training__num_train_steps": 1_000_000,
            "training__eval_samples": 0,
            "training__save_total_limit": 3,
            "training__report_to": "none",
        }
        config = load_config(Path(QUICKSTART), overrides(self._run, **settings))
        self._log.write_text("")
        port = free_port()
        return [_fork_rank(rank, port, config, self._log) for rank in range(WORLD_SIZE)]

    def _kill(self, ranks: list[int]) -> None:
        for pid in self._rng.sample(ranks, len(ranks)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(self._rng.uniform(0.0, BETWEEN_RANKS_SECONDS))
        for pid in ranks:
            os.waitpid(pid, 0)

    def _await(self, ranks: list[int], seen: Callable[[], T], what: str) -> T:
        """What `seen`, asked often, returns when it is neither None nor False."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (value := seen()) is None or value is False:
            if time.monotonic() > deadline:
                raise CheckFailedError(f"no sign of {what} after {PATIENCE_SECONDS:.0f} s")
            if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks):
                raise CheckFailedError(f"a rank ended before {what}")
            time.sleep(0.002)
        return value

    def _first_step(self) -> int | None:
        """The step that the run says it starts from; by then it has cleared what the last kill left."""
        found = re.search(r"steps (\d+) to", self._log.read_text())
        return int(found[1]) if found else None

    def _newest(self) -> int:
        return max(committed_steps(self._checkpoints), default=0)

    def _trained(self) -> int:
        """The newest step that was finished; a line that the kill has torn is not counted."""
        lines = (self._run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return max(json.loads(line)["step"] for line in lines if line.endswith(b"\n"))

    def _begun(self) -> int:
        """The newest step that is being saved, or has been."""
        return max(self._unfinished(), default=self._newest())

    def _unfinished(self) -> list[int]:
        return [int(path.stem.removeprefix("step-")) for path in self._checkpoints.glob("step-*.tmp")]


def _fork_rank(rank: int, port: int, config: FullConfig, log: Path) -> int:
    """The process id of a rank that trains until it is killed."""
    pid = os.fork()
    return pid or _be_rank(rank, port, config, log)


def _be_rank(rank: int, port: int, config: FullConfig, log: Path) -> NoReturn:
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
        run_training(config, resume="auto")
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
