"""A file system that is really full: a small tmpfs in a mount namespace of its own, where the system lets us."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")


def with_small_disk(mount: Path, kilobytes: int) -> tuple[str, ...]:
    """Words in front of a command line, whose processes see a file system of that size at `mount`.

    Others see it under `/proc/PID/root` as long as one of them lives. Skips the test where none may be mounted.
    """
    if not _may_mount():
        pytest.skip("no file system may be mounted here")
    mount.mkdir()
    return (*_UNSHARE, f'mount -t tmpfs -o size={kilobytes}k none "{mount}" && exec "$@"', "bash")


@functools.cache
def _may_mount() -> bool:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARE, "mount -t tmpfs none /mnt"], capture_output=True, timeout=300).returncode == 0
