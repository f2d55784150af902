"""Every engine's checkpoint, from 1, 2 and 4 ranks, continued by every engine on 1, 2 and 4 ranks.

It writes the second part of docs/parity.md:

    python scripts/dev/checkpoint_matrix.py          write it (three quarters of an hour on two cores)
    python scripts/dev/checkpoint_matrix.py --print    only print the page

Needs the `dev` extra: the runs are the tests' own (tests/distributed/portable_runs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from parity_table import NEXT_PART, PAGE, only_prints  # which also lets the tests' modules be imported
from portable_runs import (
    ADAPTERS,
    ENGINES,
    ONE_OF_EACH,
    SAVED_STEP,
    SIDES,
    STEPS,
    TESTED_SIDES,
    TESTED_STEPS,
    WORLD_SIZES,
    Changes,
    Continued,
    Pair,
    Side,
    continue_all,
    save_all,
    uninterrupted,
)

INTRODUCTION = (
    NEXT_PART
    + """ and numbers of ranks

Each engine trained a tiny model in float32 on real text for {saved} steps on 1, 2 and 4 ranks and was stopped; from
each of the {savers} checkpoints each engine went on for {steps} steps on 1, 2 and 4 ranks ({pairs} continuations).
The table shows, worst of the nine combinations of ranks, the largest difference of a step's loss (nats per target
token) from a run that was never interrupted. The bound is 1e-5. The samples of every step, lane by lane, were
{samples}.

`python scripts/dev/checkpoint_matrix.py` writes these tables. `tests/distributed/test_portable_checkpoints.py` repeats
{tested} of the pairs over fewer steps, each between DeepSpeed and FSDP2.
"""
)
ADAPTER_INTRODUCTION = """
### Adapters

The same with LoRA (rank 4, dropout 0.1, full recomputation): each of {savers} checkpoints of adapters, continued by
each engine on another number of ranks for {steps} steps ({pairs} continuations), against a run on one rank that was
never interrupted. Its loss falls from {first:.3f} to {last:.3f}. The samples were {samples}. At ten times this learning
rate (3e-2), two runs that nothing interrupts, on one and on two ranks, part within ten steps: rounding grows.
"""


def main() -> None:
    is_printed = only_prints(__doc__)
    found, _ = run_pairs([(saver, loader) for saver in SIDES for loader in SIDES])
    counts = {"saved": SAVED_STEP, "steps": STEPS - SAVED_STEP, "savers": len(SIDES), "tested": len(TESTED_SIDES)}
    page = INTRODUCTION.format(**counts, pairs=len(found), samples=samples(found)) + table(found)
    # Of adapters all pairs of engines, each on a number of ranks that the other is not on.
    others = [WORLD_SIZES[WORLD_SIZES.index(saver.world_size) - 1] for saver in ONE_OF_EACH]
    sides = list(zip(ONE_OF_EACH, others, strict=True))
    pairs = [(saver, Side(engine, other)) for saver, other in sides for engine in ENGINES]
    found, losses = run_pairs(pairs, TESTED_STEPS, ADAPTERS)
    counts = {"savers": len(ONE_OF_EACH), "steps": TESTED_STEPS - SAVED_STEP, "pairs": len(found)}
    ends = {"first": losses[1], "last": losses[TESTED_STEPS]}
    page += ADAPTER_INTRODUCTION.format(**counts, **ends, samples=samples(found)) + table(found)
    if is_printed:
        print(page)
    else:
        PAGE.write_text(PAGE.read_text().partition(NEXT_PART)[0] + page)


def run_pairs(
    pairs: list[Pair], steps: int = STEPS, changes: Changes = None
) -> tuple[dict[Pair, Continued], dict[int, float]]:
    """Every pair, and the losses of the uninterrupted run."""
    with TemporaryDirectory(prefix="matrix-") as scratch:
        folder = Path(scratch)
        reference = uninterrupted(folder, steps, changes)
        saved = save_all(list(dict.fromkeys(saver for saver, _ in pairs)), folder, steps, changes)
        return continue_all(pairs, saved, reference, folder, steps, changes), reference["losses"]


def samples(found: Mapping[Pair, Continued]) -> str:
    """How the samples compare, as the end of a sentence."""
    different = sum(not continued.same_samples for continued in found.values())
    return "the same" if not different else f"different in {different} continuations"


def table(found: Mapping[Pair, Continued]) -> str:
    """The worst difference of a loss, by engine that saved and engine that went on."""
    lines = [["saved by \\ continued by", *ENGINES], ["---"] * (len(ENGINES) + 1)]
    for saver in ENGINES:
        cells = [
            [one.loss_difference for (a, b), one in found.items() if (a.engine, b.engine) == (saver, loader)]
            for loader in ENGINES
        ]
        lines.append([saver, *(f"{max(differences):.1e}" for differences in cells)])
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
