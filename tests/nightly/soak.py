"""Trains for an hour under scripts/supervise.sh while faults are drawn at random, and compares the weights.

    python tests/nightly/soak.py                  an hour, both engines in turn
    python tests/nightly/soak.py --minutes 5 --engine fsdp

Two ranks with a data worker each train a tiny model under torchrun, which starts lost ranks again, and that under the
supervisor, which starts torchrun again. Every half minute or so one of `FAULTS` happens. At the end `ds-encdec stop`
ends the run, and an undisturbed one trains as many steps. Every weight and moment of the two last checkpoints must be
equal to the bit; metrics.jsonl must have each step's loss once, and no evaluation that is not equal; the memory of
ranks and workers of the undisturbed run must not grow. Exit code 1: a check failed.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch")]

import psutil  # noqa: E402
import torch  # noqa: E402
from tiny_run import environment, launcher, losses, overrides, run, wait_until  # noqa: E402

from ds_encdec.base.types import MOMENTS  # noqa: E402
from ds_encdec.checkpoint.folder import committed_steps  # noqa: E402
from ds_encdec.checkpoint.zero_state import open_saved_state  # noqa: E402

ENGINES = {
    "deepspeed": {"infra__distributed_type": "deepspeed"},
    "fsdp": {"infra__distributed_type": "fsdp", "infra__offload_optimizer": "none"},
}
SECONDS_BETWEEN_FAULTS = (5.0, 50.0)
SAMPLE_SECONDS = 5.0
MOST_GROWTH = 2.0  # MiB a minute of one process, by least squares over the undisturbed run's second half
SETTINGS = {
    "training__save_steps": 25,
    "training__logging_steps": 1,
    "training__eval_steps": 100,
    "training__lr_scheduler_type": "constant",
    "training__report_to": "[]",
    "training__average_checkpoints": 0,
    "training__export_at_end": "false",
    "data__preprocessing_num_workers": 1,
}


def killed_rank(rng: random.Random, tree: "Tree") -> None:
    rng.choice(tree.ranks()).kill()


def killed_ranks(rng: random.Random, tree: "Tree") -> None:
    for rank in tree.ranks():
        rank.kill()


def killed_worker(rng: random.Random, tree: "Tree") -> None:
    rng.choice(tree.workers()).kill()


def killed_launcher(rng: random.Random, tree: "Tree") -> None:
    tree.launcher().kill()


def terminated_launcher(rng: random.Random, tree: "Tree") -> None:
    tree.launcher().terminate()


def stopped_rank(rng: random.Random, tree: "Tree") -> None:
    rank = rng.choice(tree.ranks())
    rank.suspend()
    time.sleep(rng.uniform(1.0, 8.0))
    rank.resume()


FAULTS: list[Callable[[random.Random, "Tree"], None]] = [
    killed_rank,
    killed_ranks,
    killed_worker,
    killed_launcher,
    terminated_launcher,
    stopped_rank,
]


class Tree:
    """The processes of the run in `folder`, wherever they stand: known by their environment's RUN."""

    def __init__(self, name: str) -> None:
        self._name = name

    def launcher(self) -> psutil.Process:
        return self._named(lambda words: any(word.endswith("torchrun") for word in words[:3]))[0]

    def ranks(self) -> list[psutil.Process]:
        """Those that train: the parents of the workers."""
        return [parent for worker in self.workers() if (parent := worker.parent())]

    def workers(self) -> list[psutil.Process]:
        return self._named(lambda words: "serve(sys.stdin.buffer)" in " ".join(words))

    def all(self) -> list[psutil.Process]:
        return self._named(lambda words: True)

    def _named(self, matches: Callable[[list[str]], bool]) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SOAK") == self._name and matches(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def supervised(folder: Path, engine: str) -> "subprocess.Popen[bytes]":
    words = launcher("torchrun")
    words[1:1] = ["--max-restarts", "3"]
    command = [str(ROOT / "scripts" / "supervise.sh"), str(folder), *words, "--config", "quickstart"]
    command += overrides(folder, **SETTINGS | ENGINES[engine] | {"training__num_train_steps": 10_000_000})
    command += ["--resume", "auto"]
    variables = {"SUPERVISE_SECONDS": "1", "SUPERVISE_RESTARTS": "50", "SOAK": str(folder)}
    own = environment() | variables
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True)


def soak(folder: Path, engine: str, minutes: float, rng: random.Random) -> Counter[str]:
    """Train with faults for `minutes`, then stop; return how often each fault has happened."""
    happened: Counter[str] = Counter()
    tree, supervisor = Tree(str(folder)), supervised(folder, engine)
    deadline = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < deadline:
            time.sleep(rng.uniform(*SECONDS_BETWEEN_FAULTS))
            fault = rng.choice(FAULTS)
            try:
                fault(rng, tree)
            except (IndexError, psutil.Error, AttributeError):
                continue  # between two starts
            happened[fault.__name__] += 1
            assert supervisor.poll() is None, f"the supervisor has ended after {fault.__name__}"
        wait_until(lambda: len(tree.ranks()) == 2, 300)
        wait_until(lambda: _state(folder) == "running" and run([*_verb(), "stop", str(folder)], folder).returncode == 0)
        assert supervisor.wait(timeout=300) == 75
        wait_until(lambda: not tree.all(), 60)
    except (AssertionError, subprocess.TimeoutExpired):
        print(folder.with_suffix(".log").read_text()[-5000:], *tree.all(), sep="\n", flush=True)
        raise
    finally:
        os.killpg(supervisor.pid, signal.SIGKILL) if supervisor.poll() is None else None
        for process in tree.all():
            process.kill()
    return happened


def undisturbed(folder: Path, engine: str, steps: int) -> dict[int, list[tuple[float, float]]]:
    """Train `steps` steps; return for each process (minutes, MiB) of its resident memory, by number."""
    samples: dict[int, list[tuple[float, float]]] = {}
    words = [*launcher("torchrun"), "--config", "quickstart"]
    words += overrides(folder, **SETTINGS | ENGINES[engine] | {"training__num_train_steps": steps})
    tree, began = Tree(str(folder)), time.monotonic()
    with folder.with_suffix(".log").open("w") as log:
        torchrun = subprocess.Popen(words, env=environment() | {"SOAK": str(folder)}, stdout=log, stderr=log)
        while torchrun.poll() is None:
            time.sleep(SAMPLE_SECONDS)
            for process in [*tree.ranks(), *tree.workers()]:
                try:
                    resident = process.memory_info().rss / 2**20
                except psutil.Error:
                    continue
                samples.setdefault(process.pid, []).append(((time.monotonic() - began) / 60, resident))
    assert torchrun.returncode == 0, folder.with_suffix(".log").read_text()[-3000:]
    return samples


def slope(samples: list[tuple[float, float]]) -> float:
    """MiB a minute over the second half of the samples, by least squares."""
    half = samples[len(samples) // 2 :]
    times, sizes = zip(*half, strict=True)
    mean_time, mean_size = sum(times) / len(half), sum(sizes) / len(half)
    spread = sum((at - mean_time) ** 2 for at in times)
    return sum((at - mean_time) * (size - mean_size) for at, size in half) / spread if spread else 0.0


def differing(one: Path, other: Path) -> list[str]:
    """The weights and moments that differ between the newest checkpoints of two runs."""
    newest = [max(committed_steps(folder / "checkpoints").items()) for folder in (one, other)]
    assert newest[0][0] == newest[1][0], newest
    states = [open_saved_state(path) for _, path in newest]
    return [
        f"{kind} of {name}"
        for name, shape in states[0].shapes.items()
        for kind in ("weight", *MOMENTS)
        if not torch.equal(*(state.read(kind, name, 0, torch.Size(shape).numel()) for state in states))
    ]


def _first(found: list[Any], expected: list[Any]) -> str:
    pairs = itertools.zip_longest(found, expected)
    return next(f"{one} instead of {other}" for one, other in pairs if one != other)


def _state(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_text())["state"])
    except (OSError, ValueError, KeyError):
        return ""


def _verb() -> list[str]:
    return [sys.executable, "-m", "ds_encdec.cli"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="with faults, of all engines together (default 60)")
    parser.add_argument("--engine", choices=ENGINES, help="(default: one after the other)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments (default 0)")
    options = parser.parse_args()
    engines = [options.engine] if options.engine else [*ENGINES]
    rng, failed = random.Random(options.seed), False
    print(
        "| engine | faults | steps | weights and moments | growth of a process, MiB a minute |\n|---|---|---|---|---|"
    )
    for engine in engines:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            disturbed, whole = Path(scratch, "disturbed"), Path(scratch, "whole")
            happened = soak(disturbed, engine, options.minutes / len(engines), rng)
            steps = max(committed_steps(disturbed / "checkpoints"))
            samples = undisturbed(whole, engine, steps)
            different = differing(disturbed, whole)
            found, expected = losses(disturbed), losses(whole)
            # A stop does not wait for an evaluation, and training may go on behind the last checkpoint.
            found = [line for line in found if line[0] < steps + line[1].startswith("train/")]
            expected = [line for line in expected if line[1].startswith("train/") or line in found]
            growth = max(slope(of_one) for of_one in samples.values())
            same = "equal to the bit" if not different else f"{len(different)} differ, first {different[0]}"
            lines = "" if found == expected else f"; the lines of metrics differ, first {_first(found, expected)}"
            faults = ", ".join(f"{count} {name}" for name, count in happened.most_common())
            row = (engine, f"{sum(happened.values())}: {faults}", steps, same + lines, f"{growth:.2f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            failed |= bool(different or lines) or growth > MOST_GROWTH
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
