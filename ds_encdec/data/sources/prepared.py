"""Documents that were tokenized before a run, in arrow files that every rank maps into memory.

PREPARED_DIR/                 `data.prepared_dir`
  .lock                       held while the folder is prepared
  source-0/                   a folder for each source: `data`'s own, or those of `data.mixture` in their order;
                              `validation` and `test` if these splits have their own sources
    index.json                the source's facts and parts and, once it is finished, its shards
    0003-00001.arrow          shard 1 of the fourth part: keys, token ids, and the problems of bad rows
    0003.json                 the shards of that part; it is written last, so a part that has one is complete

A map's rows keep their places, so a run may switch to its prepared copy. A stream becomes a map, in another order.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_encdec.base.plugins import PYTHON
from ds_encdec.base.types import DataError, Document
from ds_encdec.config.schema import DataConfig, MixtureSource, Source
from ds_encdec.config.yaml.plain_files import MAX_RECORD_BYTES, read_plain
from ds_encdec.data.examples.protocol import ExampleMaker
from ds_encdec.data.fingerprint import digest
from ds_encdec.data.sources.local_files import expand_files, file_digests, local_errors, short_names
from ds_encdec.data.sources.sources import BadRow, Row, reader_digest
from ds_encdec.data.sources.tables import folder_files
from ds_encdec.data.text_tokenizer import SAMPLE
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.registry.source_kinds import HUB, local_kind

INDEX = "index.json"
_FORMAT = 3
"""The version of the folder and of the rules that make ids of rows: raised when either changes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Facts about a shard; `problem` is that of its last bad row."""

    file: str
    rows: int
    tokens: int
    bad_rows: int
    problem: str | None
    num_bytes: int
    sha256: str


class Columns(NamedTuple):
    """A shard in memory: row i has the pieces `rows[i]` to `rows[i + 1]`, piece j is `ids[pieces[j]:pieces[j + 1]]`."""

    keys: Any
    problems: Any
    rows: np.ndarray
    pieces: np.ndarray
    ids: np.ndarray


class PreparedSource:
    """The documents of a finished folder, with token ids instead of texts. A `MapSource`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Raise DataError if the folder is not finished, damaged, or not made from `facts`."""
        index = read_index(folder)
        if index is None or index["shards"] is None:
            raise DataError(
                f"data.prepared_dir: {folder} is not finished: run `ds-encdec prepare` with this configuration"
            )
        require_made_from(folder, index["made_from"], facts)
        self._folder = folder
        self._shards = [Shard(**facts) for facts in index["shards"]]
        for shard in self._shards:
            if not is_whole(folder, shard):
                raise DataError(
                    f"data.prepared_dir: {folder / shard.file} is missing or damaged: run `ds-encdec prepare` with "
                    "this configuration, which makes it again"
                )
        self._first = [0, *accumulate(shard.rows for shard in self._shards)]
        self._makes_pairs = OBJECTIVES[facts["data.objective"]].takes_records
        self._columns: dict[int, Columns] = {}
        self.identity: dict[str, Any] = dict(index["identity"])
        if index["is_stream"]:
            self.identity["kind"] = f"prepared {self.identity['kind']}"

    def __len__(self) -> int:
        return self._first[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}

    def key(self, index: int) -> str:
        """Return the document's key in its source."""
        columns, row = self._locate(index)
        return columns.keys[row].as_py()

    def document(self, index: int) -> Row:
        """Return document `index`, with the ids that its maker read."""
        columns, row = self._locate(index)
        key, problem = columns.keys[row].as_py(), columns.problems[row].as_py()
        if problem is not None:
            return BadRow(key, problem)
        edges = columns.pieces[columns.rows[row] : columns.rows[row + 1] + 1]
        pieces = [columns.ids[start:stop] for start, stop in pairwise(edges)]
        if self._makes_pairs:
            return Document(key, "", tuple(zip(pieces[::2], pieces[1::2], strict=True)))
        return Document(key, "", pieces[0])

    def _locate(self, index: int) -> tuple[Columns, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._open(number), index - self._first[number]

    def _open(self, number: int) -> Columns:
        if number not in self._columns:
            self._columns[number] = read_shard(self._folder / self._shards[number].file)
        return self._columns[number]


def prepared_folder(data: DataConfig) -> Path:
    """Return the path in `data.prepared_dir`, which must be set."""
    return Path(str(data.prepared_dir)).expanduser().absolute()


def made_from(data: DataConfig, entry: Source, maker: ExampleMaker, seed: int) -> dict[str, Any]:
    """Return the JSON-able facts that decide a source's rows and token ids; those that are fields have their names."""
    objective, vocabulary = OBJECTIVES[data.objective], maker.vocabulary
    facts: dict[str, Any] = {"data.objective": data.objective, "the format of prepared data": _FORMAT}
    facts |= {f"data.{name}": getattr(entry, name) for name in Source.model_fields}
    facts |= {f"data.{name}": getattr(data, name) for name in objective.read_fields}
    if "seed" in (local_kind(entry.dataset_name) or HUB).needs:
        facts["training.seed"] = seed
    if entry.dataset_name.startswith(PYTHON):
        facts["the reader's code"] = reader_digest(entry.dataset_name)
    facts["tokenizer"] = digest([maker.tokenize(Document("", text)).tolist() for text in SAMPLE])
    if objective.takes_records:  # templates may hold special tokens
        facts["special tokens"] = digest([vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.mode_token_ids])
    return json.loads(json.dumps(facts | maker.facts()))


def open_prepared(data: DataConfig, name: str, entry: MixtureSource, maker: ExampleMaker, seed: int) -> PreparedSource:
    """Open the prepared source `name`. Raises DataError if it is unfinished, or its facts or local files changed."""
    folder = prepared_folder(data) / name
    source = PreparedSource(folder, made_from(data, entry, maker, seed))
    files: Sequence[str] = ()
    with suppress(DataError):  # the files may be missing on this machine
        is_local = local_kind(entry.dataset_name) is not None
        is_folder = not is_local and os.path.isdir(entry.dataset_name)
        files = folder_files(entry) if is_folder else expand_files(entry.data_files or ()) if is_local else ()
    if files and "files" in source.identity:
        require_made_from(folder, source.identity["files"], file_digests(files, short_names(files)))
    return source


def require_made_from(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError with each fact that differs, and both values."""
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    if names:
        facts = [f"{name}: {reprlib.repr(there.get(name))} there, {reprlib.repr(now.get(name))} now" for name in names]
        raise DataError(
            f"data.prepared_dir: {folder} was made from something else ({'; '.join(facts):.600}). Restore that, or "
            "delete the folder (or name another one) and run `ds-encdec prepare`"
        )


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a folder; None if it has none. Raises DataError for a damaged one."""
    try:
        return json.loads(read_plain(folder / INDEX, MAX_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / INDEX}: cannot be read ({error}). Delete {folder} and prepare it again") from error


def is_whole(folder: Path, shard: Shard) -> bool:
    """Return whether the file of a shard exists with its size."""
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.num_bytes


def verified_shards(prepared_dir: Path) -> Iterator[str]:
    """Compare all shards with their SHA-256; yield a line for each folder. Raises DataError for one that differs."""
    for folder in sorted(path.parent for path in prepared_dir.glob(f"*/{INDEX}")):
        shards = [Shard(**facts) for facts in (read_index(folder) or {})["shards"] or ()]
        for shard in shards:
            with local_errors(str(folder / shard.file)), open(folder / shard.file, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise DataError(f"{file.name} is damaged: delete it, and run `ds-encdec prepare` again")
        yield f"{folder}: {len(shards)} shards" if shards else f"{folder}: not finished"


def finished_shards(folder: Path, part: int) -> list[Shard] | None:
    """Return the shards of a part; None if it is not finished, or a shard is incomplete."""
    try:
        shards = [Shard(**facts) for facts in json.loads((folder / f"{part:04}.json").read_text())]
    except (OSError, ValueError, TypeError):
        return None
    return shards if all(is_whole(folder, shard) for shard in shards) else None


def write_part(folder: Path, part: int, shards: Sequence[Shard]) -> None:
    """Write the complete list of a part's shards. Raises DiskRefusedError."""
    with writing(folder).explain_refusals():
        write_atomically(folder / f"{part:04}.json", json.dumps([asdict(shard) for shard in shards]))


def write_shard(folder: Path, name: str, rows: Sequence[tuple[str, Any | BadRow]]) -> Shard:
    """Write rows, each a key and a maker's ids (or a bad row), as the shard `name`. Raises DiskRefusedError."""
    import pyarrow as pa

    pieces = [[] if isinstance(ids, BadRow) else _pieces(ids) for _, ids in rows]
    problems = [ids.problem if isinstance(ids, BadRow) else None for _, ids in rows]
    flat = [piece for row in pieces for piece in row]
    ids = pa.ListArray.from_arrays(_edges(map(len, flat)), np.concatenate([np.zeros(0, np.int32), *flat]))
    columns = {
        "key": pa.array([key for key, _ in rows], pa.string()),
        "problem": pa.array(problems, pa.string()),
        "token_ids": pa.ListArray.from_arrays(_edges(map(len, pieces)), ids),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, batch.schema) as writer:
        writer.write_batch(batch)
    content = buffer.getvalue().to_pybytes()
    path = folder / f"{name}.arrow"
    with writing(folder).explain_refusals():
        write_atomically(path, content)
    bad = [problem for problem in problems if problem is not None]
    return Shard(
        file=path.name,
        rows=len(rows),
        tokens=sum(map(len, flat)),
        bad_rows=len(bad),
        problem=bad[-1] if bad else None,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def writing(folder: Path) -> Writing:
    """Return the `Writing` of prepared data into `folder`, for the message if its file system refuses it."""
    return Writing(folder, "The prepared data", "Free space there, and run the same command again.")


def read_shard(path: Path) -> Columns:
    """Map a shard into memory. Raises DataError."""
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    pieces = batch.column("token_ids")
    ids = pieces.values
    return Columns(
        batch.column("key"),
        batch.column("problem"),
        pieces.offsets.to_numpy(),
        ids.offsets.to_numpy(),
        ids.values.to_numpy(),
    )


def _pieces(ids: Any) -> list[np.ndarray]:
    return [ids] if isinstance(ids, np.ndarray) else [side for pair in ids for side in pair]


def _edges(lengths: Iterable[int]) -> np.ndarray:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int32)
