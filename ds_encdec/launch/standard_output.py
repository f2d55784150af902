"""Standard output whose reader may leave before the end, as in `ds-encdec plan | head -1`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
