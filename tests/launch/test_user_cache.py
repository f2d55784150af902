"""The user's cache: what is in it is believed if it is whole, and no trouble with it ends a run."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_encdec.launch.disk import cached

TEXT = 'two lines\nof "text" 日本 \ud83d'


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_encdec"


def not_made() -> str:
    pytest.fail("made although it is cached")


def test_what_was_made_is_kept(cache_folder: Path) -> None:
    assert cached("thing", [b"a", b"b"], lambda: TEXT) == TEXT
    assert cached("thing", [b"a", b"b"], not_made) == TEXT
    for name, made_from in (("thing", [b"ab"]), ("thing", [b"a", b"c"]), ("other", [b"a", b"b"])):
        assert cached(name, made_from, lambda: "another") == "another"
    assert cached("thing", [b"a", b"b"], not_made) == TEXT
    assert sorted(path.name.split("-")[0] for path in cache_folder.iterdir()) == ["other", "thing", "thing", "thing"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"null",
        lambda content: b"\xff" * 50,
    ],
)
def test_a_damaged_file_is_made_anew(cache_folder: Path, damage: Callable[[bytes], bytes]) -> None:
    cached("thing", [], lambda: TEXT)
    (path,) = cache_folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert cached("thing", [], lambda: TEXT) == TEXT
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_made_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached("thing", [], lambda: TEXT) == TEXT


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert cached("thing", [], lambda: TEXT) == TEXT


def test_what_cannot_be_named_is_not_kept(tmp_path: Path, cache_folder: Path) -> None:
    def made_from() -> Iterator[bytes]:
        yield (tmp_path / "nowhere.py").read_bytes()

    assert cached("thing", made_from(), lambda: TEXT) == TEXT
    assert not cache_folder.exists()
