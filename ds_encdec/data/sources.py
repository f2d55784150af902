"""Where documents come from: two protocols, and the choice of a source by `data.dataset_name`.

A source that can hand out document i is a `MapSource`: its order is a permutation. One that can only be read
from the front of a unit (a row group, a file, a shard) is a `StreamSource`: its order is shuffled in windows.
Both are pickled into worker processes, and neither keeps a position: that is `readers.py`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ds_encdec.config.schema import LOCAL_FORMATS, DataConfig, MixtureSource, Source
from ds_encdec.data.bad_rows import BadRow, check_bad_rows
from ds_encdec.data.builtin_corpus import builtin_documents
from ds_encdec.data.held_out import held_out_below
from ds_encdec.data.json_lines import JsonLines
from ds_encdec.data.local_files import expand_files
from ds_encdec.data.parquet_files import ParquetFiles
from ds_encdec.data.randomness import Permutation, keyed_generator
from ds_encdec.data.text_files import TextFiles
from ds_encdec.types import DataError, Document

if TYPE_CHECKING:
    from ds_encdec.tokenizer.sentinels import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """A document that is token ids (int32) from the start, for sources without text."""

    key: str
    token_ids: np.ndarray


AnyDocument: TypeAlias = Document | TokenDocument
AnyRow: TypeAlias = AnyDocument | BadRow


class MapSource(Protocol):
    """Documents by number. `identity`: JSON-able facts that tell this data from other data."""

    identity: dict[str, Any]

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The key of document `index`, without reading the document."""
        ...

    def document(self, index: int) -> AnyRow:
        """Document `index`. Raises DataError where the source itself fails, not a row."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """Documents in units that are read from the front. `identity` as in `MapSource`."""

    identity: dict[str, Any]
    num_units: int

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[AnyRow]:
        """The documents of `unit` from row `first_row` on; those whose key is `wanted`, if given. Errors as there."""
        ...


@dataclass(frozen=True)
class OpenSource:
    """A source as a run uses it: its share of the documents, and the rule that holds documents out.

    Documents whose key hashes below `held_out_below` (see `held_out.py`) are kept for evaluation. `number`: its own
    among the run's sources, whatever was added, taken out or put in another order; its documents' order depends on it.
    """

    source: MapSource | StreamSource
    weight: float
    held_out_below: float
    number: int


class RandomIds:
    """Uniformly random ids in documents of log-normal length (median 620 tokens, sigma 1, like web pages)."""

    NUM_DOCUMENTS = 1_000_000
    MEDIAN_TOKENS = 620
    MAX_TOKENS = 100_000

    def __init__(self, seed: int, vocabulary: Vocabulary) -> None:
        reserved = {*vocabulary.sentinel_ids, *vocabulary.mode_token_ids, vocabulary.eos_id, vocabulary.pad_id}
        self._ids = np.setdiff1d(np.arange(vocabulary.vocab_size, dtype=np.int32), sorted(reserved))
        self._seed = seed
        self.identity = {"kind": "random", "seed": seed, "vocab_size": vocabulary.vocab_size}

    def __len__(self) -> int:
        return self.NUM_DOCUMENTS

    def key(self, index: int) -> str:
        """`random/INDEX`."""
        return f"random/{index}"

    def document(self, index: int) -> TokenDocument:
        """Document `index`, drawn anew at every call, always the same."""
        rng = keyed_generator(self._seed, "random ids", index)
        num_tokens = int(np.clip(self.MEDIAN_TOKENS * np.exp(rng.normal()), 2, self.MAX_TOKENS))
        return TokenDocument(self.key(index), self._ids[rng.integers(len(self._ids), size=num_tokens)])


class BuiltinCorpus:
    """The text that every CPython installation has (`builtin_corpus.py`), as a source."""

    def __init__(self) -> None:
        self._documents = builtin_documents()
        content = hashlib.sha256(repr(self._documents).encode()).hexdigest()
        self.identity = {"kind": "builtin", "documents": len(self._documents), "sha256": content}

    def __len__(self) -> int:
        return len(self._documents)

    def key(self, index: int) -> str:
        """`builtin/` and the module and class, or the topic."""
        return self._documents[index].key

    def document(self, index: int) -> Document:
        """Document `index`."""
        return self._documents[index]


LOCAL_DATASETS = ("builtin", "random", *LOCAL_FORMATS)
"""Values of `data.dataset_name` that do not name a data set of the hub."""


def source_entries(data: DataConfig) -> Sequence[MixtureSource]:
    """The sources that `data` names: those of `data.mixture`, else the only one."""
    return data.mixture or (MixtureSource(weight=1.0, **{name: getattr(data, name) for name in Source.model_fields}),)


def open_sources(
    data: DataConfig, seed: int, vocabulary: Vocabulary, num_lanes: int, commits: Mapping[str, str]
) -> tuple[OpenSource, ...]:
    """Open what `data` names, data sets of the hub at `commits` (see `hub_commits.py`). Raises DataError."""
    opened = []
    for number, entry in enumerate(source_entries(data)):
        pinned = entry.model_copy(update={"dataset_revision": commits.get(hub_name(entry), entry.dataset_revision)})
        source = _open(pinned, seed, vocabulary, num_lanes, streaming=data.streaming)
        opened.append(OpenSource(source, entry.weight, held_out_below(_keys(source), data.eval_fraction), number))
    return tuple(opened)


def hub_name(entry: MixtureSource) -> str:
    """`DATASET@REVISION`: what a commit is looked up by."""
    return f"{entry.dataset_name}@{entry.dataset_revision or 'main'}"


def readable(rows: Iterable[AnyRow], bad_row_limit: int) -> Iterator[AnyDocument]:
    """The documents among `rows`. Raises DataError for more than `bad_row_limit` others."""
    count = 0
    for row in rows:
        if isinstance(row, BadRow):
            count += 1
            check_bad_rows(count, bad_row_limit, row.problem)
        else:
            yield row


def sample_documents(source: MapSource | StreamSource, count: int, bad_row_limit: int) -> Iterator[AnyDocument]:
    """Up to `count` `readable` documents, the same on every machine: spread over a map, the first of a stream."""
    return islice(readable(_documents(source), bad_row_limit), count)


def _documents(source: MapSource | StreamSource) -> Iterator[AnyRow]:
    if isinstance(source, StreamSource):
        for unit in range(source.num_units):
            yield from source.documents(unit, 0)
    elif len(source):
        order = Permutation(len(source), 0, "sample")
        yield from (source.document(order[place]) for place in range(len(source)))


def _keys(source: MapSource | StreamSource) -> Iterator[str]:
    if isinstance(source, StreamSource):
        return (document.key for document in _documents(source))
    return (source.key(index) for index in range(len(source)))


def _open(
    entry: MixtureSource, seed: int, vocabulary: Vocabulary, num_lanes: int, *, streaming: bool
) -> MapSource | StreamSource:
    match entry.dataset_name:
        case "builtin":
            return BuiltinCorpus()
        case "random":
            return RandomIds(seed, vocabulary)
        case "text":
            return TextFiles(_files(entry))
        case "json" | "csv":
            return JsonLines(_files(entry), entry.text_column, kind=entry.dataset_name)
        case "parquet":
            return ParquetFiles(_files(entry), entry.text_column, num_lanes=num_lanes)
    # Imported here because `datasets` takes a second to import, and local runs do not need it.
    from ds_encdec.data.hub import open_hub_data

    return open_hub_data(entry, num_lanes, streaming=streaming)


def _files(entry: MixtureSource) -> tuple[str, ...]:
    if not entry.data_files:
        raise DataError(
            f"data.dataset_name={entry.dataset_name} reads local files: name them in data.data_files "
            "(paths or glob patterns)"
        )
    patterns = (entry.data_files,) if isinstance(entry.data_files, str) else entry.data_files
    return expand_files(patterns)
