"""A folder that appears under its name once all of it is written, or leaves nothing: exports, means, conversions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_encdec.launch.atomic_files import flush_folder, flush_tree
from ds_encdec.launch.disk import Writing
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.types import CheckpointError


@contextmanager
def written_whole(out: Path, collectives: HostCollectives | None = None) -> Iterator[tuple[Path, Writing]]:
    """Wraps the writing of a folder: where to write it, which is named `out` at the end, or removed by what goes wrong.

    One process writes it, or with `collectives` all ranks do, which leave this together. The Writing is to be told how
    many bytes it will be (`require_space`). Only a kill leaves `out` + `.tmp` behind; the next attempt replaces it.
    Raises CheckpointError where `out` exists and is not empty, DiskRefusedError where the file system takes no more.
    """
    refuse_existing(out)
    unfinished = out.with_name(f"{out.name}.tmp")
    several = collectives is not None and collectives.world_size > 1
    advice = "Free space there, or name a folder on another file system."
    writing = Writing(out.absolute().parent, str(out), advice, collectives.rank if collectives and several else None)

    def on_rank_zero(action: Callable[[], object]) -> None:
        def told() -> None:
            with writing.refusals_told():
                action()

        collectives.on_rank_zero(told) if collectives is not None else told()

    def commit() -> None:
        flush_tree(unfinished)  # a network's file system may refuse only now
        unfinished.replace(out)
        flush_folder(out.absolute().parent)

    try:
        on_rank_zero(lambda: _make_empty(unfinished))
        with writing.refusals_told():
            yield unfinished, writing
        on_rank_zero(commit)
    except BaseException:
        if not writing.rank:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def refuse_existing(out: Path) -> None:
    """Raise CheckpointError where `out` is there and not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: nothing was written. Name another folder")
