"""A manager of one process, and saves of an engine whose state is a thousand random bytes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from ds_encdec.base.types import TrainingState
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import CheckpointManager, SaveOutcome, Stage, find_checkpoint
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch.host_collectives import HostCollectives

NUM_BYTES = 1000


def make_manager(folder: Path, keep: int | None = None) -> CheckpointManager:
    manager = CheckpointManager(folder, HostCollectives(), engine_name="test", keep=keep)
    folder.mkdir(exist_ok=True)
    manager.prepare()
    return manager


def find(manager: CheckpointManager, resume: str | None) -> Checkpoint | None:
    return find_checkpoint(manager.folder, HostCollectives(), resume)


def found(manager: CheckpointManager, resume: str | Path = "auto") -> Checkpoint:
    checkpoint = find(manager, str(resume))
    assert checkpoint is not None
    return checkpoint


def engine(before_writing: Callable[[], object] = lambda: None, num_bytes: int = NUM_BYTES) -> Stage:

    def stage(folder: Path, *, copy: bool) -> StagedSave:
        content = os.urandom(NUM_BYTES)

        def write() -> list[Path]:
            path = folder / "zero" / "shard.bin"
            path.parent.mkdir()
            path.write_bytes(content[:10])  # the beginning is always written
            before_writing()
            path.write_bytes(content)
            return [path]

        return StagedSave(num_bytes, lambda: None, write)

    return stage


def begin(
    manager: CheckpointManager, step: int, *pointers: str, stage: Stage | None = None, in_background: bool = False
) -> None:
    def write_rest(folder: Path) -> None:
        (folder / "trainer.json").write_text(json.dumps({"step": step}))

    manager.save(TrainingState(step), stage or engine(), write_rest, pointers=pointers, in_background=in_background)


def collect(manager: CheckpointManager) -> SaveOutcome:
    outcome = manager.collect()
    assert outcome is not None
    return outcome


def save(manager: CheckpointManager, step: int, *pointers: str) -> Path:
    begin(manager, step, *pointers)
    assert collect(manager).problem is None
    return manager.folder / f"step-{step:08d}"
