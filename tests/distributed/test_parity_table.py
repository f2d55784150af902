"""Two rows of docs/parity.md, which scripts/dev/parity_table.py writes, are run again here."""

from functools import cache

import pytest
from gloo_ranks import run_ranks
from parity_runs import oracle_losses

FLOAT32_BOUND, BF16_BOUND = 1e-5, 0.03


@cache
def oracle() -> list[float]:
    return oracle_losses()


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
