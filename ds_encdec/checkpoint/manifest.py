"""The manifest of a checkpoint: every file with its size and SHA-256, and a SHA-256 of the manifest's own content. It
is written last, so a folder without one is no checkpoint, and checked before anything is unpickled."""

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.yaml.plain_files import kind_of, open_plain, read_json
from ds_encdec.launch.disk import flush_folder, write_atomically
from ds_encdec.launch.run_folder import code_facts

MANIFEST = "manifest.json"
FORMAT_VERSION = 5
_STRICT = ConfigDict(extra="forbid")
_Count = Annotated[StrictInt, Field(ge=0)]


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not match its manifest; an older one may be whole."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class FileRecord:
    """One file: its path relative to the checkpoint, its size, and its SHA-256 in hex."""

    path: StrictStr
    num_bytes: StrictInt
    sha256: StrictStr


@dataclass(frozen=True, slots=True, config=_STRICT)
class Manifest:
    """The files of a checkpoint and their origin: `engine` is the name of a row of `engines.ENGINES`; `code_facts` has
    `code` and `commit`. `state_is_finite`: no element of its tensors is NaN or infinite, judged before they were
    written."""

    step: _Count
    world_size: _Count
    engine: StrictStr
    files: tuple[FileRecord, ...]
    state_is_finite: StrictBool
    code: StrictStr
    commit: StrictStr | None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        content = asdict(self)
        return json.dumps(content | {"sha256": _content_hash(content)}, indent=1) + "\n"

    @property
    def num_bytes(self) -> int:
        """Size of the whole checkpoint."""
        return sum(record.num_bytes for record in self.files)


def record_file(path: Path, root: Path) -> FileRecord:
    """Flush `path` to disk and describe it."""
    with open_plain(path) as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(path.relative_to(root).as_posix(), file.tell(), digest)


def seal(folder: Path, *, step: int, world_size: int, engine: str, engine_files: Sequence[FileRecord]) -> Manifest:
    """Make `folder` durable and write its manifest. The engine's files are recorded already, and their tensors were
    judged finite. Raises OSError."""
    known = {folder / record.path for record in engine_files}
    rest = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in known]
    files = (*engine_files, *(record_file(path, folder) for path in rest))
    manifest = Manifest(step, world_size, engine, files, state_is_finite=True, **code_facts())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_folder(inner)
    write_atomically(folder / MANIFEST, manifest.to_json())
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a committed checkpoint. Raises DamagedCheckpointError with the problem."""
    path = checkpoint / MANIFEST
    try:
        content = read_json(path)
        if (version := content.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"its format version is {version!r:.40}; this version of ds_encdec reads {FORMAT_VERSION}")
        if content.pop("sha256", None) != _content_hash(content):
            raise ValueError("its own SHA-256 does not match, so it was changed or damaged")
        manifest = TypeAdapter(Manifest).validate_python(content)
        if not manifest.state_is_finite:
            raise DamagedCheckpointError(f"{path}: the state is not finite (NaN or infinite). Take an earlier one.")
        return manifest
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}."
        for final in (checkpoint / "final", checkpoint / "checkpoints" / "final"):
            if final.exists():
                problem = f"{checkpoint} is not a checkpoint, but holds some: give {final} or one beside it."
        raise DamagedCheckpointError(problem) from error
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        raise DamagedCheckpointError(
            f"{path} is not a manifest: {'.'.join(map(str, wrong['loc']))} is {wrong['input']!r:.80}: {wrong['msg']}."
        ) from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is not a manifest: {error}.") from error


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Hash all files of a checkpoint and return its manifest. Raises DamagedCheckpointError naming a wrong file."""
    manifest = read_manifest(checkpoint)
    verify_listing(checkpoint, manifest)
    verify_files(checkpoint, manifest.files)
    return manifest


def verify_listing(checkpoint: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError unless there are only the manifest's files, since readers find some by pattern."""
    listed = {record.path for record in manifest.files}
    try:
        modes = {path.relative_to(checkpoint).as_posix(): path.lstat().st_mode for path in checkpoint.rglob("*")}
    except OSError as error:
        raise DamagedCheckpointError(f"{error.filename or checkpoint}: {error.strerror}.") from error
    present = {path for path, mode in modes.items() if not stat.S_ISDIR(mode)}
    if foreign := sorted(present - listed - {MANIFEST}):
        raise DamagedCheckpointError(f"{checkpoint / foreign[0]}: not in the manifest; the checkpoint was changed.")
    if missing := sorted(listed - present):
        raise DamagedCheckpointError(f"{checkpoint / missing[0]}: missing, but the manifest lists it.")
    for path in sorted(present):
        if kind := kind_of(modes[path]):
            raise DamagedCheckpointError(f"{checkpoint / path}: {kind}; a checkpoint holds plain files.")


def verify_files(checkpoint: Path, records: tuple[FileRecord, ...]) -> None:
    """Compare files with their records. Raises DamagedCheckpointError naming the first that differs."""
    for record in records:
        path = checkpoint / record.path
        try:
            if (size := path.stat().st_size) != record.num_bytes:
                raise DamagedCheckpointError(f"{path}: {size} bytes, but {record.num_bytes} in the manifest.")
            with open_plain(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}, but the manifest lists it.") from error
        if digest != record.sha256:
            raise DamagedCheckpointError(f"{path}: its SHA-256 is not the manifest's; the file was changed or damaged.")


def _content_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
