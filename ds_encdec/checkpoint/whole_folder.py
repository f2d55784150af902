"""Folders that appear under their names once all of them is written, or leave nothing: every way out of this package.

`NAME.tmp` is being written; `.replaced-NAME` is what had the name, while `NAME.tmp` takes it. A process killed at any
moment leaves the earlier folder or the new one, and `clear_leftovers` mends what it leaves under the other names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.launch.disk import Writing, flush_folder
from ds_encdec.types import CheckpointError

if TYPE_CHECKING:  # it imports torch, which a report of a run does without
    from ds_encdec.launch.host_collectives import HostCollectives

_REPLACED = ".replaced-"


def unfinished(final: Path) -> Path:
    """The folder that is to become `final`."""
    return final.with_name(f"{final.name}.tmp")


def begin(final: Path) -> Path:
    """Make `unfinished(final)` an empty folder. Raises OSError."""
    delete(unfinished(final))
    unfinished(final).mkdir(parents=True)
    return unfinished(final)


def name_it(final: Path) -> Path:
    """Give `unfinished(final)`, which is durable, its name; returns where an earlier one of that name is now, if any.

    Raises OSError; then an earlier one is what it was.
    """
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        delete(replaced)  # left where it could not be deleted before
        # Between these two renames the earlier one has no name that counts; `clear_leftovers` gives it back.
        os.rename(final, replaced)
    try:
        os.rename(unfinished(final), final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    return replaced


def clear_leftovers(folder: Path, name: str = "*") -> None:
    """Mend what killed processes left of `name` in `folder`: give back what was being replaced, delete the rest."""
    for replaced in folder.glob(f"{_REPLACED}{name}"):
        original = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if original.exists():
            delete(replaced)
        else:
            replaced.rename(original)
    for path in folder.glob(f"{name}.tmp"):
        delete(path)


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def written_whole(
    out: Path, collectives: HostCollectives | None = None, *, replace: bool = False
) -> Iterator[tuple[Path, Writing]]:
    """Wraps the writing of a folder: where to write it, which is named `out` at the end, or removed by what goes wrong.

    One process writes it, or with `collectives` all ranks do, which leave this together. The Writing must be given the
    bytes to come (`require_space`). Only a kill leaves `out` + `.tmp` behind; the next attempt replaces it. Raises
    CheckpointError where `out` exists and is not empty, unless it is to be replaced, and DiskRefusedError where the
    file system takes no more.
    """
    if not replace:
        refuse_existing(out)
    several = collectives is not None and collectives.world_size > 1
    advice = "Free space there, or name a folder on another file system."
    writing = Writing(out.absolute().parent, str(out), advice, collectives.rank if collectives and several else None)

    def on_rank_zero(action: Callable[[], object]) -> None:
        told = writing.refusals_told()(action)
        collectives.on_rank_zero(told) if collectives is not None else told()

    def commit() -> None:
        for path in (unfinished(out), *unfinished(out).rglob("*")):
            flush_folder(path)  # a network's file system may refuse only now
        replaced = name_it(out)
        flush_folder(out.absolute().parent)
        delete(replaced)

    try:
        on_rank_zero(lambda: begin(out))
        with writing.refusals_told():
            yield unfinished(out), writing
        on_rank_zero(commit)
    except BaseException:
        if not writing.rank:
            shutil.rmtree(unfinished(out), ignore_errors=True)
        raise


def refuse_existing(out: Path) -> None:
    """Raise CheckpointError where `out` is there and not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: nothing was written. Name another folder")
