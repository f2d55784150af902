"""`ds-encdec prepare`: makes what `prepared.py` reads, with processes that work on parts of a source side by side.

A part is a range of a map's rows or of a stream's units. It is written shard by shard, each of which says where the
next one begins, so whatever ends this program, the next start goes on behind the last shard of each part. The processes
are fresh Pythons like a run's data workers, without torch, and end with their parent.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ds_encdec import terminal
from ds_encdec.data.examples import ExampleMaker
from ds_encdec.data.lane import own_output, pipe, start_worker, worker_death
from ds_encdec.data.prepared import (
    INDEX,
    Position,
    Shard,
    finished_shards,
    read_index,
    require_made_from,
    write_shard,
    writing,
)
from ds_encdec.data.sources import AnySource, BadRow, Row, StreamSource, check_bad_rows
from ds_encdec.launch.disk import write_atomically
from ds_encdec.launch.run_folder import lock_file
from ds_encdec.terminal import outlive_readers
from ds_encdec.types import ConfigError, DsEncDecError, OutputLockedError

logger = logging.getLogger(__name__)

SHARD_TOKENS, SHARD_ROWS = 1 << 24, 1 << 20
"""Tokens (64 MiB of them) and rows behind which a shard ends."""
PART_ROWS, MOST_PARTS = 1000, 512
"""Rows of a map that are worth a part of their own, and the most parts of a source."""
_TOLD_ROWS = 500
_LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Work:
    """The source that all processes work on, and how. `bad_row_limit`: as in a run."""

    source: AnySource
    maker: ExampleMaker
    folder: Path
    bad_row_limit: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rest of a part of a source: from `start` up to row, or unit, `stop`, behind `shards` finished shards."""

    number: int
    start: Position
    stop: int
    shards: int


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Keep others from preparing into `folder`. Raises OutputLockedError, DiskRefusedError, ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115  held open as long as it is worked on
    except OSError as error:
        raise ConfigError(
            f"data.prepared_dir: cannot write to {folder} ({error.strerror}): name another one"
        ) from error
    with lock:
        if not lock_file(lock):
            lock.seek(0)
            raise OutputLockedError(
                f"data.prepared_dir: {folder} is being prepared by {lock.read() or 'another process'}"
            )
        with writing(folder).refusals_told():
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield folder


def prepare_source(
    source: AnySource, facts: dict[str, Any], maker: ExampleMaker, folder: Path, bad_row_limit: int, num_proc: int
) -> str:
    """Make the folder of a source, or finish it; return what is in it, in words.

    `facts`: see `made_from`. Raises DataError for a folder that was made from something else, and for bad rows, and
    DiskRefusedError.
    """
    is_stream = isinstance(source, StreamSource)
    size = source.num_units if isinstance(source, StreamSource) else len(source)
    with writing(folder.parent).refusals_told():
        folder.mkdir(exist_ok=True)
    if (index := read_index(folder)) is None:
        parts = max(1, min(size if is_stream else size // PART_ROWS, MOST_PARTS))
        edges = [number * size // parts for number in range(parts + 1)]
        index = {"made_from": facts, "identity": json.loads(json.dumps(source.identity)), "is_stream": is_stream}
        index |= {"parts": edges}
        with writing(folder).refusals_told():
            write_atomically(folder / INDEX, json.dumps(index | {"shards": None}))
    require_made_from(folder, index["made_from"], facts)
    require_made_from(folder, index["identity"], json.loads(json.dumps(source.identity)))
    made = [finished_shards(folder, number) for number in range(len(index["parts"]) - 1)]
    todo = [
        Part(number, (shards[-1].next if shards else None) or (start, 0), stop, len(shards))
        for number, (start, stop, shards) in enumerate(zip(index["parts"], index["parts"][1:], made, strict=False))
        if not shards or shards[-1].next is not None
    ]
    rows = sum(shard.rows for shards in made for shard in shards)
    with _progress(folder.name, rows, None if is_stream else size) as advance:
        for number, news in _work_off(Work(source, maker, folder, bad_row_limit), todo, num_proc):
            if isinstance(news, int):
                advance(news)
            else:
                made[number].append(news)
            _check(made, bad_row_limit)
    _check(made, bad_row_limit)
    shards = [shard for shards in made for shard in shards]
    with writing(folder).refusals_told():
        write_atomically(folder / INDEX, json.dumps(index | {"shards": [asdict(shard) for shard in shards]}))
    rows, tokens, bad = (sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "bad_rows"))
    return f"{folder}: {rows:,} rows, {tokens:,} tokens in {len(shards)} shards; {bad} rows could not be read"


def _check(made: Sequence[Sequence[Shard]], bad_row_limit: int) -> None:
    """Raise DataError where the parts have more bad rows than they may all together."""
    bad = [shard for shards in made for shard in shards if shard.bad_rows]
    if bad:
        check_bad_rows(sum(shard.bad_rows for shard in bad), bad_row_limit, str(bad[-1].problem))


@contextmanager
def _progress(name: str, rows: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields what is told of further rows: a bar on a terminal, else a line now and then."""
    console = terminal.console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal or terminal.is_quiet()) as bar:
        task = bar.add_task(name, total=total, completed=rows)
        told = time.monotonic()

        def advance(more: int) -> None:
            nonlocal rows, told
            rows += more
            bar.update(task, completed=rows)
            if not console.is_terminal and time.monotonic() - told > _LINE_SECONDS:
                told = time.monotonic()
                logger.info(f"{name}: {rows:,} {'' if total is None else f'of {total:,} '}rows")

        yield advance


def _work_off(work: Work, todo: Sequence[Part], num_proc: int) -> Iterator[tuple[int, int | Shard]]:
    """Have processes make `todo`; yield the number of a part with a shard that is made, or rows that are.

    Raises what a process raised, and DataError where one is gone.
    """
    tasks: queue.SimpleQueue[Part] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for part in todo:
        tasks.put(part)
    processes = [start_worker(__name__) for _ in range(min(num_proc, len(todo)))]
    threads = [threading.Thread(target=_drive, args=(one, work, tasks, answers), daemon=True) for one in processes]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                running -= 1
            else:
                yield answer
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _drive(
    process: subprocess.Popen[bytes], work: Work, tasks: queue.SimpleQueue[Part], answers: queue.SimpleQueue[Any]
) -> None:
    """Give one process part after part, and hand its messages on; None when there is nothing left."""
    try:
        with pipe(process.stdin) as stdin, pipe(process.stdout) as stdout:
            pickle.dump(sys.path, stdin)
            pickle.dump(work, stdin)
            while not tasks.empty():
                part = tasks.get_nowait()
                pickle.dump(part, stdin)
                stdin.flush()
                while (message := pickle.load(stdout)) is not None:
                    answers.put(message if isinstance(message, BaseException) else (part.number, message))
        answers.put(None)
    except queue.Empty:  # another thread was faster
        answers.put(None)
    except (EOFError, OSError, pickle.UnpicklingError):
        answers.put(worker_death(process, "give it fewer processes (--num-proc)"))


def serve(tasks: IO[bytes]) -> None:
    """The life of a process: read what it works on, then make one part after the other until there is none."""
    outlive_readers()
    out = own_output()

    def tell(message: Any) -> None:
        try:
            pickle.dump(message, out)
            out.flush()
        except OSError:
            os._exit(0)  # the parent is gone

    work = pickle.load(tasks)
    try:
        while True:
            for news in _make(work, pickle.load(tasks)):
                tell(news)
            tell(None)
    except EOFError:
        return
    except DsEncDecError as error:
        tell(error)
    except Exception:
        tell(RuntimeError(f"in a process that prepares data:\n{traceback.format_exc()}"))


def _make(work: Work, part: Part) -> Iterator[int | Shard]:
    """Write what is left of a part; yield each shard, and before it how many rows are read, bit by bit."""
    rows: list[tuple[str, Any | BadRow]] = []
    tokens = untold = bad = 0
    name = count(part.shards)
    for row, then in _rows(work.source, part):
        ids = row if isinstance(row, BadRow) else work.maker.read(row)
        if isinstance(ids, BadRow):
            bad += 1
            check_bad_rows(bad, work.bad_row_limit, ids.problem)
        else:
            tokens += work.maker.size(ids)
        rows.append((row.key, ids))
        untold += 1
        if untold == _TOLD_ROWS:
            yield untold
            untold = 0
        if tokens >= SHARD_TOKENS or len(rows) >= SHARD_ROWS:
            yield write_shard(work.folder, f"{part.number:04}-{next(name):05}", rows, then)
            rows, tokens = [], 0
    yield untold
    yield write_shard(work.folder, f"{part.number:04}-{next(name):05}", rows, None)


def _rows(source: AnySource, part: Part) -> Iterator[tuple[Row, Position]]:
    """The rows of a part, each with the position behind it."""
    start, first_row = part.start
    if not isinstance(source, StreamSource):
        yield from ((source.document(index), (index + 1, 0)) for index in range(start, part.stop))
        return
    for unit in range(start, part.stop):
        for row, document in enumerate(source.documents(unit, first_row), start=first_row):
            yield document, (unit, row + 1)
        first_row = 0
