"""What the ranks of test_commit_ranks.py do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_encdec.checkpoint.manager import CheckpointManager, write_json
from ds_encdec.launch.agreement import Agreement
from ds_encdec.types import DataError, DsEncDecError


def error_of(action: Any) -> tuple[str, str]:
    try:
        action()
    except DsEncDecError as error:
        return type(error).__name__, str(error)
    return "none", ""


def agree() -> dict[str, Any]:
    """Every way of agreeing, with the failing rank chosen so that the other one must learn of it."""
    agreement = Agreement()
    rank = agreement.rank

    def fail_on(failing: int) -> None:
        if rank == failing:
            raise DataError(f"rank {failing} found nothing")

    order: list[int] = []

    def note_order() -> int:
        order.append(rank)
        return rank

    return {
        "exchange": agreement.exchange([rank, True]),
        "zero": agreement.on_rank_zero(lambda: os.getpid()),
        "first": agreement.rank_zero_first(note_order),
        "fail_zero": error_of(lambda: agreement.on_rank_zero(lambda: fail_on(0))),
        "fail_one": error_of(lambda: agreement.on_every_rank(lambda: fail_on(1))),
        "fail_first": error_of(lambda: agreement.rank_zero_first(lambda: fail_on(0))),
        "fail_second": error_of(lambda: agreement.rank_zero_first(lambda: fail_on(1))),
    }


def write_shard(folder: Path) -> list[Path]:
    path = folder / f"shard-{dist.get_rank()}.bin"
    path.write_bytes(bytes([dist.get_rank()]) * 100)
    dist.barrier()
    return [path]


def save_and_find(folder: str) -> dict[str, Any]:
    """Commit two steps, damage the newer one's shard of rank 1, look for what to resume from."""
    manager = CheckpointManager(Path(folder), Agreement(), engine_name="test", keep=None)
    manager.prepare()
    for step in (1, 2):
        manager.save(step, write_shard, lambda path: write_json(path / "trainer.json", {}), pointers=())
    whole = manager.find("auto")
    dist.barrier()
    damaged = Path(folder) / "step-00000002"
    if dist.get_rank() == 0:
        (damaged / "shard-1.bin").write_bytes(b"x" * 100)
    dist.barrier()
    fallback = manager.find("auto")
    assert whole is not None
    assert fallback is not None
    return {
        "files": sorted(record.path for record in whole.manifest.files),
        "steps": (whole.manifest.step, fallback.manifest.step),
        "refused": error_of(lambda: manager.find(str(damaged))),
    }


def unshared(folder: str) -> tuple[str, str]:
    """Each rank sees a folder of its own."""
    mine = Path(folder) / f"node{dist.get_rank()}"
    mine.mkdir()
    manager = CheckpointManager(mine, Agreement(), engine_name="test", keep=None)
    return error_of(manager.prepare)
