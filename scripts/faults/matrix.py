"""Runs the matrix of faults: each row is a fault, met by real runs under both engines, and what is promised then.

    ./scripts/faults.sh --list                the rows, and about how long each takes
    ./scripts/faults.sh --row killed-rank     one row (or several)
    ./scripts/faults.sh --minutes 5           as many as fit, the quick ones of each group first, some less often
    ./scripts/faults.sh --write               all, and what they show into docs/faults.md

Exit code 1 if a row failed; what its runs printed comes before the table."""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from bench import ROOT, Bench, Result, Row, Tests
from rows import GROUPS

PAGE = ROOT / "docs" / "faults.md"
ROWS = {name: row for group in GROUPS.values() for name, row in group.items()}


def in_turn(short: bool) -> list[str]:
    """Return the rows' names, one of each group after the other. Where time is `short` the quick ones come first, and
    those last that every change is tested with."""
    groups = [
        sorted(group, key=lambda name: (isinstance(ROWS[name].run, Tests), seconds(ROWS[name], short)))
        for group in GROUPS.values()
    ]
    return [name for name in chain.from_iterable(zip_longest(*groups)) if name is not None]


def seconds(row: Row, short: bool) -> int:
    return row.quick_seconds or row.seconds if short else row.seconds


def met(bench: Bench, row: Row, short: bool) -> Result:
    try:
        return (row.quick if short and row.quick else row.run)(bench)
    except Exception:
        return Result(problems=(traceback.format_exc(),))


def cells(result: Result) -> tuple[str, str, str]:
    """Return what the table has of a row: times, lost, verdict."""
    if result.skipped:
        return "", "", f"skipped: {' '.join(result.skipped.split())}"
    failed = f"**failed**: {result.problems[0].splitlines()[0][:120]}" if result.problems else "held"
    return f"{result.times:,}", result.lost, failed.replace("|", "/")


def written(results: dict[str, Result]) -> str:
    """Return the page with these results; rows that were not met keep what they had."""
    lines, commit = PAGE.read_text().splitlines(), _output("git", "rev-parse", "--short=8", "HEAD")
    for place, line in enumerate(lines):
        name, *_ = cut = line.removeprefix("| ").split(" | ")
        if line.startswith("Machine of the newest lines: "):
            lines[place] = f"Machine of the newest lines: {_machine()}."
        elif name in results and not results[name].skipped:
            seen = f"{time.strftime('%Y-%m-%d')}, {commit}"
            lines[place] = f"| {' | '.join([*cut[:2], *cells(results[name]), seen])} |"
    return "\n".join(lines) + "\n"


def _machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} × {model[1] if model else platform.machine()}, {platform.system()} {platform.release()}"


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="faults.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, metavar="NAME", help="only these")
    parser.add_argument("--minutes", type=float, help="as many as fit, some less often")
    parser.add_argument("--list", action="store_true", help="print the rows and their seconds")
    parser.add_argument("--write", action="store_true", help="write the results into docs/faults.md")
    options = parser.parse_args(words)
    short = options.minutes is not None
    names = options.row or in_turn(short)
    if options.list:
        print("\n".join(f"{name}  {seconds(ROWS[name], short)} s" for name in names))
        return 0
    began, results = time.monotonic(), dict[str, Result]()
    with Bench() as bench:
        for name in names:
            if short and time.monotonic() - began + seconds(ROWS[name], short) > options.minutes * 60:
                continue
            at = time.monotonic()
            results[name] = result = met(bench, ROWS[name], short)
            print(f"{name}: {cells(result)[-1]} ({time.monotonic() - at:.0f} s)", file=sys.stderr, flush=True)
            for problem in result.problems:
                print(problem, file=sys.stderr, flush=True)
    print("| row | times | lost | verdict |\n|---|---|---|---|")
    for name, result in results.items():
        print(f"| {name} | {' | '.join(cells(result))} |")
    left_out = [name for name in names if name not in results]
    print(f"{time.strftime('%Y-%m-%d')}, commit {_output('git', 'rev-parse', '--short=8', 'HEAD')}, {_machine()}")
    print(f"no time was left for: {', '.join(left_out)}" if left_out else "all rows")
    if options.write:
        PAGE.write_text(written(results))
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
