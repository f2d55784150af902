"""Python code run where some packages are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in BLOCKED_PACKAGES:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


def without(packages: Sequence[str], code: str, *arguments: Path, cwd: Path) -> str:
    """The last line that `code` prints in a fresh process in which `packages` cannot be imported."""
    program = f"BLOCKED_PACKAGES = {packages!r}{BLOCKED}{code}"
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        | {"HF_HOME": str(cwd / "hf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=cwd,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]
