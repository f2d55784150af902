"""Documents that were tokenized before a run, in arrow files that every rank maps into memory (docs/data.md).

A source's folder has its facts, its parts and, once it is finished, its shards in `index.json`. `0003-00001.arrow` is
shard 1 of the fourth part: keys, token ids with their CRC, and the problems of bad rows. `0003.json` lists that part's
shards; it is written last, so a part that has one is complete. Processes work on parts side by side: ranges of rows or
units. The CRC of a row's ids is compared where the row is read; that of the rest of a file, a few percent, at opening.
"""

# ruff: noqa: D102  (sources.MapSource documents the methods)

import hashlib
import json
import logging
import os
import reprlib
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ds_encdec.base.plugins import PYTHON
from ds_encdec.base.types import DataError, Document
from ds_encdec.config.schema import DataConfig, MixtureSource, Source
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.data.examples.protocol import ExampleMaker, with_ids
from ds_encdec.data.fingerprint import digest
from ds_encdec.data.sources.local_files import expand_files, file_digests, local_errors
from ds_encdec.data.sources.sources import AnySource, BadRow, Row, StreamSource, check_bad_rows, reader_digest
from ds_encdec.data.sources.tables import folder_files
from ds_encdec.data.text_tokenizer import SAMPLE
from ds_encdec.data.workers import Worker
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.registry.source_kinds import HUB, local_kind

INDEX = "index.json"
SHARD_TOKENS, SHARD_ROWS = 1 << 24, 1 << 20  # tokens (64 MiB of them) and rows at which a shard ends
PART_ROWS, MOST_PARTS = 1000, 512  # the fewest rows of a map in a part, and the most parts of a source
_FORMAT = 4  # of the folder, and of the rules that make ids of rows: raised when either changes
_LINE_SECONDS = 10.0
_PREPARE = "run `ds-encdec prepare` with this configuration"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """Facts about a shard; `problem` is that of its last bad row. `ids`: the first byte of the token ids, and the one
    behind them; `crc32`: of all other bytes."""

    file: str
    rows: int
    tokens: int
    bad_rows: int
    problem: str | None
    num_bytes: int
    sha256: str
    ids: Sequence[int]
    crc32: int


class PreparedSource:
    """The documents of a finished folder, with token ids instead of texts. A `MapSource`. Raises DataError if the
    folder is unfinished or damaged, or its facts or files changed."""

    def __init__(self, data: DataConfig, name: str, entry: MixtureSource, maker: ExampleMaker, seed: int) -> None:
        self._folder = prepared_folder(data) / name
        index = _read_index(self._folder)
        if index is None or index["shards"] is None:
            raise DataError(f"data.prepared_dir: {self._folder} is not finished: {_PREPARE}")
        _require_made_from(self._folder, index["made_from"], made_from(data, entry, maker, seed))
        self._shards = [Shard(**facts) for facts in index["shards"]]
        if damaged := [self._folder / shard.file for shard in self._shards if not _is_whole(self._folder, shard)]:
            raise DataError(f"data.prepared_dir: {damaged[0]} is missing or damaged: {_PREPARE}")
        self._first = [0, *accumulate(shard.rows for shard in self._shards)]
        self._pieces = maker.pieces
        self._batches: dict[int, Any] = {}
        kind = {"kind": f"prepared {index['identity']['kind']}"} if index["is_stream"] else {}
        self.identity: dict[str, Any] = {**index["identity"], **kind}
        files: Sequence[str] = ()
        with suppress(DataError):  # the files may be missing on this machine
            if local_kind(entry.dataset_name) is not None:
                files = expand_files(entry.data_files or ())
            elif os.path.isdir(entry.dataset_name):
                files = folder_files(entry)
        if files and "files" in self.identity:
            _require_made_from(self._folder, self.identity["files"], file_digests(files))

    def __len__(self) -> int:
        return self._first[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": {}}

    def key(self, index: int) -> str:
        batch, row = self._locate(index)
        return batch.column("key")[row].as_py()

    def document(self, index: int) -> Row:
        batch, row = self._locate(index)
        key, problem = batch.column("key")[row].as_py(), batch.column("problem")[row].as_py()
        if problem is not None:
            return BadRow(key, problem)
        pieces = [piece.values.to_numpy() for piece in batch.column("token_ids")[row]]
        if _crc32(*pieces) != batch.column("crc32")[row].as_py():
            raise _damaged(self._folder / self._shards[self._number(index)].file)
        of_examples = tuple(zip(*[iter(pieces)] * self._pieces, strict=True))
        return Document(key, "", pieces[0] if self._pieces == 1 else of_examples)

    def _number(self, index: int) -> int:
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def _locate(self, index: int) -> tuple[Any, int]:
        import pyarrow as pa

        number = self._number(index)
        if number not in self._batches:
            shard = self._shards[number]
            path = self._folder / shard.file
            try:
                content = pa.memory_map(str(path)).read_buffer()
                if _crc32(*_around(content, shard.ids)) != shard.crc32:  # else pyarrow may read beyond the file
                    raise _damaged(path)
                self._batches[number] = pa.ipc.open_file(content).get_batch(0)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{path}: cannot be read ({error})") from error
        return self._batches[number], index - self._first[number]


def prepared_folder(data: DataConfig) -> Path:
    """Return the path in `data.prepared_dir`, which must be set."""
    return Path(str(data.prepared_dir)).expanduser().absolute()


def made_from(data: DataConfig, entry: Source, maker: ExampleMaker, seed: int) -> dict[str, Any]:
    """Return the JSON-able facts that decide a source's rows and token ids; those that are fields have their names."""
    objective, vocabulary = OBJECTIVES[data.objective], maker.vocabulary
    specials = [vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.mode_token_ids, *vocabulary.beginning()]
    facts: dict[str, Any] = {
        "data.objective": data.objective,
        "the format of prepared data": _FORMAT,
        **{f"data.{name}": getattr(entry, name) for name in Source.model_fields},
        **{f"data.{name}": getattr(data, name) for name in objective.read_fields},
        **({"training.seed": seed} if "seed" in (local_kind(entry.dataset_name) or HUB).needs else {}),
        **({"the reader's code": reader_digest(entry.dataset_name)} if entry.dataset_name.startswith(PYTHON) else {}),
        "tokenizer": digest([maker.tokenize(Document("", text)).tolist() for text in SAMPLE]),
        # Templates may hold special tokens.
        **({"special tokens": digest(specials)} if objective.takes_records else {}),
        **maker.facts(),
    }
    return json.loads(json.dumps(facts))


def _require_made_from(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if names := [name for name in {**there, **now} if there.get(name) != now.get(name)]:
        facts = [f"{name}: {reprlib.repr(there.get(name))} there, {reprlib.repr(now.get(name))} now" for name in names]
        raise DataError(
            f"data.prepared_dir: {folder} was made from something else ({'; '.join(facts):.600}). Restore that, or "
            "delete the folder (or name another one) and run `ds-encdec prepare`"
        )


def _read_index(folder: Path) -> dict[str, Any] | None:
    try:
        index = read_json(folder / INDEX)
        if "shards" not in index:
            raise ValueError("it is no index of prepared data")
        return index
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / INDEX}: cannot be read ({error}). Delete {folder} and prepare it again") from error


def _is_whole(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.num_bytes


def verified_shards(prepared_dir: Path) -> Iterator[str]:
    """Compare all shards with their SHA-256; yield a line for each folder. Raises DataError for one that differs."""
    for folder in sorted(path.parent for path in prepared_dir.glob(f"*/{INDEX}")):
        shards = [Shard(**facts) for facts in (_read_index(folder) or {})["shards"] or ()]
        for shard in shards:
            with local_errors(str(folder / shard.file)), open(folder / shard.file, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise _damaged(Path(file.name))
        yield f"{folder}: {len(shards)} shards" if shards else f"{folder}: not finished"


def prepare_source(
    source: AnySource, facts: dict[str, Any], maker: ExampleMaker, folder: Path, bad_row_limit: int, num_proc: int
) -> str:
    """Make or finish the folder of a source; return a line about it. Raises DataError and DiskRefusedError."""
    is_stream = isinstance(source, StreamSource)
    size = source.num_units if isinstance(source, StreamSource) else len(source)
    identity = json.loads(json.dumps(source.identity))
    if (index := _read_index(folder)) is None:
        count = max(1, min(size if is_stream else size // PART_ROWS, MOST_PARTS))
        edges = [number * size // count for number in range(count + 1)]
        index = {"made_from": facts, "identity": identity, "is_stream": is_stream, "parts": edges, "shards": None}
        _write(folder / INDEX, json.dumps(index))
    _require_made_from(folder, index["made_from"], facts)
    _require_made_from(folder, index["identity"], identity)
    shards: list[Shard] = []
    done: list[Shard] = []
    todo: list[tuple[int, range]] = []
    for number, (start, stop) in enumerate(pairwise(index["parts"])):
        try:
            made = [Shard(**facts) for facts in json.loads((folder / f"{number:04}.json").read_text())]
        except (OSError, ValueError, TypeError):
            made = []  # it is not finished
        if made and all(_is_whole(folder, shard) for shard in made):
            done += made
        else:
            todo.append((number, range(start, stop)))
    logged = time.monotonic()
    for shard in chain(done, _work_off(todo, num_proc, source, maker, folder)):
        shards.append(shard)
        check_bad_rows(sum(one.bad_rows for one in shards), bad_row_limit, str(shard.problem))
        if time.monotonic() - logged > _LINE_SECONDS:
            logged = time.monotonic()
            total = "" if is_stream else f" of {size:,}"
            logger.info(f"{folder.name}: {sum(one.rows for one in shards):,}{total} rows")
    shards.sort(key=lambda shard: shard.file)
    _write(folder / INDEX, json.dumps(index | {"shards": [asdict(shard) for shard in shards]}))
    rows, tokens, bad = (sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "bad_rows"))
    return f"{folder}: {rows:,} rows, {tokens:,} tokens in {len(shards)} shards; {bad} rows could not be read"


def _work_off(todo: Sequence[tuple[int, range]], num_proc: int, *work: Any) -> Iterator[Shard]:
    workers: list[Worker] = []
    try:
        for first in range(min(num_proc, len(todo))):
            advice = "give it fewer processes (--num-proc)"
            workers.append(Worker(_make, todo[first::num_proc], *work, ahead=1 << 16, advice=advice))
        running = workers
        while running:
            made = [(worker, next(worker, None)) for worker in running]
            running = [worker for worker, shard in made if shard is not None]
            yield from (shard for _, shard in made if shard is not None)
    finally:
        for worker in workers:
            worker.close()


def _make(parts: Sequence[tuple[int, range]], source: AnySource, maker: ExampleMaker, folder: Path) -> Iterator[Shard]:
    for number, places in parts:
        shards: list[Shard] = []
        for rows in _shard_rows(source, places, maker):
            shards.append(_write_shard(folder / f"{number:04}-{len(shards):05}.arrow", rows))
            yield shards[-1]
        _write(folder / f"{number:04}.json", json.dumps([asdict(shard) for shard in shards]))


def _shard_rows(source: AnySource, places: range, maker: ExampleMaker) -> Iterator[list[tuple[str, Any | BadRow]]]:
    rows: list[tuple[str, Any | BadRow]] = []
    tokens = 0
    for place in places:
        read = source.documents(place, 0) if isinstance(source, StreamSource) else (source.document(place),)
        for row, ids in with_ids(read, maker):
            tokens += 0 if isinstance(ids, BadRow) else maker.size(ids)
            rows.append((row.key, ids))
            if tokens >= SHARD_TOKENS or len(rows) >= SHARD_ROWS:
                yield rows
                rows, tokens = [], 0
    if rows:
        yield rows


def _write_shard(path: Path, rows: Sequence[tuple[str, Any | BadRow]]) -> Shard:
    import pyarrow as pa

    problems = [ids.problem if isinstance(ids, BadRow) else None for _, ids in rows]
    pieces: list[list[np.ndarray]] = [
        [] if isinstance(ids, BadRow) else [ids] if isinstance(ids, np.ndarray) else [*chain(*ids)] for _, ids in rows
    ]
    flat = [*chain.from_iterable(pieces)]
    ids = pa.ListArray.from_arrays(_edges(map(len, flat)), np.concatenate([np.zeros(0, np.int32), *flat]))
    columns = {
        "key": pa.array([key for key, _ in rows], pa.string()),
        "problem": pa.array(problems, pa.string()),
        "token_ids": pa.ListArray.from_arrays(_edges(map(len, pieces)), ids),
        "crc32": pa.array([_crc32(*of_row) for of_row in pieces], pa.uint32()),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, batch.schema) as writer:
        writer.write_batch(batch)
    content, tokens = buffer.getvalue(), sum(map(len, flat))
    stored = pa.ipc.open_file(content).get_batch(0).column("token_ids").values.values.buffers()[1]
    first = stored.address - content.address if tokens else 0
    where = (first, first + tokens * np.dtype(np.int32).itemsize)
    _write(path, content.to_pybytes())
    bad = [problem for problem in problems if problem is not None]
    problem, sha256 = bad[-1] if bad else None, hashlib.sha256(content).hexdigest()
    size, rest = content.size, _crc32(*_around(content, where))
    return Shard(path.name, len(rows), tokens, len(bad), problem, size, sha256, where, rest)


def _around(content: Any, ids: Sequence[int]) -> tuple[memoryview, memoryview]:
    return memoryview(content)[: ids[0]], memoryview(content)[ids[1] :]


def _crc32(*pieces: Any) -> int:
    return reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)


def _damaged(path: Path) -> DataError:
    return DataError(f"{path} is damaged: delete it, and run `ds-encdec prepare` again")


def _edges(lengths: Iterable[int]) -> np.ndarray:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int32)


def _write(path: Path, content: bytes | str) -> None:
    make_room = "Free space there, and run the same command again."
    with Writing(path.parent.parent, "The prepared data", make_room).explain_refusals():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content)
