"""The scripts of scripts/bench, each in a form so small that it shows only that it still runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"
TINY = {"hidden": 32, "layers": 1, "vocab": 1024, "encoder_length": 32, "decoder_length": 16, "median_tokens": 12}

# Sizes of a model without blanks, for the command line.
SPECIAL = '"pad_token_id":0,"eos_token_id":1,"decoder_start_token_id":0'
SMALL = f'{{"hidden_size":32,"num_hidden_layers":4,"vocab_size":1000,{SPECIAL}}}'


def rows(script: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script; returns the rows of its JSON."""
    path = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPTS / script), *arguments, "--json", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["machine"]["torch"]
    assert found["title"] in done.stdout
    return found["rows"]


def test_contenders_do_equal_work(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    names = ["ours_zero1", "hf_zero1"]
    sizes = ("--size", json.dumps(TINY), "--steps", "1", "--rounds", "1", "--warm-up", "6")
    found = rows("train_step.py", tmp_path, "--only", *names, *sizes)
    assert [row["contender"] for row in found] == names
    for row in found:
        assert row["tokens a step"] == 2 * (32 + 16)
        assert row["first losses differ by"] < 0.01


@pytest.mark.parametrize(
    ("script", "arguments", "first"),
    [
        ("save.py", "--engine fsdp --hidden 128 --layers 1 --vocab 512 --repeats 1", "quiet step"),
        ("data.py", "--micro-batches 2 --rounds 1 --max-length 256", "ours"),
        ("packing.py", "--batches 5", "4 x (4096 + 2048)"),
        ("depth.py", f"--size {SMALL} --decoder-layers 4 1 --rounds 1 --new-tokens 16 --input-tokens 8", "3 + 4"),
    ],
)
def test_figures_of_one_process(script: str, arguments: str, first: str, tmp_path: Path) -> None:
    name, *figures = rows(script, tmp_path, *arguments.split())[0].values()
    assert name == first
    assert all(figure > 0 for figure in figures if figure is not None)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="torch 2.11 has no shapes for addmm's out_dtype"
)
def test_what_is_counted_for_a_gpu(tmp_path: Path) -> None:
    kernel, operators, *taught = rows("loss_traffic.py", tmp_path)
    assert kernel["GB"] < operators["GB"] / 2
    assert taught[0]["GB"] < taught[1]["GB"] / 2  # with a teacher
