"""Opens the tensors of a checkpoint with the reader of the engine that wrote it."""

from collections.abc import Callable
from pathlib import Path

from ds_encdec.base.types import CheckpointError, SavedState
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.engine.protocol import read_record
from ds_encdec.registry.engines import STATE_FORMATS, ByEngine

_READERS: ByEngine[Callable[[Path], SavedState]] = ByEngine(deepspeed=ZeroState, fsdp=DcpState)


def open_saved_state(checkpoint: Path, *, verified: bool = False) -> SavedState:
    """Open the weights and optimizer state in a committed checkpoint, whose files are hashed first unless `verified`.

    Opening unpickles some. Raises CheckpointError, naming the file, for damage or an unknown format.
    """
    if not verified:
        verify_checkpoint(checkpoint)
    written_as = read_record(checkpoint).format
    if written_as not in STATE_FORMATS:
        raise CheckpointError(f"{checkpoint}: engine.json names an unknown format, {written_as!r}.")
    return _READERS[STATE_FORMATS[written_as].name](checkpoint)
