"""Every engine's checkpoint, from 1, 2 and 4 ranks, continued by every engine on 1, 2 and 4 ranks: docs/portability.md.

    python scripts/checkpoint_matrix.py            write docs/portability.md (half an hour on two cores)
    python scripts/checkpoint_matrix.py --print    only print the page

Needs the `dev` extra: the runs are the tests' own (tests/distributed/portable_runs.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from portable_matrix import SIDES, TESTED_SIDES, Continued, Pair, continue_all, save_all, uninterrupted  # noqa: E402
from portable_runs import ENGINES, SAVED_STEP, STEPS  # noqa: E402

PAGE = ROOT / "docs" / "portability.md"

INTRODUCTION = """# Checkpoints across engines and numbers of ranks

Each engine trained a tiny model in float32 on real text for {saved} steps on 1, 2 and 4 ranks and was stopped; from
each of the {savers} checkpoints each engine went on for {steps} steps on 1, 2 and 4 ranks ({pairs} continuations).
The table shows, worst of the nine combinations of ranks, the largest difference of a step's loss (nats per target
token) from a run that was never interrupted. The bound is 1e-5. The samples of every step, lane by lane, were
{samples}.

Regenerate this page with `python scripts/checkpoint_matrix.py`. `tests/distributed/test_portable_checkpoints.py`
repeats {tested} of the pairs over fewer steps, with every engine on either side.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="matrix-") as scratch:
        folder = Path(scratch)
        pairs = [(saver, loader) for saver in SIDES for loader in SIDES]
        found = continue_all(pairs, save_all(SIDES, folder), uninterrupted(folder), folder)
    page = render(found)
    if options.print:
        print(page)
    else:
        PAGE.write_text(page)


def render(found: Mapping[Pair, Continued]) -> str:
    """The page."""
    different = sum(not continued.same_samples for continued in found.values())
    introduction = INTRODUCTION.format(
        saved=SAVED_STEP,
        steps=STEPS - SAVED_STEP,
        savers=len(SIDES),
        pairs=len(found),
        tested=len(TESTED_SIDES),
        samples="the same" if not different else f"different in {different} continuations",
    )
    lines = [["saved by \\ continued by", *ENGINES], ["---"] * (len(ENGINES) + 1)]
    for saver in ENGINES:
        worst = [
            max(
                continued.loss_difference
                for pair, continued in found.items()
                if (pair[0].engine, pair[1].engine) == (saver, loader)
            )
            for loader in ENGINES
        ]
        lines.append([saver, *(f"{difference:.1e}" for difference in worst)])
    return introduction + "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
