"""Load the configuration of a run: defaults, then a YAML file, then the command line, in agreement with a DeepSpeed
JSON. It may be for another machine, so loading looks at no file that it names: training/absent.py does."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import GenerateJsonSchema

from ds_encdec.base.types import ConfigError
from ds_encdec.config.data_sections import DataConfig, MixtureSource, Source  # noqa: F401  also importable from here
from ds_encdec.config.first_rows import trained_and_evaluated_on
from ds_encdec.config.hostfile import read_hosts, read_variables
from ds_encdec.config.rules import find_conflicts
from ds_encdec.config.section_base import Mark, Section  # noqa: F401
from ds_encdec.config.sections import (  # noqa: F401
    ArchitectureConfig,
    InfraConfig,
    LoraConfig,
    ModelConfig,
    MonitorConfig,
    PhaseOverrides,
    PhasesConfig,
    Sections,
    marked,
)
from ds_encdec.config.settings import COMMAND_LINE, Conflict, Problem, Settings, raise_if_any, show, unusable
from ds_encdec.config.shares import unevenness
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.training_sections import ENDLESS_SCHEDULES, TrainingConfig  # noqa: F401
from ds_encdec.config.validation import Checked, default_of, mention, mention_all, validate
from ds_encdec.config.words.rewording import read_overrides, read_words
from ds_encdec.config.yaml.deepspeed_json import merge_deepspeed_json, read_deepspeed_json
from ds_encdec.config.yaml.text import file_problem, read_yaml, write_yaml

SCHEMA_ID = "urn:ds_encdec:configuration"
_JSON_FIELD = "infra.deepspeed_config"


def imply(settings: Settings) -> None:
    """Set fields for which others in `settings` leave only one value."""
    for source, field, value in _decided(settings):
        if settings.get(field) is None:
            decided_by = f"{source.rpartition('.')[2]} = {show(settings.get(source))}"
            settings.put(field, value, f"{settings.place_of(source)} ({decided_by})")


def _decided(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield the deciding field, the decided field and its value. Later ones read the values that earlier ones set."""
    for source, value, field, decided in (
        ("infra.distributed_type", "ddp", "infra.sharding_stage", "zero0"),
        ("infra.sharding_stage", "zero0", "infra.offload_optimizer", "none"),
        ("infra.offload_optimizer", "nvme", "training.async_save", False),  # the host has no memory for a copy
        ("training.fp16", True, "training.bf16", False),
        ("data.objective", "dpo", "data.input_template", "{prompt}"),
        ("data.objective", "dpo", "data.output_template", "{output}"),
    ):
        if isinstance(found := settings.get(source), type(value)) and found == value:
            yield source, field, decided
    steps = settings.get("training.num_train_steps", default_of("training.num_train_steps"))
    ratio = settings.get("training.warmup_ratio")
    if settings.get("training.num_train_epochs") is not None or not _is_number(steps):
        return  # counted when the run starts (data/survey.py)
    if _is_number(ratio) and 0 <= ratio < 1 and settings.get("training.warmup_steps") is None:
        yield "training.warmup_ratio", "training.warmup_steps", math.ceil(steps * ratio)
        settings.put("training.warmup_ratio", None, settings.place_of("training.warmup_ratio"))
    elif ratio is None and (shorter := shortened_warmup(steps, settings.get("training.lr_scheduler_type"))) is not None:
        yield "training.num_train_steps", "training.warmup_steps", shorter


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and unusable(value) is None


def shortened_warmup(steps: float, schedule: str) -> int | None:
    """Return the default warm-up of a short run, a tenth of its steps, or None if the schema's default fits."""
    is_short = steps <= default_of("training.warmup_steps") and schedule not in ENDLESS_SCHEDULES
    return max(1, int(steps // 10)) if is_short else None


class FullConfig(Sections):
    """A run. One that exists is consistent: contradictions between its fields are errors too."""

    @model_validator(mode="before")
    @classmethod
    def _imply(cls, values: Any) -> Any:
        """Translate other tools' words and set implied fields, also in a configuration built in Python."""
        if not isinstance(values, dict):
            return values
        plain = {
            name: part.model_dump(exclude_unset=True) if isinstance(part, Section) else part
            for name, part in values.items()
        }
        settings, problems = Settings(deepcopy(plain)), list[Problem]()
        read_words(settings, problems, [])
        if problems:
            raise ValueError("; ".join(f"{problem.mentions[0]}: {problem.message}" for problem in problems))
        imply(settings)
        return settings.values

    @model_validator(mode="after")
    def _reject_contradictions(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get("was_judged") and (conflicts := find_conflicts(self)):
            raise ValueError("; ".join(f"{', '.join(c.fields)}: {c.message}" for c in conflicts))
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "FullConfig":
        """Load a YAML file; see `load_config`. Raises ConfigError."""
        return load_config(Path(path), overrides)

    def to_yaml(self, path: str | Path) -> None:
        """Write every field to `path`; `from_yaml` reads back an equal object."""
        Path(path).write_text(self.dump_yaml(), encoding="utf-8")

    def dump_yaml(self) -> str:
        """Return every field as YAML text. Steps that are still to be counted from epochs are null."""
        values = self.model_dump(mode="json")
        if self.training.num_train_epochs is not None:
            values["training"] |= dict.fromkeys({"num_train_steps", "warmup_steps"} - self.training.model_fields_set)
        return write_yaml(values)


def editor_schema() -> str:
    """Return the configuration's JSON schema for editors: every field with its description, bounds and choices."""
    schema = FullConfig.model_json_schema()
    for section in schema["$defs"].values():
        for titled in (section, *section["properties"].values()):
            titled.pop("title", None)  # made from the name ("Learning Rate"); some editors show only that
    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID}
    return json.dumps(head | schema | {"title": "ds_encdec configuration"}, indent=1) + "\n"


@dataclass(frozen=True)
class Loaded:
    """A configuration and its problems. `translated`: how words of other tools were read."""

    settings: Settings
    checked: Checked
    problems: list[Problem]
    translated: list[str]

    @cached_property
    def config(self) -> FullConfig:
        """Return the configuration, which is right only if `checked` says so."""
        # A second validation would have to build a schema, which takes time.
        return FullConfig.model_construct(None, **dict(self.checked.sections))

    def add(self, conflicts: Iterable[Conflict]) -> None:
        """Add `conflicts` to the problems."""
        self.problems.extend(mention_all(self.settings, conflict) for conflict in conflicts)

    def check_hosts(self, hostfile: str | Path) -> None:
        """Add the problems that prevent a start on the hosts of `hostfile`, a path or the name of a shipped file."""
        path = find_shipped(hostfile) or Path(hostfile)
        hosts = read_hosts(path, self.problems)
        if len(hosts) > 1:
            read_variables(self.problems)
        ranks = sum(hosts.values())
        if self.checked.is_sound and ranks and (wrong := unevenness(self.config, ranks)):
            self.problems.append(file_problem(path, wrong))

    def valid(self) -> FullConfig:
        """Return the configuration. Raises ConfigError that lists every problem."""
        raise_if_any(self.problems)
        return self.config

    def notes(self) -> list[str]:
        """Return notes on how words were read, and warnings. Raises ConfigError if the configuration is not valid."""
        return [*self.translated, *trained_and_evaluated_on(self.valid().data)]


def read_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: str | Path | None = None,
    *,
    unread: Sequence[str] = (),
) -> Loaded:
    """Read a configuration and find its problems, except contradictions in the sections or fields `unread`."""
    problems: list[Problem] = []
    path, deepspeed_config = map(find_shipped, (path, deepspeed_config))
    settings, translated = read_yaml(path, problems) if path is not None else Settings(), list[str]()
    read_words(settings, problems, translated)
    read_overrides(settings, overrides, problems, translated)
    json_path, named_by = deepspeed_config, None
    if json_path is None and isinstance(named := settings.get(_JSON_FIELD), str):
        json_path, named_by = find_shipped(named), mention(settings, _JSON_FIELD)
        beside = (path or Path()).parent / named
        if settings.place_of(_JSON_FIELD) != COMMAND_LINE and os.path.isfile(beside):  # the YAML file names it
            json_path = beside
    if json_path is not None:
        settings = merge_deepspeed_json(settings, read_deepspeed_json(json_path, problems, named_by), problems)
        settings.put(_JSON_FIELD, None, "")
    if settings.get("infra.wandb_project") is None and (project := os.environ.get("WANDB_PROJECT")):
        settings.put("infra.wandb_project", project, "WANDB_PROJECT")
    imply(settings)
    return Loaded(settings, validate(settings, problems, unread), problems, translated)


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), deepspeed_config: str | Path | None = None
) -> FullConfig:
    """Return the validated configuration of a run. Raises ConfigError that lists every problem.

    `path`: a YAML file or a shipped one's name; None keeps the schema's defaults. `overrides`: settings of the command
    line for `read_overrides`, which replace the file's. `deepspeed_config`: a raw DeepSpeed JSON in place of an unset
    `infra.deepspeed_config`, which is None in the result: the JSON's entries, which must agree with the other settings,
    are in the fields that stand for them or in `infra.deepspeed_extra`.
    """
    return read_config(path, overrides, deepspeed_config).valid()


def load_saved(path: Path) -> FullConfig:
    """Return the configuration that a run saved, without judging it again: newer rules are no reason to lose a run.
    Raises ConfigError if the file is not a configuration."""
    problems: list[Problem] = []
    settings = read_yaml(path, problems)
    read_words(settings, problems, [])
    raise_if_any(problems)
    try:
        return FullConfig.model_validate(settings.values, context={"was_judged": True})
    except ValidationError as error:
        raise ConfigError(f"{path} is no configuration that a run has saved: {error}") from error
