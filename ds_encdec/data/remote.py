"""Patience with remote files: what fails is tried again for two minutes, and only then ends the run with DataError."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ds_encdec.types import DataError

T = TypeVar("T")

RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Pauses between attempts: two minutes in total, on top of what the libraries below wait by themselves."""

_REFUSED = {401, 403, 404, 410}
"""HTTP statuses that another attempt does not change."""

logger = logging.getLogger(__name__)


def is_of_network(error: BaseException) -> bool:
    """Whether `error` is one of the system's or of an HTTP client's: huggingface_hub's changes with its releases."""
    clients = ("httpx", "httpcore", "requests", "aiohttp")
    return isinstance(error, OSError) or any(one.__module__.startswith(clients) for one in type(error).__mro__)


def retry(action: Callable[[], T], what: str) -> T:
    """`action()`, again after each transient failure. Raises DataError naming `what` once patience is over."""
    patience = _Patience(what)
    while True:
        try:
            return action()
        except Exception as error:
            patience.wait_after(error)


def retry_rows(read: Callable[[int], Iterator[T]], first_row: int, what: str) -> Iterator[T]:
    """What `read(first_row)` yields; after a transient failure `read(row)` goes on with the first row still missing."""
    row = first_row
    patience = _Patience(what)
    while True:
        try:
            for item in read(row):
                yield item
                row += 1
                patience.restore()
            return
        except Exception as error:
            patience.wait_after(error)


class _Patience:
    """Counts failures in a row, and waits longer after each."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0

    def restore(self) -> None:
        self._failures = 0

    def wait_after(self, error: Exception) -> None:
        """Sleep, or raise DataError where another attempt is pointless."""
        if isinstance(error, DataError):
            raise error
        reason = f"{type(error).__name__}: {error}"
        if not _is_transient(error):
            raise DataError(f"{self._what}: cannot be read ({reason})") from error
        if self._failures == len(RETRY_DELAYS_SECONDS):
            raise DataError(
                f"{self._what}: cannot be read after {self._failures + 1} attempts ({reason}). Check the network, and "
                "start again from the last checkpoint once it is back"
            ) from error
        delay = RETRY_DELAYS_SECONDS[self._failures]
        self._failures += 1
        logger.warning(
            "%s: attempt %d of %d failed (%s); trying again in %g s",
            self._what,
            self._failures,
            len(RETRY_DELAYS_SECONDS) + 1,
            reason,
            delay,
        )
        time.sleep(delay)


def _is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed. Every fsspec protocol raises classes of its own, so this lists what may not.

    ValueError covers pyarrow's ArrowInvalid: a file that arrived, and is not parquet.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return not isinstance(error, FileNotFoundError | PermissionError | ValueError) and status not in _REFUSED
