"""Tables as sources: parquet files, local or behind a URL, and data sets of the Hugging Face hub through `datasets`.

A downloaded data set is a memory-mapped table, read by row. Our own reader streams parquet by row group, so a resume
jumps to its place; other formats go through `datasets`' stream, whose shards a resume reads again from their start.
"""

# ruff: noqa: D102  (sources.MapSource and StreamSource document the methods)

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.foreign_places import check
from ds_encdec.base.types import DataError
from ds_encdec.config.data_sections import MAX_ROW_BYTES
from ds_encdec.config.file_rows import too_long
from ds_encdec.config.schema import DataConfig, MixtureSource
from ds_encdec.data.sources.hub_errors import content_error, is_of_network, no_shifted, readable_errors, retry_rows
from ds_encdec.data.sources.local_files import CsvFiles, JsonLines, file_digests, local_errors, short_names
from ds_encdec.data.sources.sources import BadRow, Row, missing_column, named_sources, row_document
from ds_encdec.registry.source_kinds import is_remote, kind_of_file, local_kind

if TYPE_CHECKING:
    import datasets

_NARROW = {"float": np.float32, "float32": np.float32, "halffloat": np.float16, "float16": np.float16}
Columns = Callable[[Sequence[str]], Sequence[str]]  # a function that returns which of a table's columns are read

logger = logging.getLogger(__name__)


def _read_columns(text_column: str | None, columns: Columns | None, existing: Sequence[str]) -> list[str]:
    return [text_column] if text_column is not None else [*(existing if columns is None else columns(existing))]


class ParquetFiles:
    """Parquet files, local or behind an fsspec URL. A `StreamSource`. A unit is a file if there are many, else a row
    group: reading thousands of footers over a network takes minutes."""

    FILES_PER_LANE = 2

    def __init__(
        self,
        files: Sequence[str],
        text_column: str | None,
        *,
        num_lanes: int,
        columns: Columns | None = None,
        limit: int = MAX_ROW_BYTES,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self._files, self._names, self._longest = files, short_names(files), limit
        self._text_column, self._columns = text_column, columns
        self.is_remote = any(map(is_remote, files))
        self._units: list[tuple[int, int | None]] = []
        has_few = len(files) < self.FILES_PER_LANE * num_lanes
        for file in range(len(files)):
            groups = self._open(file).num_row_groups if has_few or file == 0 else 0
            self._units += [(file, group) for group in range(groups)] if has_few else [(file, None)]
        self.num_units = len(self._units)
        self.identity = identity or {"kind": "parquet", "files": file_digests(files), "text_column": text_column}

    @property
    def num_rows(self) -> int | None:
        """Return the rows of all files, from their footers; None if reading these takes a network."""
        return None if self.is_remote else sum(self._open(file).metadata.num_rows for file in range(len(self._files)))

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        read, path = partial(self._rows, unit, wanted), self._files[self._units[unit][0]]
        rows = retry_rows(read, first_row, path) if is_remote(path) else read(first_row)
        return (document for document in rows if document is not None)

    def _rows(self, unit: int, wanted: Callable[[str], bool] | None, first_row: int) -> Iterator[Row | None]:
        file, only_group = self._units[unit]
        parquet = self._open(file)
        for group in range(parquet.num_row_groups) if only_group is None else [only_group]:
            where = f"{self._names[file]}, row group {group}"
            num_rows = parquet.metadata.row_group(group).num_rows
            # It reads the row group for the first wanted row, and alone holds it: one is freed before the next is read.
            rows = cache(partial(self._read, parquet, file, group))
            for row in range(first_row, num_rows):
                key = f"{self._names[file]}:{group}:{row}"
                if wanted is not None and not wanted(key):
                    yield None
                elif isinstance(rows(), str):  # damaged: none of its rows can be read
                    yield BadRow(key, f"{where}: {rows()}")
                else:
                    yield row_document(key, partial(_record, rows(), row), self._text_column, f"{where}, row {row}")
            first_row = max(0, first_row - num_rows)

    def _read(self, parquet: Any, file: int, group: int) -> Any:
        from pyarrow import ArrowException

        columns = _read_columns(self._text_column, self._columns, parquet.schema_arrow.names)
        stored = parquet.metadata.row_group(group)
        parts = (stored.column(number) for number in range(stored.num_columns))
        read = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
        if read > self._longest * stored.num_rows:
            return f"its rows are on average {too_long(self._longest)}"
        try:
            return parquet.read_row_group(group, columns=columns)
        except (OSError, ArrowException) as error:
            path = self._files[file]
            if is_remote(path):
                raise  # for another attempt: it may have arrived damaged
            if isinstance(error, OSError) and error.errno:  # the disk's, not the content's
                raise DataError(f"{path}: cannot be read (row group {group}: {error})") from error
            return f"cannot be read ({error})"

    def _open(self, file: int) -> Any:
        # Imported here because it takes 0.2 s, and most runs read no parquet.
        import fsspec
        from pyarrow.parquet import ParquetFile

        path = self._files[file]
        if is_remote(path):
            parquet = next(retry_rows(lambda _: iter([ParquetFile(fsspec.open(path, "rb").open())]), 0, path))
        else:
            with local_errors(path, "cannot be read as parquet"):
                parquet = ParquetFile(path)
        names = parquet.schema_arrow.names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path}: the column {', '.join(twice):.300} is there more than once: rename the others")
        if parquet.metadata.num_rows:  # one without rows may have no columns either
            _require_column(self._text_column, self._names[file], names)
        return parquet


def _record(table: Any, row: int) -> dict[str, Any]:
    columns = zip(table.column_names, table.columns, strict=True)
    return {name: _shortest(column[row].as_py(), str(column.type)) for name, column in columns}


def _shortest(value: Any, kind: str | None) -> Any:
    """Return the value of a column, a narrow float as its shortest number: 0.1, and not 0.10000000149011612."""
    narrow = _NARROW.get(kind or "")
    return float(str(narrow(value))) if narrow and isinstance(value, float | np.floating) else value


def _shortest_in(record: Mapping[str, Any], features: Mapping[str, Any] | None) -> dict[str, Any]:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in (features or {}).items()}
    return {name: _shortest(value, kinds.get(name)) for name, value in record.items()}


def open_hub_data(
    entry: MixtureSource,
    num_lanes: int,
    *,
    streaming: bool,
    columns: Columns | None = None,
    limit: int = MAX_ROW_BYTES,
) -> HubTable | HubStream | ParquetFiles | JsonLines:
    """Open the data set `entry`, for its text or for rows of the `columns` that are read. Raises DataError."""
    # Imported here because it takes a second, and local runs do not need it.
    import datasets

    path, column = entry.dataset_name, entry.text_column if columns is None else None
    name, is_folder = _name(entry), os.path.isdir(entry.dataset_name)
    with readable_errors(entry, name):
        builder, files = _builder_and_files(entry)
        identity = (
            {"kind": "folder", "files": file_digests(files), "text_column": column}  # without a name: it may move
            if is_folder
            else {"kind": "hub", "name": name, "commit": builder.hash, "text_column": column}
        )
        if _is_saved(path):
            return HubTable(name, column, datasets.load_from_disk(path), identity, columns)
        if reader := _row_reader(builder, files, streaming=streaming):
            return reader(files, column, limit)
        if not streaming:
            try:
                builder.download_and_prepare()
            except Exception as error:
                if is_of_network(error) and not is_folder:
                    raise
                raise content_error(name, error, files) from error
            rows = builder.as_dataset(split=entry.dataset_split)
            no_shifted(builder.name, name, rows.column_names)
            return HubTable(name, column, rows, identity, columns)
        if builder.name == "parquet" and files:
            return ParquetFiles(files, column, num_lanes=num_lanes, columns=columns, limit=limit, identity=identity)
        shards = builder.as_streaming_dataset(split=entry.dataset_split)
        return HubStream(name, column, shards, identity, files, builder.name)


def folder_files(entry: MixtureSource) -> list[str]:
    """Return the files of a data set that is a folder, as in its identity. Raises DataError."""
    with readable_errors(entry, _name(entry)):
        return _builder_and_files(entry)[1]


def _builder_and_files(entry: MixtureSource) -> tuple[datasets.DatasetBuilder, list[str]]:
    import datasets

    check("datasets")
    builder = datasets.load_dataset_builder(
        entry.dataset_name,
        entry.dataset_config,
        data_files=None if entry.data_files is None else list(entry.data_files),
        revision=entry.dataset_revision,
    )
    parts = dict(builder.config.data_files or {})
    files = chain(*parts.values()) if _is_saved(entry.dataset_name) else parts.get(entry.dataset_split, ())
    return builder, list(files)


def _row_reader(builder: datasets.DatasetBuilder, files: Sequence[str], *, streaming: bool) -> type[JsonLines] | None:
    """Return our row-by-row reader of a folder's files; None if its card sets how they are read, and for other kinds.
    `datasets` needs the same columns in all files, and shifts rows of CSV that have more fields than there are
    names."""
    kind = type(builder).__module__.rpartition(".")[2]
    readers: dict[str, type[JsonLines]] = {"csv": CsvFiles} if streaming else {"json": JsonLines, "csv": CsvFiles}
    reader = readers.get(kind)
    if reader is None or not files or any(is_remote(path) or kind_of_file(path) != kind for path in files):
        return None
    plain, named = vars(type(builder.config)()), ("name", "version", "data_dir", "data_files", "description")
    is_plain = all(value == plain[field] for field, value in vars(builder.config).items() if field not in named)
    return reader if is_plain else None


def _name(entry: MixtureSource) -> str:
    return "/".join(part for part in (entry.dataset_name, entry.dataset_config, entry.dataset_split) if part)


def _is_saved(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "state.json"))


@dataclass(eq=False)
class HubTable:
    """A downloaded data set. A `MapSource`."""

    name: str
    column: str | None
    table: datasets.Dataset
    identity: dict[str, Any]
    columns: Columns | None = None

    def __post_init__(self) -> None:
        names = self.table.column_names
        _require_column(self.column, self.name, names)
        self.table = self.table.select_columns(_read_columns(self.column, self.columns, names))
        self.identity = {**self.identity, "rows": len(self)}

    def __len__(self) -> int:
        return len(self.table)

    def key(self, index: int) -> str:
        return f"{self.name}:{index}"

    def document(self, index: int) -> Row:
        key = self.key(index)
        return row_document(key, lambda: _shortest_in(self.table[index], self.table.features), self.column, key)


@dataclass(eq=False)
class HubStream:
    """A streamed data set that is not parquet. A `StreamSource` whose units are `datasets`' shards."""

    name: str
    column: str | None
    stream: datasets.IterableDataset
    identity: dict[str, Any]
    files: Sequence[str]
    kind: str

    def __post_init__(self) -> None:
        self.num_units: int = self.stream.num_shards
        self.is_remote = not self.files or any(map(is_remote, self.files))
        for first in islice(self._records(0, 0), 1) if self.num_units else ():
            no_shifted(self.kind, self.name, first)
            _require_column(self.column, self.name, list(first))

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        for row, record in enumerate(self._records(unit, first_row), start=first_row):
            key = f"{self.name}:{unit}:{row}"
            if wanted is None or wanted(key):
                no_shifted(self.kind, self.name, record)
                yield row_document(key, partial(_shortest_in, record, self.stream.features), self.column, key)

    def _records(self, unit: int, first_row: int) -> Iterator[dict[str, Any]]:
        shard = self.stream.shard(num_shards=self.num_units, index=unit)
        where = self.files[unit] if len(self.files) == self.num_units else f"{self.name}, shard {unit}"
        return retry_rows(lambda row: islice(shard, row, None), first_row, where, is_local=not self.is_remote)


def resolve_commits(data: DataConfig, saved: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the commit (a sha) of each hub data set of `data` by its `hub_name`; those in `saved` stay. A data set
    that the hub does not show is left out: opening it tries the local cache, and reports the problem."""
    entries = {
        entry.hub_name: entry
        for entry in ({} if data.prepared_dir else named_sources(data)).values()
        if local_kind(entry.dataset_name) is None and not os.path.exists(entry.dataset_name)
    }
    commits = {name: (saved or {}).get(name) or _hub_commit(entry) for name, entry in entries.items()}
    return {name: commit for name, commit in commits.items() if commit}


def _hub_commit(entry: MixtureSource) -> str | None:
    # Imported here because runs on local data do not need it.
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(entry.dataset_name, revision=entry.dataset_revision).sha
    except Exception as error:
        logger.warning("%s: its commit is not known (%s: %s)", entry.dataset_name, type(error).__name__, error)
        return None


def _require_column(column: str | None, where: str, existing: Sequence[str]) -> None:
    if column is not None and column not in existing:
        raise DataError(missing_column(column, where, existing))
