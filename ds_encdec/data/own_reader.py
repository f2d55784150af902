"""A reader of the user's own as a source: `data.dataset_name: python:MODULE:FUNCTION`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.config.schema import Source
from ds_encdec.data.sources import BadRow, Row, field_document, text_document
from ds_encdec.plugins import code_digest, load_plugin
from ds_encdec.source_kinds import PYTHON
from ds_encdec.types import DataError


def reader_digest(name: str) -> str:
    """A digest of the file of the function that `python:MODULE:FUNCTION` names. Raises ConfigError."""
    return code_digest("data.dataset_name", name, load_plugin("data.dataset_name", name))


class OwnReader:
    """The rows of a user's reader as a `MapSource`: `reader[i]`, of `len(reader)`, is a text or a row by columns.

    It is known by its name, its length, the file of the function, and the JSON-able mapping `reader.identity`, if there
    is one. Each process calls the function for itself, so that none shares another's open files.
    """

    def __init__(self, entry: Source, text_column: str | None) -> None:
        self._name, self._column = entry.dataset_name, text_column
        name = self._name.removeprefix(PYTHON)
        self._rows: Any = None
        digest = reader_digest(self._name)
        reader = self._reader()
        self._size = len(reader)
        own = getattr(reader, "identity", {})
        self.identity: dict[str, Any] = {"kind": "python", "name": name, "sha256": digest, "text_column": text_column}
        self.identity |= {f"own {key}": value for key, value in own.items()} if isinstance(own, Mapping) else {}

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": None}

    def key(self, index: int) -> str:
        """The name of the reader, and the row's number."""
        return f"{self._name}/{index}"

    def document(self, index: int) -> Row:
        """Row `index`; a bad one where the reader raises."""
        key = self.key(index)
        try:
            row = self._reader()[index]
        except Exception as error:  # whatever the user's reader raises
            return BadRow(key, f"{key}: {type(error).__name__}: {error}")
        if isinstance(row, Mapping):
            return field_document(key, row, self._column, key)
        if self._column is None:
            return BadRow(key, f"{key}: expected a row by columns, found {type(row).__name__}")
        return text_document(key, lambda: row, key)

    def _reader(self) -> Sequence[Any]:
        if self._rows is None:
            make = load_plugin("data.dataset_name", self._name)
            try:
                rows = make()
                len(rows), rows.__getitem__
            except Exception as error:
                raise DataError(
                    f"data.dataset_name={self._name}: called without arguments, it must return what has a length and "
                    f"numbered rows ({type(error).__name__}: {error})"
                ) from error
            self._rows = rows
        return self._rows
