"""A converted checkpoint is one like any other: a run of the other engine goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import BIN, QUICKSTART, launcher, losses, overrides, run

pytestmark = pytest.mark.launch


def test_a_run_of_the_other_engine_goes_on_from_a_converted_checkpoint(tmp_path: Path) -> None:
    """The same losses as the run that DeepSpeed made in one go; converted on two ranks, trained on one."""
    train = [*launcher("python"), "--config", QUICKSTART]
    first, second, converted = tmp_path / "first", tmp_path / "second", tmp_path / "converted"
    result = run([*train, *overrides(first, training__bf16="false")], tmp_path)
    assert result.returncode == 0, result.stdout
    convert = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "ds_encdec.cli", "convert"]
    result = run([*convert, str(first / "checkpoints" / "step-00000003"), str(converted), "--to", "dcp"], tmp_path)
    assert result.returncode == 0, result.stdout
    settings = overrides(second, training__bf16="false", infra__distributed_type="fsdp")
    result = run([*train, "--resume", str(converted), *settings], tmp_path)
    assert result.returncode == 0, result.stdout
    expected = [line for line in losses(first) if line[0] > 3]
    resumed = losses(second)
    assert [line[:2] for line in resumed] == [line[:2] for line in expected]
    assert [line[2] for line in resumed] == pytest.approx([line[2] for line in expected], abs=1e-5)
