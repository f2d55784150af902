"""Runs the matrix of faults: each row is a fault, met by real runs under both engines, and what is promised then.

    ./scripts/faults.sh                       all rows
    ./scripts/faults.sh --row killed-rank     one row (or several)
    ./scripts/faults.sh --minutes 5           those that the tests do not run, in a fixed order, as many as fit
    ./scripts/faults.sh --write               what is shown goes into docs/faults.md

Exit code 1 if a row failed; what its runs printed comes before the table."""

import argparse
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from bench import ROOT, Bench, Result
from rows import GROUPS

PAGE = ROOT / "docs" / "faults.md"
MARK = "<!-- Written by ./scripts/faults.sh --write -->\n"
HEAD = "| row | what happens: what is promised | times | lost | verdict | seen |\n|---|---|---|---|---|---|\n"
ROWS = {name: row for group in GROUPS.values() for name, row in group.items()}


def shown(name: str, result: Result) -> str:
    """Return a row's line in the table."""
    if result.skipped:
        cells = f"0 | | skipped: {' '.join(result.skipped.split())}"
    else:
        lost = "nothing" if result.lost == 0 else "1 step" if result.lost == 1 else f"{result.lost} steps"
        problem = result.problems[0].splitlines()[0][:120].replace("|", "/") if result.problems else ""
        cells = f"{result.times:,} | {lost} | {f'**failed**: {problem}' if problem else 'held'}"
    return f"| {name} | {ROWS[name].promise} | {cells} | {time.strftime('%Y-%m-%d')}, {_commit()} |"


def page(lines: dict[str, str]) -> str:
    """Return the page with these lines; those of other rows stay as they were."""
    head, _, tables = PAGE.read_text().partition(MARK)
    lines = {row[1]: row[0] for row in re.finditer(r"^\| ([\w-]+) \| .* \|$", tables, re.MULTILINE)} | lines
    named = ((group, (lines.get(name, f"| {name} | {row.promise} | | | not run | |") for name, row in rows.items()))
             for group, rows in GROUPS.items())  # fmt: skip
    return head + MARK + "".join(f"\n## {group}\n\n{HEAD}" + "\n".join(rows) + "\n" for group, rows in named)


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
    began, results, lines = time.monotonic(), dict[str, Result](), dict[str, str]()
    with Bench(few=few) as bench:
        for name in names:
            at = time.monotonic()
            # A busy machine takes longer than expected, and so it will for this row.
            expected = sum(ROWS[one].seconds for one in results)
            slowness = max(1.0, (at - began) / expected) if expected else 1.0
            if few and at - began + slowness * ROWS[name].seconds > options.minutes * 60:
                break
            try:
                results[name] = ROWS[name].run(bench)
            except Exception:
                results[name] = Result(problems=(traceback.format_exc(),))
            lines[name] = shown(name, results[name])
            took = f"{name}: {time.monotonic() - at:.0f} s"
            print(took, *results[name].problems, sep="\n", file=sys.stderr, flush=True)
            if options.write:
                PAGE.write_text(page({name: lines[name]}))
    print(HEAD + "\n".join(lines.values()))
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"\n{time.strftime('%Y-%m-%d')}, commit {_commit()}, {os.cpu_count()} × {model[1] if model else 'CPU'}")
    print(
        f"Not run: {', '.join(left)}" if (left := [name for name in names if name not in results]) else "All were run."
    )
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
