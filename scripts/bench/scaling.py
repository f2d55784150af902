"""How the cost of our step grows: with ranks, with the model's width and depth, with the documents' length.

    python scripts/bench/scaling.py                                  every curve
    python scripts/bench/scaling.py --curves ranks --contender ours_fsdp2 --json curves.json

A curve changes one thing and leaves the others at their middle. Its points are processes that take turns
(train_step.py), so that they can be compared on a busy machine. Figures are of one rank: milliseconds of CPU a step,
and tokens a second of CPU over those of the curve's first point.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from turns import Contender, in_turns, median, report

MIDDLE = {"documents": "web", "ranks": 1, "hidden": 128, "layers": 2, "vocab": 4096, "batch": 2}
"""Fields of contenders.Job."""
CURVES: dict[str, list[dict[str, Any]]] = {
    "ranks": [{"ranks": ranks} for ranks in (1, 2, 4)],
    "width": [{"hidden": width} for width in (64, 128, 256)],
    "depth": [{"layers": layers} for layers in (1, 2, 4)],
    # As many tokens a step, in fewer and longer examples.
    "length": [
        {"documents": "equal", "encoder_length": length, "decoder_length": length // 2, "batch": 1024 // length}
        for length in (128, 256, 512)
    ],
    "documents": [{"median_tokens": tokens} for tokens in (20, 80, 320)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--contender", default="ours_zero1", help="of contenders.py")
    parser.add_argument("--points", type=int, default=3, help="the first so many of a curve")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=json.loads, default={}, help="JSON of fields that the curves leave alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.curves for row in curve(name, options)]
    report(f"cost of a step, {options.contender}", rows, options.json, middle=MIDDLE | options.size)


def curve(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each point of the curve."""
    points = CURVES[name][: options.points]
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder, ExitStack() as stack:
        running = {}
        for point in points:
            job = MIDDLE | options.size | point
            command = [sys.executable, str(Path(__file__).with_name("contenders.py")), options.contender]
            log = Path(folder) / f"{len(running)}.log"
            one = Contender([*command, json.dumps(job)], log, ranks=job["ranks"])
            stack.callback(one.close)
            one.take(options.steps)
            running[json.dumps(point)] = one
        turns = in_turns({key: partial(one.take, options.steps) for key, one in running.items()}, options.rounds)
    speeds = {
        key: [of_rank(ranks, "tokens") / of_rank(ranks, "cpu_s") for ranks in taken] for key, taken in turns.items()
    }
    first = next(iter(speeds.values()))
    return [
        {
            "curve": name,
            "point": ", ".join(f"{field} {value}" for field, value in json.loads(key).items()),
            "CPU ms a step": median(
                mean(rank["cpu_s"] for rank in ranks) / options.steps * 1e3 for ranks in turns[key]
            ),
            "tokens a step": median(mean(rank["tokens"] for rank in ranks) / options.steps for ranks in turns[key]),
            "tokens / CPU s": median(found),
            "over the first": median(mine / theirs for mine, theirs in zip(found, first, strict=True)),
        }
        for key, found in speeds.items()
    ]


def of_rank(ranks: list[dict[str, Any]], name: str) -> float:
    return mean(rank[name] for rank in ranks)


if __name__ == "__main__":
    main()
