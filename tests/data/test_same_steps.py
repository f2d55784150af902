"""Steps are the same for any ranks and workers, resumed behind any step, whatever kind of data is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
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

from ds_encdec.config.schema import FullConfig

STEPS = 40


def mixed(folder: Path, **fields: Any) -> FullConfig:
    a = write_json_lines(folder / "a.jsonl", texts(150, median_characters=250))
    b = write_parquet(folder / "a.parquet", texts(150, median_characters=250, seed=1), row_group_size=20)
    lines, rows = {"dataset_name": "json", "data_files": a}, {"dataset_name": "parquet", "data_files": b}
    return make_config(mixture=[{"weight": 2, **lines}, {"weight": 1, **rows}], **fields)


def bad_line(folder: Path) -> FullConfig:
    lines = [json.dumps({"text": text}) for text in texts(80)]
    lines[31] = '{"text": "x'
    (folder / "a.jsonl").write_text("\n".join(lines))
    return json_config(folder / "a.jsonl", on_bad_row="skip")


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
    "a bad line": (bad_line, "bad_rows"),
    "a bad row group": (bad_row_group, "bad_rows"),
    "a mixture of pairs": (mixed_pairs, "long_rows"),
    "conversations": (chat, ""),
}


def run(
    config: FullConfig, world_size: int = 1, workers: int = 0, records: Any = (), count: int = STEPS, lanes: int = 4
) -> tuple[list[Any], list[Any]]:
    """Micro-batches of `count` steps in lane order, and the records behind each step."""
    data = config.data.model_copy(update={"preprocessing_num_workers": workers})
    shape = {"world_size": world_size, "num_lanes": lanes, "parts": chat_tokenizer()}
    ranks = [make_data(config.model_copy(update={"data": data}), rank=i, **shape).loader for i in range(world_size)]
    steps, states = [], []
    try:
        for loader in ranks:
            loader.load_state([*records])
        for _ in range(count):
            in_order = [*chain.from_iterable(zip(*(next(loader) for loader in ranks), strict=True))]
            steps.append([plain_batches(in_order), [(one.lane, one.number, one.encoder_lengths) for one in in_order]])
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
