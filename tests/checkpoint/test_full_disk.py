"""Folders written beside a run on a disk that is too small: the error says how much they take, and nothing stays."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from saved_checkpoints import config, random_state, save_checkpoint
from small_disk import with_small_disk

PROGRAM = """
import contextlib, io, json, os, sys
from pathlib import Path
import torch.distributed as dist
from ds_encdec.cli import main

def leave(folder, num_bytes):
    ballast = folder / "ballast"
    with contextlib.suppress(OSError):
        ballast.write_bytes(bytes(1 << 22))
    os.truncate(ballast, ballast.stat().st_size - num_bytes)

disk, commands, found = Path(sys.argv[1]), json.loads(sys.argv[2]), []
for free in (8 << 10, int(sys.argv[3])):
    leave(disk, free)
    for command in commands:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = main(command)
        found.append([command[0], free, code, errors.getvalue(), sorted(os.listdir(disk))])
        if dist.is_initialized():
            dist.destroy_process_group()
print(json.dumps(found))
"""


def size(words: str) -> float:
    """The bytes that a message names, rounded to a tenth of its unit."""
    number, unit = words.split()
    return float(number.replace(",", "")) * {"KB": 1e3, "MB": 1e6}.get(unit, 1)


def test_nothing_is_left_of_what_does_not_fit(tmp_path: Path) -> None:
    """Too little for the tensors, which is known before; and too little for what comes after them, which is not."""
    model, disk = config(hidden_size=48), tmp_path / "disk"
    for step in (1, 2):
        checkpoint = save_checkpoint(tmp_path / "run" / "checkpoints", step, random_state(model, seed=step), model)
    weights = 4 * sum(tensor.numel() for tensor in random_state(model, seed=0)["weight"].values())
    commands = [
        ["export", str(checkpoint), str(disk / "exported")],
        ["average", str(tmp_path / "run"), str(disk / "averaged")],
    ]
    result = subprocess.run(
        [*with_small_disk(disk, 4096), sys.executable, "-c", PROGRAM, disk, json.dumps(commands), str(weights + 8192)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for verb, free, code, errors, left in json.loads(result.stdout.splitlines()[-1]):
        assert code == 5, errors
        assert left == ["ballast"], (verb, free)
        takes, has = map(size, re.findall(r"takes about ([\d,.]+ \w+) and has ([\d,.]+ \w+) free in", errors)[0])
        assert takes >= weights - 50, errors  # bytes, of rounding to 0.1 KB
        assert has <= free + 50
        assert "Free space there, or name a folder on another file system" in errors
        assert ("too little space is free" if free < weights else "No space left on device") in errors
