"""When this rank last showed that it lives: what tells a rank that stands still from one that is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Heartbeat:
    """The main thread beats once per step and per evaluation batch; other threads read how long ago that was.

    `beats`: how many there have been. `longest_pause_seconds`: the longest time between two of them, saves left out.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.longest_pause_seconds = 0.0
        self._last = time.monotonic()
        self._busy_depth = 0

    def beat(self) -> None:
        """Now."""
        self._end_pause()
        self.beats += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Wraps what takes as long as it takes, such as a save: the rank lives all the while."""
        self._end_pause()
        self._busy_depth += 1
        try:
            yield
        finally:
            self._last = time.monotonic()  # before the depth falls; and this was no pause to learn patience from
            self._busy_depth -= 1

    @property
    def silent_seconds(self) -> float:
        """Since the last sign, or the start where there is none yet; 0 while the rank is busy."""
        return 0.0 if self._busy_depth else time.monotonic() - self._last

    def _end_pause(self) -> None:
        now = time.monotonic()
        if self.beats:  # what comes before the first is the start of the run, and no pause to learn patience from
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - self._last)
        self._last = now
