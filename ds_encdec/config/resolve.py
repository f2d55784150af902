"""From a YAML file, the command line and a DeepSpeed JSON to one configuration.

This is what `load.load_config` and `FullConfig.from_yaml` share; it is handed the schema's class, so that the
schema can offer `from_yaml` without importing in a circle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.config.deepspeed_json import merge_deepspeed_json, read_deepspeed_json
from ds_encdec.config.overrides import apply_overrides, parse_overrides
from ds_encdec.config.report import COMMAND_LINE, Mention, Problem, raise_if_any, show
from ds_encdec.config.rules import Conflict
from ds_encdec.config.settings import Settings, unusable
from ds_encdec.config.validation import mention, mention_all, validate
from ds_encdec.config.yaml_text import read_yaml

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

_JSON_FIELD = "infra.deepspeed_config"


def resolve(
    schema: type[FullConfig],
    path: Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: Path | None = None,
    look: Callable[[FullConfig, list[Problem]], Iterable[Conflict]] = lambda *_: (),
) -> FullConfig:
    """See `load.load_config`. `look` finds more that is wrong, once the configuration is sound by itself."""
    problems: list[Problem] = []
    settings = read_yaml(path, problems) if path is not None else Settings()
    settings = apply_overrides(settings, parse_overrides(overrides, problems), problems)
    json_path, named_by = _find_json(schema, settings, path, deepspeed_config, problems)
    if json_path is not None:
        document = read_deepspeed_json(json_path, problems, named_by)
        settings = merge_deepspeed_json(schema, settings, document, problems)
        settings.put(_JSON_FIELD, None, "")
    config = validate(schema, settings, problems)
    if config is not None:
        problems.extend(mention_all(schema, settings, conflict) for conflict in look(config, problems))
    raise_if_any(problems)
    assert config is not None  # validate gives None only with problems
    return config


def _find_json(
    schema: type[FullConfig],
    settings: Settings,
    yaml_path: Path | None,
    argument: Path | None,
    problems: list[Problem],
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
    named_by = mention(schema, settings, _JSON_FIELD)
    if argument is not None and os.path.realpath(argument) != os.path.realpath(found):
        mentions = (named_by, Mention(COMMAND_LINE, "--deepspeed_config", show(str(argument))))
        problems.append(Problem(mentions, "two different files: name one"))
    return (found, named_by) if argument is None else (argument, None)
