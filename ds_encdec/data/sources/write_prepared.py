"""`ds-encdec prepare`: it writes the files of `prepared.py`, in processes that work on parts of a source side by side.

A part is a range of rows or units. After an interruption the next start makes the parts without a list of shards.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_encdec.data.examples.protocol import ExampleMaker
from ds_encdec.data.sources.prepared import (
    INDEX,
    Shard,
    finished_shards,
    read_index,
    require_made_from,
    write_part,
    write_shard,
    writing,
)
from ds_encdec.data.sources.sources import AnySource, BadRow, Row, StreamSource, check_bad_rows
from ds_encdec.data.workers import Worker
from ds_encdec.launch.disk import write_atomically

logger = logging.getLogger(__name__)

SHARD_TOKENS, SHARD_ROWS = 1 << 24, 1 << 20
"""Tokens (64 MiB of them) and rows at which a shard ends."""
PART_ROWS, MOST_PARTS = 1000, 512
"""Fewest rows of a map in a part, and the most parts of a source."""
_LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Work:
    """The source that all processes work on, with the settings for it."""

    source: AnySource
    maker: ExampleMaker
    folder: Path
    bad_row_limit: int  # as in a run


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source: the rows, or units, from `start` up to `stop`."""

    number: int
    start: int
    stop: int


def prepare_source(
    source: AnySource, facts: dict[str, Any], maker: ExampleMaker, folder: Path, bad_row_limit: int, num_proc: int
) -> str:
    """Make or finish the folder of a source; return a line about it. Raises DataError and DiskRefusedError."""
    is_stream = isinstance(source, StreamSource)
    size = source.num_units if isinstance(source, StreamSource) else len(source)
    identity = json.loads(json.dumps(source.identity))
    with writing(folder.parent).explain_refusals():
        folder.mkdir(exist_ok=True)
    if (index := read_index(folder)) is None:
        count = max(1, min(size if is_stream else size // PART_ROWS, MOST_PARTS))
        edges = [number * size // count for number in range(count + 1)]
        index = {"made_from": facts, "identity": identity, "is_stream": is_stream, "parts": edges, "shards": None}
        with writing(folder).explain_refusals():
            write_atomically(folder / INDEX, json.dumps(index))
    require_made_from(folder, index["made_from"], facts)
    require_made_from(folder, index["identity"], identity)
    parts = [Part(number, *edges) for number, edges in enumerate(zip(index["parts"], index["parts"][1:], strict=False))]
    made = {part.number: finished_shards(folder, part.number) for part in parts}
    shards = [shard for finished in made.values() for shard in finished or ()]
    todo = [part for part in parts if made[part.number] is None]
    _check(shards, bad_row_limit)
    logged = time.monotonic()
    for shard in _work_off(Work(source, maker, folder, bad_row_limit), todo, num_proc):
        shards.append(shard)
        _check(shards, bad_row_limit)
        if time.monotonic() - logged > _LINE_SECONDS:
            logged = time.monotonic()
            total = "" if is_stream else f" of {size:,}"
            logger.info(f"{folder.name}: {sum(one.rows for one in shards):,}{total} rows")
    shards.sort(key=lambda shard: shard.file)
    with writing(folder).explain_refusals():
        write_atomically(folder / INDEX, json.dumps(index | {"shards": [asdict(shard) for shard in shards]}))
    rows, tokens, bad = (sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "bad_rows"))
    return f"{folder}: {rows:,} rows, {tokens:,} tokens in {len(shards)} shards; {bad} rows could not be read"


def _check(shards: Sequence[Shard], bad_row_limit: int) -> None:
    if bad := [shard for shard in shards if shard.bad_rows]:
        check_bad_rows(sum(shard.bad_rows for shard in bad), bad_row_limit, str(bad[-1].problem))


def _work_off(work: Work, todo: Sequence[Part], num_proc: int) -> Iterator[Shard]:
    """Make the parts `todo` in processes; yield each shard once it is written. Raises a process's error."""
    shares = [todo[number::num_proc] for number in range(min(num_proc, len(todo)))]
    answers: queue.SimpleQueue[Shard | BaseException | None] = queue.SimpleQueue()

    def listen(worker: Worker) -> None:
        try:
            for shard in worker:
                answers.put(shard)
            answers.put(None)
        except BaseException as error:
            answers.put(error)

    workers: list[Worker] = []
    try:
        for share in shares:
            workers.append(Worker(_make, work, share, ahead=1, advice="give it fewer processes (--num-proc)"))
            threading.Thread(target=listen, args=(workers[-1],), daemon=True).start()
        running = len(shares)
        while running:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                running -= 1
            else:
                yield answer
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def _make(work: Work, parts: Sequence[Part]) -> Iterator[Shard]:
    for part in parts:
        shards: list[Shard] = []
        rows: list[tuple[str, Any | BadRow]] = []
        tokens = bad = 0
        for row in _rows(work.source, part):
            ids = row if isinstance(row, BadRow) else work.maker.read(row)
            if isinstance(ids, BadRow):
                bad += 1
                check_bad_rows(bad, work.bad_row_limit, ids.problem)
            else:
                tokens += work.maker.size(ids)
            rows.append((row.key, ids))
            if tokens >= SHARD_TOKENS or len(rows) >= SHARD_ROWS:
                shards.append(write_shard(work.folder, f"{part.number:04}-{len(shards):05}", rows))
                yield shards[-1]
                rows, tokens = [], 0
        if rows:
            shards.append(write_shard(work.folder, f"{part.number:04}-{len(shards):05}", rows))
            yield shards[-1]
        write_part(work.folder, part.number, shards)


def _rows(source: AnySource, part: Part) -> Iterator[Row]:
    for number in range(part.start, part.stop):
        if isinstance(source, StreamSource):
            yield from source.documents(number, 0)
        else:
            yield source.document(number)
