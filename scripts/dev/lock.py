"""Writes requirements/cpu.lock by uv (`pip install uv`), which asks the package indexes for the SHA-256 of every file.

It holds the versions of constraints.txt, for Python 3.11 and torch's CPU build. Install it by
`pip install --require-hashes -r requirements/cpu.lock --extra-index-url https://download.pytorch.org/whl/cpu`, then
ds_encdec by `pip install --no-deps -e .`: pip refuses any file whose SHA-256 is another. `--check` compares the lock
with constraints.txt and pyproject.toml, without uv and without a network. torch comes from a folder of wheels if
UV_FIND_LINKS names one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from ds_encdec.base.foreign_places import known_ranges

ROOT = Path(__file__).parents[2]
LOCK, CONSTRAINTS = ROOT / "requirements" / "cpu.lock", ROOT / "constraints.txt"
HEAD = """\
# The environment that this release was tested in, with the SHA-256 of every file that pip may install:
#   pip install --require-hashes -r requirements/cpu.lock --extra-index-url https://download.pytorch.org/whl/cpu
# Made by `python scripts/dev/lock.py` of pyproject.toml[dev] and constraints.txt, for Python 3.11, torch without CUDA.
"""
NOT_LOCKED = {"flash-attn"}  # it is built on GPUs


def problems(lock: str, constraints: str) -> list[str]:
    """Return a line for each package of the lock that has no hash or another version than in constraints.txt, and for
    each requirement of pyproject.toml that the lock lacks."""
    entries = re.findall(r"^([\w.-]+)==([^\s;+]+)\S*(?:[^\n]*\\\n\s+--hash=sha256:([0-9a-f]{64}))?", lock, re.M)
    pins = {one.name: str(one.specifier) for line in constraints.splitlines() if (one := _requirement(line))}
    return [
        *(f"{name}=={version} has no SHA-256" for name, version, sha256 in entries if not sha256),
        *(
            f"{name}=={version}, but constraints.txt has {pins.get(name, 'no such package')}"
            for name, version, _ in entries
            if pins.get(name) != f"=={version}"
        ),
        *(
            f"{name} is required by pyproject.toml and is missing"
            for name in (one.lower().replace("_", "-") for one in known_ranges())
            if name not in {entry[0] for entry in entries} | NOT_LOCKED
        ),
    ]


def _requirement(line: str) -> Requirement | None:
    return None if line.startswith("#") or not line.strip() else Requirement(line)


def write() -> None:
    LOCK.parent.mkdir(exist_ok=True)
    wanted = ["pyproject.toml", "--extra", "dev", "--constraints", "constraints.txt", "--python-version", "3.11"]
    source = [] if "UV_FIND_LINKS" in os.environ else ["--torch-backend", "cpu"]
    command = ["uv", "pip", "compile", *wanted, *source, "--generate-hashes", "--no-annotate", "--no-header"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        sys.exit(found.stderr)
    LOCK.write_text(HEAD + found.stdout)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        write()
    if wrong := problems(LOCK.read_text(), CONSTRAINTS.read_text()):
        sys.exit("\n".join([f"{LOCK} is not up to date; `python scripts/dev/lock.py` writes it again:", *wrong]))
