"""Digests of tokens: the same for any ranks, another for other steps, and small; the newest of a step is read back."""

import json
from pathlib import Path

import numpy as np
import torch

from ds_encdec.base.types import Batch
from ds_encdec.monitor.metrics_file import EventLog, read_step_lines
from ds_encdec.monitor.token_digests import StepDigest, digest_sums, entry, read_digests

STEPS, LANES = 10, 64
ALL = np.random.default_rng(0).integers(2**48, size=(STEPS, LANES)).tolist()


def batch(lane: int, digest: int) -> Batch:
    nothing = torch.zeros(0)
    return Batch(*[nothing] * 8, encoder_lengths=(), decoder_lengths=(), lane=lane, digest=digest)  # type: ignore[arg-type]


def entries(path: Path, digests: list[list[int]], ranks: int = 1, first: int = 1, every: int = STEPS) -> Path:
    """Write what `ranks` ranks would."""
    log, sums = EventLog(path), list[tuple[int, int]]()
    for number, lanes in enumerate(digests, start=first):
        of_ranks = [[batch(lane, lanes[lane]) for lane in range(rank, LANES, ranks)] for rank in range(ranks)]
        plain, by_lane = map(sum, zip(*map(digest_sums, of_ranks), strict=True))
        sums.append((plain, by_lane))
        if len(sums) == every:
            log.write("tokens", step=number, ranks=ranks, **entry(sums, number))
            sums.clear()
    return path


def read(path: Path) -> dict[int, StepDigest]:
    return read_digests(read_step_lines(path).lines)


def test_entries_do_not_depend_on_ranks_but_on_every_lane_which_they_name_if_it_is_one(tmp_path: Path) -> None:
    one, four = (read(entries(tmp_path / f"{n}", ALL, n)) for n in (1, 4))
    assert [*one] == [*range(1, STEPS + 1)]
    assert {step: found._replace(ranks=4) for step, found in one.items()} == four
    for lanes in ([37], [0], [LANES - 1], [5, 6]):
        wrong = [[*of_step] for of_step in ALL]
        for lane in lanes:
            wrong[6][lane] ^= 10
        other = read(entries(tmp_path / f"wrong {lanes}", wrong))
        assert [step for step in one if one[step] != other[step]] == [7]
        expected = lanes[0] if len(lanes) == 1 else None
        assert one[7].other_lane(other[7]) == other[7].other_lane(one[7]) == expected
    exchanged = [[*ALL[0][1::-1], *ALL[0][2:]]]
    assert read(entries(tmp_path / "exchanged", exchanged, every=1))[1].by_lane != one[1].by_lane


def test_the_newest_of_a_step_counts_and_damaged_entries_do_not(tmp_path: Path) -> None:
    path = entries(tmp_path / "ledger.jsonl", ALL, every=5)
    before = read(path)
    good = {"first": 1, "steps": "00" * 8, "ranks": 1}
    with path.open("a") as file:
        for damage in (
            {"steps": 3},
            {"first": "x"},
            {"first": 1e999},
            {"steps": "00000000"},
            {"ranks": None},
        ):
            file.write(json.dumps({"kind": "tokens", "step": 1, **good, **damage}) + "\n")
        file.write('{"kind": "tokens", "step": 1}\n{"kind": "tokens", "st')
    assert read(path) == before
    with path.open("a") as file:
        file.write("\n")
    entries(path, ALL[:3], ranks=2, first=4, every=3)
    after = read(path)
    assert [after[step] == before[step] for step in after] == [True] * 3 + [False] * 3 + [True] * 4
    assert (after[5].plain, after[5].ranks) == (sum(ALL[1]) % 2**32, 2)


def test_a_hundred_thousand_steps_take_four_megabytes(tmp_path: Path) -> None:
    (line,) = entries(tmp_path / "ledger.jsonl", ALL, ranks=64, first=99_991).read_bytes().splitlines(keepends=True)
    assert len(line) * 100_000 / STEPS < 4e6
