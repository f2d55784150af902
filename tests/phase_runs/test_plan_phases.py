"""The needs of the phases, from the command line: no run is started, no torch imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_runs import QUICKSTART, finish_run

from ds_encdec.cli import main
from ds_encdec.commands.phases.plan import TrainingPhase, plan_phase
from ds_encdec.config.schema import load_config


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["phases", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_days_and_money(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = dry_run(capsys, "--tokens-per-second", "400000", "--price-per-gpu-hour", "3")
    medium = estimate["phases"][2]
    assert medium["tokens"] == 50_000 * 1_572_864
    assert medium["time"]["days"] == pytest.approx(medium["tokens"] / 400_000 / 86400)
    assert medium["usd"] == pytest.approx(medium["time"]["hours"] * 8 * 3)
    assert [phase["ends_with"] for phase in estimate["phases"]] == ["tokens", "tokens", "steps", "steps"]
    assert estimate["total"]["usd"] == pytest.approx(sum(phase["usd"] for phase in estimate["phases"]))


def test_the_tables(capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]) -> None:
    """They fit 80 columns, their numbers are rounded to three places, and what is not known has no column."""
    short = ("--config", str(QUICKSTART), "--steps-per-phase", "40")
    for options in ((), ("--tokens-per-second", "4000", "--price-per-gpu-hour", "300"), short):
        assert main(["phases", "--dry-run", *options]) == 0
        golden(text := capsys.readouterr().out)
        assert options == short or max(map(len, text.splitlines())) <= 80
    assert dry_run(capsys, "--price-per-gpu-hour", "3")["total"]["time"] is None


def test_a_measured_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    phase = plan_phase(load_config(QUICKSTART, [f"infra.output_dir={tmp_path}"]), TrainingPhase.SANITY_CHECK, 40)
    finish_run(phase, [8.0, 7.0, 6.0])  # at 100, 200 and 300 tokens/s
    assert dry_run(capsys, "--measured", str(phase.folder))["tokens_per_second"] == 200
    (phase.folder / "run.json").write_text('{"world_size": 2, "device": "cpu"}')
    assert main(["phases", "--dry-run", "--measured", str(phase.folder)]) == 0
    assert f"200 tokens/s were measured in {phase.folder} (ranks: 2; device: cpu)" in capsys.readouterr().err


def test_metrics_that_cannot_be_read_are_no_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for content, why in (
        (None, "has no metrics.jsonl"),
        (b"\xff\n", "1 lines cannot be read"),
        (b"", "no line has perf/tokens_per_sec"),
        (b'{"step": 1, "perf/tokens_per_sec": null}\n', "no line has perf/tokens_per_sec"),
    ):
        if content is not None:
            metrics.write_bytes(content)
        assert main(["phases", "--dry-run", "--measured", str(tmp_path)]) == 4
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "medium", "--from", "full"],
        ["--from", "full", "--to", "medium"],
        ["--only", "midium"],
        ["--steps-per-phase", "1"],
        ["phases.medium.num_tokns=3"],
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], golden: Callable[[object], None], arguments: list[str]
) -> None:
    assert main(["phases", "--dry-run", *arguments]) == 2
    golden(capsys.readouterr().err)


def test_what_belongs_to_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["phases", "--json"]) == 2
    assert "belong to --dry-run" in capsys.readouterr().err


def test_only_and_from_to(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*arguments: str) -> list[str]:
        return [phase["phase"] for phase in dry_run(capsys, *arguments)["phases"]]

    assert names("--only", "medium") == ["medium"]
    assert names("--from", "validation", "--to", "medium") == ["validation", "medium"]
    assert names("--from", "medium") == ["medium", "full"]


def test_a_dry_run_imports_no_torch() -> None:
    code = (
        "import sys; from ds_encdec.cli import main; main(['phases', '--dry-run']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)
