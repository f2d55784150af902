"""Runs the parts of the GPU kit, each in a process of its own, and writes what they found to gpu.json and gpu.txt.

A part that fails, hangs or ends its process is reported, and the others go on. Parts that measure time run alone; the
others side by side. The files are rewritten after each part, so a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from settings import SPEED_SETTINGS

LOG_LINES = 25  # of a failed part's output are shown


@dataclass(frozen=True)
class Part:
    """A piece of work. `run`: `module:function`, called with a Kit and `arguments`; `seconds` it may take at most.

    `alone`: it measures time. `needs`: parts whose files it reads. `left_out_dry`: why a dry run leaves it out.
    """

    name: str
    run: str
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    needs: tuple[str, ...] = ()
    left_out_dry: str = ""
    proves_forks: bool = False
    """Where it does not get to its `device` row, forks are no way to a GPU here: it begins again without."""


def _speed(setting: str) -> Part:
    row = SPEED_SETTINGS[setting]
    why = "" if row.in_dry_run else "another row runs the same code there"
    seconds = 240 if row.compiled else 110  # nothing is cached on a new machine
    return Part(f"speed {setting}", "speed_parts:speed", seconds, {"setting": setting}, alone=True, left_out_dry=why)


def _engine(name: str, resumes: str, *, in_dry_run: bool = False) -> Part:
    why = "" if in_dry_run else "tests/distributed has it on a CPU"
    arguments, needs = {"name": name, "resumes": resumes}, ("reference", resumes)
    return Part(f"engine {name}", "engine_parts:engine", 150, arguments, needs=needs, left_out_dry=why)


_SPEED = [_speed(name) for name in SPEED_SETTINGS]
PARTS: tuple[Part, ...] = (
    Part("machine", "speed_parts:machine", 60, alone=True, proves_forks=True),
    Part("reference", "engine_parts:reference", 200),
    Part("attention", "fused_parts:attention", 120),
    Part("loss", "fused_parts:loss", 120),
    *_SPEED[:4],
    _engine("zero1", "reference", in_dry_run=True),
    _engine("zero2", "reference"),
    _engine("zero3", "reference"),
    _engine("zero3 offload", "engine zero1", in_dry_run=True),
    _engine("fsdp zero2", "engine zero2"),
    _engine("fsdp zero3", "engine zero3 offload", in_dry_run=True),
    _engine("zero1 again", "engine fsdp zero2"),
    Part("compile", "engine_parts:compiled", 240, needs=("reference",)),
    Part("memory", "speed_parts:memory", 120),
    Part("frozen", "frozen_parts:frozen", 90),
    *_SPEED[4:],
)
"""In the order in which they begin: the most informative first."""


class Running(NamedTuple):
    """A part's process. `folder`: of its rows and its output."""

    part: Part
    process: BaseProcess
    folder: Path
    began: float
    seconds: float


class Check:
    """One run over `parts`. `seconds`: for all together. `forks`: parts are forks, which need not import again."""

    def __init__(self, parts: Sequence[Part], out: Path, seconds: float, *, dry_run: bool, forks: bool = True) -> None:
        self._waiting, self._out, self._dry_run, self._forks = list(parts), out, dry_run, forks
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self._work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        (self._work / "shared").mkdir()
        self._running: list[Running] = []
        self.found: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.txt").unlink(missing_ok=True)

    def run(self) -> bool:
        """Run all; True if all have passed."""
        try:
            while self._waiting or self._running:
                while self._waiting and self._may_begin(self._waiting[0]):
                    self._begin(self._waiting.pop(0))
                for running in list(self._running):
                    self._look_at(running)
                time.sleep(0.05)
        finally:
            for running in self._running:
                _kill(running.process)
            self._write()
            shutil.rmtree(self._work, ignore_errors=True)
        return all(part["ok"] for part in self.found)

    def _may_begin(self, part: Part) -> bool:
        """Parts begin in order, up to four side by side; what measures time waits until nothing runs."""
        busy, done = [running.part for running in self._running], {part["name"] for part in self.found}
        is_quiet = not busy or not any(one.alone for one in (part, *busy))
        return is_quiet and len(busy) < (2 if self._dry_run else 4) and done.issuperset(part.needs)

    def _begin(self, part: Part) -> None:
        left = self._ends - time.monotonic()
        why = part.left_out_dry if self._dry_run else ""
        if not why and left < min(15.0, part.seconds):
            why = f"not reached: {max(left, 0):.0f} s were left"
        if why:
            self._keep(part, 0.0, [{"name": part.name, "ok": True, "omitted": why}])
            return
        folder = self._work / f"{len(self.found)}-{part.name.replace(' ', '-')}"
        folder.mkdir(exist_ok=True)  # a part that could not be forked begins again
        self.say(f"begins {part.name}")
        process = multiprocessing.get_context("fork" if self._forks else "spawn").Process(
            target=work, args=(part, folder, self._work / "shared", self._dry_run)
        )
        process.start()
        seconds = left if self._dry_run else min(part.seconds, left)
        self._running.append(Running(part, process, folder, time.monotonic(), seconds))

    def _look_at(self, running: Running) -> None:
        """Take in what has ended, and end what has run for too long."""
        part, seconds, code = running.part, time.monotonic() - running.began, running.process.exitcode
        if code is None and seconds < running.seconds:
            return
        self._running.remove(running)
        problem = f"ended after {seconds:.0f} s: too slow, or stuck"
        if code is None:
            _kill(running.process)
        else:
            problem = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}" if code else ""
        rows, log = _rows(running.folder), _text(running.folder / "log.txt")
        if problem and self._forks and part.proves_forks and all(row["name"] != "device" for row in rows):
            self.say(f"{part.name}: {problem}; from here on each part imports all by itself")
            self._forks = False
            self._waiting.insert(0, part)
            return
        with (self._out / "gpu.txt").open("a") as file:
            file.write(f"===== {part.name}\n{log}\n")
        self._keep(part, seconds, rows, problem, log)

    def _keep(self, part: Part, seconds: float, rows: list[dict[str, Any]], problem: str = "", log: str = "") -> None:
        passed = not problem and all(row["ok"] for row in rows)
        self.found.append(
            {"name": part.name, "ok": passed, "seconds": round(seconds, 1), "problem": problem, "rows": rows}
        )
        for line in map(line_of, rows):
            self.say(line)
        if problem and log:
            print("\n".join(f"        | {line}" for line in log.splitlines()[-LOG_LINES:]))
        if seconds or problem:
            self.say(f"{'passed' if passed else 'FAILED'} {part.name} in {seconds:.1f} s {problem}")
        self._write()

    def _write(self) -> None:
        left = [part.name for part in (*(running.part for running in self._running), *self._waiting)]
        seconds = round(time.monotonic() - self._began, 1)
        facts = {"dry_run": self._dry_run, "seconds": seconds, "parts": self.found, "left": left}
        new = self._out / "gpu.json.new"
        new.write_text(json.dumps(facts, indent=1) + "\n")
        new.replace(self._out / "gpu.json")

    def say(self, text: str) -> None:
        """Print a line with the time since the beginning."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)


def work(part: Part, folder: Path, shared: Path, dry_run: bool) -> NoReturn:
    """Do a part in this process, and end it. What it prints goes to a file."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # so that it can be ended with all that it has started
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        from kit import Kit

        module, function = part.run.split(":")
        getattr(importlib.import_module(module), function)(Kit(dry_run, folder, shared), **part.arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def line_of(row: Mapping[str, Any]) -> str:
    """A row of figures as a line."""
    if "omitted" in row:
        return f"    left out: {row['name']}: {row['omitted']}"
    shown = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("name", "ok") and not isinstance(value, (list, dict)) and len(str(value)) < 200
    ]
    return f"  {' ' if row['ok'] else '*'} {row['name']}: {', '.join(shown)}"


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for line in _text(folder / "rows.jsonl").splitlines():
        with suppress(ValueError):  # a process that was killed may have written half of its last one
            rows.append(json.loads(line))
    return rows


def _kill(process: BaseProcess) -> None:
    assert process.pid is not None
    for end in (os.killpg, os.kill):  # before it has a group of its own, itself
        with suppress(ProcessLookupError, PermissionError):
            end(process.pid, signal.SIGKILL)
    process.join()


def chosen(parts: Sequence[Part], words: Sequence[str]) -> list[Part]:
    """The first part, those whose names begin with one of `words`, and those they need; all without any."""
    wanted = {part.name for part in parts if not words or part.name.startswith(tuple(words))}
    if not wanted:
        there = ", ".join(part.name for part in parts)
        raise SystemExit(f"--only {' '.join(words)}: no part begins so; there are {there}")
    wanted.add(parts[0].name)  # which names the machine
    for part in reversed(parts):
        wanted |= set(part.needs) if part.name in wanted else set()
    return [part for part in parts if part.name in wanted]


def _import(*, dry_run: bool) -> None:
    """Import what all parts need, once. It must not touch a GPU, which no fork could use then: DeepSpeed may."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    modules = ["kit", "ds_encdec.training.build", "ds_encdec.engine.fsdp2"]
    if dry_run:
        os.environ["DS_ACCELERATOR"] = "cpu"
        modules += ["deepspeed", "torch._inductor.compile_fx"]  # which may have workers, that forks cannot use
    for module in modules:
        importlib.import_module(module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of the results")
    parser.add_argument("--seconds", type=float, help="time for all parts together (default: 560, in a dry run no end)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="parts whose names begin so")
    parser.add_argument("--dry-run", action="store_true", help="try all on a CPU, with tiny models")
    parser.add_argument("--spawn", action="store_true", help="start an interpreter for each part, where forks fail")
    options = parser.parse_args()
    seconds = options.seconds or (math.inf if options.dry_run else 560)
    parts = chosen(PARTS, options.only)
    check = Check(parts, options.out, seconds, dry_run=options.dry_run, forks=not options.spawn)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so ends what it has started
    if not options.spawn:
        _import(dry_run=options.dry_run)
        check.say("imported")
    passed = check.run()
    failed = [part["name"] for part in check.found if not part["ok"]]
    omitted = sum(part["ok"] and any("omitted" in row for row in part["rows"]) for part in check.found)
    left_out = f", {omitted} of them without what is left out above" if omitted else ""
    check.say(
        f"{len(check.found) - len(failed)} of {len(check.found)} parts passed{left_out}; {options.out / 'gpu.json'}"
    )
    for name in failed:
        print(f"  failed: {name}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
