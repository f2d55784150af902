"""Runs the matrix of faults: each row is a fault, met by real runs under both engines, and what is promised then.

    ./scripts/faults.sh                       all rows
    ./scripts/faults.sh --row killed-rank     one row (or several)
    ./scripts/faults.sh --minutes 5           those that the tests do not run, in a fixed order, as many as fit
    ./scripts/faults.sh --write               what is shown goes into docs/faults.md, row by row

Exit code 1 if a row failed; what its runs printed comes before the table."""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cache
from itertools import chain, zip_longest
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from bench import ROOT, Bench, Result, Unavailable
from rows import GROUPS

PAGE = ROOT / "docs" / "faults.md"
MARK = "<!-- Written by ./scripts/faults.sh --write -->\n"
HEAD = "| row | what happens: what is promised | times | lost | verdict | seen |\n|---|---|---|---|---|---|\n"
ROWS = {name: row for group in GROUPS.values() for name, row in group.items()}
NOT_RUN = " | | not run | |"


class Worker:
    """Runs rows in a process that keeps a Bench. If a row fails, takes too long or ends the process, `close` kills what
    is left, and the next row gets a new one."""

    def __init__(self, folder: Path, *, few: bool) -> None:
        self._folder, self._few = folder, few
        self._process: ForkProcess | None = None

    def run(self, name: str) -> Result:
        if self._process is None:
            self._pipe, theirs = multiprocessing.Pipe()
            self._process = ForkProcess(target=_serve, args=(theirs, self._folder, self._few))
            self._process.start()
            theirs.close()
        result, minutes = Result(problems=("the process that ran it has died",)), ROWS[name].minutes
        with suppress(EOFError, OSError):
            self._pipe.send(name)
            is_over = self._pipe.poll(minutes * 60)
            result = self._pipe.recv() if is_over else Result(problems=(f"it took longer than {minutes} minutes",))
        if result.problems:
            self.close()
        return result

    def close(self) -> None:
        """Kill the process and all that it started. If it has died, what made a session of its own is not found."""
        if self._process:
            process = psutil.Process(self._process.pid)  # until it is joined there is one, if dead
            for one in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            with suppress(ProcessLookupError):  # it was killed before it made its session
                os.killpg(process.pid, signal.SIGKILL)
            self._process.join()
        self._process = None


def _serve(pipe: Connection, folder: Path, few: bool) -> None:
    os.setsid()  # its number is its children's group, also when they have lost it
    bench = Bench(folder, few=few)
    while True:
        name = pipe.recv()
        try:
            result = ROWS[name].run(bench)
        except Unavailable as why:
            result = Result(skipped=str(why))
        except Exception as error:
            result = Result(problems=(f"{type(error).__name__}: {error}\n{traceback.format_exc()}",))
        pipe.send(result)


def cells(result: Result) -> str:
    """Return what a row's line in the table has behind its promise."""
    seen = f"{time.strftime('%Y-%m-%d')}, {_commit()}"
    if result.skipped:
        return f"0 | | skipped: {' '.join(result.skipped.split())} | {seen} |"
    lost = {None: "", 0: " nothing", 1: " 1 step"}.get(result.lost, f" {result.lost} steps")
    problem = result.problems[0].splitlines()[0][:120].replace("|", "/") if result.problems else ""
    return f"{result.times:,} |{lost} | {f'**failed**: {problem}' if problem else 'held'} | {seen} |"


def page(results: dict[str, str]) -> str:
    """Return the page with these cells by row; those of other rows stay as they were."""
    head, _, tables = PAGE.read_text().partition(MARK)
    earlier = {row[1]: row[2] for row in re.finditer(r"^\| ([\w-]+) \| .*? \| (.* \|)$", tables, re.MULTILINE)}
    known, tables = dict.fromkeys(ROWS, NOT_RUN) | earlier | results, ""
    for group, rows in GROUPS.items():
        lines = (f"| {name} | {row.promise} | {known[name]}\n" for name, row in rows.items())
        tables = f"{tables}\n## {group}\n\n{HEAD}{''.join(lines)}"
    return head + MARK + tables


@cache
def _commit() -> str:
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="faults.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, metavar="NAME", help=f"only these: {', '.join(ROWS)}")
    parser.add_argument("--minutes", type=float, help="as many as fit that the tests do not run, with few repetitions")
    parser.add_argument("--write", action="store_true", help="write the results into docs/faults.md")
    options = parser.parse_args(words)
    few = options.minutes is not None
    # One of each group after the other, so that whatever the time every kind of fault is met.
    names = [name for name in chain.from_iterable(zip_longest(*GROUPS.values())) if name and ROWS[name].seconds]
    names = options.row or (names if few else [*ROWS])
    print(f"commit {_commit()}", file=sys.stderr)
    began, results = time.monotonic(), dict[str, Result]()
    temporary = TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)
    with temporary as folder, closing(Worker(Path(folder), few=few)) as worker:
        for name in names:
            at = time.monotonic()
            # A busy machine takes longer than expected, and so it will for this row.
            expected = sum(ROWS[one].seconds for one in results)
            slowness = max(1.0, (at - began) / expected) if expected else 1.0
            if few and at - began + slowness * ROWS[name].seconds > options.minutes * 60:
                break
            results[name] = worker.run(name)
            took = f"{name}: {time.monotonic() - at:.0f} s"
            print(took, *results[name].problems, sep="\n", file=sys.stderr, flush=True)
            if options.write:
                PAGE.write_text(page({name: cells(results[name])}))
    print(HEAD + "\n".join(f"| {name} | {ROWS[name].promise} | {cells(result)}" for name, result in results.items()))
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine, minutes = f"{os.cpu_count()} × {model[1] if model else 'CPU'}", (time.monotonic() - began) / 60
    print(f"\n{time.strftime('%Y-%m-%d')}, commit {_commit()}, {machine}, {minutes:.0f} minutes")
    left = [name for name in names if name not in results]
    print(f"Not run: {', '.join(left)}" if left else "All were run.")
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
