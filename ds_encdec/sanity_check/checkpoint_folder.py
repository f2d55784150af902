"""Where a checkpoint is for a moment: many gigabytes, which must neither fill a disk nor be left on it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ds_encdec.types import CheckpointError

BYTES_PER_PARAMETER = 14
"""Float32 weights and two moments, and the bfloat16 weights that DeepSpeed keeps beside them."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""From schedulers, keyboards and terminals that are closed; those that are ignored (nohup) stay so."""


@contextmanager
def checkpoint_folder(parameters: int) -> Iterator[Path]:
    """A temporary folder with room for a checkpoint of so many parameters. Raises CheckpointError where there is none.

    It is removed in the end, or, where a signal comes before that, by it; then it ends the process.
    An exception raised by the signal's handler would not do: the library that it comes up in may turn it into another.
    """
    _require_space(parameters)
    folder = Path(tempfile.mkdtemp(prefix="ds-encdec-sanity-check-"))

    def end(number: int, _: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    heeded = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in heeded}
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _require_space(parameters: int) -> None:
    folder = tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    needed = BYTES_PER_PARAMETER * parameters
    if usage.total and usage.free < needed:  # some network file systems report 0 in all
        raise CheckpointError(
            f"a checkpoint takes about {needed:,} bytes and {folder} has {usage.free:,} free: free space there, or set "
            "TMPDIR to a folder that has it"
        )
