"""Digests of tokens: the same for any ranks, another for other steps, and small; the newest of a step is read back."""

import json
from pathlib import Path

import numpy as np
import torch

from ds_encdec.base.types import Batch
from ds_encdec.monitor.metrics_file import EventLog, read_step_lines
from ds_encdec.monitor.token_digests import StepDigest, TokenDigests, read_digests

STEPS, LANES = 10, 64
ALL = np.random.default_rng(0).integers(2**48, size=(STEPS, LANES)).tolist()


def batch(lane: int, digest: int) -> Batch:
    nothing = torch.zeros(0)
    return Batch(*[nothing] * 8, encoder_lengths=(), decoder_lengths=(), lane=lane, digest=digest)  # type: ignore[arg-type]


def entries(path: Path, digests: list[list[int]], ranks: int = 1, first: int = 1, every: int = STEPS) -> Path:
    """Write what `ranks` ranks would."""
    log, of_ranks = EventLog(path), [TokenDigests() for _ in range(ranks)]
    log.write("start", step=first - 1, data_step=first - 1, world_size=ranks)
    for number, lanes in enumerate(digests, start=first):
        for rank, own in enumerate(of_ranks):
            own.add(number, sum(lanes), [batch(lane, lanes[lane]) for lane in range(rank, LANES, ranks)])
        if (number + 1 - first) % every == 0:
            everyones = [own.lanes for own in of_ranks]
            facts, *_ = (own.take(everyones) for own in of_ranks)
            log.write("tokens", step=number, **facts)
    return path


def test_entries_do_not_depend_on_ranks_but_on_every_lane_and_the_order_of_steps(tmp_path: Path) -> None:
    one, four = (read_digests(read_step_lines(entries(tmp_path / f"{n}", ALL, n)).lines) for n in (1, 4))
    assert [*one] == [*range(1, STEPS + 1)]
    assert {step: found._replace(ranks=4) for step, found in one.items()} == four
    assert (four[1].first, four[1].last, len(four[1].lanes)) == (1, STEPS, LANES)
    wrong = [[*lanes] for lanes in ALL]
    wrong[6][37] ^= 1
    other = read_digests(read_step_lines(entries(tmp_path / "wrong", wrong)).lines)
    assert [step for step in one if one[step].digest != other[step].digest] == [7]
    assert [lane for lane in range(LANES) if one[1].lanes[lane] != other[1].lanes[lane]] == [37]
    exchanged = [ALL[1], ALL[0], *ALL[2:]]
    assert read_digests(read_step_lines(entries(tmp_path / "exchanged", exchanged)).lines)[1].lanes != one[1].lanes


def test_the_newest_of_a_step_counts_and_damaged_entries_do_not(tmp_path: Path) -> None:
    path = entries(tmp_path / "ledger.jsonl", ALL, every=5)
    before = read_digests(read_step_lines(path).lines)
    with path.open("a") as file:
        for damage in (
            {"steps": 3},
            {"steps": "00000000", "first": "x", "lanes": ""},
            {"first": 1e999, "steps": "0", "lanes": ""},
            {},
        ):
            file.write(json.dumps({"kind": "tokens", "step": 1, **damage}) + "\n")
        file.write('{"kind": "tokens", "st')
    assert read_digests(read_step_lines(path).lines) == before
    with path.open("a") as file:
        file.write("\n")
    entries(path, ALL[:3], ranks=2, first=4, every=3)
    after = read_digests(read_step_lines(path).lines)
    assert [after[step] == before[step] for step in after] == [True] * 3 + [False] * 3 + [True] * 4
    assert after[5] == StepDigest(f"{sum(ALL[1]) % 2**32:08x}", 4, 6, after[4].lanes, 2)


def test_a_hundred_thousand_steps_of_64_lanes_take_six_megabytes(tmp_path: Path) -> None:
    path = entries(tmp_path / "ledger.jsonl", ALL, first=99_991)
    _, line = path.read_bytes().splitlines(keepends=True)
    assert len(line) * 100_000 / STEPS < 6e6


def test_without_steps_there_is_no_entry_and_without_the_other_ranks_no_lanes() -> None:
    digests = TokenDigests()
    assert digests.take([{}]) == {}
    digests.add(3, 2**40 + 255, [batch(0, 1)])
    assert digests.take(()) == {"data_step": 3, "first": 3, "steps": "000000ff", "lanes": ""}
    assert digests.lanes == {}
