"""HostCollectives and the commit of a checkpoint between two real ranks."""

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import short_engine
from gloo_ranks import run_ranks

from ds_encdec.base.types import DataError, DsEncDecError, TrainingState
from ds_encdec.checkpoint.folder import Checkpoint, committed_steps
from ds_encdec.checkpoint.manager import CheckpointManager, find_checkpoint
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch.host_collectives import HostCollectives

pytestmark = pytest.mark.distributed


def error_of(action: Any) -> tuple[str, str]:
    try:
        action()
    except DsEncDecError as error:
        return type(error).__name__, str(error)
    return "none", ""


def agree() -> dict[str, Any]:
    collectives = HostCollectives()
    rank = collectives.rank

    def fail_on(failing: int) -> None:
        if rank == failing:
            raise DataError(f"rank {failing} found nothing")

    order: list[int] = []

    def note_order() -> int:
        order.append(rank)
        return rank

    return {
        "exchange": (collectives.sum(rank + 1, True), collectives.lowest(rank + 1, -rank)),
        "records": (collectives.gather("x" * rank), collectives.gather_to_zero("y" * rank)),
        "zero": collectives.on_rank_zero(lambda: os.getpid()),
        "first": collectives.rank_zero_first(note_order),
        "fail_zero": error_of(lambda: collectives.on_rank_zero(lambda: fail_on(0))),
        "fail_one": error_of(lambda: collectives.on_every_rank(lambda: fail_on(1))),
        "fail_first": error_of(lambda: collectives.rank_zero_first(lambda: fail_on(0))),
        "fail_second": error_of(lambda: collectives.rank_zero_first(lambda: fail_on(1))),
    }


class SlowShards:
    """An engine of one shard per rank, whose last rank takes `seconds` to write it."""

    def __init__(self, num_bytes: int = 100, seconds: float = 0.0) -> None:
        self._num_bytes, self._seconds = num_bytes, seconds * dist.get_rank()

    def stage(self, folder: Path, *, copy: bool) -> StagedSave:
        def write() -> list[Path]:
            time.sleep(self._seconds)
            path = folder / f"shard-{dist.get_rank()}.bin"
            path.write_bytes(bytes([dist.get_rank()]) * self._num_bytes)
            return [path]

        return StagedSave(self._num_bytes, lambda: None, write)

    def close(self) -> None: ...


def save(manager: CheckpointManager, step: int, engine: Any, *pointers: str, in_background: bool = False) -> None:
    def write_rest(path: Path) -> None:
        (path / "trainer.json").write_text("{}")

    manager.save(TrainingState(step), engine.stage, write_rest, pointers=pointers, in_background=in_background)


def problem_of(manager: CheckpointManager) -> str | None:
    outcome = manager.collect()
    assert outcome is not None
    return None if outcome.problem is None else str(outcome.problem)


def find(manager: CheckpointManager, resume: str) -> Checkpoint | None:
    return find_checkpoint(manager.folder, HostCollectives(), resume)


def prepared(folder: str | Path) -> CheckpointManager:
    manager = CheckpointManager(Path(folder), HostCollectives(), engine_name="test", keep=None)
    manager.prepare()
    return manager


def save_and_find(folder: str) -> dict[str, Any]:
    """Commit two steps, damage the newer one's shard of rank 1, look for what to resume from."""
    manager = prepared(folder)
    for step in (1, 2):
        save(manager, step, SlowShards())
        assert problem_of(manager) is None
    whole = find(manager, "auto")
    dist.barrier()
    damaged = Path(folder) / "step-00000002"
    if dist.get_rank() == 0:
        (damaged / "shard-1.bin").write_bytes(b"x" * 100)
    dist.barrier()
    fallback = find(manager, "auto")
    refused = error_of(lambda: find(manager, str(damaged)))
    if dist.get_rank() == 0:
        (damaged / "shard-1.bin").unlink()
    dist.barrier()
    assert whole is not None
    assert fallback is not None
    return {
        "files": sorted(record.path for record in whole.manifest.files),
        "steps": (whole.manifest.step, fallback.manifest.step),
        "flipped": refused,
        "missing": error_of(lambda: find(manager, str(damaged))),
    }


def unshared(folder: str) -> tuple[str, str]:
    mine = Path(folder) / f"node{dist.get_rank()}"
    mine.mkdir()
    return error_of(lambda: prepared(mine))


def train_while_saving(folder: str) -> dict[str, Any]:
    """Collectives of the training's group go on under a save that one rank is slow to write."""
    manager = prepared(folder)
    save(manager, 1, SlowShards(seconds=1.5), in_background=True)
    total = torch.zeros(1)
    for _ in range(100):
        total += 1
        dist.all_reduce(total)
        total /= dist.get_world_size()
    visible_before = sorted(committed_steps(Path(folder)))
    over_before = manager.save_is_over
    outcome = manager.collect()
    assert outcome is not None
    return {
        "total": float(total),
        "before": (visible_before, over_before),
        "after": (sorted(committed_steps(Path(folder))), outcome.problem),
        "seconds": outcome.seconds,
    }


def fail_to_save(folder: str, engines: tuple[str, ...]) -> dict[str, Any]:
    """Rank 1 may write no file above a limit: each engine, at once and in the background, then without the limit."""
    return {
        f"{name}-{in_background}": fail_once(Path(folder) / f"{name}-{in_background}", name, in_background)
        for name in engines
        for in_background in (False, True)
    }


def fail_once(folder: Path, engine_name: str, in_background: bool) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    engine = SlowShards(num_bytes=100_000) if engine_name == "shards" else short_engine(distributed_type=engine_name)
    manager = prepared(folder)
    save(manager, 1, engine, "best")
    problems = [problem_of(manager)]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    save(manager, 2, engine, "best", in_background=in_background)
    problems.append(problem_of(manager))
    left = sorted(path.name for path in folder.iterdir())
    best = (folder / "best").resolve().name
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    save(manager, 3, engine, "best", in_background=in_background)
    problems.append(problem_of(manager))
    for path in committed_steps(folder).values():
        verify_checkpoint(path)
    engine.close()
    steps = sorted(committed_steps(folder))
    dist.barrier()
    return {"problems": problems, "left": left, "best": best, "steps": steps}


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks("test_commit_ranks.py:agree", 2)
    for found in (first, second):
        assert found["exchange"] == ([3, 2], [1, -1])
        assert found["records"][0] == ["", "x"]
        assert found["fail_zero"] == found["fail_first"] == ("DataError", "rank 0 found nothing")
        assert found["fail_one"] == found["fail_second"] == ("DataError", "rank 1 found nothing")
    assert (first["records"][1], second["records"][1]) == (["", "y"], [])
    assert first["zero"] == second["zero"]
    assert (first["first"], second["first"]) == (0, 1)


def test_ranks_commit_together_and_agree_on_what_is_damaged(tmp_path: Path) -> None:
    found = run_ranks("test_commit_ranks.py:save_and_find", 2, {"folder": str(tmp_path)})
    assert found[0] == found[1]
    assert found[0]["files"] == ["shard-0.bin", "shard-1.bin", "trainer.json"]
    assert found[0]["steps"] == (2, 1)
    for damage, says in (("flipped", "SHA-256"), ("missing", "missing, but the manifest lists it")):
        kind, message = found[0][damage]
        assert kind == "DamagedCheckpointError"
        assert "shard-1.bin" in message
        assert says in message


def test_collectives_of_training_go_on_under_a_save(tmp_path: Path) -> None:
    found = run_ranks("test_commit_ranks.py:train_while_saving", 2, {"folder": str(tmp_path)})
    for rank in found:
        assert rank["total"] == 100
        assert rank["before"] == ([], False)
        assert rank["after"] == ([1], None)
        assert rank["seconds"] >= 1.5


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: it needs no file system of its own."""
    engines = ("shards", "deepspeed", "fsdp")
    found = run_ranks("test_commit_ranks.py:fail_to_save", 2, {"folder": str(tmp_path), "engines": engines})
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(engines)
    for case, result in found[0].items():
        first, second, third = result["problems"]
        assert (first, third) == (None, None), case
        assert "[Errno 27]" in second, case
        assert "rank 1: " in second, case
        assert "rank 0" not in second, case
        assert "ulimit -f" in second, case
        if not case.startswith("shards"):
            assert str(tmp_path / case) in second, case
        assert re.search(r"takes about [\d,.]+ [KM]B and has [\d,.]+ (byte|[KMGT]?B).* free in /", second), second
        assert result["left"] == ["best", "latest", "step-00000001"], case
        assert result["best"] == "step-00000001", case
        assert result["steps"] == [1, 3], case


def test_a_folder_that_is_not_shared_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks("test_commit_ranks.py:unshared", 2, {"folder": str(tmp_path)})
    for kind, message in found:
        assert kind == "CheckpointError"
        assert "is not shared: rank 1 (" in message
