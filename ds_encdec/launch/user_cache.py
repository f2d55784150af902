"""The user's cache folder: it keeps texts that every process needs and that take a second to make."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ds_encdec.launch.atomic_files import write_atomically


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/ds_encdec`, which need not exist. Raises RuntimeError without that variable and a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ds_encdec")


def cached(name: str, made_from: Iterable[bytes], make: Callable[[], str]) -> str:
    """The text that `make` returns, or returned to an earlier call with this `name` and `made_from`.

    It is kept in `$XDG_CACHE_HOME/ds_encdec/NAME-DIGEST.json`: a line with its digest, and a line of JSON. No run ends
    for the cache's sake: without a home, or an OSError from `made_from`, `make` is called every time; a file that is
    damaged is written anew; one that cannot be written is not.
    """
    path = None
    with suppress(OSError, RuntimeError, ValueError):  # of these the last two: no home; no text, or not two lines
        path = cache_folder() / f"{name}-{_digest(made_from)}.json"
        digest, line = path.read_text().split("\n")
        if digest == _digest([line.encode()]):
            return json.loads(line)
    text = make()
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(text)
            write_atomically(path, f"{_digest([line.encode()])}\n{line}")
    return text


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]
