"""A training step of ours beside those of others: tokens a second of CPU, and the first losses.

    python scripts/bench/train_step.py                         equal work: every example 512 + 256 tokens, no padding
    python scripts/bench/train_step.py --documents web         log-normal documents, median 80 tokens, at most 512 + 256
    python scripts/bench/train_step.py --ranks 2 --only ours_zero1 hf_zero1 --json rows.json

Each contender (contenders.py) is built and warmed up, then they take turns of a few steps each. Given are medians over
the rounds: useful tokens, without padding, a second of process CPU (the mean of the ranks), the same by the clock, and
the speed over that of `--reference`, from pairs of the same round. The work is equal only where documents are, and
there the first losses are compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turns import Contender, in_turns, median, report

ALONE = {"bare_loop"}  # knows no ranks
UNPACKED_ONLY = {"hf_zero3_offload_grouped", "hf_zero1_grouped"}  # without padding there is nothing to group
NAMES = ("ours_zero3_offload", "hf_zero3_offload", "ours_zero1", "hf_zero1", "ours_fsdp2", *ALONE, *UNPACKED_ONLY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", choices=("equal", "web"), default="equal")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=20, help="steps before; their losses are compared")
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--reference", choices=NAMES, help="default: Hugging Face's best at these documents")
    parser.add_argument("--size", type=json.loads, default={}, help="JSON of other fields of contenders.Job")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    left_out = (ALONE if options.ranks > 1 else set()) | (UNPACKED_ONLY if options.documents == "equal" else set())
    names = [name for name in options.only or NAMES if name not in left_out]
    if not find_spec("accelerate") and any(name.startswith("hf") for name in names):
        parser.error("Hugging Face's contenders need accelerate: pip install -c constraints.txt -e '.[dev]'")
    job = {"documents": options.documents, "ranks": options.ranks, **options.size}
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        rows = measure(names, job, options, Path(folder))
    report(f"{options.documents} documents, {options.ranks} rank(s)", rows, options.json, job=job)


def measure(names: list[str], job: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Build, warm up, take turns; one row for each of `names`."""
    os.environ["TMPDIR"] = str(folder)
    running, first = {}, {}
    with ExitStack() as stack:
        for name in names:
            command = [sys.executable, str(Path(__file__).with_name("contenders.py")), name, json.dumps(job)]
            running[name] = Contender(command, folder / f"{name}.log", ranks=options.ranks)
            stack.callback(running[name].close)
            first[name] = running[name].take(options.warm_up)
            print(f"{name}: built", file=sys.stderr, flush=True)
        turns = in_turns({name: partial(one.take, options.steps) for name, one in running.items()}, options.rounds)
    # Tokens of all ranks, seconds of the mean rank.
    tokens = {name: [sum(rank["tokens"] for rank in ranks) for ranks in taken] for name, taken in turns.items()}
    clocks = ("cpu_s", "wall_s")
    cpu, wall = (
        {name: [statistics.mean(rank[clock] for rank in ranks) for ranks in taken] for name, taken in turns.items()}
        for clock in clocks
    )
    speeds = {name: [done / seconds for done, seconds in zip(tokens[name], cpu[name], strict=True)] for name in names}
    peers = [name for name in names if name.startswith("hf")]
    reference = options.reference or max(peers, key=lambda name: median(speeds[name]), default=names[0])
    losses = {name: first[name][0]["losses"] for name in names}
    rows = []
    for name in names:
        apart = [abs(mine - theirs) for mine, theirs in zip(losses[name], losses[reference], strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(speeds[name], speeds[reference], strict=True)]
        row = {
            "contender": name,
            "CPU ms a step": median(1e3 * seconds / options.steps for seconds in cpu[name]),
            "tokens a step": median(done / options.steps for done in tokens[name]),
            "tokens / CPU s": median(speeds[name]),
            "tokens / s by the clock": median(t / s for t, s in zip(tokens[name], wall[name], strict=True)),
            f"over {reference}": median(ratios),
            "peak MB": max(rank["peak_mb"] for ranks in turns[name] for rank in ranks),
            "first losses differ by": max(apart) if job["documents"] == "equal" else None,
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
