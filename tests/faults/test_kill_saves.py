"""Kills in the middle of saves, with data workers, by the script that does a hundred of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).resolve().parents[1] / "nightly" / "kill_saves.py"
KILLS = 8  # two of each engine, in the background and at once


def test_killed_saves_leave_whole_checkpoints_to_go_on_from() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", str(KILLS)], capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(
        r"\| (\w+), (?:in the background|at once) \| (\d+) \| (\d+) \| (\d+) \| [\d.]+ \| (\d) \|", result.stdout
    )
    assert [(engine, int(kills)) for engine, kills, *_ in rows] == 2 * [("deepspeed", 2), ("fsdp", 2)], result.stdout
    assert sum(int(unfinished) for *_, unfinished, _, _ in rows) > 0, "no kill hit a save before its commit"
    assert sum(int(verified) for *_, verified, _ in rows) >= KILLS
    compared = re.search(r"never interrupted: (\d+) of deepspeed, (\d+) of fsdp", result.stdout)
    assert compared is not None, result.stdout
    assert min(map(int, compared.groups())) >= 2 * KILLS, "two saves of each kill, four steps apart, less what it lost"
    lost = [int(most) for *_, most in rows]
    assert max(lost[:2]) <= 8, "two intervals, in the background"
    assert max(lost[2:]) <= 4, "one interval, at once"
    assert max(lost) >= 4, "a save that was killed loses what was trained since the one before"
