"""Configurations as a machine has them: a run's own, those that are shipped, and what one names, looked for.

A run looks for itself, later and more closely. A configuration may be made for another machine, so loading one does
not look; `ds-encdec validate` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from glob import iglob
from pathlib import Path

from pydantic import ValidationError

from ds_encdec.config.batch_size import is_auto, micro_batches_per_step
from ds_encdec.config.model_folder import is_hub_name
from ds_encdec.config.schema import LOCAL_FORMATS, FullConfig, load_config
from ds_encdec.config.settings import Conflict, Problem, raise_if_any
from ds_encdec.config.shares import per_rank
from ds_encdec.config.yaml_text import file_problem, read_text, read_yaml
from ds_encdec.types import ConfigError

_HOST = re.compile(r"(\S+)\s+slots=(\d{1,9})(?!\d)")


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


def find_shipped(path: Path | None) -> Path | None:
    """`path`, or where it is not there, the file of that name beside the package: ds_configs/… from any folder."""
    if path is None or path.is_absolute() or os.path.exists(path):
        return path
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if os.path.exists(shipped) else path


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
            _check_hostfile(hostfile, config, problems)
        return () if elsewhere else _find_absent(config)

    return load_config(path, overrides, deepspeed_config, look)


def _find_absent(config: FullConfig) -> Iterator[Conflict]:
    """The files and folders that `config` names and that a run of it would not find, or could not make."""
    data, model, infra = config.data, config.model, config.infra
    for number, source in enumerate(data.mixture or [data]):
        field = f"data.mixture.{number}.data_files" if data.mixture else "data.data_files"
        for pattern in (source.data_files or ()) if source.dataset_name in LOCAL_FORMATS else ():
            if not any(os.path.isfile(path) for path in iglob(os.path.expanduser(pattern), recursive=True)):
                yield Conflict((field,), f"no file matches {pattern} (looked from {os.getcwd()})")
    field = "model.model_name_or_path"
    if model.model_name_or_path is not None:
        yield from _folder(field, model.model_name_or_path, "config.json")
    if model.tokenizer_name_or_path is not None:
        field = "model.tokenizer_name_or_path"
    if (tokenizer := model.tokenizer_name_or_path or model.model_name_or_path) not in (None, "builtin"):
        yield from _folder(field, str(tokenizer), "tokenizer.json")
    yield from _creatable("infra.output_dir", infra.output_dir)
    if config.training.report_to and os.path.isabs(infra.logging_dir):
        yield from _creatable("infra.logging_dir", infra.logging_dir)


def _check_hostfile(path: Path, config: FullConfig, problems: list[Problem]) -> None:
    """Append to `problems` what DeepSpeed's launcher, or a run on the hosts in the file `path`, would refuse."""
    text = read_text(path, problems)
    slots: dict[str, int] = {}
    for number, line in enumerate((text or "").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _HOST.match(line)
        if found is None:
            problems.append(file_problem(path, "not `HOST slots=N`", number, field=line))
        elif found[1] in slots:
            problems.append(file_problem(path, "the host is listed twice", number, field=found[1]))
        else:
            slots[found[1]] = int(found[2])
    ranks = sum(slots.values())
    if text is not None and not ranks:
        problems.append(file_problem(path, "no host has a slot; write `HOST slots=N` lines"))
    elif ranks and not is_auto(config):
        try:
            per_rank(micro_batches_per_step(config, ranks), ranks, "data.num_lanes")
        except ConfigError as error:
            problems.append(file_problem(path, str(error)))


def _folder(field: str, name: str, needed: str) -> Iterator[Conflict]:
    """A model's or a tokenizer's. What is on the hub, or in its cache, is not looked at."""
    folder = _expanded(name)
    if folder is not None and folder.is_dir():
        if not (folder / needed).is_file():
            yield Conflict((field,), f"the folder has no {needed}")
    elif folder is None or not is_hub_name(name):
        yield Conflict((field,), "there is no such folder, and a name on the hub is `OWNER/NAME`")


def _creatable(field: str, name: str) -> Iterator[Conflict]:
    """A folder that is there and can be written into, or can be made."""
    folder = _expanded(name)
    if folder is None:
        yield Conflict((field,), "there is no such user")
        return
    folder = folder.absolute()
    if any(len(os.fsencode(part)) > 255 for part in folder.parts) or len(os.fsencode(folder)) > 4000:
        yield Conflict((field,), "the name is too long for a file system")
        return
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        yield Conflict((field,), f"{there} is no folder")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Conflict((field,), f"{there} cannot be written to")


def _expanded(name: str) -> Path | None:
    """None where `~NAME` names nobody."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return None
