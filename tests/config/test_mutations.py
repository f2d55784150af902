"""Changed configurations, by the script that makes thousands of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "nightly" / "mutate_configs.py"


def test_mutated_configurations_are_accepted_or_refused_with_their_places() -> None:
    command = [sys.executable, str(SCRIPT), "--count", "500", "--run", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    accepted = int(re.search(r"\b0: (\d+)", result.stdout)[1])  # type: ignore[index]
    assert 50 <= accepted <= 250, "mutations must reach both ends"
