"""What a program asks of its disk, in its order."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Call(NamedTuple):
    """`name`: fsync, rename or replace; `path`: the file, or its new name."""

    name: str
    path: Path


def recorded(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Call], bool] = lambda _: False) -> list[Call]:
    """The calls from now on. One that `fails` raises EIO, and does nothing."""
    done: list[Call] = []

    def record(name: str, path_of: Callable[..., Path]) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> None:
            done.append(Call(name, path_of(*arguments)))
            if fails(done[-1]):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(done[-1].path))
            original(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    for name in ("rename", "replace"):
        record(name, lambda source, target: Path(target))
    return done
