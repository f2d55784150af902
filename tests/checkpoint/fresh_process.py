"""Python code run where some packages are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BLOCKED = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in BLOCKED_PACKAGES else self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def without(packages: Sequence[str], code: str, *arguments: Path, cwd: Path, site: str | None = None) -> str:
    """The last line that `code` prints in a fresh process in which `packages` cannot be imported.

    `site`: a folder whose packages go before installed ones.
    """
    first = "" if site is None else f"\nsys.path.insert(0, {site!r})\n"
    program = f"BLOCKED_PACKAGES = {packages!r}{BLOCKED}{first}{code}"
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
