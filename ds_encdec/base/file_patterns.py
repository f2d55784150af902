"""Local files by their paths, or by patterns of them (`*`, `?`, `[abc]`, and `**` for folders at any depth)."""

import os
import re
from collections.abc import Iterator, Sequence
from glob import escape, iglob

_VARIABLE = re.compile(r"\$(\{[^}]*\}|[A-Za-z_]\w*)")


def named_files(name: str, folder: str = "") -> Iterator[str]:
    """The files that `name` means, in no order: one with this path, or else all that it matches as a pattern.

    `folder`: where a relative `name` starts, itself no pattern. Folders in `name` that are there as they are written
    are no patterns either: of `run[1]/*.csv` the brackets stand for themselves where there is a folder `run[1]`.
    """
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
    """The message for paths and patterns without a file, with what to write for a folder, or for a bracket."""
    folders = ", ".join(pattern for pattern in patterns if os.path.isdir(os.path.expanduser(pattern)))
    advice = f". {folders}: a folder; add /** for its files" if folders else ""
    if any("[" in pattern for pattern in patterns):
        advice += ". In a pattern [abc] is one of three letters: write [[] for a bracket"
    advice += "".join(f". {found}" for found in map(variable_in, patterns) if found)
    return f"no file matches {', '.join(patterns)} (looked from {os.getcwd()}){advice}"


def variable_in(name: str) -> str | None:
    """Say that a path has a shell's variable in it; None for one that has none."""
    found = _VARIABLE.search(name)
    return f"{found[0]} is part of the name: variables are not replaced here, write the value" if found else None
