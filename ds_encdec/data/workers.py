"""Worker processes that run lanes ahead of the training process.

A worker is a fresh Python that imports this module, gets its lanes pickled through stdin, and writes pickled
micro-batches to a pipe. It imports neither torch nor transformers (0.3 s and about 100 MB instead of seconds and
several hundred), does not run the program's `__main__` again, uses no shared memory (which containers keep
small), and is safe to start after threads and process groups exist. Arrays travel as int32 examples, some 100
kB a micro-batch; the training process collates them.

A worker dies with its parent: its next write fails. From its first moment on it leaves signals to the parent, because
launchers, schedulers and terminals signal every process of a job, and the parent may still want to finish its step and
save.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from ds_encdec.data.lane import Lane, LanePipeline
from ds_encdec.launch.preemption import outlive_readers, stop_signals_left_to_this_process
from ds_encdec.types import DataError, DsEncDecError, Example

READY_BATCHES_PER_LANE = 2
"""Micro-batches of each lane that a worker prepares in advance."""

_BOOTSTRAP = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from ds_encdec.data.workers import serve; serve(sys.stdin.buffer)"
)


class LaneBatch(NamedTuple):
    """A micro-batch, and the record of its lane right behind it."""

    examples: list[Example]
    record: dict[str, Any]


class WorkerLanes:
    """Lanes that run in `num_workers` processes; lane number k of the list runs in worker k mod num_workers.

    `take` must ask for the lanes in the order of the list, over and over. Without workers, lanes run in this process,
    each when it is asked.
    """

    def __init__(
        self, pipeline: LanePipeline, lanes: Sequence[int], records: Mapping[int, dict[str, Any]], num_workers: int
    ) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lanes = {} if num_workers else {lane: Lane(pipeline, lane, records.get(lane)) for lane in lanes}
        for worker in range(num_workers):
            mine = list(lanes[worker::num_workers])
            process = _start()
            self._processes |= dict.fromkeys(mine, process)
            _send(process, (pipeline, mine, {lane: records[lane] for lane in mine if lane in records}))

    def take(self, lane: int) -> LaneBatch:
        """The next micro-batch of `lane`. Raises what the worker raised, or DataError when it is gone."""
        if lane in self._lanes:
            return LaneBatch(next(self._lanes[lane]), self._lanes[lane].record)
        process = self._processes[lane]
        try:
            answer = pickle.load(_pipe(process.stdout))
        except (EOFError, pickle.UnpicklingError) as error:
            raise _death(process) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers. They hold nothing that would have to be saved."""
        for process in set(self._processes.values()):
            process.kill()
            process.wait()
            _pipe(process.stdout).close()


def _start() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _BOOTSTRAP]
    with stop_signals_left_to_this_process():
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _send(process: subprocess.Popen[bytes], task: Any) -> None:
    try:
        with _pipe(process.stdin) as pipe:
            pickle.dump(sys.path, pipe)
            pickle.dump(task, pipe)
    except BrokenPipeError as error:
        raise _death(process) from error


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class WorkerKilledError(DataError):
    """A signal has ended a data worker: the kernel's, for want of memory, or that of whoever ends the run."""


def _death(process: subprocess.Popen[bytes]) -> DataError:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return (WorkerKilledError if code < 0 else DataError)(
        f"a data worker (process {process.pid}) {how}. SIGKILL usually means that the machine ran out of memory: lower "
        "data.preprocessing_num_workers or data.shuffle_buffer_size, or work without workers "
        "(data.preprocessing_num_workers=0)"
    )


def serve(task_stream: IO[bytes]) -> None:
    """The life of a worker: read the task, then write micro-batches until the parent is gone."""
    outlive_readers()
    # The pipe moves away from stdout, so that a library that prints cannot break the stream.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pipeline, numbers, records = pickle.load(task_stream)
    ready: queue.Queue[bytes | None] = queue.Queue(maxsize=READY_BATCHES_PER_LANE * len(numbers))
    writer = threading.Thread(target=_write_all, args=(ready, out))
    writer.start()
    try:
        lanes = [Lane(pipeline, number, records.get(number)) for number in numbers]
        while True:
            for lane in lanes:
                ready.put(pickle.dumps(LaneBatch(next(lane), lane.record)))
    except DsEncDecError as error:
        ready.put(pickle.dumps(error))
    except Exception:
        ready.put(pickle.dumps(RuntimeError(f"in a data worker:\n{traceback.format_exc()}")))
    ready.put(None)
    writer.join()


def _write_all(ready: queue.Queue[bytes | None], out: IO[bytes]) -> None:
    try:
        while (message := ready.get()) is not None:
            out.write(message)
            out.flush()
    except OSError:
        os._exit(0)  # the parent is gone
