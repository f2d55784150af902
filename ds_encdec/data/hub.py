"""Data sets of the Hugging Face hub (or of a folder laid out like one), through `datasets`.

Downloaded (`data.streaming=false`): a memory-mapped table, read by row. Streamed: parquet, which almost all
large sets are, is read by row group by our own reader, so that a resume jumps to where it was. Other formats go
through `datasets`' own stream: its shards can only be read from their start, so a resume reads the shard
again up to its window.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import datasets

from ds_encdec.config.schema import MixtureSource
from ds_encdec.data.bad_rows import BadRow, missing_column, text_document
from ds_encdec.data.local_files import file_digests, short_names
from ds_encdec.data.parquet_files import ParquetFiles
from ds_encdec.data.remote import is_of_network, retry_rows
from ds_encdec.types import DataError, Document


def open_hub_data(entry: MixtureSource, num_lanes: int, *, streaming: bool) -> HubTable | HubStream | ParquetFiles:
    """Open the data set that `entry` names. Raises DataError."""
    with _readable_errors(entry):
        builder = datasets.load_dataset_builder(**_arguments(entry))
        identity = _identity(entry, builder)
        if os.path.isfile(os.path.join(entry.dataset_name, "state.json")):  # written by Dataset.save_to_disk
            return HubTable(entry, datasets.load_from_disk(entry.dataset_name), identity)
        if not streaming:
            builder.download_and_prepare()
            return HubTable(entry, builder.as_dataset(split=entry.dataset_split), identity)
        files = _files(entry, builder)
        if type(builder).__module__.endswith(".parquet") and files:
            return ParquetFiles(list(files), entry.text_column, num_lanes=num_lanes, identity=identity)
        stream = datasets.load_dataset(**_arguments(entry), split=entry.dataset_split, streaming=True)
        return HubStream(entry, stream, identity)


class HubTable:
    """A downloaded data set. A `MapSource`."""

    def __init__(self, entry: MixtureSource, table: datasets.Dataset, identity: dict[str, Any]) -> None:
        if entry.text_column not in table.column_names:
            raise DataError(missing_column(entry.text_column, _name(entry), table.column_names))
        self._table = table.select_columns([entry.text_column])
        self._column = entry.text_column
        self._name = _name(entry)
        self.identity = {**identity, "rows": len(table)}

    def __len__(self) -> int:
        return len(self._table)

    def key(self, index: int) -> str:
        """`DATASET/CONFIG/SPLIT:ROW`."""
        return f"{self._name}:{index}"

    def document(self, index: int) -> Document | BadRow:
        """Row `index`."""
        key = self.key(index)
        try:
            return text_document(key, self._table[index][self._column], key)
        except UnicodeDecodeError as error:
            return BadRow(key, f"{key}: not UTF-8 text ({error.reason})")


class HubStream:
    """A streamed data set that is not parquet. A `StreamSource` whose units are `datasets`' shards."""

    def __init__(self, entry: MixtureSource, stream: datasets.IterableDataset, identity: dict[str, Any]) -> None:
        first = next(iter(stream.take(1)), None)
        if first is not None and entry.text_column not in first:
            raise DataError(missing_column(entry.text_column, _name(entry), list(first)))
        self._stream = stream
        self._column = entry.text_column
        self._name = _name(entry)
        self.num_units = stream.num_shards
        self.identity = identity

    def documents(
        self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[Document | BadRow]:
        """The documents of a shard from row `first_row` on (those before are read and dropped) that are `wanted`."""
        shard = self._stream.shard(num_shards=self.num_units, index=unit)
        records = retry_rows(lambda row: islice(shard, row, None), first_row, f"{self._name}, shard {unit}")
        for row, record in enumerate(records, start=first_row):
            key = f"{self._name}:{unit}:{row}"
            if wanted is None or wanted(key):
                if self._column in record:
                    yield text_document(key, record[self._column], key)
                else:
                    yield BadRow(key, missing_column(self._column, key, list(record)))


def _arguments(entry: MixtureSource) -> dict[str, Any]:
    files = list(entry.data_files) if isinstance(entry.data_files, tuple) else entry.data_files
    return {
        "path": entry.dataset_name,
        "name": entry.dataset_config,
        "data_files": files,
        "revision": entry.dataset_revision,
    }


def _name(entry: MixtureSource) -> str:
    return "/".join(part for part in (entry.dataset_name, entry.dataset_config, entry.dataset_split) if part)


def _files(entry: MixtureSource, builder: datasets.DatasetBuilder) -> list[str]:
    return list((builder.config.data_files or {}).get(entry.dataset_split, []))


def _identity(entry: MixtureSource, builder: datasets.DatasetBuilder) -> dict[str, Any]:
    """Name and commit of a data set on the hub; of a folder, its files, so that it may move."""
    if not os.path.isdir(entry.dataset_name):
        return {"kind": "hub", "name": _name(entry), "commit": builder.hash, "text_column": entry.text_column}
    files = _files(entry, builder)
    return {"kind": "folder", "files": file_digests(files, short_names(files)), "text_column": entry.text_column}


@contextmanager
def _readable_errors(entry: MixtureSource) -> Iterator[None]:
    """Turn what `datasets` raises while opening into DataErrors that name the field and the way out."""
    try:
        yield
    except ValueError as error:  # an unknown configuration or split; the message lists the known ones
        raise DataError(f"data set {_name(entry)}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(
            f"data.dataset_name={entry.dataset_name}: no such data set on the hub, or no access to it ({error}). "
            "Check the name; for a gated one log in with `hf auth login`. Local files: text, json or parquet"
        ) from error
    except Exception as error:
        if not is_of_network(error):
            raise
        raise DataError(
            f"data.dataset_name={entry.dataset_name}: the hub cannot be reached and the data set is not in the local "
            f"cache ({error}). Without a network use local files (text, json, parquet), `builtin` or `random`"
        ) from error
