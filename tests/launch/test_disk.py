"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_encdec.launch.disk import atomic_file, build_folder, write_atomically


def write_half(path: Path, error: BaseException) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_text() == "old"
        raise error


@pytest.mark.parametrize("error", [OSError("full"), ValueError("a bug"), KeyboardInterrupt()])
def test_what_goes_wrong_leaves_the_old_content_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_text_is_utf8_and_bytes_are_as_they_are(tmp_path: Path) -> None:
    for content, written in (("日本\n", "日本\n".encode()), (b"\xff\r\n", b"\xff\r\n")):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == written


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "private", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_build_folder_is_private_and_stable(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "HOME": "/root"}
    folder = build_folder(environ)
    assert folder == build_folder(environ)
    assert folder.parent == tmp_path / "ds_encdec"
    assert build_folder({"HOME": "/home/ada"}).parent == Path("/home/ada/.cache/ds_encdec")


def test_the_users_build_folder_wins() -> None:
    assert build_folder({"TORCH_EXTENSIONS_DIR": "/scratch/ext", "HOME": "/root"}) == Path("/scratch/ext")
