"""Tries to compile C against Python's headers, as Triton must to make its kernels; slim images lack the headers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

WITHOUT_KERNELS = "without Triton's kernels the loss takes about five times as long, and layers are not compiled"


def triton_lacks() -> tuple[str, str] | None:
    """Compile a C file with Triton's compiler; return the problem, and its fix and cost, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed", f"pip install triton: {WITHOUT_KERNELS}"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.c")
        source.write_text("#include <Python.h>\n")
        command = [compiler, "-c", str(source), "-o", str(source.with_suffix(".o")), f"-I{include}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            problem = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if not problem:
        return None
    found = f"{compiler} cannot compile against Python.h, as Triton does: {' '.join(problem.split())[:200]}"
    return found, f"install gcc and python3-dev (or set CC): {WITHOUT_KERNELS}"
