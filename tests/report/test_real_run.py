"""The report of a run that was really trained, rolled back, and stopped as diverged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from one_page import Page
from tiny_run import QUICKSTART, launcher, overrides, run

from ds_encdec import cli

pytestmark = pytest.mark.launch


def test_a_real_run_with_a_rollback(tmp_path: Path) -> None:
    """Every gradient norm is an explosion here: step 4 goes back to step 2, and the next alert ends the run."""
    settings = overrides(
        tmp_path / "run",
        infra__distributed_type="fsdp",
        infra__device="cpu",
        training__report_to="none",
        training__num_train_steps=12,
        training__save_steps=2,
        training__eval_steps=2,
        training__logging_steps=1,
        training__max_grad_norm=1e-5,
        monitor__grad_norm_threshold=1e-4,
        monitor__on_grad_explosion="rollback",
        monitor__rollback_min_steps=2,
        monitor__max_rollbacks=1,
    )
    finished = run([*launcher("python"), "--config", QUICKSTART, *settings], cwd=tmp_path)
    assert finished.returncode == 7, finished.stdout
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    page = Page(tmp_path / "run" / "report" / "index.html")
    assert "Failed after step 3 of 12, exit code 7" in page.text
    assert "1 rollback, which took back 2 steps." in page.text
    events = [row[:4] for row in page.tables["Alerts and rollbacks"]]
    assert ["4", "rollback 1"] in [row[:2] for row in events]
    assert "back to step 2; the data between steps 2 and 4 is not used again" in [row[3] for row in events]
    assert ["1", "grad_explosion", "no rollback: no checkpoint old enough"] in [[*row[:2], row[3]] for row in events]
    assert [[*row[:2], row[3]] for row in page.tables["Checkpoints"][1:]] == [["2", "latest, best", "rollback"]]
    assert {"Training loss, nats per token", "Gradient norm, before clipping"} < set(page.charts)
    for legend in ("taken back", "rollback", "alert"):
        assert f">{legend}</text>" in page.source
    assert "clipped above 1×10⁻⁵" in page.source
    counted = json.loads((tmp_path / "run" / "run.json").read_text())["parameters"]
    assert f"{counted:,} parameters, " in finished.stdout
    assert page.facts["parameters"] == f"{counted:,}"
