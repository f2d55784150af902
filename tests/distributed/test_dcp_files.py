"""Ranges of tensors out of what `torch.distributed.checkpoint` wrote on real ranks, bit for bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dcp_cases import KINDS, SHAPES, tensors
from gloo_ranks import run_ranks

from ds_encdec.base.types import CheckpointError
from ds_encdec.checkpoint.saved_state import DcpState

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: {"sharded": ((1,), (0,))},
    2: {"sharded": ((2,), (0,)), "replicated": ((2,), (None,)), "columns": ((2,), (-1,))},
    4: {"sharded": ((4,), (0,)), "hybrid": ((2, 2), (None, 0))},
}
IO_COUNTERS = Path("/proc/self/io")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """World size → the folder with a checkpoint of each of its layouts."""

    @functools.cache
    def write(world_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"dcp{world_size}")
        run_ranks("dcp_cases.py:save", world_size, {"folder": str(folder), "layouts": LAYOUTS[world_size]})
        return folder

    return write


@pytest.mark.parametrize(
    ("world_size", "layout"), [(size, layout) for size in LAYOUTS for layout in LAYOUTS[size] if layout != "columns"]
)
def test_every_range_is_what_was_saved(written: Callable[[int], Path], world_size: int, layout: str) -> None:
    saved = DcpState(written(world_size) / layout)
    assert (list(saved.shapes.items()), saved.applied_steps) == (list(SHAPES.items()), 11)
    full = tensors()
    draw = random.Random(0)
    for kind in KINDS:
        for name in SHAPES:
            expected = full[f"{kind}.{name}"].flatten()
            assert torch.equal(saved.read(kind, name), expected)
            for _ in range(20):
                start, stop = sorted(draw.choices(range(len(expected) + 1), k=2))
                assert torch.equal(saved.read(kind, name, start, stop), expected[start:stop])


def test_shards_of_columns_are_refused(written: Callable[[int], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"weight\.even is cut along other dimensions"):
        DcpState(written(2) / "columns")


@pytest.mark.skipif(not IO_COUNTERS.exists(), reason="the system does not count the bytes that a process reads")
def test_a_range_costs_its_own_bytes(written: Callable[[int], Path]) -> None:
    """What one rank wrote is read in parts by many; so a part must not cost the whole."""
    saved = DcpState(written(1) / "sharded")
    before = bytes_read()
    saved.read("weight", "large", 1000, 2000)
    assert bytes_read() - before < 4 * 1000 + 50_000 < 4 * 301 * 257


def bytes_read() -> int:
    (line,) = (line for line in IO_COUNTERS.read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])
