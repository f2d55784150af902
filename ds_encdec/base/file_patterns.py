"""Finds local files by their paths, or by patterns of them (`*`, `?`, `[abc]`, and `**` for folders at any depth)."""

import os
from collections.abc import Iterator, Sequence
from glob import escape, iglob


def named_files(name: str, folder: str = "") -> Iterator[str]:
    """Yield the files that `name` means, in no order: the one with this path, or else all that it matches as a pattern.
    `folder`: where a relative `name` starts; it is no pattern. Brackets in `name` are literal if such a folder exists:
    those of `run[1]/*.csv` if there is a folder `run[1]`."""
    name = os.path.expanduser(name)
    if os.path.isfile(path := os.path.join(folder, name)):
        yield path
        return
    *folders, last = name.split("/")
    here = "" if os.path.isabs(name) else os.path.join(folder, "")
    pattern = escape(here)
    for part in folders:
        is_there = not any(mark in part for mark in "*?") and os.path.isdir(f"{here}{part}")
        here, pattern = f"{here}{part}/", f"{pattern}{escape(part) if is_there else part}/"
    yield from filter(os.path.isfile, iglob(pattern + last, recursive=True))


def no_file_matches(patterns: Sequence[str]) -> str:
    """Return the message for patterns without a file, with advice on folders."""
    folders = ", ".join(pattern for pattern in patterns if os.path.isdir(os.path.expanduser(pattern)))
    advice = f". {folders}: a folder; add /** for its files" if folders else ""
    return f"no file matches {', '.join(patterns)} (looked from {os.getcwd()}){advice}"
