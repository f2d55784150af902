"""Files that appear whole or not at all, and the user's cache, no trouble with which ends a run."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ds_encdec.launch.disk import atomic_file, build_folder, cached, disk_error, write_atomically

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


def test_the_build_folder_is_the_users_or_the_one_that_the_user_names(tmp_path: Path) -> None:
    assert build_folder({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/root"}).parent == tmp_path / "ds_encdec"
    assert build_folder({"TORCH_EXTENSIONS_DIR": "/scratch/ext", "HOME": "/root"}) == Path("/scratch/ext")


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


def test_which_errors_are_the_disks() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert disk_error(raised(ValueError, full, explicitly=True)) is full
    assert disk_error(raised(RuntimeError, full, explicitly=False)) is full  # torch.save
    assert disk_error(raised(KeyError, full, explicitly=False)) is None  # a bug where an OSError was handled
    network = TimeoutError(errno.ETIMEDOUT, "timed out")
    assert disk_error(raised(RuntimeError, network, explicitly=True)) is None
