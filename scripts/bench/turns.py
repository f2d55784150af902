"""Shared by the benches: contenders that take turns, so that a busy machine slows them alike, and tables of medians.

A contender is a command, started once for each rank, that measures itself: `Turns.after_step` behind each of its
steps. It waits in there until the next turn. So all contenders are built and warm before the first
turn counts, and only one of them computes at a time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


class Turns:
    """The contender's end. What the process prints goes to its log from now on."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left = 0
        self._losses: list[Any] = []
        self._tokens = self._began_cpu = self._began = 0.0

    def wait(self) -> None:
        """Wait for the next turn. Without one the process ends at once: its libraries' way out is no part of this."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self._left, self._tokens, self._losses = int(line), 0, []
        self._began_cpu, self._began = time.process_time(), time.perf_counter()

    def after_step(self, loss: Any, tokens: int) -> None:
        """A step is over. `loss`: this rank's mean per target token, a number or a tensor; `tokens`: no padding."""
        self._left -= 1
        self._tokens += tokens
        self._losses.append(loss)
        if self._left:
            return
        answer = {
            "cpu_s": time.process_time() - self._began_cpu,
            "wall_s": time.perf_counter() - self._began,
            "tokens": self._tokens,
            "losses": [float(one) for one in self._losses],
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(answer), file=self._answers, flush=True)
        self.wait()


class Contender:
    """The processes of one contender, seen from the bench."""

    def __init__(self, command: Sequence[str], log: Path, *, ranks: int = 1, patience_s: float = 900.0) -> None:
        """Start `command` once for each rank. A turn that takes longer than `patience_s` is an error."""
        self.log, self._patience_s = log, patience_s
        with log.open("w") as file:
            self._processes = [
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
                )
                for environment in rank_environments(ranks)
            ]

    def take(self, steps: int) -> list[dict[str, Any]]:
        """Let it take `steps` steps and return what each rank measured. Raises RuntimeError with the end of its log."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended, as its answer shows
                print(steps, file=process.stdin, flush=True)
        return [json.loads(self._answer(process.stdout)) for process in self._processes]

    def _answer(self, answers: TextIO | None) -> str:
        has_answered = bool(select.select([answers], [], [], self._patience_s)[0])
        if has_answered and answers is not None and (line := answers.readline()):
            return line
        what = "has ended" if has_answered else f"has not answered for {self._patience_s:.0f} s"
        raise RuntimeError(f"a contender {what}; the end of its log:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank on this machine: one thread, and what launchers set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def in_turns(takes: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call each in turn, `rounds` times, every other time in reverse order; returns their answers by name."""
    found: dict[str, list[Any]] = {name: [] for name in takes}
    for number in range(rounds):
        for name in list(takes)[:: -1 if number % 2 else 1]:
            found[name].append(takes[name]())
    return found


def machine() -> dict[str, Any]:
    """The facts about this machine that figures depend on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(re.findall(r"^(model name|flags)\s*: (.*)$", info, re.M))
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "instructions": [name for name in known if name in facts.get("flags", "").split()],
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: version(package) if find_spec(package) else "absent" for package in PACKAGES},
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """`rows` as Markdown, the keys of the first as its head; numbers with the digits that they need."""
    rows = list(rows)
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_cell(row.get(name)) for name in head) + " |" for row in rows)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def report(title: str, rows: Iterable[Mapping[str, Any]], json_path: Path | None = None, **facts: Any) -> None:
    """Print `title` and the table; write it, with `facts` and the machine's, as JSON where a path is given."""
    rows = list(rows)
    here = machine()
    print(f"{title}\n{', '.join(f'{name} {value}' for name, value in here.items())}\n\n{table(rows)}")
    if json_path is not None:
        json_path.write_text(json.dumps({"title": title, "machine": here, **facts, "rows": rows}, indent=1) + "\n")


def median(values: Iterable[float]) -> float:
    """The median as a float."""
    return float(statistics.median(values))
