"""Kills training in the middle of saves, resumes it, and checks what is left each time.

    python tests/nightly/kill_saves.py    100 kills
    python tests/nightly/kill_saves.py --kills 10 --engine fsdp

Two gloo ranks run the real program on a tiny model, with data workers, and save every few steps. They are forked from
this process, which has imported everything. Both are killed (SIGKILL, one shortly after the other) at a random time
after a save has begun. Then every visible checkpoint must verify, the steps trained since the newest one (metrics.jsonl
has a line for every step) must be no more than an interval, or two where saves are written in the background, and the
next start must go on from it: with the other way of saving, in turn. At the end each engine's losses, norms and rates
must equal those of a run that was never interrupted, to the last digit. Exit code 1 where a check failed.
"""

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
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what is imported next
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch"), str(ROOT / "tests" / "faults")]

# Everything is imported before the ranks are forked, also what the engines import late.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
from forked_runs import be_rank, lives_on, on_this_host  # noqa: E402
from tiny_run import QUICKSTART, free_port, overrides  # noqa: E402

from ds_encdec.checkpoint.folder import committed_steps  # noqa: E402
from ds_encdec.checkpoint.manifest import verify_checkpoint  # noqa: E402
from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: E402, F401
from ds_encdec.training import build  # noqa: E402, F401

WORLD_SIZE = 2
ENGINES = ("deepspeed", "fsdp")
SAVE_STEPS = 4
LATEST_KILL = 1.5  # the latest kill after a save has begun, in lengths of the save before it
PATIENCE_SECONDS = 120.0


@dataclass
class Way:
    """How a start trains and saves, and the results. `unfinished`: ends that left a `step-N.tmp`, so they hit a save
    before its commit. `lost`: of each end, the finished steps since the newest visible checkpoint."""

    engine: str
    async_save: bool
    ends: int = 0
    unfinished: int = 0
    verified: int = 0
    lost: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.engine}, {'in the background' if self.async_save else 'at once'}"


class Victim:
    """A run of one engine, watched through its log and its folder, and killed."""

    def __init__(self, folder: Path, engine: str, options: argparse.Namespace, rng: random.Random) -> None:
        self.engine, self.compared = engine, 0
        self._options, self._rng, self._folder = options, rng, folder
        self._run, self.log = folder / engine, folder / f"{engine}.log"
        self._checkpoints = self._run / "checkpoints"
        self.log.touch()

    def end_once(self, way: Way) -> None:
        newest, ranks = self._newest(), self._fork(self._arguments(self._run, way.engine, way.async_save))
        try:
            self._wait_for_a_save(ranks, newest)
        finally:
            self._kill(ranks)
        first = self._first_step()
        assert first == newest, f"went on from step {first}, but the newest checkpoint was {newest}"
        way.ends += 1
        for path in committed_steps(self._checkpoints).values():
            verify_checkpoint(path)
            way.verified += 1
        way.unfinished += bool(self._unfinished())
        trained, now = self._trained(self._run), self._newest()
        way.lost.append(trained - now)
        # In the background the next interval is trained while a save is written.
        is_sound = trained - now <= SAVE_STEPS * (1 + way.async_save) and now >= newest
        assert is_sound, f"resumed at {newest}, trained to {trained}, and the newest checkpoint is {now}"

    def compare(self) -> None:
        """Train as far without an interruption, and compare every step."""
        trained, whole = self._trained(self._run), self._folder / f"{self.engine}-whole"
        ranks = self._fork(self._arguments(whole, self.engine, True))
        try:
            self._await(ranks, lambda: self._trained(whole) >= trained, f"step {trained}", patience=trained)
        finally:
            self._kill(ranks)
        expected, found = _steps(whole), _steps(self._run)
        for step in range(1, trained + 1):
            assert found.get(step) == expected[step], f"step {step} was {found.get(step)}, and whole {expected[step]}"
        self.compared = trained

    def _wait_for_a_save(self, ranks: list[int], newest: int) -> None:
        self._await(ranks, lambda: self._first_step() is not None, "its first step")
        self._await(ranks, lambda: self._begun() > newest, f"a save after step {newest}")
        began = time.monotonic()
        self._await(ranks, lambda: self._newest() > newest, f"a checkpoint after step {newest}")
        save_seconds = time.monotonic() - began
        self._await(ranks, lambda: self._begun() > self._newest(), "another save")
        time.sleep(self._rng.uniform(0.0, LATEST_KILL * save_seconds))

    def _arguments(self, run: Path, engine: str, async_save: bool) -> list[str]:
        settings = {
            "infra__distributed_type": engine,
            "data__dataset_name": "random",
            "data__preprocessing_num_workers": self._options.workers,
            "data__num_lanes": WORLD_SIZE * max(1, self._options.workers),
            "training__async_save": str(async_save).lower(),
            "training__save_steps": SAVE_STEPS,
            "training__logging_steps": 1,
            "training__num_train_steps": 1_000_000,
            "training__eval_samples": 0,
            "training__save_total_limit": 3,
            "training__report_to": "none",
        }
        return ["--config", QUICKSTART, *overrides(run, **settings), "--resume", "auto"]

    def _fork(self, arguments: list[str]) -> list[int]:
        self.log.write_text("")
        port, ranks = free_port(), list[int]()
        for rank in range(WORLD_SIZE):
            program = partial(on_this_host, rank, WORLD_SIZE, port, arguments, {}, [], self._folder, "train")
            ranks.append(os.fork() or be_rank(str(self.log), program))
            os.setpgid(ranks[rank], ranks[0])
        return ranks

    def _kill(self, ranks: list[int]) -> None:
        for pid in self._rng.sample(ranks, len(ranks)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(self._rng.uniform(0.0, 0.02))
        for pid in reversed(ranks):
            os.waitpid(pid, 0)
        assert not lives_on(ranks[0], PATIENCE_SECONDS), "processes of the run are left over"

    def _await(self, pids: list[int], seen: Callable[[], bool], what: str, *, patience: float = 0.0) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS + patience
        while not seen():
            assert time.monotonic() < deadline, f"no sign of {what}"
            assert not any(map(_ended, pids)), f"a process ended before {what}"
            time.sleep(0.002)

    def _first_step(self) -> int | None:
        """The step that the run logs as its start; by then it has cleared what the last end left."""
        found = re.search(r"steps (\d+) to", self.log.read_text())
        return int(found[1]) if found else None

    def _newest(self) -> int:
        return max(committed_steps(self._checkpoints), default=0)

    def _trained(self, run: Path) -> int:
        return max(_steps(run), default=0)

    def _begun(self) -> int:
        return max(self._unfinished(), default=self._newest())

    def _unfinished(self) -> list[int]:
        return [int(path.stem.removeprefix("step-")) for path in self._checkpoints.glob("step-*.tmp")]


def _steps(run: Path) -> dict[int, tuple[float, ...]]:
    """Loss, norm and rate of every step that was finished; a line that a kill has torn is not counted."""
    names, path = ("train/loss", "train/grad_norm", "train/learning_rate"), run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return {line["step"]: tuple(line[name] for name in names) for line in whole if names[0] in line}


def _ended(pid: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _passes(victim: Victim, action: Callable[..., None], *arguments: Any) -> bool:
    try:
        action(victim, *arguments)
    except Exception:
        print(f"{arguments[0] if arguments else victim.engine}:\n{traceback.format_exc()}", file=sys.stderr)
        print(victim.log.read_text()[-3000:], file=sys.stderr, flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="(default 100)")
    parser.add_argument("--engine", choices=ENGINES, help="(default both)")
    parser.add_argument("--workers", type=int, default=1, choices=(0, 1, 4), help="data workers a rank (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are killed on the way out
    engines = (options.engine,) if options.engine else ENGINES
    ways = [Way(engine, async_save) for async_save in (True, False) for engine in engines]
    began, rng = time.monotonic(), random.Random(options.seed)
    with TemporaryDirectory(prefix="kill-saves-") as scratch:
        victims = {engine: Victim(Path(scratch), engine, options, rng) for engine in engines}
        turns = islice(cycle(ways), options.kills)
        failed = not all(_passes(victims[way.engine], Victim.end_once, way) for way in turns)
        for victim in victims.values():
            failed |= not _passes(victim, Victim.compare)
    print("| engine, saves | kills | before the commit | checkpoints verified | steps lost: mean | at most |")
    print("|---|---|---|---|---|---|")
    for way in ways:
        mean, most = (f"{fmean(way.lost):.1f}", max(way.lost)) if way.lost else ("", "")
        print(f"| {way} | {way.ends} | {way.unfinished} | {way.verified} | {mean} | {most} |")
    compared = ", ".join(f"{victim.compared} of {engine}" for engine, victim in victims.items())
    print(f"steps whose losses equal those of a run that was never interrupted: {compared}")
    kills = sum(way.ends for way in ways)
    print(f"{kills} kills in {time.monotonic() - began:.0f} s, seed {options.seed}, a save every {SAVE_STEPS} steps")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
