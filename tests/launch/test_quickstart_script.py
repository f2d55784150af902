"""`scripts/quickstart.sh`, all around its training: how it starts that, and the table behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY

LAUNCHER = """#!/bin/bash
words="$*" run="${words##*infra.output_dir=}" run="${run%% *}"
echo "$(basename "$0"): $*"
mkdir -p "$run/export/final"
echo '{"train/loss": 8.0, "train/loss_R1": 8.5}
{"eval/loss": 5.0, "eval/loss_R1": 5.5, "eval/loss_R2": 5.25}' > "$run/metrics.jsonl"
"""


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (["output_dir={run}"], "deepspeed"),
        (["--output_dir", "{run}", "distributed_type=FSDP"], "torchrun"),
        (["--infra.output_dir", "{run}", "--infra.distributed_type", "ddp", "infra.sharding_stage=0"], "torchrun"),
    ],
)
def test_settings_in_any_words_and_a_first_interval_without_a_denoiser(
    tmp_path: Path, words: list[str], launcher: str
) -> None:
    (tmp_path / "quickstart.sh").write_text((REPOSITORY / "scripts" / "quickstart.sh").read_text())
    (tmp_path / "venv.sh").write_text(f"ROOT={REPOSITORY}; PATH={tmp_path}:$PATH\n")  # the environment is there
    programs = {"deepspeed": LAUNCHER, "torchrun": LAUNCHER}
    programs["ds-encdec"] = f'#!/bin/sh\n[ "$1" != train ] || exec {sys.executable} -m ds_encdec.cli "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = [word.format(run=tmp_path / "run") for word in words]
    command = ["bash", str(tmp_path / "quickstart.sh"), *given]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert f"{launcher}: " in result.stdout
    assert result.stdout.count(f"output_dir={tmp_path / 'run'}") == 1
    assert "  the first steps          8.00   8.50      -\n" in result.stdout
