"""Files that appear whole or not at all, and the user's cache, no trouble with which ends a run."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_encdec.launch.disk import atomic_file, build_folder, cached, write_atomically

TEXT = 'two lines\nof "text" 日本 \ud83d'


@pytest.mark.parametrize("error", [OSError("full"), ValueError("a bug"), KeyboardInterrupt()])
def test_what_goes_wrong_leaves_the_old_content_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            assert path.read_text() == "old"
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_text_is_utf8_bytes_are_kept_and_permissions_are_those_given(tmp_path: Path) -> None:
    for content, written in (("日本\n", "日本\n".encode()), (b"\xff\r\n", b"\xff\r\n")):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == written
    with atomic_file(tmp_path / "private", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_the_build_folder_is_the_users_or_the_one_that_the_user_names(tmp_path: Path) -> None:
    assert build_folder({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/root"}).parent == tmp_path / "ds_encdec"
    assert build_folder({"HOME": "/home/ada"}).parent == Path("/home/ada/.cache/ds_encdec")
    assert build_folder({"TORCH_EXTENSIONS_DIR": "/scratch/ext", "HOME": "/root"}) == Path("/scratch/ext")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_encdec"


def test_a_text_is_made_once_for_each_name_and_source(cache_folder: Path) -> None:
    assert cached("thing", [b"a", b"b"], lambda: TEXT) == TEXT
    for name, made_from in (("thing", [b"ab"]), ("thing", [b"a", b"c"]), ("other", [b"a", b"b"])):
        assert cached(name, made_from, lambda: "another") == "another"
    assert cached("thing", [b"a", b"b"], lambda: pytest.fail("made again")) == TEXT
    assert sorted(path.name.split("-")[0] for path in cache_folder.iterdir()) == ["other", "thing", "thing", "thing"]


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:-1], lambda content: b"null", lambda content: b"\xff" * 50],
)
def test_a_damaged_file_is_replaced(cache_folder: Path, damage: Callable[[bytes], bytes]) -> None:
    cached("thing", [], lambda: TEXT)
    (path,) = cache_folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert cached("thing", [], lambda: TEXT) == TEXT
    assert path.read_bytes() == whole


def test_without_a_cache_the_text_is_made_every_time(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def made_from() -> Iterator[bytes]:
        yield (tmp_path / "nowhere.py").read_bytes()

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    assert cached("thing", made_from(), lambda: TEXT) == TEXT
    assert not cache_folder.exists()
    cache_folder.touch()
    assert cached("thing", [], lambda: TEXT) == TEXT
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert cached("thing", [], lambda: TEXT) == TEXT
