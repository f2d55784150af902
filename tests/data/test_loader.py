"""The loader: the same steps for any ranks and workers, resumed behind any step; worker processes; batches."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parts import (
    SFT_ROWS,
    chat_tokenizer,
    damage_row_group,
    json_config,
    make_config,
    make_data,
    plain_batches,
    sft_config,
    texts,
    write_json_lines,
    write_parquet,
    write_rows,
)
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.base.types import CheckpointError, ConfigError, DataError, Example
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data import workers
from ds_encdec.data.fingerprint import digest
from ds_encdec.data.lane import Lane
from ds_encdec.data.loader import LaneLoader, collate, token_digest
from ds_encdec.launch.preemption import STOP_SIGNALS
from ds_encdec.registry.denoisers import DENOISERS

STEPS = 40


def mixed(folder: Path, **fields: Any) -> FullConfig:
    a = write_json_lines(folder / "a.jsonl", texts(150, median_characters=250))
    b = write_parquet(folder / "a.parquet", texts(150, median_characters=250, seed=1), row_group_size=20)
    lines, rows = {"dataset_name": "json", "data_files": a}, {"dataset_name": "parquet", "data_files": b}
    return make_config(mixture=[{"weight": 2, **lines}, {"weight": 1, **rows}], **fields)


def bad_row_group(folder: Path) -> FullConfig:
    path = Path(write_parquet(folder / "a.parquet", texts(80), row_group_size=20))
    damage_row_group(path, 1)
    return make_config(dataset_name="parquet", data_files=str(path), on_bad_row="skip")


def mixed_pairs(folder: Path) -> FullConfig:
    alone = {"dataset_name": FullConfig().data.dataset_name, "data_files": None}  # which a mixture replaces
    mixture = [
        {"weight": weight, "dataset_name": "json", "data_files": write_rows(folder / f"{weight}.jsonl", SFT_ROWS)}
        for weight in (1, 2)
    ]
    return sft_config("", mixture=mixture, on_long_row="skip", max_decoder_length=40, **alone)


def chat(folder: Path) -> FullConfig:
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    path = write_rows(folder / "a.jsonl", [{"messages": turns[: 2 + 2 * (i % 3)], "id": i} for i in range(120)])
    return sft_config(path, chat_targets="every", on_long_row="skip", max_encoder_length=160)


# How to make the data, and of which rows some are met.
CASES: dict[str, tuple[Callable[[Path], FullConfig], str]] = {
    "lines": (lambda folder: json_config(folder / "a.jsonl", texts(400)), ""),
    "a mixture by tokens": (lambda folder: mixed(folder, mixture_weights_count="tokens"), ""),
    "a bad row group": (bad_row_group, "bad_rows"),
    "a mixture of pairs": (mixed_pairs, "long_rows"),
    "conversations": (chat, ""),
}


def run(
    config: FullConfig, world_size: int = 1, workers: int = 0, records: Any = (), count: int = STEPS, lanes: int = 4
) -> tuple[list[Any], list[Any]]:
    data = config.data.model_copy(update={"preprocessing_num_workers": workers})
    shape = {"world_size": world_size, "num_lanes": lanes, "parts": chat_tokenizer()}
    ranks = [make_data(config.model_copy(update={"data": data}), rank=i, **shape).loader for i in range(world_size)]
    steps, states = [], []
    try:
        for loader in ranks:
            loader.load_state([*records])
        for _ in range(count):
            in_order = [*chain.from_iterable(zip(*(next(loader) for loader in ranks), strict=True))]
            steps.append(
                [plain_batches(in_order), [(one.lane, one.number, one.encoder_lengths, one.digest) for one in in_order]]
            )
            states.append(sorted((one for loader in ranks for one in loader.state()), key=lambda one: one["lane"]))
    finally:
        for loader in ranks:
            loader.close()
    return steps, json.loads(json.dumps(states))


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_for_any_ranks_and_workers_and_resumed_at_any(tmp_path: Path, case: str) -> None:
    make, met = CASES[case]
    config = make(tmp_path)
    whole, records = run(config)
    assert len({json.dumps(one) for one in records}) == STEPS
    assert max(len(json.dumps(record)) for record in chain(*records)) < 3000
    if met:
        assert sum(sum(record[met]) for record in records[-1]) >= (10 if case == "a bad row group" else 1)
    assert run(config, 2) == (whole, records)
    for cut, ranks in ((1, 4), (4, 1), (9, 2), (30, 4)):
        assert run(config, ranks, 0, records[cut - 1], STEPS - cut) == (whole[cut:], records[cut:])
    if case in ("lines", "a bad row group", "conversations"):
        assert run(config, 2, 2, count=12) == (whole[:12], records[:12])


@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (3, 0)])
def test_twelve_lanes_are_divided_among_any_ranks_and_workers(tmp_path: Path, ranks: int, workers: int) -> None:
    """The state is that of the steps handed out, although workers are several steps ahead."""
    config = json_config(tmp_path / "a.jsonl", texts(400))
    whole, records = run(config, count=8, lanes=12)
    assert run(config, ranks, workers, count=4, lanes=12) == (whole[:4], records[:4])
    assert run(config, 12 // ranks, workers % 2, records[2], 5, lanes=12) == (whole[3:], records[3:])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_json_lines(tmp_path / "a.jsonl", texts(400))


@pytest.fixture
def loader(path: str) -> Iterator[LaneLoader]:
    made = make_data(json_config(path, preprocessing_num_workers=2, eval_fraction=0.0)).loader
    yield made
    made.close()


def steps(loader: LaneLoader, count: int) -> list[Any]:
    return [plain_batches(next(loader)) for _ in range(count)]


def alone(path: str, count: int) -> list[Any]:
    return steps(make_data(json_config(path, eval_fraction=0.0)).loader, count)


def test_a_closed_loader_starts_again_where_it_was(path: str, loader: LaneLoader) -> None:
    first = steps(loader, 2)
    pids = [worker.process.pid for worker in loader.workers]
    assert len(pids) == 2
    loader.close()
    assert wait_until_gone(pids, 120) == []
    assert first + steps(loader, 2) == alone(path, 4)


def test_lanes_that_ranks_do_not_divide_and_records_of_other_lanes_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"num_lanes=12 cannot be divided .* 5 ranks: .*: 1, 2, 3, 4, 6, 12"):
        make_data(json_config(path), rank=0, world_size=5, num_lanes=12)
    loader = make_data(json_config(path), world_size=2).loader
    next(loader)
    with pytest.raises(CheckpointError, match=r"lanes \[0, 2\]; this run has lanes 0 to 3"):
        loader.load_state(loader.state())


def test_an_error_in_a_worker_is_the_error_of_the_run(path: str, loader: LaneLoader) -> None:
    Path(path).write_text(Path(path).read_text().replace('"text"', '"tixt"'))  # the column goes after the start
    with pytest.raises(DataError, match=r"data.text_column=text: a.jsonl, line \d+ has no such column"):
        steps(loader, 3)


def test_a_dead_worker_is_noticed(loader: LaneLoader) -> None:
    next(loader)
    os.kill(loader.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"a data worker \(process \d+\) was killed by SIGKILL"):
        steps(loader, 10)  # what it had prepared may still arrive


def test_workers_leave_signals_to_their_parent(path: str, loader: LaneLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and terminals signal every process of a job, as it starts or later; the parent may have work to end."""
    start = workers.start_worker

    def signal_all(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        for number in (*STOP_SIGNALS, signal.SIGUSR2):
            process.send_signal(number)
        return process

    monkeypatch.setattr(workers, "start_worker", lambda: signal_all(start()))
    first = steps(loader, 1)
    for worker in loader.workers:
        signal_all(worker.process)
    assert first + steps(loader, 5) == alone(path, 6)


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


IDS = ("encoder_ids", "decoder_input_ids", "labels", "encoder_cu_seqlens", "decoder_cu_seqlens")


@given(st.sampled_from(IDS), st.integers(0, 4), st.integers(1, 2**31 - 1))
def test_a_digest_is_another_for_any_wrong_id_boundary_or_lane(part: str, place: int, by: int) -> None:
    first, second = example([1, 2, 3], [4, 90], "R2"), example([5, 6], [7, 8, 9], "S")
    batch = collate([first, second], BUDGETS, PAD)
    changed = getattr(batch, part).clone()
    changed[place] ^= by
    exchanged = collate([second, first], BUDGETS, PAD)
    digests = [
        token_digest(batch, 0),
        token_digest(batch, 1),
        token_digest(exchanged, 0),
        token_digest(exchanged, 1),
        token_digest(dataclasses.replace(batch, **{part: changed}), 0),
    ]
    assert len(set(digests)) == 5
    assert digests[0] + digests[3] != digests[1] + digests[2]  # two lanes that were exchanged
    assert max(digests) < 2**48
    assert token_digest(collate([first, second], BUDGETS, PAD), 0) == digests[0]


@pytest.mark.parametrize("wrong", [282, -100])
@pytest.mark.parametrize("side", ["encoder_ids", "decoder_ids"])
def test_an_id_that_the_tokenizer_does_not_have_reaches_no_model(
    path: str, monkeypatch: pytest.MonkeyPatch, side: str, wrong: int
) -> None:
    """In training and in evaluation. The largest id of this tokenizer, 281, is that of a sentinel."""
    data = make_data(json_config(path, eval_fraction=0.0))
    expected = rf"data.dataset_name: document a.jsonl:\d+ \(lane 2\) has the token id {wrong}, .* are 0 to 281\. "
    next(data.loader)
    pack = Lane.__next__

    def damaged(lane: Lane) -> list[Example]:
        made = pack(lane)
        if lane.record["lane"] == 2:
            ids = getattr(made[-1], side).copy()
            ids[-1] = wrong
            made[-1] = dataclasses.replace(made[-1], **{side: ids})
        return made

    monkeypatch.setattr(Lane, "__next__", damaged)
    with pytest.raises(DataError, match=expected):
        next(data.loader)
    folder = Path(path).parent / "evaluation"
    make_data(json_config(path), evaluation_cache=folder)
    (cached,) = folder.iterdir()
    rows = json.loads(cached.read_text())["examples"]
    rows[3][0][0][side == "decoder_ids"][0] = wrong
    cached.write_text(json.dumps({"digest": digest(rows), "examples": rows}))
    with pytest.raises(DataError, match=rf"data.dataset_name: document a.jsonl:\d+ has the token id {wrong}, "):
        make_data(json_config(path), evaluation_cache=folder)
