"""Read a raw DeepSpeed JSON into the schema. Its "auto", null and absent keys leave a field to the YAML file, the
command line and the default; its values must agree with those. As in DeepSpeed, a ZeRO stage without an offload block
means no offload, but the YAML file and the command line take precedence over that."""

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from ds_encdec.config.settings import Mention, Problem, Settings, above, join, masked, show
from ds_encdec.config.validation import default_of, mention, wrong_value
from ds_encdec.config.yaml.deepspeed_keys import IGNORED, PASSED_ON, SCHEMA_FIELDS, check_keys
from ds_encdec.config.yaml.text import compose, file_problem, read_text

logger = logging.getLogger(__name__)

_EXTRA = "infra.deepspeed_extra."
_HPZ = f"{_EXTRA}zero_optimization.zero_hpz_partition_size"


def read_deepspeed_json(path: Path, problems: list[Problem], named_by: Mention | None = None) -> Settings:
    """Return the entries of a DeepSpeed JSON under DeepSpeed's names, and append the file's problems to `problems`.
    Places are `file:line:column`, since such files are often one line; YAML's reader finds them, because JSON is also
    YAML except for odd characters. `named_by` is the setting that names the file, if any."""
    text = read_text(path, problems, named_by)
    if text is None:
        return Settings()
    try:
        values = json.loads(text)
        root = compose("".join(char if char.isprintable() or char == "\n" else " " for char in text))
    except json.JSONDecodeError as error:
        problems.append(file_problem(path, f"not valid JSON: {error.msg}", error.lineno, error.colno))
        return Settings()
    except (ValueError, RecursionError) as error:
        problems.append(file_problem(path, f"not valid JSON: {error}"))
        return Settings()
    if not isinstance(values, dict):
        problems.append(file_problem(path, "a DeepSpeed configuration is one { ... } block", 1))
        return Settings()
    document = Settings(values, {"": f"{path}:1"})
    for key, mark in _keys(root, ""):
        place = mark.line + 1, mark.column + 1
        if key in document.places:
            message = f"`{key.rpartition('.')[2]}` is set twice in one block"
            problems.append(file_problem(path, message, *place, field=key))
        document.places[key] = ":".join(map(str, (path, *place)))
    for key, message in document.unusable().items():
        problems.append(Problem((_mention(document, key, document.get(key)),), message))
        document.put(key, None, document.place_of(key))
    return document


def _keys(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.Mark]]:
    """Yield the dotted path and the place of every key inside `node`, which stands at `path`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = join(path, key.value)
            yield here, key.start_mark
            yield from _keys(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(item, join(path, index))


Claims = dict[str, tuple[Any, Mention]]
"""Fields that a JSON sets, each with the value and the key that sets it."""


def merge_deepspeed_json(settings: Settings, document: Settings, problems: list[Problem]) -> Settings:
    """Return `settings`, extended by `document` (see `read_deepspeed_json`). Unknown keys, and values that disagree
    with `settings` or with each other, are appended to `problems`."""
    claims = _claims(document, problems)
    _claim_hybrid(claims, problems)
    _claim_lanes(claims, settings, document, problems)
    result = deepcopy(settings)
    for field, (value, key) in claims.items():
        if (present := settings.get(field)) is None:
            result.put(field, value, f"{key.place} ({key.field})")
        elif not _agree(field, present, value, key, problems):
            message = 'the two disagree: make them equal, or leave it to one (null here, or "auto" in the JSON)'
            problems.append(Problem((mention(settings, field), key), message))
    if "infra.sharding_stage" in claims:
        key = claims["infra.sharding_stage"][1]
        for field in ("infra.offload_optimizer", "infra.offload_params"):
            if result.get(field) is None:
                result.put(field, "none", f"{key.place} ({key.field})")
    return result


def _claims(document: Settings, problems: list[Problem]) -> Claims:
    claims: Claims = {}
    for path, value, message in check_keys(document.values):
        key, block = _mention(document, path, value), above(path)
        switched_off = f"{block}.enabled" in document and not path.endswith(".enabled")
        if path in IGNORED and message is None and value and not switched_off:
            logger.warning("%s: `%s` does nothing here: %s", key.place, path, IGNORED[path])
        found = message or ([] if value is None else _meant(path, value))
        if isinstance(found, str):
            problems.append(Problem((key,), found))
            continue
        for field, wanted in found:
            _claim(claims, field, wanted, key, problems)
    return claims


def _claim(claims: Claims, field: str, value: Any, key: Mention, problems: list[Problem]) -> None:
    """Record that `key` sets a field, or report that another key of the same JSON sets it to another value."""
    earlier, by = claims.setdefault(field, (value, key))
    if not _agree(field, earlier, value, key, problems):
        problems.append(Problem((by, key), f"both set `{field}` and must agree"))


def _claim_hybrid(claims: Claims, problems: list[Problem]) -> None:
    """Translate a secondary partition (hpZ) into zero3_hybrid."""
    size, key = claims.get(_HPZ, (1, None))
    if key is None or size <= 1:
        claims.pop(_HPZ, None)
        return
    stage, by = claims.pop("infra.sharding_stage", ("zero3", key))
    if stage != "zero3":
        message = "hpZ is part of ZeRO-3: set stage 3, or remove zero_hpz_partition_size"
        problems.append(Problem((by, key), message))
    _claim(claims, "infra.sharding_stage", "zero3_hybrid", key, problems)


def _claim_lanes(claims: Claims, settings: Settings, document: Settings, problems: list[Problem]) -> None:
    """Translate `train_batch_size` into the micro-batches of an optimizer step, whatever the number of ranks."""
    total, field = document.get("train_batch_size"), "training.per_device_train_batch_size"
    if total in (None, "auto"):
        return
    key = _mention(document, "train_batch_size", total)
    micro, by = claims.get(field, (settings.get(field, default_of(field)), mention(settings, field)))
    if not _is_count(total):
        problems.append(Problem((key,), 'must be a whole number >= 1, or "auto"'))
    elif micro == "auto":  # of the YAML file: the number of micro-batches is not known yet
        _claim(claims, "training.global_batch_size", total, key, problems)
    elif _is_count(micro) and total % micro:
        problems.append(Problem((key, by), "train_batch_size must be a multiple of the micro-batch size"))
    elif _is_count(micro):
        _claim(claims, "data.num_lanes", total // micro, key, problems)


def _agree(field: str, earlier: Any, value: Any, key: Mention, problems: list[Problem]) -> bool:
    """Return whether `value` agrees with `earlier`, which an invalid value always does. An invalid `value` is reported
    here, an invalid `earlier` when the settings are validated."""
    if earlier == value and isinstance(earlier, bool) == isinstance(value, bool):
        return True
    if wrong := wrong_value(field, value):
        problems.append(Problem((key,), wrong))
    return wrong is not None or wrong_value(field, earlier) is not None


def _meant(path: str, value: Any) -> list[tuple[str, Any]] | str:
    """Return the fields and values that a key sets, or an error message. `_claim_lanes` reads `train_batch_size`."""
    if path == "zero_optimization.stage":
        is_stage = value in (0, 1, 2, 3) and not isinstance(value, bool)
        return [(SCHEMA_FIELDS[path], f"zero{int(value)}")] if is_stage else 'allowed: 0, 1, 2, 3 or "auto"'
    if path == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            return "must be a list of two numbers"
        pairs = zip(("training.adam_beta1", "training.adam_beta2"), value, strict=True)
        return [(name, beta) for name, beta in pairs if beta != "auto"]
    if path in PASSED_ON:
        return [(_EXTRA + path, int(value) if PASSED_ON[path] is int else value)]
    return [(SCHEMA_FIELDS[path], value)] if path in SCHEMA_FIELDS and path != "train_batch_size" else []


def _mention(document: Settings, path: str, value: Any) -> Mention:
    return Mention(document.place_of(path), path, show(masked(path.rpartition(".")[2], value)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
