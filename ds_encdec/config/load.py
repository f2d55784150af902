"""The one way to a configuration: defaults, then a YAML file, then the command line, agreed with a DeepSpeed JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from ds_encdec.config.local_paths import check_hostfile, find_absent
from ds_encdec.config.report import Problem, raise_if_any
from ds_encdec.config.resolve import resolve
from ds_encdec.config.rules import Conflict
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.yaml_text import read_yaml
from ds_encdec.types import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = (), deepspeed_config: Path | None = None) -> FullConfig:
    """The validated configuration of a run.

    `path`: YAML file; None leaves the schema's defaults. `overrides`: settings of the command line
    (`section.field=value`, `--section.field=value` or `--section.field`, `value`), which replace the
    file's. `deepspeed_config`: a raw DeepSpeed JSON; it replaces `infra.deepspeed_config` where that is
    not set. What the JSON and the other two both set must agree.

    The result stands on its own: `infra.deepspeed_config` is None, because everything the JSON says has gone
    into the fields that stand for it, the rest into `infra.deepspeed_extra`.

    Raises ConfigError that lists every problem found in all of them.
    """
    return resolve(FullConfig, path, overrides, deepspeed_config)


def load_saved(path: Path) -> FullConfig:
    """The configuration that a run has written beside what it saved: it is not judged again.

    Rules that have come since are no reason to lose a run. Raises ConfigError for what is no configuration.
    """
    problems: list[Problem] = []
    settings = read_yaml(path, problems)
    raise_if_any(problems)
    try:
        return FullConfig.model_validate(settings.values, context={"was_judged": True})
    except ValidationError as error:
        raise ConfigError(f"{path} is no configuration that a run has saved: {error}") from error


def check_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: Path | None = None,
    *,
    hostfile: Path | None = None,
    elsewhere: bool = False,
) -> FullConfig:
    """`load_config`, and a look at what it names on this machine, which `elsewhere` leaves out, and at a `hostfile`."""

    def look(config: FullConfig, problems: list[Problem]) -> Iterable[Conflict]:
        if hostfile is not None:
            check_hostfile(hostfile, config, problems)
        return () if elsewhere else find_absent(config)

    return resolve(FullConfig, path, overrides, deepspeed_config, look)


def find_shipped(path: Path | None) -> Path | None:
    """`path`, or where it is not there, the file of that name beside the package: ds_configs/… from any folder."""
    if path is None or path.is_absolute() or os.path.exists(path):
        return path
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if os.path.exists(shipped) else path
