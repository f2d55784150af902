"""Errors of `datasets`, pyarrow and HTTP clients: network errors are retried, others become DataErrors."""

import logging
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ds_encdec.base.quantities import count
from ds_encdec.base.types import DataError, DsEncDecError
from ds_encdec.config.schema import MixtureSource
from ds_encdec.registry.source_kinds import is_remote, kind_of_file

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Pauses between attempts: two minutes in total, on top of the waits of the libraries below.
RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)

# HTTP statuses, and errors of the system and of HTTP clients, that another attempt does not change.
_REFUSED = {401, 403, 404, 410}
_POINTLESS = (FileNotFoundError, PermissionError, ValueError)
_HTTP_CLIENTS = ("httpx", "httpcore", "requests", "urllib3", "aiohttp", "http.client", "botocore", "gcsfs")


@contextmanager
def readable_errors(entry: MixtureSource, name: str) -> Iterator[None]:
    """Turn errors of `datasets` while opening into DataErrors that name the field and the way out."""
    is_folder = os.path.isdir(entry.dataset_name)
    try:
        yield
    except DsEncDecError:
        raise
    except Exception as error:
        if is_folder:
            way_out = (
                "Check dataset_config and dataset_split. In a folder, files with train, dev, valid or test in their "
                "names are read as those splits; loose files are read by data.dataset_name=text (json, csv, parquet) "
                "data.data_files='FOLDER/**'"
            )
        elif isinstance(error, ValueError):  # an unknown configuration or split; the message lists the known ones
            way_out = "Check dataset_config and dataset_split, or eval_split and test_split"
        elif isinstance(error, FileNotFoundError):
            way_out = "Not on the hub, or needs `hf auth login`. Local files are read by text, json, csv or parquet"
        elif is_of_network(error):
            way_out = (
                "The hub cannot be reached, and the data set is not in the local cache. Without a network use local "
                "files (text, json, csv, parquet), a folder that save_to_disk wrote, or `builtin`"
            )
        else:
            way_out = "Check data.dataset_name, or read its files by data.dataset_name=json (csv, parquet, text)"
        raise DataError(f"data.dataset_name={name}: `datasets` cannot open it ({_reason(error)}). {way_out}") from error


def content_error(where: str, error: Exception, files: Sequence[str]) -> DataError:
    """Return the error for data that `datasets` cannot read beyond `where`, perhaps because of one of `files`."""
    is_parquet = {kind_of_file(path) for path in files if not is_remote(path)} == {"parquet"}
    other = "data.streaming=true" if is_parquet else "data.streaming=false with data.on_bad_row=skip"
    return DataError(
        f"{where}: cannot be read ({_reason(error)}). All files need the same columns and types there, and no file may "
        f"be damaged: mend that, try {other}, or list files of other columns as separate sources in data.mixture"
    )


def no_shifted(kind: str, name: str, columns: Container[str]) -> None:
    """Raise DataError for CSV rows with more fields than names: pandas takes the first fields for row numbers."""
    if kind == "csv" and "__index_level_0__" in columns:
        raise DataError(
            f"data set {name}: the rows of a CSV file have more fields than its first line names, so `datasets` shifts "
            "them. Name every column, or quote the fields that hold a comma"
        )


def is_of_network(error: BaseException) -> bool:
    """Return whether `error`, or the one that `datasets` wrapped in it, is the system's or an HTTP client's."""
    wrapped = error.__cause__ if type(error).__module__.startswith("datasets") else None
    if wrapped is not None and not isinstance(error, OSError):
        return is_of_network(wrapped)
    # huggingface_hub changes its HTTP client with its releases.
    return isinstance(error, OSError) or any(one.__module__.startswith(_HTTP_CLIENTS) for one in type(error).__mro__)


def _reason(error: BaseException) -> str:
    # `datasets` gives no reason, and leaves it to the cause.
    named = (error.__cause__ if type(error).__module__.startswith("datasets.exceptions") else None) or error
    return f"{type(named).__name__}: {' '.join(str(named).split()):.600}"


def retry_rows(read: Callable[[int], Iterator[T]], first_row: int, what: str, *, is_local: bool = False) -> Iterator[T]:
    """Yield the rows of `read(first_row)`; after a transient failure `read(row)` continues with the first missing row.
    Raises DataError naming `what` after the last attempt, or at once if the data and not the network is at fault."""
    row, failures = first_row, 0
    while True:
        try:
            for item in read(row):
                yield item
                row, failures = row + 1, 0
            return
        except DataError:
            raise
        except Exception as error:
            if is_local or not is_of_network(error):
                raise content_error(f"{what}, from row {row} on", error, [what] if is_local else ()) from error
            reason = f"{type(error).__name__}: {error}"
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_pointless = isinstance(error, _POINTLESS) or status in _REFUSED
            if is_pointless or failures == len(RETRY_DELAYS_SECONDS):
                raise DataError(
                    f"{what}: cannot be read after {count(failures + 1, 'attempt')} ({reason}). Once it can be "
                    "read, start again from the last checkpoint"
                ) from error
            delay = RETRY_DELAYS_SECONDS[failures]
            failures += 1
            logger.warning("%s: attempt %d failed (%s); trying again in %g s", what, failures, reason, delay)
            time.sleep(delay)
