"""Pages of several runs: laid over each other, or the phases of a pipeline behind each other; and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_page import Page
from run_folders import write_checkpoint, write_lines, write_phases, write_run

from ds_encdec import cli
from ds_encdec.report.read_run import read_run
from ds_encdec.report.write import difference, incomparable, write_report

LOSSES = ("train/loss", "eval/loss", "train/tokens_seen")


def test_curves_over_tokens_and_what_differed_beside_what_came_out(
    tmp_path: Path, golden: Callable[[object], None]
) -> None:
    metrics = (*LOSSES, "train/grad_norm", "perf/tokens_per_sec", "train/learning_rate")
    one = write_run(tmp_path / "one", only=metrics, training__learning_rate=1e-3)
    two = write_run(tmp_path / "two", only=metrics, steps=400, seed=1)
    index, warnings = write_report(one, compare=[two], out=tmp_path / "out")
    page = Page(index)
    assert warnings == []
    golden(page.prose)
    assert next(iter(page.charts)) == "Difference of the training losses, nats"
    assert page.source.count(">tokens seen</text>") == 6


def test_runs_with_the_same_configuration_are_said_to_be(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, only=("train/loss",), seed=len(name)) for name in ("a/run", "bb/c/run")]
    own = write_report(runs[0])[0]
    before = own.read_bytes()
    page = Page(write_report(runs[0], compare=runs[1:])[0])
    assert own.read_bytes() == before, "a comparison has a page of its own"
    assert "Their configurations are the same." in page.text
    assert page.tables["What came out, and what differed"][0] == ["", "a/run", "bb/c/run"]
    assert ">tokens seen</text>" not in page.source, "a run that did not log them is drawn over steps"


def test_runs_of_different_tokenizers_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", only=LOSSES)
    two = write_run(tmp_path / "two", only=LOSSES, model__tokenizer_name_or_path="builtin")
    assert cli.main(["report", str(one), "--compare", str(two)]) == 0
    said = capsys.readouterr().err
    assert "warning: one and two differ in model.tokenizer_name_or_path: losses per token of different" in said
    assert said.partition("warning: ")[2].strip() in Page(one / "report-compared" / "index.html").text


def test_checkpoints_know_the_tokenizer_better_than_its_path(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", model__tokenizer_name_or_path="a copy")]
    files = [write_checkpoint(run, 200) / "trainer.json" for run in runs]
    names = ["one", "two"]
    assert list(incomparable([read_run(run) for run in runs], names)) == []
    files[1].write_text(json.dumps({"data": {"fingerprint": {"tokenizer": "another"}}}))
    assert [warning[:30] for warning in incomparable([read_run(run) for run in runs], names)] == [
        "one and two differ in tokenize"
    ]


def test_runs_without_a_common_loss_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    write_lines(two / "metrics.jsonl", [{"step": 1, "perf/mfu": 0.4, "train/loss": None}])
    assert cli.main(["report", str(one), "--compare", str(two)]) == 4
    assert "neither of train/loss and eval/loss was logged by both" in capsys.readouterr().err
    assert not (one / "report-compared").exists()


def test_the_difference_is_taken_at_the_same_tokens(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_lines(one / "metrics.jsonl", [{"step": s, "train/loss": 4 - s / 10 if s != 5 else None} for s in range(11)])
    write_lines(two / "metrics.jsonl", [{"step": s + 0.5, "train/loss": 4.45 - s / 10} for s in range(15)])
    found = difference(*(read_run(run).curve("train/loss") for run in (two, one)))
    assert list(found.steps) == [s + 0.5 for s in range(10)]
    np.testing.assert_allclose(found.values, 0.5)


def test_the_losses_of_all_phases_stand_behind_each_other(tmp_path: Path, golden: Callable[[object], None]) -> None:
    root = write_phases(tmp_path / "output", only=("train/loss",))
    page = Page(write_report(root)[0])
    golden(page.prose)
    assert list(page.charts) == ["Training loss, nats per token, all phases"]
    assert all(f">{name}</text>" in page.source for name in ("sanity_check", "validation", "medium"))
    reports = [link["href"] for link in page.all("a") if link["href"].endswith(".html")]
    assert reports == [f"{name}/index.html" for name in ("sanity_check", "validation", "medium")]
    assert "The gate of medium was not passed" in Page(root / "report" / "medium" / "index.html").text


def test_a_phase_that_logged_nothing_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "phases" / "sanity_check" / "metrics.jsonl", [])
    assert cli.main(["report", str(tmp_path)]) == 4
    assert "none of the phases has logged metrics" in capsys.readouterr().err
    write_run(tmp_path / "phases" / "sanity_check", only=("train/loss",))
    (tmp_path / "phases" / "validation").mkdir()
    page = Page(write_report(tmp_path, out=tmp_path / "out")[0])
    assert "! validation was begun and not judged" in page.text
    assert "validation is not the folder of a run" in page.text


def test_a_pipeline_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_phases(tmp_path / "output", only=("train/loss",))
    last = root / "phases" / "medium"
    assert cli.main(["report", str(last), "--compare", str(root)]) == 2
    assert f"{root} is the folder of a pipeline of phases" in (said := capsys.readouterr().err)
    assert f"name one of its phases, e.g. {last}." in said
