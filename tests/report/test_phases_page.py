"""The page of a pipeline: one loss curve of all phases, the gates, and each phase's own report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from one_page import Page
from run_folders import write_lines, write_phases, write_run

from ds_encdec import cli
from ds_encdec.report.write import write_report


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
    assert [link["href"] for link in page.all("a") if "html" in link["href"]] == ["sanity_check/index.html"]


def test_one_phase_is_compared_and_not_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_phases(tmp_path / "output", only=("train/loss",))
    one, last = root / "phases" / "validation", root / "phases" / "medium"
    for first, second in ((root, last), (last, root)):
        assert cli.main(["report", str(first), "--compare", str(second)]) == 2
        said = capsys.readouterr().err
        assert f"{root} is the folder of a pipeline of phases" in said
        assert f"name one of its phases, e.g. {last}." in said
    assert cli.main(["report", str(one), "--compare", str(last)]) == 0
