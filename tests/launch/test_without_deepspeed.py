"""A whole run, resumed, where deepspeed cannot be imported."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tiny_run import QUICKSTART, losses, overrides, run

pytestmark = pytest.mark.launch

BLOCKED = """
import json, os, sys
sys.modules["deepspeed"] = None  # what an import finds where it is not installed
from ds_encdec import train
from ds_encdec.training import build
from ds_encdec.engine import fsdp2
for words in json.loads(sys.argv[1]):
    if not (process := os.fork()):  # with all that is imported by now
        os._exit(train.main(words))
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_run_without_deepspeed(tmp_path: Path) -> None:
    output, part = tmp_path / "run", tmp_path / "part"
    runs = [
        overrides(tmp_path / "refused"),
        overrides(output, infra__distributed_type="auto", training__save_steps=2),
        ["--resume", str(output / "checkpoints" / "step-00000004"), *overrides(part, infra__distributed_type="fsdp")],
    ]
    said = run(
        [sys.executable, "-c", BLOCKED, json.dumps([["--config", QUICKSTART, *words] for words in runs])], tmp_path
    )
    refused, finished, resumed, rest = re.split(r"ended with (?=\d)", said.stdout)
    assert "deepspeed is not installed" in refused
    assert finished.startswith("2\n")
    assert "deepspeed is not installed. Training with FSDP2" in finished
    assert (resumed[:2], rest) == ("0\n", "0\n"), said.stdout
    assert losses(part)[-1] == losses(output)[-1]
