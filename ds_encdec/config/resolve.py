"""From a YAML file, the command line and a DeepSpeed JSON to one configuration.

This is what `load.load_config` and `FullConfig.from_yaml` share; it is handed the schema's class, so that the
schema can offer `from_yaml` without importing in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.config.deepspeed_json import merge_deepspeed_json, read_deepspeed_json
from ds_encdec.config.overrides import apply_overrides, parse_overrides
from ds_encdec.config.report import COMMAND_LINE, Mention, Problem, raise_if_any, show
from ds_encdec.config.settings import Settings
from ds_encdec.config.validation import mention, validate
from ds_encdec.config.yaml_text import read_yaml

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

_JSON_FIELD = "infra.deepspeed_config"


def resolve(
    schema: type[FullConfig],
    path: Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: Path | None = None,
) -> FullConfig:
    """See `load.load_config`."""
    problems: list[Problem] = []
    settings = read_yaml(path, problems) if path is not None else Settings()
    settings = apply_overrides(settings, parse_overrides(overrides, problems), problems)
    json_path = _find_json(schema, settings, path, deepspeed_config, problems)
    if json_path is not None:
        document = read_deepspeed_json(json_path, problems)
        settings = merge_deepspeed_json(schema, settings, document, problems)
        settings.put(_JSON_FIELD, None, "")
    config = validate(schema, settings, problems)
    raise_if_any(problems)
    assert config is not None  # validate gives None only with problems
    return config


def _find_json(
    schema: type[FullConfig],
    settings: Settings,
    yaml_path: Path | None,
    argument: Path | None,
    problems: list[Problem],
) -> Path | None:
    """The DeepSpeed JSON to read. A relative path in the YAML file is looked up beside that file first."""
    named = settings.get(_JSON_FIELD)
    if not isinstance(named, str):
        return argument
    found = Path(named)
    if yaml_path is not None and settings.place_of(_JSON_FIELD) != COMMAND_LINE and (yaml_path.parent / found).exists():
        found = yaml_path.parent / found
    if argument is not None and argument.resolve() != found.resolve():
        mentions = (
            mention(schema, settings, _JSON_FIELD),
            Mention(COMMAND_LINE, "--deepspeed_config", show(str(argument))),
        )
        problems.append(Problem(mentions, "two different files: name one"))
    return argument or found
