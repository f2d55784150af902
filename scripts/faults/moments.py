"""Kills both ranks of a run (SIGKILL, one shortly after the other) at random moments of a save, load, rollback or
export. Then every visible checkpoint must be whole, and the next start must go on from the newest, or a finished export
be there; in the end each engine's steps must equal those of a run that was never interrupted, to the last digit."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# Everything is imported before the ranks are forked, also what the engines import late.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
from bench import ENGINES, Bench, Result, arguments, assert_equal, in_steps, steps
from forked_runs import be_rank, lives_on, on_this_host
from tiny_run import free_port

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: F401
from ds_encdec.training import build  # noqa: F401

SAVE_STEPS = 4
LATEST_KILL = 1.5  # the latest moment, in lengths of what is to be hit as it took undisturbed
PATIENCE_SECONDS = 180.0
ENDLESS = {
    "data__dataset_name": "random",
    "data__preprocessing_num_workers": 1,
    "training__save_steps": SAVE_STEPS,
    "training__logging_steps": 1,
    "training__num_train_steps": 1_000_000,
    "training__save_total_limit": 3,
}
SPIKE_STEP = 15  # the data of this step is bad
ROLLBACK = {
    "training__num_train_steps": 16,
    "training__save_steps": SAVE_STEPS,
    "training__save_total_limit": 10,
    "training__logging_steps": 1,
    "training__async_save": "false",
    "monitor__window_size": 4,
    "monitor__loss_spike_min_values": 4,
    "monitor__loss_spike_threshold": 1.02,
    "monitor__on_loss_spike": "rollback",
    "monitor__rollback_min_steps": 2,
}
EXPORT = {"training__export_at_end": "true", "training__average_checkpoints": 3, "training__async_save": "false"}


@dataclass
class Victim:
    """A run of one engine on two ranks, which are forked, watched through its log and folder, and killed."""

    run: Path
    engine: str
    rng: random.Random
    settings: dict[str, Any]
    ranks: list[int] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def log(self) -> str:
        return self.run.with_suffix(".log").read_text()

    @contextmanager
    def started(self, *options: str, faults: tuple[dict[str, Any], ...] = (), **changes: Any) -> Iterator[None]:
        """Start its ranks; in the end those are killed that are left."""
        log, port = self.run.with_suffix(".log"), free_port()
        log.write_text("")
        command = arguments(self.run, self.engine, *options, **self.settings | changes)
        for rank in range(2):
            program = partial(on_this_host, rank, 2, port, command, {}, [*faults], self.run.parent)
            self.ranks.append(os.fork() or be_rank(str(log), program))
            os.setpgid(self.ranks[rank], self.ranks[0])
        try:
            yield
        finally:
            for pid in self.rng.sample(self.ranks, 2):
                os.kill(pid, signal.SIGKILL)
                time.sleep(self.rng.uniform(0.0, 0.02))
            for pid in reversed(self.ranks):
                os.waitpid(pid, 0)
            group, self.ranks = self.ranks[0], []
            assert not lives_on(group, PATIENCE_SECONDS), "processes of the run are left over"

    def until(self, seen: Callable[[], object], what: str, patience: float = PATIENCE_SECONDS) -> float:
        """Wait for what is to be seen, and return the seconds that it took."""
        began = time.monotonic()
        while not seen():
            assert time.monotonic() < began + patience, f"no sign of {what}"
            assert not any(map(_ended, self.ranks)) or seen(), f"a process ended before {what}"
            time.sleep(0.002)
        return time.monotonic() - began

    def logged(self, text: str) -> "re.Match[str] | None":
        return re.search(text, self.log)

    def until_end(self) -> float:
        """Wait for the end of all ranks, and return the seconds that it took."""
        began = time.monotonic()
        while not all(map(_ended, self.ranks)):
            assert time.monotonic() < began + PATIENCE_SECONDS, "it does not end"
            time.sleep(0.01)
        return time.monotonic() - began

    def finish(self, **changes: Any) -> None:
        """Resume it, and wait for its end."""
        with self.started("--resume", "auto", **changes):
            self.until_end()
        assert self.logged("finished at step"), "it was not completed"

    def newest(self) -> int:
        return max(committed_steps(self.checkpoints), default=0)

    def begun(self) -> int:
        unfinished = self.checkpoints.glob("step-*.tmp")
        return max((int(path.stem.removeprefix("step-")) for path in unfinished), default=self.newest())

    def verify(self) -> None:
        for path in committed_steps(self.checkpoints).values():
            verify_checkpoint(path)


def saves(bench: Bench, times: int) -> Result:
    """Kill runs in saves, in the background and at once; resume each with the other way of saving, in turn."""
    hits = []

    def once(victim: Victim, number: int) -> int:
        in_background, newest = number % 4 < 2, victim.newest()
        with victim.started("--resume", "auto", training__async_save=str(in_background).lower()):
            victim.until(lambda: victim.logged(r"steps (\d+) to"), "its first step")
            victim.until(lambda: victim.begun() > newest, f"a save after step {newest}")
            seconds = victim.until(lambda: victim.newest() > newest, f"a checkpoint after step {newest}")
            victim.until(lambda: victim.begun() > victim.newest(), "another save")
            time.sleep(victim.rng.uniform(0.0, LATEST_KILL * seconds))
        first = int((victim.logged(r"steps (\d+) to") or [0, 0])[1])
        assert first == newest, f"went on from step {first}, but the newest checkpoint was {newest}"
        hits.append(victim.begun() > victim.newest())
        lost = max(steps(victim.run), default=0) - victim.newest()
        # In the background the next interval is trained while a save is written.
        most = SAVE_STEPS * (1 + in_background)
        assert lost <= most, f"{lost} steps were lost, and may be {most}"
        return lost

    def compare(victim: Victim) -> None:
        trained = max(steps(victim.run), default=0)
        whole = Victim(victim.run.with_name("whole"), victim.engine, victim.rng, victim.settings)
        with whole.started():
            whole.until(lambda: max(steps(whole.run), default=0) >= trained, f"step {trained}", 180.0 + trained)
        expected, found = steps(whole.run), steps(victim.run)
        for step in range(1, trained + 1):
            assert found.get(step) == expected[step], f"step {step} was {found.get(step)}, and whole {expected[step]}"

    result = _killed(bench, times, ENDLESS, once, compare)
    missed = () if any(hits) or result.problems else ("no kill hit a save before its commit",)
    return Result(result.times, result.lost, result.problems + missed)


def loads(bench: Bench, times: int) -> Result:
    """Kill runs between their start with `--resume auto` and their first step."""
    seconds: dict[str, float] = {}

    def once(victim: Victim, number: int) -> int:
        if victim.engine not in seconds:
            with victim.started():
                victim.until(lambda: victim.newest() >= SAVE_STEPS, "a checkpoint")
            with victim.started("--resume", "auto"):
                seconds[victim.engine] = victim.until(lambda: victim.logged(r"steps (\d+) to"), "its first step")
        newest = victim.newest()
        with victim.started("--resume", "auto"):
            time.sleep(victim.rng.uniform(0.0, LATEST_KILL * seconds[victim.engine]))
        assert victim.newest() >= newest, f"the newest checkpoint was {newest}, and is {victim.newest()}"
        return max(0, max(steps(victim.run)) - victim.newest())

    def compare(victim: Victim) -> None:
        last = victim.newest() + SAVE_STEPS
        victim.finish(training__num_train_steps=last)
        settings = ENDLESS | {"training__num_train_steps": last}
        assert_equal(victim.run, bench.undisturbed(victim.engine, **settings))

    # The constant rate does not depend on the number of steps.
    return _killed(bench, times, ENDLESS | {"training__lr_scheduler_type": "constant"}, once, compare)


def rollbacks(bench: Bench, times: int) -> Result:
    """Kill runs in their rollback: those that had saved it are as if they had never met the data, others as if it had
    not been bad."""
    seconds: dict[str, float] = {}
    bad = ({"kind": "bad_data", "at": SPIKE_STEP - 12, "until": SPIKE_STEP - 12},)  # counted from the resume at step 12

    def once(victim: Victim, number: int) -> int:
        before = victim.run.with_name("before")
        if not before.exists():
            with victim.started():
                victim.until(lambda: victim.newest() >= 12, "step 12")
            shutil.copytree(victim.run, before, symlinks=True)
            shutil.rmtree(victim.run)
            shutil.copytree(before, victim.run, symlinks=True)
            with victim.started("--resume", "auto", faults=bad):
                victim.until(lambda: victim.logged("Rollback 1 of"), "a rollback")
                seconds[victim.engine] = victim.until(lambda: victim.logged("saved step 12"), "the rollback's save")
        shutil.rmtree(victim.run)
        shutil.copytree(before, victim.run, symlinks=True)
        with victim.started("--resume", "auto", faults=bad):
            victim.until(lambda: victim.logged("Rollback 1 of"), "a rollback")
            time.sleep(victim.rng.uniform(0.0, LATEST_KILL * seconds[victim.engine]))
        victim.verify()
        newest = victim.newest()
        victim.finish()
        state = (victim.checkpoints / "final" / "trainer.json").read_text()
        without = (13, 14, 15) if re.search(r'"rollbacks": 1\b', state) else ()
        assert_equal(victim.run, bench.undisturbed(victim.engine, without, **victim.settings))
        return SPIKE_STEP - newest

    return _killed(bench, times, ROLLBACK, once, lambda victim: None)


def exports(bench: Bench, times: int) -> Result:
    """Kill complete runs while they export and average; a folder with the name of an export is always the whole one."""
    whole: dict[str, tuple[dict[str, bytes], float]] = {}

    def once(victim: Victim, number: int) -> int:
        out = victim.run / "export"
        if victim.engine not in whole:
            with victim.started():
                victim.until(lambda: victim.logged("Exporting the final"), "an export")
                seconds = victim.until_end()
            whole[victim.engine] = _files(out), seconds
        files, seconds = whole[victim.engine]
        shutil.rmtree(out)
        with victim.started("--resume", "auto"):
            victim.until(lambda: victim.logged("Exporting the final"), "an export")
            time.sleep(victim.rng.uniform(0.0, seconds))
        for name in ("final", "averaged"):
            here, expected = (
                {path: content for path, content in one.items() if path.startswith(name + "/")}
                for one in (_files(out), files)
            )
            assert here in ({}, expected), f"export/{name} is not whole: {sorted(here)}"
        victim.finish()
        assert _files(out) == files, "the exports differ from those of a run that was never interrupted"
        return 0

    settings = EXPORT | {"training__num_train_steps": 6, "training__save_steps": 2}
    return _killed(bench, times, settings, once, lambda victim: None)


def _killed(
    bench: Bench,
    times: int,
    settings: dict[str, Any],
    once: Callable[[Victim, int], int],
    compare: Callable[[Victim], None],
) -> Result:
    """Kill so many times, each engine in turn; `once` returns the steps that were lost."""
    rng, lost, problems = random.Random(times), [0], list[str]()
    victims = [Victim(bench.new_folder(), engine, rng, settings) for engine in ENGINES]

    def holds(victim: Victim, action: Callable[[], int | None]) -> None:
        try:
            lost.append(action() or 0)
            victim.verify()
        except Exception as error:
            problems.append(f"{victim.engine}: {type(error).__name__}: {error}\n{victim.log[-3000:]}")

    for number in range(times):
        victim = victims[number % len(victims)]
        holds(victim, partial(once, victim, number))
    for victim in victims:
        holds(victim, partial(compare, victim))
    return Result(times, in_steps(max(lost)), tuple(problems))


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.as_posix())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _ended(pid: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
