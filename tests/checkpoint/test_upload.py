"""Copies of a run's outputs on another file system: complete or not to be taken for complete, and never in the way."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from saves import make_manager, save

from ds_encdec.base.types import ConfigError, TrainingState
from ds_encdec.checkpoint.manifest import MANIFEST, verify_checkpoint
from ds_encdec.checkpoint.upload import Uploads
from ds_encdec.launch.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(str(tmp_path / "run"))
    run.root.mkdir()
    return run


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def tell(uploads: Uploads, checkpoint: Path) -> None:
    uploads.after_save(TrainingState(), checkpoint)


def test_checkpoints_and_exports_arrive_whole(run: RunFolder, there: Path) -> None:
    manager = make_manager(run.checkpoints)
    (run.root / "metrics.jsonl").write_text("{}\n")
    run.reference.mkdir()
    for name in ("table.npy", "table.json"):  # without which no copy of a checkpoint of preferences could be resumed
        (run.reference / name).write_text(name)
    uploads = Uploads(run, f"file://{there}")
    tell(uploads, save(manager, 1, "best"))
    tell(uploads, save(manager, 2, "final"))
    (run.exports / "final").mkdir(parents=True)
    (run.exports / "final" / "config.json").write_text("{}")
    uploads.finish()
    for step in (1, 2):
        assert verify_checkpoint(there / "checkpoints" / f"step-{step:08d}").step == step
    assert (there / "export" / "final" / "config.json").read_text() == "{}"
    assert (there / "metrics.jsonl").exists()
    assert {path.name for path in (there / "reference").iterdir()} == {"table.npy", "table.json"}
    # A step that is saved again after a rollback takes the place of the earlier one, in another process, too.
    uploads = Uploads(run, f"file://{there}")
    tell(uploads, save(manager, 2))
    uploads.finish()
    for name in (MANIFEST, "zero/shard.bin"):
        copied, own = (folder / "checkpoints" / "step-00000002" / name for folder in (there, run.root))
        assert copied.read_bytes() == own.read_bytes()


def test_what_fails_is_no_manifest_a_warning_and_tried_again(
    run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, tried, put = make_manager(run.checkpoints), threading.Event(), LocalFileSystem.put_file
    broken = True

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        if broken and path.endswith("shard.bin"):
            tried.set()
            raise ConnectionError("the line is down")
        put(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    uploads = Uploads(run, f"file://{there}")
    with caplog.at_level(logging.WARNING):
        tell(uploads, save(manager, 1))
        assert tried.wait(30)
        assert not list(there.rglob(MANIFEST))
        broken = False
        tell(uploads, save(manager, 2))
        uploads.finish()
    assert "ConnectionError: the line is down. It is tried again after the next save." in caplog.text
    assert sorted(path.parent.name for path in there.rglob(MANIFEST)) == ["step-00000001", "step-00000002"]


def test_half_of_a_second_copy_has_no_manifest(run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, uploads = make_manager(run.checkpoints), Uploads(run, f"file://{there}")
    tell(uploads, save(manager, 1))
    uploads.finish()
    assert list(there.rglob(MANIFEST))

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        raise ConnectionError("the line is down")

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    tell(uploads, save(manager, 1))
    uploads.finish()
    assert not list(there.rglob(MANIFEST))


def test_a_slow_copy_holds_nothing_up_and_what_was_deleted_meanwhile_is_left_out(
    run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, copies, put = make_manager(run.checkpoints, keep=1), threading.Event(), LocalFileSystem.put_file

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        assert copies.wait(30)
        put(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    uploads = Uploads(run, f"file://{there}")
    for step in (1, 2, 3):
        tell(uploads, save(manager, step))  # returns although nothing is copied yet
    copies.set()
    uploads.finish()
    assert [path.parent.name for path in there.rglob(MANIFEST)] == ["step-00000003"]


def test_a_step_that_a_rollback_saves_again_while_it_is_copied_arrives_whole(
    run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, put = make_manager(run.checkpoints), LocalFileSystem.put_file
    uploads, step = Uploads(run, f"file://{there}"), run.checkpoints / "step-00000001"

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        put(self, path, *arguments, **options)
        if path.endswith("shard.bin") and (step / "zero/shard.bin").read_bytes() == first:
            shutil.rmtree(step)
            save(manager, 1)

    first = (save(manager, 1) / "zero/shard.bin").read_bytes()
    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    tell(uploads, step)
    uploads.finish()
    assert verify_checkpoint(there / "checkpoints" / step.name).step == 1
    assert (there / "checkpoints" / step.name / "zero/shard.bin").read_bytes() != first


def test_a_new_run_does_not_write_over_the_copies_of_another(run: RunFolder, there: Path, tmp_path: Path) -> None:
    url = f"file://{there}"
    run.run_json.write_text("{}")
    uploads = Uploads(run, url)
    uploads.claim("auto")
    tell(uploads, save(make_manager(run.checkpoints), 1))
    uploads.finish()
    Uploads(run, url).claim("auto")  # continues from its own checkpoints
    Uploads(RunFolder(str(tmp_path / "other")), url).claim(str(run.checkpoints / "step-00000001"))
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match=r"infra.upload_to: .* already holds the copies of a run"):
            Uploads(RunFolder(str(tmp_path / "other")), url).claim(resume)


def test_a_password_comes_from_the_environment_and_is_not_logged(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "ftp", {"username": "someone", "password": "hunter2"})  # of FSSPEC_FTP_…
    uploads = Uploads(run, "ftp://127.0.0.1:9/run")
    with caplog.at_level(logging.INFO):
        uploads.claim(None)
        tell(uploads, save(make_manager(run.checkpoints), 1))
        uploads.finish()
    assert "infra.upload_to=ftp://127.0.0.1:9/run: ConnectionRefusedError" in caplog.text
    assert "hunter2" not in caplog.text
