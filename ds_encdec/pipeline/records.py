"""What a phase keeps about itself, beside its run: with what it began, and how it was judged.

OUTPUT/phases/
  .lock                 held while phases run
  sanity_check/
    phase.yaml          the configuration of its run
    started.json        when it began, and from which weights
    result.json         how it was judged
    export/final/       what it hands on
    …                   the run itself (launch/run_folder.py)
  validation/ …
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.run_folder import RunFolder, write_atomically
from ds_encdec.phases import PlannedPhase, exported_weights, phase_before
from ds_encdec.types import ConfigError, OutputLockedError

UNTRAINED_FIELDS = {
    "data.preprocessing_num_workers",
    "training.per_device_eval_batch_size",
    "training.eval_steps",
    "training.eval_samples",
    "training.save_steps",
    "training.save_interval_hours",
    "training.save_total_limit",
    "training.save_on_best",
    "training.async_save",
    "training.average_checkpoints",
    "training.logging_steps",
    "training.report_to",
    "training.activation_checkpointing",
    "training.activation_checkpointing_every_n",
    "training.activation_offload",
    "training.torch_compile",
    "model.loss_chunk_tokens",
    "model.use_flash_attention",
}
"""Fields of `model`, `data` and `training` that may change in the middle of a phase: they do not decide what it
learns."""


class PhaseRecords:
    """The records of a planned phase."""

    def __init__(self, planned: PlannedPhase) -> None:
        self._planned = planned
        self.run = RunFolder(str(planned.folder))
        self.export = exported_weights(planned.folder)
        self.phase_yaml = planned.folder / "phase.yaml"
        self._started = planned.folder / "started.json"
        self._result = planned.folder / "result.json"

    @property
    def has_begun(self) -> bool:
        """Whether a run was started."""
        return self._started.exists()

    @property
    def is_completed(self) -> bool:
        """Whether its run came to its end."""
        return self.run.read_status().get("state") == "completed"

    @property
    def can_be_resumed(self) -> bool:
        """Whether the run has come so far that `--resume` is asked for. Before, its errors belong into run.json."""
        return self.run.metrics.exists() or any(self.run.checkpoints.glob("step-*"))

    def begin(self, weights_sha256: str | None) -> None:
        """Write down what is about to be trained; `weights_sha256` is the checkpoint's that it starts from, if any.

        When it began is kept from the first time.
        """
        self.phase_yaml.parent.mkdir(parents=True, exist_ok=True)
        started = self._read(self._started).get("started", now())
        self._planned.config.to_yaml(self.phase_yaml)
        _write(self._started, {"started": started, "weights_sha256": weights_sha256})

    def refuse_changes(self, weights_sha256: str | None) -> None:
        """Raise ConfigError where this phase began with other settings, or from other weights, than it has now."""
        differing = changed_settings(
            FullConfig.from_yaml(self.phase_yaml),
            self._planned.config,
            starts_from_export=phase_before(self._planned.phase) is not None,
        )
        if self._read(self._started).get("weights_sha256") != weights_sha256:
            differing.append("the phase before it has been trained anew since")
        if differing:
            raise ConfigError(
                f"phase {self._planned.phase} in {self._planned.folder} has begun with other settings: "
                f"{'; '.join(differing)}. Give the former values, or delete (or rename) that folder to train the phase "
                "anew, and those of the phases after it, or choose another infra.output_dir."
            )

    def read_result(self) -> dict[str, Any]:
        """result.json, or {} where there is none."""
        return self._read(self._result)

    def write_result(self, values: Mapping[str, Any]) -> None:
        """Replace result.json by `values`, when the phase began and ended, and its numbers."""
        record = {
            "phase": self._planned.phase,
            **values,
            "started": self._read(self._started).get("started"),
            "ended": now(),
            "phase_config": dataclasses.asdict(self._planned.settings),
        }
        _write(self._result, record)

    def passed_as_now(self) -> bool:
        """Whether it has passed its gate with the numbers that it has now, and what it hands on is there."""
        result = self.read_result()
        same = result.get("phase_config") == dataclasses.asdict(self._planned.settings)
        return bool(result.get("passed")) and same and self.export.exists()

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); restore it, or delete it") from error


def changed_settings(before: FullConfig, after: FullConfig, *, starts_from_export: bool) -> list[str]:
    """The settings that decide what a phase learns and that differ, in words.

    Of a phase that starts from the export of another the path of it is none: it moves with the output folder.
    """
    first, second = _trained_settings(before), _trained_settings(after)
    names = first.keys() - UNTRAINED_FIELDS - ({"model.model_name_or_path"} if starts_from_export else set())
    return [
        f"{name} was {first[name]!r} and is {second[name]!r}" for name in sorted(names) if first[name] != second[name]
    ]


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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputLockedError(f"infra.output_dir: another process runs the phases in {folder}") from error
        yield


def now() -> str:
    """The time, ISO 8601 with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
