"""The loader: the layout of batches, and worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parts import json_config, make_data, plain_batches, texts, write_json_lines

from ds_encdec.base.types import CheckpointError, ConfigError, DataError, Example
from ds_encdec.data import workers
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.loader import LaneLoader, collate
from ds_encdec.launch.preemption import STOP_SIGNALS
from ds_encdec.registry.denoisers import DENOISERS

NUM_LANES = 12


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_json_lines(tmp_path / "a.jsonl", texts(400))


@contextmanager
def loaders(
    path: str, world_size: int, workers: int, records: list[dict[str, Any]] | None = None
) -> Iterator[list[LaneLoader]]:
    made = [
        make_data(
            json_config(path, preprocessing_num_workers=workers), rank=rank, world_size=world_size, num_lanes=NUM_LANES
        ).loader
        for rank in range(world_size)
    ]
    try:
        for loader in made:
            if records is not None:
                loader.load_state(records)
        yield made
    finally:
        for loader in made:
            loader.close()


def steps(ranks: list[LaneLoader], count: int) -> list[list[Any]]:
    """`count` optimizer steps, each as the contents of its micro-batches in global lane order."""
    result = []
    for _ in range(count):
        by_rank = [next(loader) for loader in ranks]
        in_order = [by_rank[lane % len(ranks)][lane // len(ranks)] for lane in range(NUM_LANES)]
        result.append([*plain_batches(in_order), [(b.lane, b.number, b.encoder_lengths) for b in in_order]])
    return result


def test_a_closed_loader_starts_again_where_it_was(path: str) -> None:
    with loaders(path, 1, 0) as alone:
        expected = steps(alone, 4)
    with loaders(path, 1, 2) as ranks:
        first = steps(ranks, 2)
        pids = [process.pid for process in worker_processes(ranks[0])]
        assert len(pids) == 2
        ranks[0].close()
        assert wait_until_gone(pids, 120) == []
        assert first + steps(ranks, 2) == expected


def test_lanes_that_ranks_do_not_divide_and_records_of_other_lanes_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"num_lanes=12 cannot be divided .* 5 ranks: .*: 1, 2, 3, 4, 6, 12"):
        make_data(json_config(path), rank=0, world_size=5, num_lanes=NUM_LANES)

    with loaders(path, 2, 0) as ranks:
        steps(ranks, 1)
        with pytest.raises(CheckpointError, match=r"lanes \[0, 2, 4, 6, 8, 10\]; this run has lanes 0 to 11"):
            ranks[0].load_state(ranks[0].state())


def test_an_error_in_a_worker_is_the_error_of_the_run(path: str) -> None:
    loader = make_data(json_config(path, preprocessing_num_workers=2, eval_fraction=0.0), num_lanes=2).loader
    Path(path).write_text(Path(path).read_text().replace('"text"', '"tixt"'))  # the column goes after the start
    try:
        with pytest.raises(DataError, match=r"data.text_column=text: a.jsonl, line \d+ has no such column") as caught:
            [next(loader) for _ in range(3)]
        assert caught.value.exit_code == 4
    finally:
        loader.close()


def worker_processes(loader: LaneLoader) -> list[subprocess.Popen[bytes]]:
    return [worker.process for worker in loader.workers]


def test_a_dead_worker_is_noticed(path: str) -> None:
    with loaders(path, 1, 2) as (loader,):
        next(loader)
        os.kill(worker_processes(loader)[0].pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"a data worker \(process \d+\) was killed by SIGKILL"):
            steps([loader], 10)  # what it had prepared may still arrive


def test_workers_leave_signals_to_their_parent(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and terminals signal every process of a job, as it starts or later; the parent may have work to end."""
    start = workers.start_worker

    def signal_all(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        for number in (*STOP_SIGNALS, signal.SIGUSR2):
            process.send_signal(number)
        return process

    with loaders(path, 1, 0) as alone:
        expected = steps(alone, 6)
    monkeypatch.setattr(workers, "start_worker", lambda: signal_all(start()))
    with loaders(path, 1, 2) as ranks:
        first = steps(ranks, 1)
        for process in worker_processes(ranks[0]):
            signal_all(process)
        assert first + steps(ranks, 5) == expected


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("ending", ["exception", "SIGKILL"])
def test_workers_end_with_their_parent(path: str, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from data_parts import json_config, make_data
loader = make_data(json_config({path!r}, preprocessing_num_workers=2)).loader
next(loader)
print(*[worker.process.pid for worker in loader.workers], flush=True)
if {ending!r} == "exception":
    raise RuntimeError("crashed")
if {ending!r} == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    parent = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert parent.returncode == {"exception": 1, "SIGKILL": -9}[ending], parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    assert wait_until_gone(pids, 120) == []


BUDGETS = Budgets(encoder_tokens=8, decoder_tokens=9, max_examples=4)
PAD = 90


def example(encoder: list[int], decoder: list[int], denoiser: str) -> Example:
    return Example(np.array(encoder, np.int32), np.array(decoder, np.int32), denoiser, f"{denoiser} document")


def test_two_examples() -> None:
    batch = collate([example([1, 2, 3], [4, 90], "R2"), example([5, 6], [7, 8, 9], "S")], BUDGETS, PAD)
    assert batch.encoder_ids.tolist() == [1, 2, 3, 5, 6, 90, 90, 90]
    assert batch.decoder_input_ids.tolist() == [90, 4, 90, 7, 8, 90, 90, 90, 90]
    assert batch.labels.tolist() == [4, 90, 7, 8, 9, -100, -100, -100, -100]  # EOS = pad is a label all the same
    assert batch.encoder_positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert batch.decoder_positions.tolist() == [0, 1, 0, 1, 2, 0, 0, 0, 0]
    assert batch.encoder_cu_seqlens.tolist() == [0, 3, 5, 5, 5]
    assert batch.decoder_cu_seqlens.tolist() == [0, 2, 5, 5, 5]
    r2, s = (list(DENOISERS).index(name) for name in ("R2", "S"))
    assert batch.denoiser_ids.tolist() == [r2, r2, s, s, s, 0, 0, 0, 0]
    assert (batch.encoder_lengths, batch.decoder_lengths) == ((3, 2), (2, 3))
    assert batch.documents == ("R2 document", "S document")
    assert (batch.encoder_tokens, batch.target_tokens) == (5, 5)
    assert {batch.encoder_ids.dtype, batch.labels.dtype, batch.denoiser_ids.dtype} == {torch.int64}
    assert {batch.encoder_cu_seqlens.dtype, batch.decoder_cu_seqlens.dtype} == {torch.int32}


def test_an_empty_batch_has_the_same_shapes_and_no_weight() -> None:
    batch = collate([], BUDGETS, PAD)
    assert batch.target_tokens == batch.encoder_tokens == 0
    assert (batch.labels == -100).all()
    assert batch.encoder_cu_seqlens.tolist() == [0] * 5
    assert (batch.encoder_ids.shape, batch.labels.shape) == ((8,), (9,))
