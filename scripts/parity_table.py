"""Trains a tiny model with every engine on 1, 2 and 4 ranks and compares each loss with plain torch's: docs/parity.md.

    python scripts/parity_table.py            write docs/parity.md (about 10 minutes on two cores)
    python scripts/parity_table.py --print    only print the table

Needs the `dev` extra: the runs and the oracle are the tests' own (tests/distributed/parity_runs.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from gloo_ranks import run_ranks  # noqa: E402 - the path comes first
from parity_runs import ENGINES, LANES, STEPS, oracle_losses  # noqa: E402

WORLD_SIZES = (1, 2, 4)
PAGE = ROOT / "docs" / "parity.md"

INTRODUCTION = """# Parity of the engines

The same tiny model, seed and micro-batches under every engine and on 1, 2 and 4 ranks, against plain torch in one
process (float32, `torch.optim.AdamW`, no sharding): the largest difference of a step's loss (nats per target token)
over {steps} optimizer steps of {lanes} micro-batches with unequal target tokens, one of them empty, clipping active
in every step, `WarmupDecayLR`. The oracle's loss falls from {first:.2f} to {last:.2f}.

In float32 the bound is 1e-5. In bf16 it is {bf16_bound:g}: products have 8 bits there, and no engine's are better than
another's. `_hybrid` shards over half of the ranks.

Regenerate this page with `python scripts/parity_table.py`; `tests/distributed/test_parity_table.py` checks its rows and
repeats some of them.
"""
BF16_BOUND = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    options = parser.parse_args()
    oracle = oracle_losses()
    names = list(ENGINES)
    worst: dict[tuple[str, bool, int], float] = {}
    for bf16 in (False, True):
        for world_size in WORLD_SIZES:
            arguments = {"names": names, "bf16": bf16}
            found, *_ = run_ranks("parity_runs.py:engine_losses", world_size, arguments, timeout_seconds=1800)
            for name in names:
                worst[name, bf16, world_size] = max(abs(a - b) for a, b in zip(found[name], oracle, strict=True))
            print(f"{'bf16' if bf16 else 'float32'} on {world_size} ranks done", file=sys.stderr, flush=True)
    page = render(worst, oracle)
    if options.print:
        print(page)
    else:
        PAGE.write_text(page)


def render(worst: dict[tuple[str, bool, int], float], oracle: list[float]) -> str:
    """The page. `worst`: (engine, bf16, ranks) → largest difference in nats."""
    ranks = [f"{count} rank{'s' * (count > 1)}" for count in WORLD_SIZES]
    heads = ["engine", *(f"float32, {r}" for r in ranks), *(f"bf16, {r}" for r in ranks)]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for name in ENGINES:
        figures = [f"{worst[name, bf16, count]:.1e}" for bf16 in (False, True) for count in WORLD_SIZES]
        lines.append(" | ".join([name, *figures]))
    introduction = INTRODUCTION.format(
        steps=STEPS, lanes=LANES, first=oracle[0], last=oracle[-1], bf16_bound=BF16_BOUND
    )
    return introduction + "\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
