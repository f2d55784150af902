"""Processes that make data for this one: each runs a generator function and sends back the items.

A worker is a fresh Python process that imports neither torch nor transformers (0.3 s and 100 MB instead of seconds and
several hundred), does not run `__main__` again, uses no shared memory (containers have little), and can start safely
after threads and process groups exist. It ends with its parent, when its next write fails, and ignores signals:
launchers and terminals signal every process of a job, and the parent may still want to finish its step and save.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from ds_encdec.base.terminal import outlive_readers
from ds_encdec.base.types import DataError, DsEncDecError, LostRankError
from ds_encdec.launch.preemption import stop_signals_left_to_this_process

_BOOTSTRAP = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import serve; serve(sys.stdin.buffer)"
)


class WorkerKilledError(DataError, exit_code=LostRankError.exit_code):
    """A signal ended a data worker: the kernel's, for lack of memory, or that of whoever ends the run."""


class Worker:
    """An iterator over the items of `function(*arguments)` in another process, at most `ahead` in advance. It raises
    the function's error, or DataError if the process is gone."""

    def __init__(self, function: Callable[..., Iterator[Any]], *arguments: Any, ahead: int, advice: str) -> None:
        self._advice = advice
        self.process = start_worker()
        try:
            with cast(IO[bytes], self.process.stdin) as stdin:
                pickle.dump(sys.path, stdin)
                pickle.dump((function, arguments, ahead), stdin)
        except BrokenPipeError as error:
            raise self._death() from error

    def __iter__(self) -> "Worker":
        return self

    def __next__(self) -> Any:
        try:
            item = pickle.load(cast(IO[bytes], self.process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise self._death() from error
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Kill the process, which has no state to save."""
        self.process.kill()
        self.process.wait()
        cast(IO[bytes], self.process.stdout).close()

    def _death(self) -> DataError:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return (WorkerKilledError if code < 0 else DataError)(
            f"a data worker (process {self.process.pid}) {how}. SIGKILL usually means too little memory: {self._advice}"
        )


def start_worker() -> subprocess.Popen[bytes]:
    """Start a fresh Python that reads this process's path and then a task from stdin, for `serve`."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with stop_signals_left_to_this_process():
        return subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )


def serve(task_stream: IO[bytes]) -> None:
    """Run a worker: read the task, then write its items until it ends or the parent is gone."""
    outlive_readers()
    # The pipe leaves stdout, so that a library that prints cannot break the stream.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    function, arguments, ahead = pickle.load(task_stream)
    ready: queue.Queue[bytes | None] = queue.Queue(maxsize=ahead)

    def write_all() -> None:
        try:
            while (message := ready.get()) is not None:
                out.write(message)
                out.flush()
        except OSError:
            os._exit(0)  # the parent is gone

    writer = threading.Thread(target=write_all)
    writer.start()
    ending: BaseException = StopIteration()
    try:
        for item in function(*arguments):
            ready.put(pickle.dumps(item))
    except DsEncDecError as error:
        ending = error
    except Exception:
        ending = RuntimeError(f"in a data worker:\n{traceback.format_exc()}")
    ready.put(pickle.dumps(ending))
    ready.put(None)
    writer.join()
