"""The whole configuration of a run, and the one way to it: defaults, then a YAML file, then the command line, agreed
with a DeepSpeed JSON.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationInfo, model_validator

from ds_encdec.config.deepspeed_json import merge_deepspeed_json, read_deepspeed_json
from ds_encdec.config.rules import Sections, find_conflicts, marked  # noqa: F401
from ds_encdec.config.sections import (  # noqa: F401  who has the whole finds its parts here, too
    LOCAL_FORMATS,
    ArchitectureConfig,
    DataConfig,
    Mark,
    MixtureSource,
    ModelConfig,
    Section,
    Source,
)
from ds_encdec.config.settings import COMMAND_LINE, Conflict, Mention, Problem, Settings, raise_if_any, show, unusable
from ds_encdec.config.training_sections import (  # noqa: F401
    InfraConfig,
    MonitorConfig,
    PhaseOverrides,
    PhasesConfig,
    TrainingConfig,
)
from ds_encdec.config.validation import mention, mention_all, validate
from ds_encdec.config.yaml_text import apply_overrides, read_yaml, write_yaml

_JSON_FIELD = "infra.deepspeed_config"


class FullConfig(Sections):
    """A run. One that exists is consistent: contradictions between its fields are errors too."""

    @model_validator(mode="after")
    def _reject_contradictions(self, info: ValidationInfo) -> FullConfig:
        was_judged = (info.context or {}).get("was_judged", False)  # load.load_saved
        if not was_judged and (conflicts := find_conflicts(self)):
            raise ValueError("; ".join(f"{', '.join(c.fields)}: {c.message}" for c in conflicts))
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> FullConfig:
        """The configuration in a YAML file; see `load_config`. Raises ConfigError."""
        return load_config(Path(path), overrides)

    def to_yaml(self, path: str | Path) -> None:
        """Write every field to `path`; `from_yaml` reads an equal object back."""
        Path(path).write_text(self.dump_yaml(), encoding="utf-8")

    def dump_yaml(self) -> str:
        """Every field as YAML text."""
        return write_yaml(self.model_dump(mode="json"))


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: Path | None = None,
    look: Callable[[FullConfig, list[Problem]], Iterable[Conflict]] = lambda *_: (),
) -> FullConfig:
    """The validated configuration of a run.

    `path`: YAML file; None leaves the schema's defaults. `overrides`: settings of the command line
    (`section.field=value`, `--section.field=value` or `--section.field`, `value`), which replace the
    file's. `deepspeed_config`: a raw DeepSpeed JSON; it replaces `infra.deepspeed_config` where that is
    not set. What the JSON and the other two both set must agree. `look` finds more that is wrong, once the
    configuration is sound by itself.

    The result stands on its own: `infra.deepspeed_config` is None, because everything the JSON says has gone
    into the fields that stand for it, the rest into `infra.deepspeed_extra`.

    Raises ConfigError that lists every problem found in all of them.
    """
    problems: list[Problem] = []
    settings = read_yaml(path, problems) if path is not None else Settings()
    apply_overrides(settings, overrides, problems)
    json_path, named_by = _find_json(settings, path, deepspeed_config, problems)
    if json_path is not None:
        document = read_deepspeed_json(json_path, problems, named_by)
        settings = merge_deepspeed_json(settings, document, problems)
        settings.put(_JSON_FIELD, None, "")
    values = validate(settings, problems)
    config = FullConfig() if values is None else FullConfig.model_validate(values)
    if values is not None:
        problems.extend(mention_all(settings, conflict) for conflict in look(config, problems))
    raise_if_any(problems)
    return config


def _find_json(
    settings: Settings, yaml_path: Path | None, argument: Path | None, problems: list[Problem]
) -> tuple[Path | None, Mention | None]:
    """The DeepSpeed JSON to read, and the setting that names it.

    A relative path in the YAML file is looked up beside that file first.
    """
    named = settings.get(_JSON_FIELD)
    if not isinstance(named, str) or unusable(named):
        return argument, None
    found = Path(named)
    if yaml_path is not None and settings.place_of(_JSON_FIELD) != COMMAND_LINE:
        beside = yaml_path.parent / found
        found = beside if os.path.exists(beside) else found
    named_by = mention(settings, _JSON_FIELD)
    if argument is not None and os.path.realpath(argument) != os.path.realpath(found):
        mentions = (named_by, Mention(COMMAND_LINE, "--deepspeed_config", show(str(argument))))
        problems.append(Problem(mentions, "two different files: name one"))
    return (found, named_by) if argument is None else (argument, None)
