"""What a configuration names on this machine, and whether it is there: asked by `ds-encdec validate`.

A run looks for itself, later and more closely. A configuration may be made for another machine, so loading one does
not look.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from glob import iglob
from pathlib import Path

from ds_encdec.config.batch_size import is_auto, micro_batches_per_step
from ds_encdec.config.model_folder import is_hub_name
from ds_encdec.config.report import Problem
from ds_encdec.config.rules import LOCAL_FORMATS, Conflict
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.yaml_text import file_problem, read_text

_HOST = re.compile(r"(\S+)\s+slots=(\d{1,9})(?!\d)")


def find_absent(config: FullConfig) -> Iterator[Conflict]:
    """The files and folders that `config` names and that a run of it would not find, or could not make."""
    data, model, infra = config.data, config.model, config.infra
    sources = (
        [("data.", data)]
        if data.mixture is None
        else [(f"data.mixture.{number}.", source) for number, source in enumerate(data.mixture)]
    )
    for at, source in sources:
        if source.dataset_name in LOCAL_FORMATS:
            for pattern in source.data_files or ():
                if not any(os.path.isfile(path) for path in iglob(os.path.expanduser(pattern), recursive=True)):
                    yield Conflict((at + "data_files",), f"no file matches {pattern} (looked from {os.getcwd()})")
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


def check_hostfile(path: Path, config: FullConfig, problems: list[Problem]) -> None:
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
    elif ranks and not is_auto(config) and (lanes := micro_batches_per_step(config, ranks)) % ranks:
        message = f"its {ranks} slots do not divide the {lanes} micro-batches of a step (data.num_lanes)"
        problems.append(file_problem(path, message))


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
