"""The folder of an evaluation: its facts, the predictions so far, and the figures at its end.

evaluation.json        all that decides the predictions; an evaluation is continued only if all of it is the same
predictions.jsonl      a line for each example, appended as they are made; in the order of the split at the end
predictions.rank1.jsonl  …  those of other ranks, until the end
metrics.json           the figures, at the end
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from ds_encdec.base.types import ConfigError, OutputLockedError
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.launch.run_folder import lock_file
from ds_encdec.monitor.metrics_file import strict_json

_FILES_OF_A_MODEL = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*.json")


def model_digest(folder: Path) -> str:
    """Return a SHA-256 over the files of a model that decide its output."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _FILES_OF_A_MODEL for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


class Predictions:
    """The predictions in `folder`, by the number of their example; each rank appends to its own file. A line that a
    kill has cut is dropped, and its example is generated again."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._path = folder / ("predictions.jsonl" if rank == 0 else f"predictions.rank{rank}.jsonl")
        self._writing = Writing(folder, "The evaluation", "Make room, and start it again: it goes on from here.", rank)
        self.records: dict[int, dict[str, Any]] = {}
        for path in folder.glob("predictions*.jsonl"):
            *lines, torn = path.read_bytes().split(b"\n")
            self.records |= {record["number"]: record for record in map(json.loads, lines)}
            if torn and path == self._path:
                os.truncate(path, path.stat().st_size - len(torn))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records, each with its `number`; they are on the disk on return."""
        with self._writing.explain_refusals(), self._path.open("ab") as file:
            file.write("".join(map(_line, records)).encode())
            file.flush()
            os.fsync(file.fileno())
        self.records |= {record["number"]: dict(record) for record in records}

    def finish(self, records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> None:
        """Write `records`, those of all ranks in order, as the one file of predictions, and write the figures."""
        with self._writing.explain_refusals():
            write_atomically(self._folder / "predictions.jsonl", "".join(map(_line, records)))
            write_atomically(self._folder / "metrics.json", json.dumps(strict_json(metrics), indent=2) + "\n")
            for path in self._folder.glob("predictions.rank*.jsonl"):
                path.unlink()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(strict_json(record), ensure_ascii=False) + "\n"


def claim(folder: Path, facts: Mapping[str, Any]) -> IO[str]:
    """Begin an evaluation in `folder`, or continue the one in it; it is this process's until the returned file is
    closed. Raises ConfigError that names the differences if its evaluation differs from `facts`, and OutputLockedError
    if another process is writing into it."""
    header = folder / "evaluation.json"
    with (
        Writing(folder, "The evaluation", "Make room, or choose another --out.").explain_refusals(),
        ExitStack() as undo,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        lock = undo.enter_context(open(folder / ".lock", "a"))
        if not lock_file(lock):
            raise OutputLockedError(f"--out: another process is writing its evaluation into {folder}")
        if header.exists():
            _require_same(header, facts)
        else:
            write_atomically(header, json.dumps(facts, indent=2) + "\n")
        undo.pop_all()
        return lock


def is_free(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether `folder` has no evaluation, or one of the same `facts`."""
    try:
        _require_same(folder / "evaluation.json", facts)
    except FileNotFoundError:
        return True
    except ConfigError:
        return False
    return True


def _require_same(header: Path, facts: Mapping[str, Any]) -> None:
    try:
        earlier = json.loads(header.read_text())
        differing = [name for name in {**facts, **earlier} if facts.get(name) != earlier.get(name)]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--out: {header} cannot be read ({error}); choose another folder, or delete it") from error
    if differing:
        changes = (f"{name} ({earlier.get(name)} there, {facts.get(name)} now)" for name in differing)
        raise ConfigError(
            f"--out: {header.parent} has the predictions of another evaluation, which differs in {', '.join(changes)}. "
            "Choose another folder, or delete it"
        )
