"""The lock on a run's folder, and run.json: how a run began and ended, without secrets."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_calls import Call, recorded

from ds_encdec.base.types import ConfigError, OutputLockedError, Preempted
from ds_encdec.launch import run_folder
from ds_encdec.launch.disk import atomic_file, cached, disk_error, write_atomically
from ds_encdec.launch.run_folder import RunFolder, RunFolderGoneError, masked


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(str(tmp_path / "run"))
    folder.claim(resume=False)
    return folder


def again(folder: RunFolder) -> RunFolder:
    return RunFolder(str(folder.root))


def test_a_second_run_is_refused_unless_it_resumes(folder: RunFolder) -> None:
    folder.metrics.touch()
    folder.write_status("failed", reason="no such column", exit_code=4)
    folder.release()
    folder = again(folder)
    folder.claim(resume=False)  # it failed before its first step
    folder.metrics.write_text("{}\n")
    for resume in (False, True):
        with pytest.raises(OutputLockedError, match="in use by process"):
            again(folder).claim(resume=resume)
    folder.release()
    for _ in range(2):
        with pytest.raises(OutputLockedError, match="already holds a run") as refused:
            again(folder).claim(resume=False)
        assert refused.value.common  # rank 0 alone prints it
    assert refused.traceback  # which holds on to the refused claim, but not to its lock
    again(folder).claim(resume=True)


def test_ranks_that_fail_together_keep_the_first_reason(folder: RunFolder) -> None:
    folder.write_status("running", world_size=8)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(fail, [(str(folder.root), rank) for rank in range(40)])
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["world_size"]) == ("failed", 4, 8)
    folder.write_status("failed", reason="a peer is gone", exit_code=1)
    assert folder.read_status() == status
    folder.write_status("running")
    assert folder.read_status()["state"] == "running"


def fail(root: str, rank: int) -> None:
    RunFolder(root).write_status("failed", reason=f"rank {rank}", exit_code=4)


def test_a_good_end_is_kept_until_the_next_start(folder: RunFolder) -> None:
    folder.write_status("preempted")
    folder.write_status("failed", reason="a peer is gone", exit_code=9)
    assert folder.read_status()["state"] == "preempted"
    folder.release()
    folder = again(folder)
    assert folder.claim(resume=True)["state"] == "preempted"
    for reason in ("refused", "a peer is gone"):
        folder.write_status("failed", reason=reason, exit_code=5)
    assert (folder.read_status()["state"], folder.read_status()["reason"]) == ("failed", "refused")
    folder.run_json.unlink()
    folder.write_status("failed", reason="after somebody deleted it", exit_code=5)
    assert folder.read_status()["exit_code"] == 5


@pytest.mark.parametrize(("state", "exit_code"), [("running", None), ("failed", 9), ("preempted", 75)])
def test_a_stop_between_two_starts_ends_the_second(folder: RunFolder, state: str, exit_code: int | None) -> None:
    folder.write_status(state, exit_code=exit_code)
    folder.release()
    assert "if it is started again, that start ends at once" in folder.ask_to_stop()
    with pytest.raises(Preempted, match="ds-encdec stop was used before this start"):
        again(folder).claim(resume=True)
    status = folder.read_status()
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert "nothing to stop" in folder.ask_to_stop()
    assert "ds-encdec stop" in again(folder).claim(resume=True)["reason"]


@pytest.mark.parametrize(("state", "exit_code"), [("completed", 0), ("failed", 4)])
def test_a_stop_that_came_too_late_does_not_end_the_next_start(folder: RunFolder, state: str, exit_code: int) -> None:
    folder.write_status("running")
    assert "the run saves after its step" in folder.ask_to_stop()
    folder.write_status(state, exit_code=exit_code)
    folder.release()
    again(folder).claim(resume=True)
    assert not folder.stop_file.exists()


def test_a_file_system_without_locks_is_not_taken_for_a_held_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunFolder(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"infra\.output_dir: .*cannot be locked .*-o flock.*another file system"):
        folder.claim(resume=False)
    folder.write_status("failed", reason="told by a host that cannot lock", exit_code=5)
    assert folder.read_status()["exit_code"] == 5


def test_on_a_full_disk_an_ending_is_written_over_the_old_text(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_status("running", world_size=2)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_atomically", full)
    done = recorded(monkeypatch)
    folder.write_status("failed", reason="https://user:hunter2@host/" + "x" * 100_000, exit_code=5)
    assert done[-1] == Call("fsync", folder.run_json)
    ended = folder.read_status()
    assert (ended["state"], ended["exit_code"], ended["world_size"]) == ("failed", 5, 2)
    assert ended["reason"].startswith("https://***@host/xxx")
    assert folder.run_json.stat().st_size < 4096


@pytest.mark.parametrize(
    "content", ["", "[1]", "\0" * 300, '{"state": 3}', '{"state": "running", "reason": null}', "[" * 9999]
)
def test_a_damaged_run_json_counts_as_none(folder: RunFolder, content: str) -> None:
    folder.write_status("running")
    folder.run_json.write_text(content)
    folder.release()
    assert again(folder).claim(resume=True) == {}


def test_a_folder_is_made_and_an_ending_is_written_behind_what_they_rely_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = recorded(monkeypatch)
    folder = RunFolder(str(tmp_path / "of" / "run"))
    folder.claim(resume=False)
    assert {Call("fsync", tmp_path), Call("fsync", tmp_path / "of")} <= {*done}
    for path in (folder.metrics, folder.events):
        path.write_text("{}\n")
    folder.write_status("running")
    done.clear()
    folder.write_status("completed", exit_code=0)
    named = done.index(Call("replace", folder.run_json))
    assert {Call("fsync", path) for path in (folder.metrics, folder.events, folder.root)} <= {*done[:named]}


def test_lines_that_cannot_be_flushed_cost_an_error_and_no_ending(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.metrics.write_text("{}\n")
    recorded(monkeypatch, lambda call: call.path == folder.metrics)
    folder.write_status("completed", exit_code=0)
    assert folder.read_status()["state"] == "completed"
    assert f"{folder.metrics}: its last lines may not be on the disk: [Errno 5]" in caplog.text


def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.checkpoints.touch()
    with pytest.raises(ConfigError, match=f"{folder.checkpoints}: File exists; use another folder"):
        folder.claim(resume=True)


def test_a_run_ends_if_its_folder_is_gone_and_not_if_only_the_checkpoints_are(folder: RunFolder) -> None:
    folder.checkpoints.rmdir()
    folder.require_present()
    (folder.root / ".lock").unlink()
    with pytest.raises(RunFolderGoneError, match=rf"{folder.root} was deleted or replaced"):
        folder.require_present()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--token", "hunter2", "HF_TOKEN=hunter2"], "train.py --token '***' 'HF_TOKEN=***'"),
        (["train.py", 'x={"client_secret": "hunter2", "a": 1}'], """train.py 'x={"client_secret": ***, "a": 1}'"""),
        (["train.py", "x.password=correct horse", "--key", "a b"], "train.py 'x.password=***' --key '***'"),
        (["train.py", "x=s3://me:hun/hunter2@host/f"], "train.py 'x=s3://***@host/f'"),
        (["train.py", "x={token: 'it''hunter2', a: 1}"], """train.py 'x={token: ***, a: 1}'"""),
        (["train.py", "phases.full.num_tokens=5", "model.tokenizer_name_or_path=gpt2"], None),
        ([], ""),
    ],
)
def test_secrets_are_masked_and_nothing_else(words: list[str], shown: str | None) -> None:
    assert masked(words) == (" ".join(words) if shown is None else shown)


TEXT = 'two lines\nof "text" 日本 \ud83d'


def test_what_goes_wrong_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    write_atomically(path, "日本\n")
    assert path.read_bytes() == "日本\n".encode()
    with atomic_file(tmp_path / "private", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_a_text_is_made_once_for_each_name_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached("thing", [b"a", b"b"], lambda: TEXT) == TEXT
    (path,) = (tmp_path / "ds_encdec").iterdir()
    for name, made_from in (("thing", [b"ab"]), ("other", [b"a", b"b"])):
        assert cached(name, made_from, lambda: "another") == "another"
    assert cached("thing", [b"a", b"b"], lambda: pytest.fail("made again")) == TEXT
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"null", b"\xff" * 50):
        path.write_bytes(damaged)
        assert cached("thing", [b"a", b"b"], lambda: TEXT) == TEXT
        assert path.read_bytes() == whole


def test_without_a_cache_the_text_is_made_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_from() -> Iterator[bytes]:
        yield (tmp_path / "nowhere.py").read_bytes()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached("thing", made_from(), lambda: TEXT) == TEXT
    (tmp_path / "ds_encdec").touch()
    assert cached("thing", [], lambda: TEXT) == TEXT


def raised(kind: type[Exception], earlier: OSError, *, explicitly: bool) -> Exception:
    try:
        try:
            raise earlier
        except OSError as error:
            raise kind("later") from (error if explicitly else None)
    except Exception as error:
        return error


def test_a_disk_without_inodes_is_told_apart_from_a_full_one(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from ds_encdec.launch.disk import Writing\n"
        "with Writing(Path(sys.argv[1]), 'The run', 'Free space.').explain_refusals():\n"
        "    [Path(sys.argv[1], str(number)).touch() for number in range(9)]"
    )
    mounted = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
    script = 'mount -t tmpfs -o size=1m,nr_inodes=5 none "$3" || exit 99; exec "$0" "$@"'
    if not shutil.which("unshare"):
        pytest.skip("no file system may be mounted here")
    ended = subprocess.run(
        [*mounted, script, sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    if ended.returncode == 99:
        pytest.skip("no file system may be mounted here")
    assert "1.0 MB free" in ended.stderr
    assert "No inode is left there: delete files, however small. Free space." in ended.stderr


def test_which_errors_are_the_disks() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert disk_error(raised(ValueError, full, explicitly=True)) is full
    assert disk_error(raised(RuntimeError, full, explicitly=False)) is full  # torch.save
    assert disk_error(raised(KeyError, full, explicitly=False)) is None  # a bug where an OSError was handled
    network = TimeoutError(errno.ETIMEDOUT, "timed out")
    assert disk_error(raised(RuntimeError, network, explicitly=True)) is None
