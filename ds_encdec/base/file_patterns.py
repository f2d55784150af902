"""Finds local files by their paths, or by patterns of them (`*`, `?`, `[abc]`, and `**` for folders at any depth)."""

import os
from collections.abc import Iterator, Sequence
from glob import escape, iglob


def named_files(name: str, folder: str = "") -> Iterator[str]:
    """Yield the files that `name` means, in no order: the one with this path, or else all that it matches as a pattern.
    `folder`: where a relative `name` starts; it is no pattern."""
    name = os.path.expanduser(name)
    if os.path.isfile(path := os.path.join(folder, name)):
        yield path
    else:
        yield from filter(os.path.isfile, iglob(os.path.join(escape(folder), name), recursive=True))


def no_file_matches(patterns: Sequence[str]) -> str:
    """Return the message for patterns without a file, with advice on folders."""
    folders = ", ".join(pattern for pattern in patterns if os.path.isdir(os.path.expanduser(pattern)))
    advice = f". {folders}: a folder; add /** for its files" if folders else ""
    return f"no file matches {', '.join(patterns)} (looked from {os.getcwd()}){advice}"
