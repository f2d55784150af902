"""Tables as sources: parquet files, local or behind a URL, and data sets of the Hugging Face hub through `datasets`.

A data set that is downloaded (`data.streaming=false`) is a memory-mapped table, read by row. Streamed: parquet, which
almost all large sets are, is read by row group by our own reader, so that a resume jumps to where it was. Other formats
go through `datasets`' own stream: its shards can only be read from their start, so a resume reads the shard
again up to its window. The commit of each data set on the hub is found once, and kept in a run's checkpoints.

What fails on the network is tried again for two minutes, and only then ends the run with DataError.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from glob import has_magic
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from ds_encdec.config.schema import DataConfig, MixtureSource
from ds_encdec.data.local_files import file_digests, local_errors, short_names
from ds_encdec.data.sources import (
    BadRow,
    Row,
    field_document,
    hub_name,
    missing_column,
    named_sources,
    record_document,
    text_document,
)
from ds_encdec.source_kinds import local_kind
from ds_encdec.types import DataError

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")

Columns = Callable[[Sequence[str]], Sequence[str]]
"""Tells which of the columns that a table has are read of its rows."""

RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Pauses between attempts: two minutes in total, on top of what the libraries below wait by themselves."""

_REFUSED = {401, 403, 404, 410}
"""HTTP statuses that another attempt does not change."""

_POINTLESS = (FileNotFoundError, PermissionError, ValueError)
"""Errors that it does not change either; every fsspec protocol raises classes of its own, so others may be transient.
ValueError covers pyarrow's ArrowInvalid: a file that arrived, and is not parquet."""

_LOOSE_FILES = (
    ". In a folder, files with train, dev, valid or test in their names are read as those splits; loose files are read "
    "by data.dataset_name=text (json, csv, parquet) data.data_files='FOLDER/**'"
)

_HTTP_CLIENTS = ("httpx", "httpcore", "requests", "aiohttp")

logger = logging.getLogger(__name__)


class ParquetFiles:
    """Parquet files, local or behind an fsspec URL. A `StreamSource`.

    `columns`: those of a file with these columns that a whole row has; None: all. A unit is a file where there are many
    for each lane, else a row group (whose number only the files' footers tell, and reading thousands of footers over a
    network takes minutes). Keys do not depend on that choice.
    """

    FILES_PER_LANE = 2

    def __init__(
        self,
        files: Sequence[str],
        text_column: str | None,
        *,
        num_lanes: int,
        columns: Columns | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self._files = files
        self._columns = columns
        self._names = short_names(files)
        self._text_column = text_column
        has_few = len(files) < self.FILES_PER_LANE * num_lanes
        looked_into = range(len(files) if has_few else 1)
        groups = [next(self._tried_again(partial(self._opened, file), 0, file)).num_row_groups for file in looked_into]
        self._units: list[tuple[int, int | None]] = (
            [(file, group) for file, count in enumerate(groups) for group in range(count)]
            if has_few
            else [(file, None) for file in range(len(files))]
        )
        self.num_units = len(self._units)
        self.identity = identity or {
            "kind": "parquet",
            "files": file_digests(files, self._names),
            "text_column": text_column,
        }

    @property
    def num_rows(self) -> int | None:
        """Rows of all files, from their footers; None where reading these takes a network."""
        return (
            None
            if any(map(_is_remote, self._files))
            else sum(self._open(file).metadata.num_rows for file in range(len(self._files)))
        )

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        """The documents of `unit` from row `first_row` on; one row group is in memory at a time.

        Only those whose key is `wanted`, if given; a row group without any is not read. A remote file whose
        connection breaks is opened again where it was.
        """
        rows = self._tried_again(partial(self._rows, unit, wanted), first_row, self._units[unit][0])
        return (document for document in rows if document is not None)

    def _rows(self, unit: int, wanted: Callable[[str], bool] | None, first_row: int) -> Iterator[Row | None]:
        """Every row of `unit` from `first_row` on; None for one that is not wanted."""
        file, only_group = self._units[unit]
        parquet = self._open(file)
        for group in range(parquet.num_row_groups) if only_group is None else [only_group]:
            where = f"{self._names[file]}, row group {group}"
            num_rows = parquet.metadata.row_group(group).num_rows
            # It alone holds the row group: the next one is read when this one is gone.
            rows = cache(partial(self._read, parquet, file, group))
            for row in range(first_row, num_rows):
                key = f"{self._names[file]}:{group}:{row}"
                if wanted is not None and not wanted(key):
                    yield None
                elif isinstance(rows(), str):  # damaged: none of its rows can be read
                    yield BadRow(key, f"{where}: {rows()}")
                else:
                    yield self._document(key, rows(), row, f"{where}, row {row}")
            first_row = max(0, first_row - num_rows)

    def _document(self, key: str, table: Any, row: int, where: str) -> Row:
        if self._text_column is not None:
            return text_document(key, table.column(0)[row].as_py, where)
        names = table.column_names
        return record_document(key, lambda: {name: table.column(name)[row].as_py() for name in names}, where)

    def _read(self, parquet: Any, file: int, group: int) -> Any:
        """The columns of a row group, an Arrow table; for a damaged one of a local file, what is wrong with it."""
        from pyarrow import ArrowException

        try:
            return parquet.read_row_group(group, columns=self._read_columns(parquet.schema_arrow.names))
        except (OSError, ArrowException) as error:
            path = self._files[file]
            if _is_remote(path):
                raise  # it is tried again: it may have arrived damaged
            if isinstance(error, OSError) and error.errno:  # the disk's, not the content's
                raise DataError(f"{path}: cannot be read (row group {group}: {error})") from error
            return f"cannot be read ({error})"

    def _read_columns(self, existing: Sequence[str]) -> Sequence[str] | None:
        if self._text_column is not None:
            return [self._text_column]
        return None if self._columns is None else self._columns(existing)

    def _tried_again(self, read: Callable[[int], Iterator[T]], first_row: int, file: int) -> Iterator[T]:
        """The rows of `read(first_row)`, with patience where the file is remote."""
        path = self._files[file]
        return _retry_rows(read, first_row, path) if _is_remote(path) else read(first_row)

    def _opened(self, file: int, _first_row: int) -> Iterator[Any]:
        yield self._open(file)

    def _open(self, file: int) -> Any:
        # Imported here because it takes 0.2 s, and most runs read no parquet.
        import fsspec
        from pyarrow.parquet import ParquetFile

        path = self._files[file]
        with nullcontext() if _is_remote(path) else local_errors(path, "cannot be read as parquet"):
            parquet = ParquetFile(fsspec.open(path, "rb").open() if _is_remote(path) else path)
        _require_column(self._text_column, self._names[file], parquet.schema_arrow.names)
        return parquet


def open_hub_data(
    entry: MixtureSource, num_lanes: int, *, streaming: bool, columns: Columns | None = None
) -> HubTable | HubStream | ParquetFiles:
    """Open the data set that `entry` names, for its text, or for rows of the `columns` that are read. DataError."""
    # Imported here because it takes a second, and local runs do not need it.
    import datasets

    path, column = entry.dataset_name, entry.text_column if columns is None else None
    name = _name(entry)
    with _readable_errors(entry, name):
        builder, files = _found(entry)
        if os.path.isdir(path):  # known by its files, so that it may move
            identity = {"kind": "folder", "files": file_digests(files, short_names(files)), "text_column": column}
        else:
            identity = {"kind": "hub", "name": name, "commit": builder.hash, "text_column": column}
        if _is_saved(path):
            table = datasets.load_from_disk(path)
            _require_split(entry, str(table.split or "train"))
            return HubTable(name, column, table, identity, columns)
        if not streaming:
            builder.download_and_prepare()
            return HubTable(name, column, builder.as_dataset(split=entry.dataset_split), identity, columns)
        if type(builder).__module__.endswith(".parquet") and files:
            return ParquetFiles(files, column, num_lanes=num_lanes, columns=columns, identity=identity)
        return HubStream(name, column, builder.as_streaming_dataset(split=entry.dataset_split), identity)


def folder_files(entry: MixtureSource) -> list[str]:
    """The files of a data set that is a folder, as its identity names them. Raises DataError."""
    with _readable_errors(entry, _name(entry)):
        return _found(entry)[1]


def _found(entry: MixtureSource) -> tuple[datasets.DatasetBuilder, list[str]]:
    """The builder of a data set, and the files of the split, as far as it has some."""
    import datasets

    if os.path.isdir(entry.dataset_name) and has_magic(entry.dataset_name):
        raise DataError(
            f"{entry.dataset_name}: the datasets library takes brackets, * and ? in a folder's path for a pattern. "
            "Rename it, or read its files by data.dataset_name=json (csv, parquet, text) data.data_files='FOLDER/**'"
        )
    builder = datasets.load_dataset_builder(
        entry.dataset_name,
        entry.dataset_config,
        data_files=None if entry.data_files is None else list(entry.data_files),
        revision=entry.dataset_revision,
    )
    parts = dict(builder.config.data_files or {})
    if _is_saved(entry.dataset_name):
        return builder, [*chain(*parts.values())]
    return builder, list(parts.get(entry.dataset_split, []))


def _name(entry: MixtureSource) -> str:
    return "/".join(part for part in (entry.dataset_name, entry.dataset_config, entry.dataset_split) if part)


def _is_saved(path: str) -> bool:
    """Return whether `Dataset.save_to_disk` wrote this folder, which is one split then."""
    return os.path.isfile(os.path.join(path, "state.json"))


class HubTable:
    """A downloaded data set. A `MapSource`."""

    def __init__(
        self,
        name: str,
        column: str | None,
        table: datasets.Dataset,
        identity: dict[str, Any],
        columns: Columns | None = None,
    ) -> None:
        _require_column(column, name, table.column_names)
        read = (
            [column] if column is not None else table.column_names if columns is None else columns(table.column_names)
        )
        self._table = table.select_columns(list(read))
        self._name = name
        self._column = column
        self.identity = {**identity, "rows": len(table)}

    def __len__(self) -> int:
        return len(self._table)

    def key(self, index: int) -> str:
        """`DATASET/CONFIG/SPLIT:ROW`."""
        return f"{self._name}:{index}"

    def document(self, index: int) -> Row:
        """Row `index`."""
        key, column = self.key(index), self._column
        if column is None:
            return record_document(key, lambda: self._table[index], key)
        return text_document(key, lambda: self._table[index][column], key)


class HubStream:
    """A streamed data set that is not parquet. A `StreamSource` whose units are `datasets`' shards."""

    def __init__(
        self, name: str, column: str | None, stream: datasets.IterableDataset, identity: dict[str, Any]
    ) -> None:
        for first in stream.take(1):
            _require_column(column, name, list(first))
        self._stream = stream
        self._name = name
        self._column = column
        self.num_units = stream.num_shards
        self.identity = identity

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        """The documents of a shard from row `first_row` on (those before are read and dropped) that are `wanted`."""
        shard = self._stream.shard(num_shards=self.num_units, index=unit)
        records = _retry_rows(lambda row: islice(shard, row, None), first_row, f"{self._name}, shard {unit}")
        for row, record in enumerate(records, start=first_row):
            key = f"{self._name}:{unit}:{row}"
            if wanted is None or wanted(key):
                yield field_document(key, record, self._column, key)


def resolve_commits(data: DataConfig, saved: Mapping[str, str] | None = None) -> dict[str, str]:
    """The commit (a sha) that each hub data set of `data` stands at, by `hub_name`; those in `saved` stay.

    One small request for each new one. A data set that the hub does not show (no network, no such name) is
    left out: opening it looks into the local cache, and says what is wrong. None of prepared data, which needs none.
    """
    commits = {
        hub_name(entry): (saved or {}).get(hub_name(entry)) or _ask_hub(entry.dataset_name, entry.dataset_revision)
        for entry in ({} if data.prepared_dir else named_sources(data)).values()
        if local_kind(entry.dataset_name) is None and not os.path.exists(entry.dataset_name)
    }
    return {name: commit for name, commit in commits.items() if commit}


def _ask_hub(dataset_name: str, revision: str | None) -> str | None:
    # Imported here because runs on local data do not need it.
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(dataset_name, revision=revision).sha
    except Exception as error:
        if not (isinstance(error, ValueError) or _is_of_network(error)):
            raise
        logger.warning("%s: its commit is not known (%s: %s)", dataset_name, type(error).__name__, error)
        return None


@contextmanager
def _readable_errors(entry: MixtureSource, name: str) -> Iterator[None]:
    """Turn what `datasets` raises while opening into DataErrors that name the field and the way out."""
    try:
        yield
    except ValueError as error:  # an unknown configuration or split; the message lists the known ones
        raise DataError(
            f"data set {name}: {error}. Check dataset_config and dataset_split, or the fields of `data` for evaluation "
            f"and test (eval_split, test_split){_LOOSE_FILES if os.path.isdir(entry.dataset_name) else ''}"
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            f"data.dataset_name={entry.dataset_name}: no such data set on the hub, or no access to it ({error}). "
            "Check the name; for a gated one log in with `hf auth login`. Local files: text, json, csv or parquet"
        ) from error
    except Exception as error:
        if not _is_of_network(error):
            raise
        raise DataError(
            f"data.dataset_name={entry.dataset_name}: the hub cannot be reached and the data set is not in the local "
            f"cache ({error}). Without a network use local files (text, json, csv, parquet), a folder that "
            "save_to_disk wrote, or `builtin`"
        ) from error


def _require_split(entry: MixtureSource, held: str) -> None:
    """Raise DataError for a folder with the split `held`, maybe a part of one (`train[:9]`), where another is meant."""
    if entry.dataset_split not in (held, held.partition("[")[0]):
        raise DataError(
            f"{entry.dataset_name}: it is the split {held}, and asked for is {entry.dataset_split}. Set dataset_split "
            "(for evaluation eval_split, for the test test_split) to what it is, or name the folder of another split"
        )


def _require_column(column: str | None, where: str, existing: Sequence[str]) -> None:
    if column is not None and column not in existing:
        raise DataError(missing_column(column, where, existing))


def _is_remote(path: str) -> bool:
    return "://" in path


def _is_of_network(error: BaseException) -> bool:
    """True if `error` is one of the system's or of an HTTP client's: huggingface_hub's changes with its releases."""
    return isinstance(error, OSError) or any(one.__module__.startswith(_HTTP_CLIENTS) for one in type(error).__mro__)


def _retry_rows(read: Callable[[int], Iterator[T]], first_row: int, what: str) -> Iterator[T]:
    """Yield the rows of `read(first_row)`; after a transient failure `read(row)` goes on with the first missing row.

    The pauses grow with the failures in a row. Raises DataError naming `what` once patience is over, and at once where
    another attempt is pointless.
    """
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
            reason = f"{type(error).__name__}: {error}"
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, _POINTLESS) or status in _REFUSED:
                raise DataError(f"{what}: cannot be read ({reason})") from error
            attempts = len(RETRY_DELAYS_SECONDS) + 1
            failures += 1
            if failures == attempts:
                raise DataError(
                    f"{what}: cannot be read after {attempts} attempts ({reason}). Check the network, and start again "
                    "from the last checkpoint once it is back"
                ) from error
            delay = RETRY_DELAYS_SECONDS[failures - 1]
            logger.warning(
                "%s: attempt %d of %d failed (%s); trying again in %g s", what, failures, attempts, reason, delay
            )
            time.sleep(delay)
