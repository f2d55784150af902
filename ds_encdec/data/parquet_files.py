"""Parquet files as a source, local or behind a URL, as the hub's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from ds_encdec.data.bad_rows import BadRow, missing_column, text_document
from ds_encdec.data.local_files import file_digests, local_errors, short_names
from ds_encdec.data.remote import retry, retry_rows
from ds_encdec.types import DataError, Document

TextRow: TypeAlias = Document | BadRow


class ParquetFiles:
    """Parquet files, local or behind an fsspec URL. A `StreamSource`.

    A unit is a file where there are many for each lane, else a row group (whose number only the files' footers
    tell, and reading thousands of footers over a network takes minutes). Keys do not depend on that choice.
    """

    FILES_PER_LANE = 2

    def __init__(
        self, files: Sequence[str], text_column: str, *, num_lanes: int, identity: dict[str, Any] | None = None
    ) -> None:
        self._files = list(files)
        self._names = short_names(files)
        self._text_column = text_column
        self._units: list[tuple[int, int | None]] = [(file, None) for file in range(len(files))]
        if len(files) < self.FILES_PER_LANE * num_lanes:
            groups = [self._open(file).num_row_groups for file in range(len(files))]
            self._units = [(file, group) for file, count in enumerate(groups) for group in range(count)]
        else:
            self._open(0)
        self.num_units = len(self._units)
        self.identity = identity or {
            "kind": "parquet",
            "files": file_digests(files, self._names),
            "text_column": text_column,
        }

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[TextRow]:
        """The documents of `unit` from row `first_row` on; one row group is in memory at a time.

        Only those whose key is `wanted`, if given; a row group without any is not read. A remote file whose
        connection breaks is opened again where it was.
        """
        path = self._files[self._units[unit][0]]
        if not _is_remote(path):
            rows = self._rows(unit, first_row, wanted)
        else:
            rows = retry_rows(lambda row: self._rows(unit, row, wanted), first_row, path)
        return (document for document in rows if document is not None)

    def _rows(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None) -> Iterator[TextRow | None]:
        """Every row of `unit` from `first_row` on; None for one that is not wanted."""
        file, only_group = self._units[unit]
        parquet = self._open_once(file)
        groups = range(parquet.num_row_groups) if only_group is None else [only_group]
        skip = first_row
        for group in groups:
            num_rows = parquet.metadata.row_group(group).num_rows
            keys = [f"{self._names[file]}:{group}:{row}" for row in range(skip, num_rows)]
            yield from self._documents(parquet, file, group, keys, wanted)
            skip = max(0, skip - num_rows)

    def _documents(
        self, parquet: Any, file: int, group: int, keys: list[str], wanted: Callable[[str], bool] | None
    ) -> Iterator[TextRow | None]:
        """The last rows of a row group, as many as there are `keys`."""
        chosen = [wanted is None or wanted(key) for key in keys]
        if not any(chosen):
            yield from [None] * len(keys)
            return
        where = f"{self._names[file]}, row group {group}"
        column = self._read(parquet, file, group)
        if isinstance(column, str):  # damaged: none of its rows can be read
            yield from (
                BadRow(key, f"{where}: {column}") if one else None for key, one in zip(keys, chosen, strict=True)
            )
            return
        first_row = len(column) - len(keys)
        for row, (key, is_chosen) in enumerate(zip(keys, chosen, strict=True), start=first_row):
            yield _document(key, column[row], f"{where}, row {row}") if is_chosen else None

    def _read(self, parquet: Any, file: int, group: int) -> Any:
        """The texts of a row group, an Arrow array; for a damaged one of a local file, what is wrong with it."""
        from pyarrow import ArrowException

        try:
            return parquet.read_row_group(group, columns=[self._text_column]).column(0)
        except (OSError, ArrowException) as error:
            path = self._files[file]
            if _is_remote(path):
                raise  # remote.py tries again: it may have arrived damaged
            if isinstance(error, OSError) and error.errno:  # the disk's, not the content's
                raise DataError(f"{path}: cannot be read (row group {group}: {error})") from error
            return f"cannot be read ({error})"

    def _open(self, file: int) -> Any:
        path = self._files[file]
        return retry(lambda: self._open_once(file), path) if _is_remote(path) else self._open_once(file)

    def _open_once(self, file: int) -> Any:
        # Imported here because it takes 0.2 s, and most runs read no parquet.
        import fsspec  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile

        path = self._files[file]
        with nullcontext() if _is_remote(path) else local_errors(path, "cannot be read as parquet"):
            parquet = ParquetFile(fsspec.open(path, "rb").open() if _is_remote(path) else path)
        if self._text_column not in parquet.schema_arrow.names:
            raise DataError(missing_column(self._text_column, self._names[file], parquet.schema_arrow.names))
        return parquet


def _document(key: str, value: Any, where: str) -> TextRow:
    """The document of an Arrow scalar."""
    try:
        return text_document(key, value.as_py(), where)
    except UnicodeDecodeError as error:
        return BadRow(key, f"{where}: not UTF-8 text ({error.reason})")


def _is_remote(path: str) -> bool:
    return "://" in path
