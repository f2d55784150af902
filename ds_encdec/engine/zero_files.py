"""DeepSpeed's own checkpoint files: collected inside its `save_checkpoint`, written whenever it suits.

CHECKPOINT/
  engine.json        what wrote these files (record.py)
  latest             the tag, for zero_to_fp32.py (stages 1-3)
  zero_to_fp32.py    DeepSpeed's script: `python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT` (stages 1-3)
  zero/
    *mp_rank_00_model_states.pt, *_optim_states.pt

Committing the folder, hashing it and pointing at it is the checkpoint manager's work. Stage 0 has no
zero_to_fp32.py: its weights stand in full in `mp_rank_00_model_states.pt`.

`save_checkpoint` ends with a barrier; a rank that cannot write would leave the others there. So nothing is written
inside it, and no rank waits for another while it writes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_encdec.engine.protocol import StagedSave
from ds_encdec.engine.record import TAG, EngineRecord, write_record


class HostBuffers:
    """Host memory for the tensors of a save, kept from one save to the next, which needs the same sizes."""

    def __init__(self, *, pin_memory: bool) -> None:
        """`pin_memory`: an accelerator then copies several times faster."""
        self._pin_memory = pin_memory
        self._kept: list[torch.UntypedStorage] = []
        self._used = 0

    def rewind(self) -> None:
        """Begin a new save: everything may be written over."""
        self._used = 0

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The content of `storage` in the next buffer."""
        if self._used == len(self._kept):
            self._kept.append(self._new(0))
        if self._kept[self._used].nbytes() != storage.nbytes():
            self._kept[self._used] = self._new(storage.nbytes())
        buffer = self._kept[self._used]
        self._used += 1
        return buffer.copy_(storage)

    def _new(self, num_bytes: int) -> torch.UntypedStorage:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory).untyped_storage()


class StagingArea:
    """The state to save, by file. Tensors that share storage share it here too, and are counted and written once."""

    def __init__(self, buffers: HostBuffers | None) -> None:
        """Given `buffers`, every tensor is copied to the host; without, it is only referred to."""
        self.num_bytes = 0
        self._buffers = buffers
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def take(self, item: Any) -> Any:
        """`item` (nested containers) with its tensors copied or referred to, and all else copied."""
        if isinstance(item, Tensor):
            return self._take_tensor(item.detach())
        if isinstance(item, dict):
            taken = ((key, self.take(value)) for key, value in item.items())
            return OrderedDict(taken) if isinstance(item, OrderedDict) else dict(taken)
        if type(item) in (list, tuple):
            return type(item)(map(self.take, item))
        return copy.deepcopy(item)

    def _take_tensor(self, tensor: Tensor) -> Tensor:
        source = tensor.untyped_storage()
        key = (tensor.device, source.data_ptr())
        if key not in self._storages:
            self.num_bytes += source.nbytes()
            self._storages[key] = self._buffers.copy(source) if self._buffers else source
        held = torch.empty(0, dtype=tensor.dtype, device=self._storages[key].device)
        return held.set_(self._storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())


class _Collector(TorchCheckpointEngine):
    """DeepSpeed's writer of files, which here only notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[Path, Any] = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made when files are written."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = state_dict


def collect(engine: DeepSpeedEngine, directory: Path) -> dict[Path, Any]:
    """Collect what DeepSpeed would write from this rank, by file; the tensors are the live ones. Collective."""
    native, engine.checkpoint_engine = engine.checkpoint_engine, _Collector()
    engine._copy_recovery_script = lambda folder: None  # hides the method, which writes
    try:
        engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        files: dict[Path, Any] = engine.checkpoint_engine.files
        return files
    finally:
        engine.checkpoint_engine = native
        del engine._copy_recovery_script


def staged_save(
    engine: DeepSpeedEngine, directory: Path, files: dict[Path, Any], area: StagingArea, record: EngineRecord
) -> StagedSave:
    """This rank's part of a checkpoint of what `collect` has found. Not collective; nothing is written yet."""
    staged = {path: area.take(state) for path, state in files.items()}

    def write() -> list[Path]:
        (directory / TAG).mkdir(exist_ok=True)
        for path, state in staged.items():
            with path.open("wb") as file:  # a file, not a path: torch then lets the OSError of a full disk through
                torch.save(state, file)
        written = list(staged)
        if engine.global_rank == 0:
            written.append(write_record(record, directory))
            if engine.zero_optimization_stage() > 0:
                engine._copy_recovery_script(str(directory))
                (directory / "latest").write_text(TAG)
                written += [directory / name for name in ("zero_to_fp32.py", "zero_to_torch.py", "latest")]
        return written

    return StagedSave(area.num_bytes, write)
