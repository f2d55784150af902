"""The commit: a checkpoint is whole or invisible, pruned by count, and refused when damaged."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from saves import make_manager, save

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manager import Checkpoint, CheckpointManager
from ds_encdec.checkpoint.manifest import MANIFEST, DamagedCheckpointError, read_manifest, verify_checkpoint
from ds_encdec.launch.agreement import Agreement
from ds_encdec.types import CheckpointError, ConfigError, TrainingState


def test_a_saved_checkpoint_lists_every_file_and_is_found(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 7)
    manifest = read_manifest(path)
    assert {record.path for record in manifest.files} == {"zero/shard.bin", "trainer.json"}
    assert manifest.num_bytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    found = manager.find("auto")
    assert found is not None
    assert found.read_json("trainer.json") == {"step": 7}
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_to_resume(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    assert manager.find("auto") is None
    assert manager.find(None) is None
    with pytest.raises(CheckpointError, match="no such folder"):
        manager.find(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        manager.find(str(tmp_path / "empty"))
    save(manager, 1, "final")
    with pytest.raises(CheckpointError, match=r"give .*final"):
        manager.find(str(tmp_path))


def test_retention_spares_best_and_final(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep=2)
    save(manager, 1, "best")
    for step in (2, 3, 4):
        save(manager, step)
    assert sorted(committed_steps(tmp_path)) == [1, 3, 4]
    save(manager, 5, "best", "final")
    assert sorted(committed_steps(tmp_path)) == [4, 5]
    assert (tmp_path / "best").resolve().name == "step-00000005"


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_auto_passes_over_a_damaged_checkpoint_and_a_path_is_refused(tmp_path: Path, damage: str) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    newest = save(manager, 2)
    shard = newest / "zero" / "shard.bin"
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[500] ^= 1
        shard.write_bytes(content)
    elif damage == "truncate":
        shard.write_bytes(content[:-1])
    else:
        shard.unlink()
    found = manager.find("auto")
    assert found is not None
    assert found.manifest.step == 1
    with pytest.raises(CheckpointError, match=r"shard\.bin"):
        manager.find(str(newest))


def test_auto_never_starts_anew_over_damaged_checkpoints(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    for step in (1, 2):
        (save(manager, step) / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole"):
        manager.find("auto")


def test_a_foreign_file_or_link_is_refused_before_anything_reads_it(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 1)
    foreign = path / "zero" / "foreign_optim_states.pt"
    foreign.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"foreign_optim_states\.pt: not in the manifest"):
        manager.find(str(path))
    foreign.unlink()
    shard = path / "zero" / "shard.bin"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a symbolic link"):
        manager.find(str(path))


def test_going_back_puts_the_later_steps_aside(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep=3)
    save(manager, 10)
    save(manager, 20, "best")
    save(manager, 30, "best")
    back = manager.find(str(tmp_path / "step-00000020"))
    assert back is not None
    state = TrainingState(global_step=20, best_eval_loss=1.5, best_step=20)
    assert manager.adopt(back, state) == state
    assert sorted(committed_steps(tmp_path)) == [10, 20]
    assert [path.name[:23] for path in tmp_path.glob("abandoned-*")] == ["abandoned-step-00000030"]
    assert (tmp_path / "best").resolve().name == (tmp_path / "latest").resolve().name == "step-00000020"
    save(manager, 25)
    found = manager.find("auto")
    assert found is not None
    assert found.manifest.step == 25


def test_a_checkpoint_of_another_run_brings_no_best(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    other = make_manager(tmp_path / "a")
    save(other, 10, "best")
    manager = make_manager(tmp_path / "b")
    found = manager.find(str(tmp_path / "a" / "step-00000010"))
    assert found is not None
    state = manager.adopt(found, TrainingState(global_step=10, best_eval_loss=1.0, best_step=10))
    assert (state.best_eval_loss, state.best_step) == (None, None)
    assert sorted(committed_steps(tmp_path / "a")) == [10]


def test_what_a_kill_at_any_rename_leaves_is_mended(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 3)
    # Killed while the same step was saved again, between the two renames.
    path.rename(tmp_path / f".replaced-{path.name}")
    (tmp_path / f"{path.name}.tmp").mkdir()
    # Killed while a pointer was moved: a link to a folder is no folder.
    (tmp_path / ".latest.tmp").symlink_to(path.name)
    manager.prepare()
    found = manager.find("auto")
    assert found is not None
    assert found.manifest.step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    first = json.loads((save(manager, 3) / MANIFEST).read_text())
    second = json.loads((save(manager, 3) / MANIFEST).read_text())
    assert first != second
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003"]


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
            manager.find(resume, accept=refuse)
    assert seen == [{"step": 2}, {"step": 2}]  # refused, not passed over
    (newest / "trainer.json").write_text(json.dumps({"step": 9}))
    with pytest.raises(ConfigError):
        manager.find("auto", accept=refuse)
    assert seen[2:] == [{"step": 1}]  # a damaged one is not even asked about


def test_a_checkpoint_of_another_run_is_refused_where_this_run_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    foreign = save(make_manager(tmp_path / "a"), 10)
    manager = make_manager(tmp_path / "b")
    assert manager.find(str(foreign)) is not None
    own = save(manager, 3, "final")
    with pytest.raises(
        CheckpointError, match=rf"{foreign} is not one of .*{tmp_path / 'b'}.*step-00000003.*output_dir"
    ):
        manager.find(str(foreign))
    assert manager.find(str(tmp_path / "b" / "final")) is not None
    aside = own.with_name("abandoned-step-00000009")
    foreign.rename(aside)
    with pytest.raises(CheckpointError, match="is not one of this run's"):
        manager.find(str(aside))


def test_verify_reads_every_file(tmp_path: Path) -> None:
    path = save(make_manager(tmp_path), 1)
    assert verify_checkpoint(path) == read_manifest(path)
    shard = path / "zero" / "shard.bin"
    shard.write_bytes(b"x" * 1000)
    with pytest.raises(DamagedCheckpointError, match=rf"{shard}: its SHA-256"):
        verify_checkpoint(path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"infra\.output_dir: cannot write to .*Not a directory"):
        CheckpointManager(tmp_path / "file" / "x", Agreement(), engine_name="test", keep=None).prepare()


def test_what_cannot_be_deleted_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path, keep=1)
    save(manager, 1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr("shutil.rmtree", busy)
    save(manager, 2, "best")
    assert "could not be deleted" in caplog.text
    assert (tmp_path / "best").resolve().name == "step-00000002"
    monkeypatch.undo()
    manager.prepare()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "latest", "step-00000002"]
