"""A phase's records of itself, beside its run: with what it began, and how it was judged.

OUTPUT/phases/
  .lock                 held while phases run
  sanity_check/
    phase.yaml          the configuration of its run
    started.json        when it began, from which weights, and what was changed since
    result.json         how it was judged
    export/final/       what it hands on
    …                   the run itself (launch/run_folder.py)
  validation/ …
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.config.schema import FullConfig, Mark, load_saved, marked
from ds_encdec.launch.disk import write_atomically
from ds_encdec.launch.run_folder import RunFolder, lock_file
from ds_encdec.phases import PhaseConfig, exported_weights, phase_before
from ds_encdec.types import ConfigError, OutputLockedError


class PhaseRecords:
    """The records in the folder of a phase. `settings`: the numbers that it has now."""

    def __init__(self, folder: Path, settings: PhaseConfig) -> None:
        self._settings = settings
        self.run = RunFolder(str(folder))
        self.export = exported_weights(folder)
        self.phase_yaml = folder / "phase.yaml"
        self._started = folder / "started.json"
        self._result = folder / "result.json"

    @property
    def is_completed(self) -> bool:
        """True if its run came to its end."""
        return self.run.read_status().get("state") == "completed"

    def begin(self, config: FullConfig, weights_sha256: str | None, changes: Sequence[str] = ()) -> None:
        """Write down what is about to be trained; `weights_sha256` is the checkpoint's that it starts from, if any.

        When it began is kept from the first time, and every one of the `changes` (`accepted_changes`).
        """
        self.phase_yaml.parent.mkdir(parents=True, exist_ok=True)
        before = self._read(self._started)
        changed = [*before.get("changed", ()), *({"time": _now(), "settings": changes} for _ in changes[:1])]
        write_atomically(self.phase_yaml, config.dump_yaml())
        record = {"started": before.get("started", _now()), "weights_sha256": weights_sha256, "changed": changed}
        _write(self._started, record)

    def accepted_changes(self, config: FullConfig, weights_sha256: str | None) -> list[str]:
        """The settings with which this phase goes on other than it began, in words.

        All may change as long as nothing was saved, and the fields with `Mark.TUNABLE` until it is complete. Raises
        ConfigError where others have, or the weights that it started from.
        """
        if not self.is_completed and not committed_steps(self.run.checkpoints):
            return []
        began = load_saved(self.phase_yaml)
        changed = _changed_settings(began, config, starts_from_export=phase_before(self._settings.phase) is not None)
        accepted = [] if self.is_completed else marked(Mark.TUNABLE)
        refused = [words for name, words in changed.items() if name not in accepted]
        if self._read(self._started).get("weights_sha256") != weights_sha256:
            refused.append("the phase before it has been trained anew since")
        if not refused:
            return list(changed.values())
        lanes = f"On other ranks it goes on with data.num_lanes={began.data.num_lanes}. "
        raise ConfigError(
            f"phase {self._settings.phase} in {self.run.root} has begun with other settings: {'; '.join(refused)}. "
            f"{lanes if 'data.num_lanes' in changed else ''}Give the earlier values, or delete (or rename) that folder "
            "to train the phase anew, and those of the phases after it, or choose another infra.output_dir."
        )

    def read_result(self) -> dict[str, Any]:
        """The content of result.json; {} without the file."""
        return self._read(self._result)

    def write_result(self, values: Mapping[str, Any]) -> None:
        """Replace result.json by `values`, when the phase began and ended, and its numbers."""
        record = {
            "phase": self._settings.phase,
            **values,
            "started": self._read(self._started).get("started"),
            "ended": _now(),
            "phase_config": dataclasses.asdict(self._settings),
        }
        _write(self._result, record)

    def is_judged_as_now(self) -> bool:
        """True if its result is by the numbers that it has now."""
        return bool(self.read_result().get("phase_config") == dataclasses.asdict(self._settings))

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); restore it, or delete it") from error


def _changed_settings(before: FullConfig, after: FullConfig, *, starts_from_export: bool) -> dict[str, str]:
    """The settings that decide what a phase learns and that differ: by name, in words.

    The path of the previous phase's export is ignored: it moves with the output folder.
    """
    first, second = _trained_settings(before), _trained_settings(after)
    names = first.keys() - set(marked(Mark.UNTRAINED)) - ({"model.model_name_or_path"} if starts_from_export else set())
    return {
        name: f"{name} was {first[name]!r} and is {second[name]!r}"
        for name in sorted(names)
        if first[name] != second[name]
    }


def _trained_settings(config: FullConfig) -> dict[str, Any]:
    return {
        f"{section}.{field}": value
        for section in ("model", "data", "training")
        for field, value in getattr(config, section).model_dump().items()
    }


@contextmanager
def only_one_pipeline(output: Path) -> Iterator[None]:
    """Hold the phases of the folder `output`. Raises OutputLockedError where another process does."""
    folder = output / "phases"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115  closed below
    except OSError as error:
        raise ConfigError(f"infra.output_dir: cannot write to {folder} ({error.strerror}); choose another") from error
    with lock:
        if not lock_file(lock):
            raise OutputLockedError(f"infra.output_dir: another process runs the phases in {folder}")
        yield


def _now() -> str:
    """ISO 8601 with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
