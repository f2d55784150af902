"""Trains a tiny model with every engine on 1, 2 and 4 ranks and compares each loss with plain torch's.

It writes the first part of docs/parity.md:

    python scripts/dev/parity_table.py            write it (about a quarter of an hour on two cores)
    python scripts/dev/parity_table.py --print    only print the table

Needs the `dev` extra: the runs and the oracle are the tests' own (tests/distributed/parity_runs.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from gloo_ranks import run_ranks  # noqa: E402 - the path comes first
from parity_runs import ENGINES, KINDS, LANES, STEPS, engines_of, oracle_losses  # noqa: E402

WORLD_SIZES = (1, 2, 4)
PAGE = ROOT / "docs" / "parity.md"

INTRODUCTION = """# Parity of the engines

## Losses against plain torch

The same tiny model (cross-attention `aligned`, `prefix`), seed and micro-batches under every engine and on 1, 2 and 4
ranks, against plain torch in one process (float32, `torch.optim.AdamW`, no sharding): the largest difference of a
step's loss (nats per target token) over {steps} optimizer steps of {lanes} micro-batches with unequal target tokens,
one of them empty and one without input tokens, clipping active in every step, `WarmupDecayLR`. The oracle's loss falls
from {first:.2f} to {last:.2f}; with LoRA (rank 4, no dropout; the oracle's adapters are peft's own) to {lora_last:.2f},
with Muon (`torch.optim.Muon`, orthogonalizing in float32) to {muon_last:.2f}.

In float32 the bound is 1e-5. In bf16 it is {bf16_bound:g}: products have 8 bits there, and no engine's are better than
another's. `_hybrid` shards over half of the ranks.

`python scripts/dev/parity_table.py` writes this table; `tests/distributed/test_parity_table.py` repeats some of its
rows.
"""
NEXT_PART = "\n## Checkpoints across engines"  # where the part of checkpoint_matrix.py begins
BF16_BOUND = 0.03


def only_prints(description: str) -> bool:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    return parser.parse_args().print


def main() -> None:
    is_printed = only_prints(__doc__)
    oracles = {kind: oracle_losses(**changes) for kind, changes in KINDS.items()}
    worst: dict[tuple[str, str, int], float] = {}
    for kind, changes in KINDS.items():
        for world_size in WORLD_SIZES:
            names = engines_of(kind)
            arguments = {"names": names, **changes}
            found, *_ = run_ranks("parity_runs.py:engine_losses", world_size, arguments, timeout_seconds=1800)
            for name in names:
                worst[name, kind, world_size] = max(abs(a - b) for a, b in zip(found[name], oracles[kind], strict=True))
            print(f"{kind} on {world_size} ranks done", file=sys.stderr, flush=True)
    page = render(worst, oracles)
    if is_printed:
        print(page)
    else:
        PAGE.write_text(page + NEXT_PART + PAGE.read_text().partition(NEXT_PART)[2])


def render(worst: dict[tuple[str, str, int], float], oracles: dict[str, list[float]]) -> str:
    """The page. `worst`: (engine, kind, ranks) → largest difference in nats."""
    columns = [(kind, count) for kind in KINDS for count in WORLD_SIZES]
    heads = ["engine", *(f"{kind}, {count} rank{'s' * (count > 1)}" for kind, count in columns)]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for name in ENGINES:
        figures = [worst.get((name, *column)) for column in columns]
        lines.append(" | ".join([name, *("-" if figure is None else f"{figure:.1e}" for figure in figures)]))
    introduction = INTRODUCTION.format(
        steps=STEPS,
        lanes=LANES,
        first=oracles["float32"][0],
        last=oracles["float32"][-1],
        lora_last=oracles["LoRA, float32"][-1],
        muon_last=oracles["Muon, float32"][-1],
        bf16_bound=BF16_BOUND,
    )
    return introduction + "\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
