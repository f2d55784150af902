"""Tests run on ranks: nothing waits for them, and they do not live on, when who started them has ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from gloo_ranks import RankFailure, run_ranks

pytestmark = pytest.mark.distributed

SLEEP_SECONDS = 900.0


def signal_and_sleep(folder: Path, test: int, victim: str) -> None:
    """Leave this rank's id in `folder`; once all are there, rank 0 ends its server or interrupts `test`."""
    rank = int(os.environ["RANK"])
    (folder / str(os.getpid())).touch()
    while rank == 0 and len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    if rank == 0 and victim == "server":
        os.kill(os.getppid(), signal.SIGKILL)
    elif rank == 0:
        os.kill(test, signal.SIGINT)
    time.sleep(SLEEP_SECONDS)
    (folder / "slept").touch()


def twice(number: int) -> int:
    return 2 * number


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("victim", "error"), [("server", RankFailure), ("test", KeyboardInterrupt)])
def test_ranks_end_with_who_started_them(tmp_path: Path, victim: str, error: type[BaseException]) -> None:
    arguments = {"folder": tmp_path, "test": os.getpid(), "victim": victim}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(error):
        run_ranks("test_gloo_ranks.py:signal_and_sleep", 2, arguments, engine="fsdp", timeout_seconds=SLEEP_SECONDS)
    signal.signal(signal.SIGINT, before)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    while any(runs(pid) for pid in ranks):
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 2, "they ended by themselves"
    assert run_ranks("test_gloo_ranks.py:twice", 2, {"number": 21}, engine="fsdp") == [42, 42]
