"""The words of other tools (other_tools.yaml): our field for each, or why no field fits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ds_encdec.registry.source_kinds import kind_of_file

# The fields that a word sets (empty: none), or why no field can stand for it.
Meaning = Mapping[str, Any] | str


class Word(NamedTuple):
    """A row of other_tools.yaml, which explains its keys. `values` has a meaning for each single value."""

    names: str
    field: str = ""
    values: Mapping[str, Meaning] = {}
    reads: str = ""
    why: str = ""
    ignored: bool = False

    def meaning(self, value: Any) -> Meaning | None:
        """Return the meaning of `value` under this name; None for a valid value of our own field."""
        if self.reads and (read := READERS[self.reads](value)) is not None:
            return read
        if not isinstance(value, dict | list):
            for texts, meaning in self.values.items():
                if str(value).lower() in texts.split():
                    return meaning
        return {self.field: value} if self.field else {} if self.ignored else self.why or None


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of this package."""
    table: dict[str, Any] = yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


_CONTENT = read_table(Path(__file__).with_suffix(".yaml"))


WORDS = tuple(Word(**row) for row in _CONTENT["words"])
BY_NAME = {name: row for row in WORDS for name in row.names.split()}
# Sections of other tools whose names mean nothing: their entries are read like those at the top level.
THEIR_SECTIONS = frozenset(_CONTENT["sections"].split())


def _train_files(value: Any) -> Meaning | None:
    """`data.data_files`, and by its ending `data.dataset_name`."""
    kind = kind_of_file(value) if isinstance(value, str) else None
    return {"data.dataset_name": kind, "data.data_files": value} if kind else None


def _fsdp(value: Any) -> Meaning | None:
    """Words like full_shard, auto_wrap and offload are `infra.sharding_stage` and `infra.offload_optimizer`."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else None
    if words is None:
        return None
    meant: dict[str, Any] = {"infra.distributed_type": "fsdp"} if words else {}
    rows = BY_NAME["fsdp_sharding_strategy"], BY_NAME["fsdp_cpu_offload"]
    for word in map(str, words):
        found = rows[1].meaning(True) if word == "offload" else {} if word == "auto_wrap" else rows[0].meaning(word)
        if isinstance(found, str):
            return f"`{word}` is no word of it: set infra.sharding_stage and infra.offload_optimizer"
        meant |= found or {}
    return meant


def _ratio(value: Any) -> Meaning | None:
    """A number below 1 is a share of the steps, `training.warmup_ratio`."""
    return {"training.warmup_ratio": value} if isinstance(value, float) and 0 < value < 1 else None


# Readers of values that no table can list; the documentation quotes their docstrings.
READERS: dict[str, Callable[[Any], Meaning | None]] = {
    "train_files": _train_files,
    "fsdp": _fsdp,
    "ratio": _ratio,
}
