"""Standard output whose reader may leave before the end, as in `ds-encdec plan | head -1`.

For most verbs that is the end: nobody wants the rest. A training goes on without: what it is for is in its folder.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Inside, output that nobody reads any more ends the process with 1, and without a traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        stdout = sys.stdout.fileno()
        poll = select.poll()
        poll.register(stdout, 0)
        if not poll.poll(0):  # another pipe
            raise
        # Python flushes once more when it exits (https://docs.python.org/3/library/signal.html#note-on-sigpipe).
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
        raise SystemExit(1) from None


def outlive_readers() -> None:
    """From now on what is printed is dropped where nobody takes it: `| head`, a killed `tee`, a terminal that closed.

    Of the whole process, at its file descriptors: libraries print, too, log, and flush once more at the exit. Streams
    that are not the process's own (a test's, a notebook's) are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError):
                stream.flush()
            file = _Output(stream.fileno(), "w", closefd=False)
            same = io.TextIOWrapper(
                file if stream.write_through else io.BufferedWriter(file),  # like Python's own, which with -u has none
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, same)


class _Output(io.FileIO):
    """Takes whatever is written, also where the file does not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader is gone, the terminal, the disk is full
            return len(data)
