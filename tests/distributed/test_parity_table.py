"""docs/parity.md says what the engines do: its bounds hold in every row, and some rows are run again here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from parity_runs import ENGINES, KINDS, engines_of, oracle_losses

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
FLOAT32_BOUND, BF16_BOUND = 1e-5, 0.03
ROW = re.compile(r"^\| (?P<name>[^|]+?) (?P<figures>(?:\| (?:\d\.\de[-+]\d\d|-) ){12})\|$", re.MULTILINE)
RANKS = (1, 2, 4)


@cache
def oracle() -> list[float]:
    return oracle_losses()


def test_every_engine_has_a_row_within_the_bounds() -> None:
    rows = {row["name"]: row["figures"].split("|")[1:] for row in ROW.finditer(PAGE.read_text())}
    assert list(rows) == list(ENGINES)
    columns = [kind for kind in KINDS for _ in RANKS]
    for name, figures in rows.items():
        for kind, figure in zip(columns, figures, strict=True):
            assert (figure.strip() == "-") == (name not in engines_of(kind)), (name, kind)
            if figure.strip() != "-":
                assert float(figure) < (BF16_BOUND if kind == "bf16" else FLOAT32_BOUND), (name, kind)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "bf16", "bound"),
    [
        ("FSDP2 zero3", False, FLOAT32_BOUND),
        ("DeepSpeed ZeRO-3, optimizer offload", True, BF16_BOUND),  # in float32 it is followed elsewhere
    ],
)
def test_fifty_steps_follow_the_oracle(name: str, bf16: bool, bound: float) -> None:
    found, *_ = run_ranks("parity_runs.py:engine_losses", 2, {"names": [name], "bf16": bf16})
    assert oracle()[-1] < oracle()[0] - 0.3  # it learns, or collectives would say little
    assert found[name] == pytest.approx(oracle(), abs=bound)
