"""The checkpoint that a run resumes from: the newest whole one or the named one, and no damaged or foreign one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_checkpoints import flip_byte
from saves import NUM_BYTES, find, found, make_manager, save

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import find_checkpoint
from ds_encdec.launch.host_collectives import HostCollectives


def test_nothing_to_resume(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    assert find(manager, "auto") is None
    assert find(manager, None) is None
    with pytest.raises(CheckpointError, match="no such folder"):
        find(manager, str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        find(manager, str(tmp_path / "empty"))
    save(manager, 1, "final")
    with pytest.raises(CheckpointError, match=r"give .*final"):
        find(manager, str(tmp_path))


@pytest.mark.parametrize("damage", [flip_byte, lambda shard: os.truncate(shard, NUM_BYTES - 1), Path.unlink])
def test_auto_passes_over_a_damaged_checkpoint_and_a_path_is_refused(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    newest = save(manager, 2)
    shard = newest / "zero" / "shard.bin"
    damage(shard)
    assert found(manager).manifest.step == 1
    with pytest.raises(CheckpointError, match=r"shard\.bin"):
        find(manager, str(newest))


def test_auto_looks_no_later_than_it_is_told(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    for step in (2, 4, 6):
        save(manager, step)
    for latest, step in ((7, 6), (5, 4), (4, 4), (1, None)):
        newest = find_checkpoint(manager.folder, HostCollectives(), "auto", at_most=latest)
        assert (newest and newest.manifest.step) == step


def test_auto_never_starts_anew_over_damaged_checkpoints(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    for step in (1, 2):
        (save(manager, step) / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole"):
        find(manager, "auto")


def test_a_foreign_file_or_link_is_refused_before_anything_reads_it(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 1)
    foreign = path / "zero" / "foreign_optim_states.pt"
    foreign.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"foreign_optim_states\.pt: not in the manifest"):
        find(manager, str(path))
    foreign.unlink()
    shard = path / "zero" / "shard.bin"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a symbolic link"):
        find(manager, str(path))


def test_what_other_run_and_other_ranks_cannot_use_is_refused_before_large_files_are_read(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    newest = save(manager, 2)
    (newest / "zero" / "shard.bin").write_bytes(b"x" * 1000)  # nobody notices: it is not read
    seen = []

    def refuse(checkpoint: Checkpoint) -> None:
        seen.append(checkpoint.read_json("trainer.json"))
        raise ConfigError("3 ranks do not divide")

    for resume in ("auto", str(newest)):
        with pytest.raises(ConfigError, match="3 ranks"):
            find_checkpoint(tmp_path, HostCollectives(), resume, accept=refuse)
    assert seen == [{"step": 2}, {"step": 2}]  # refused, not passed over
    (newest / "trainer.json").write_text(json.dumps({"step": 9}))
    with pytest.raises(ConfigError):
        find_checkpoint(tmp_path, HostCollectives(), "auto", accept=refuse)
    assert seen[2:] == [{"step": 1}]  # a damaged one is not even asked about


def test_a_checkpoint_of_another_run_is_refused_where_this_run_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    foreign = save(make_manager(tmp_path / "a"), 10)
    manager = make_manager(tmp_path / "b")
    assert find(manager, str(foreign)) is not None
    own = save(manager, 3, "final")
    with pytest.raises(
        CheckpointError, match=rf"{foreign} is not one of .*{tmp_path / 'b'}.*step-00000003.*output_dir"
    ):
        find(manager, str(foreign))
    assert find(manager, str(tmp_path / "b" / "final")) is not None
    aside = own.with_name("abandoned-step-00000009")
    foreign.rename(aside)
    with pytest.raises(CheckpointError, match="is not one of this run's"):
        find(manager, str(aside))
