"""The needs of the phases, from the command line: no run is started, no torch imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finished_runs import finish_run

from ds_encdec.cli import main
from ds_encdec.commands.phases.plan import TrainingPhase, plan_phase
from ds_encdec.config.schema import load_config

QUICKSTART = str(Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml")


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


def test_without_a_throughput_the_time_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "--price-per-gpu-hour", "3")["total"]["time"] is None
    assert main(["phases", "--dry-run", "--config", QUICKSTART, "--steps-per-phase", "40"]) == 0
    text = capsys.readouterr().out
    assert "not known: give --tokens-per-second" in text
    assert "--steps-per-phase" in text
    assert "4,096 tokens a step" in text


def test_a_measured_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    phase = plan_phase(load_config(Path(QUICKSTART), [f"infra.output_dir={tmp_path}"]), TrainingPhase.SANITY_CHECK, 40)
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
    ("arguments", "message"),
    [
        (["--only", "medium", "--from", "full"], "--only names a single phase"),
        (["--from", "full", "--to", "medium"], "--to medium comes before --from full"),
        (["--only", "midium"], "Did you mean medium?"),
        (["--steps-per-phase", "1"], "give at least 2"),
        (["phases.medium.num_tokns=3"], "num_tokens"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["phases", "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers are rounded to three places, and what is not known has no column."""
    assert main(["phases", "--dry-run"]) == 0
    unpriced = capsys.readouterr().out.splitlines()
    assert main(["phases", "--dry-run", "--tokens-per-second", "4000", "--price-per-gpu-hour", "300"]) == 0
    priced = capsys.readouterr().out.splitlines()
    assert max(map(len, [*unpriced, *priced])) <= 80
    assert re.split("  +", unpriced[0]) == ["phase", "ends after", "runs"]
    assert re.split("  +", unpriced[4]) == ["full", "100,000 steps or 500 B", "100,000 steps, 157 B"]
    assert re.split("  +", priced[5]) == ["total", "150,643 steps, 237 B", "686 days", "39.5 M"]


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
