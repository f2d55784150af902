"""From a configuration to data: refusals before anything is built, evaluation, fingerprints, inspection."""

import json
import re
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parts import (
    byte_tokenizer,
    documents_of,
    json_config,
    make_config,
    make_data,
    texts,
    write_json_lines,
    write_parquet,
)

from ds_encdec.base.types import CheckpointError, ConfigError, DataError
from ds_encdec.config.schema import FullConfig
from ds_encdec.data import survey
from ds_encdec.data.examples.chunks import reconstruct
from ds_encdec.data.inspection import inspect_data
from ds_encdec.data.survey import steps_of_epochs, with_steps_of_epochs


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_json_lines(tmp_path / "a.jsonl", texts(300))


def evaluation_config(path: str, **fields: Any) -> FullConfig:
    return json_config(path, eval_fraction=0.2, training={"eval_samples": 40}, **fields)


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_an_empty_data_set(tmp_path: Path, documents: list[str]) -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        make_data(json_config(tmp_path / "a", documents))


def test_only_other_data_is_refused(path: str, tmp_path: Path) -> None:
    config = json_config(path)
    saved = json.loads(json.dumps(make_data(config).saved()))
    assert make_data(config, saved=saved).saved() == saved
    workers = json_config(path, preprocessing_num_workers=3)
    assert make_data(workers, world_size=2, saved=saved).saved() == saved

    other = json_config(path, max_encoder_length=80, training={"seed": 7})
    with pytest.raises(
        CheckpointError,
        match=r"\n  data.max_encoder_length: 96 there, 80 now\n  training.seed: 42 there, 7 now\n"
        r".*Then source 0 \(json a\.jsonl, .*\) begin at their start.*fingerprint \w+ there, \w+ now",
    ):
        make_data(other, saved=saved)
    with pytest.raises(CheckpointError, match=r"\n  sources: source 0 \(json a.jsonl, .*, source 1 \(builtin, .*now\n"):
        make_data(make_config(dataset_name="builtin"), saved=saved)
    assert make_data(other, saved=saved, accept_other_data=True).ratio == saved["encoder_decoder_ratio"]

    Path(path).write_text(Path(path).read_text().replace("the", "teh"))  # without growing
    with pytest.raises(CheckpointError, match=r"size 300, content \w+\) there, .*size 300, content"):
        make_data(config, saved=saved)


def test_the_ratio_is_the_mixs(path: str) -> None:
    data = make_data(json_config(path))
    batches = [batch for _ in range(200) for batch in next(data.loader)]
    seen = sum(batch.encoder_tokens for batch in batches) / sum(batch.target_tokens for batch in batches)
    assert data.ratio == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_is_the_same_for_any_world_size_and_seed(path: str, world_size: int) -> None:
    config = evaluation_config(path)
    alone = make_data(config, num_lanes=12).eval_batches()
    ranks = [make_data(config, rank=r, world_size=world_size, num_lanes=12).eval_batches() for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = [batches[j] for j in range(len(ranks[0])) for batches in ranks]
    assert [b.labels.tolist() for b in in_order[: len(alone)]] == [b.labels.tolist() for b in alone]
    assert all(batch.target_tokens == 0 for batch in in_order[len(alone) :])
    assert sum(len(batch.documents) for batch in alone) == 40
    assert len({tuple(batch.labels.shape) for batch in in_order}) == 1
    # The budgets, and so the packing, may differ by the sampled ratio: compare what is in the batches.
    other = make_data(json_config(path, eval_fraction=0.2, training={"eval_samples": 40, "seed": 9}), num_lanes=2)
    assert documents_of(other.eval_batches()) == documents_of(alone)


def test_evaluation_examples_are_found_once_and_early(path: str, tmp_path: Path) -> None:
    config, folder = evaluation_config(path), tmp_path / "evaluation"
    expected = [batch.labels.tolist() for batch in make_data(config).eval_batches()]
    first = make_data(config, evaluation_cache=folder)
    assert len([*folder.iterdir()]) == 1  # before anybody asked for a batch, and nothing unfinished beside it
    assert [batch.labels.tolist() for batch in first.eval_batches()] == expected

    make_data(evaluation_config(path, max_encoder_length=80), evaluation_cache=folder)  # other settings, another file
    later = make_data(config, evaluation_cache=folder, saved=first.saved())
    Path(path).write_text("")  # whoever reads the data now finds nothing
    assert [batch.labels.tolist() for batch in later.eval_batches()] == expected
    assert [batch.documents for batch in later.eval_batches()] == [batch.documents for batch in first.eval_batches()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:100],
        lambda content: b"",
        lambda content: bytes(300),
        lambda content: b"[1]",
        lambda content: content.replace(b"1", b"2"),
    ],
    ids=["cut", "empty", "zeros", "a list", "other ids"],
)
def test_damaged_evaluation_examples_are_made_again(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    config, folder = evaluation_config(path), tmp_path / "evaluation"
    make_data(config, evaluation_cache=folder)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    make_data(config, evaluation_cache=folder)
    assert file.read_bytes() == whole
    assert [entry.getMessage()[: len(str(file)) + 11] for entry in caplog.records] == [f"{file} is damaged"]


def test_a_disk_without_room_for_evaluation_examples_costs_a_warning(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = evaluation_config(path), tmp_path / "evaluation"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        made = make_data(config, evaluation_cache=folder).eval_batches()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
    assert "could not be written ([Errno 27] File too large)" in caplog.text
    assert documents_of(made) == documents_of(make_data(config).eval_batches())


@pytest.mark.parametrize(("unit", "expected"), [("documents", 30), ("tokens", 34)])
def test_evaluation_follows_the_weights_of_a_mixture(tmp_path: Path, unit: str, expected: int) -> None:
    mixture: list[dict[str, Any]] = [{"weight": 3, "dataset_name": "json"}, {"weight": 1, "dataset_name": "json"}]
    for source, name, length in zip(mixture, "ab", (40, 80), strict=True):
        source["data_files"] = write_json_lines(tmp_path / f"{name}.jsonl", ["x" * length] * 400)
    settings: dict[str, Any] = {"eval_fraction": 0.5, "training": {"eval_samples": 40}}
    config = make_config(mixture=mixture, mixture_weights_count=unit, **settings)
    keys = [key for batch in make_data(config).eval_batches() for key in batch.documents]
    assert sum(key.startswith("a") for key in keys) == pytest.approx(expected, abs=1)
    assert len(keys) == 40


def test_nothing_to_evaluate_on(tmp_path: Path) -> None:
    data = make_data(json_config(tmp_path / "a.jsonl", ["one document only. " * 50]), num_lanes=1)
    next(data.loader)  # a single document still trains
    with pytest.raises(DataError, match=r"the held-out documents give no example: .*Raise data.eval_fraction"):
        data.eval_batches()


def test_inspection_shows_what_a_run_sees(path: str) -> None:
    tokenizer, vocabulary = byte_tokenizer()
    data = make_data(json_config(path))
    report = json.loads(inspect_data(data, tokenizer, num_examples=25, as_json=True))
    run = [
        (key, batch.labels[batch.decoder_cu_seqlens[i] : batch.decoder_cu_seqlens[i + 1]].tolist())
        for batch in [*next(data.loader), *next(data.loader)]
        for i, key in enumerate(batch.documents)
    ]
    assert [(one["document"], one["decoder_ids"]) for one in report["examples"]] == run[:25]
    documents = texts(300)
    for one in report["examples"]:
        tokens = reconstruct(np.array(one["encoder_ids"]), np.array(one["decoder_ids"]), vocabulary)
        assert tokenizer.decode(tokens) in documents[int(one["document"].partition(":")[2])]
    statistics = report["statistics"]
    assert sum(statistics["denoisers"].values()) == statistics["examples"] >= 25
    assert 0.5 < statistics["encoder_fill"] <= 1
    ids = f"decoder ids: {report['examples'][0]['decoder_ids']}"
    for with_ids in (False, True):
        text = inspect_data(data, tokenizer, num_examples=3, as_json=False, with_ids=with_ids)
        assert (text.count("── example"), ids in text) == (3, with_ids)
    assert [re.split(" {2,}", line)[-1] for line in text.splitlines()[-5:]] == ["12.5%"] * 4 + ["50.0%"]


@pytest.mark.parametrize("passes", [1, 3])
def test_after_the_steps_every_row_was_seen_so_often_and_one_step_before_not(tmp_path: Path, passes: int) -> None:
    fields = {"objective": "sft", "input_template": "{id}", "output_template": "{text}", "on_long_row": "truncate"}
    data = make_data(json_config(tmp_path / "a.jsonl", texts(120), **fields))
    steps = steps_of_epochs(data.pipeline, passes)
    trained = {key for i in range(120) if not data.pipeline.sources[0].holds_out(key := f"a.jsonl:{i}")}
    assert 90 < len(trained) < 120

    def least_seen(count: int) -> int:
        loader = make_data(json_config(tmp_path / "a.jsonl", texts(120), **fields)).loader
        seen = Counter(key for _ in range(count) for batch in next(loader) for key in batch.documents)
        assert seen.keys() <= trained
        return min(seen[key] for key in trained)

    assert least_seen(steps) == passes
    assert least_seen(steps - 1) == passes - 1
    assert steps_of_epochs(data.pipeline, passes - 0.5) == pytest.approx(steps * (1 - 0.5 / passes), abs=2)


def short_and_long(folder: Path) -> list[dict[str, Any]]:
    mixture = []
    for number, length in enumerate([30, 300]):
        (folder / str(number)).mkdir()
        file = write_json_lines(folder / f"{number}/a.jsonl", texts(60, length))
        mixture.append({"weight": 1, "dataset_name": "json", "data_files": file})
    return mixture


@pytest.mark.parametrize("unit", [None, "tokens"])
def test_a_large_data_set_is_estimated(unit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if unit is None:
        data = make_data(json_config(tmp_path / "a.jsonl", texts(120)))
    else:
        data = make_data(make_config(mixture=short_and_long(tmp_path), mixture_weights_count=unit))
    exact = steps_of_epochs(data.pipeline, 4)
    monkeypatch.setattr(survey, "COUNTED_READINGS", 10)
    assert steps_of_epochs(data.pipeline, 4) == pytest.approx(exact, rel=0.15)
    monkeypatch.setattr(survey, "COUNTED_READINGS", 300)  # two passes are counted
    assert steps_of_epochs(data.pipeline, 3000) == 1500 * steps_of_epochs(data.pipeline, 2)


def test_a_stream_whose_length_nobody_knows_is_refused_and_local_parquet_is_none(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", texts(120), row_group_size=20)
    parquet = make_data(make_config(dataset_name="parquet", data_files=path, eval_fraction=0.0))
    assert parquet.pipeline.sources[0].source.num_rows == 120  # type: ignore[union-attr]
    assert steps_of_epochs(parquet.pipeline, 2) > steps_of_epochs(parquet.pipeline, 1) > 5
    (tmp_path / "folder").mkdir()
    write_json_lines(tmp_path / "folder/a.jsonl", texts(120))
    stream = make_data(make_config(dataset_name=str(tmp_path / "folder"), eval_fraction=0.0))
    with pytest.raises(DataError, match=r"length of streamed data is not known.*data\.streaming=false"):
        steps_of_epochs(stream.pipeline, 2)


def test_the_warm_up_must_end_before_the_steps_that_epochs_turn_out_to_be(tmp_path: Path) -> None:
    config = json_config(tmp_path / "a.jsonl", training={"num_train_epochs": 2, "warmup_steps": 10})
    assert with_steps_of_epochs(config, 11).training.num_train_steps == 11
    with pytest.raises(ConfigError, match=r"num_train_epochs=2.0 are 10 steps:\n.*warm-up must end"):
        with_steps_of_epochs(config, 10)
