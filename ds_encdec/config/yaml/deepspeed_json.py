"""Read a raw DeepSpeed JSON into the schema. Its "auto", null and absent keys leave a field to the YAML file, the
command line and the default; its values must agree with those. As in DeepSpeed, a ZeRO stage without an offload block
means no offload, but the YAML file and the command line take precedence over that."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

from ds_encdec.config.settings import Mention, Problem, Settings, above, masked, show
from ds_encdec.config.validation import default_of, mention, wrong_value
from ds_encdec.config.yaml.deepspeed_keys import IGNORED, PASSED_ON, SCHEMA_FIELDS, check_keys
from ds_encdec.config.yaml.text import NodeReader, compose, file_problem, read_text

logger = logging.getLogger(__name__)

_EXTRA = "infra.deepspeed_extra."
_STAGE = "infra.sharding_stage"
_MICRO_BATCH = "training.per_device_train_batch_size"
_HPZ = f"{_EXTRA}zero_optimization.zero_hpz_partition_size"


def read_deepspeed_json(path: Path, problems: list[Problem], named_by: Mention | None = None) -> Settings:
    """Return the entries of a DeepSpeed JSON under DeepSpeed's names, and append the file's problems to `problems`.
    YAML's reader finds places and repeated keys, because JSON is also YAML except for odd characters. Places are
    `file:line:column`, since such files are often one line. `named_by` is the setting that names the file, if any."""
    if (text := read_text(path, problems, named_by)) is None:
        return Settings()
    reader = NodeReader(lambda mark: f"{path}:{mark.line + 1}:{mark.column + 1}", problems)
    try:
        values = json.loads(text)
        root = compose("".join(char if char.isprintable() or char == "\n" else " " for char in text))
        if root is not None and isinstance(values, dict):
            reader.read(root, "")
            document = Settings(values, {**reader.places, "": f"{path}:1"})
            for key, message in document.unusable().items():
                problems.append(Problem((_mention(document, key, document.get(key)),), message))
                document.put(key, None, document.place_of(key))
            return document
        problem = file_problem(path, "a DeepSpeed configuration is one { ... } block", 1)
    except json.JSONDecodeError as error:
        problem = file_problem(path, f"not valid JSON: {error.msg}", error.lineno, error.colno)
    except (ValueError, RecursionError) as error:
        problem = file_problem(path, f"not valid JSON: {error}")
    problems.append(problem)
    return Settings()


def merge_deepspeed_json(settings: Settings, document: Settings, problems: list[Problem]) -> Settings:
    """Return `settings`, extended by `document` (see `read_deepspeed_json`). Unknown keys, and values that disagree
    with `settings` or with each other, are appended to `problems`."""
    result, claimed = deepcopy(settings), _claimed(settings, document, problems)
    for name, (value, key) in claimed.items():
        if (present := settings.get(name)) is None:
            result.put(name, value, f"{key.place} ({key.field})")
        elif not _agree(name, present, value, key, problems):
            message = 'the two disagree: make them equal, or leave it to one (null here, or "auto" in the JSON)'
            problems.append(Problem((mention(settings, name), key), message))
    if (stage := claimed.get(_STAGE)) is not None:
        for name in ("infra.offload_optimizer", "infra.offload_params"):
            if result.get(name) is None:
                result.put(name, "none", f"{stage[1].place} ({stage[1].field})")
    return result


def _claimed(settings: Settings, document: Settings, problems: list[Problem]) -> dict[str, tuple[Any, Mention]]:
    """Return the fields that a JSON sets, each with the value and the key that sets it."""
    fields: dict[str, tuple[Any, Mention]] = {}

    def claim(name: str, value: Any, key: Mention) -> None:
        earlier, by = fields.setdefault(name, (value, key))
        if not _agree(name, earlier, value, key, problems):
            problems.append(Problem((by, key), f"both set `{name}` and must agree"))

    for path, value, message in check_keys(document.values):
        key = _mention(document, path, value)
        switched_off = f"{above(path)}.enabled" in document and not path.endswith(".enabled")
        if path in IGNORED and message is None and value and not switched_off:
            logger.warning("%s: `%s` does nothing here: %s", key.place, path, IGNORED[path])
        found = message or ({} if value is None else _meant(path, value))
        if isinstance(found, str):
            problems.append(Problem((key,), found))
        else:
            for name, wanted in found.items():
                claim(name, wanted, key)
    size, hpz = fields.pop(_HPZ, (1, None))
    if hpz is not None and size > 1:  # a secondary partition (hpZ)
        fields[_HPZ] = size, hpz
        stage, stage_by = fields.pop(_STAGE, ("zero3", hpz))
        if stage != "zero3":
            message = "hpZ is part of ZeRO-3: set stage 3, or remove zero_hpz_partition_size"
            problems.append(Problem((stage_by, hpz), message))
        claim(_STAGE, "zero3_hybrid", hpz)
    # `train_batch_size` becomes the micro-batches of an optimizer step, whatever the number of ranks.
    if (total := document.get("train_batch_size")) in (None, "auto"):
        return fields
    key = _mention(document, "train_batch_size", total)
    set_here = settings.get(_MICRO_BATCH, default_of(_MICRO_BATCH)), mention(settings, _MICRO_BATCH)
    micro, by = fields.get(_MICRO_BATCH, set_here)
    if not _is_count(total):
        problems.append(Problem((key,), 'must be a whole number >= 1, or "auto"'))
    elif micro == "auto":  # of the YAML file: the number of micro-batches is not known yet
        claim("training.global_batch_size", total, key)
    elif _is_count(micro) and total % micro:
        problems.append(Problem((key, by), "train_batch_size must be a multiple of the micro-batch size"))
    elif _is_count(micro):
        claim("data.num_lanes", total // micro, key)
    return fields


def _agree(name: str, earlier: Any, value: Any, key: Mention, problems: list[Problem]) -> bool:
    """Return whether `value` agrees with `earlier`, which an invalid value always does. An invalid `value` is reported
    here, an invalid `earlier` when the settings are validated."""
    if earlier == value and isinstance(earlier, bool) == isinstance(value, bool):
        return True
    if wrong := wrong_value(name, value):
        problems.append(Problem((key,), wrong))
    return wrong is not None or wrong_value(name, earlier) is not None


def _meant(path: str, value: Any) -> dict[str, Any] | str:
    """Return the fields and values that a key sets, or an error message. `_claimed` reads `train_batch_size`."""
    if path == "zero_optimization.stage":
        is_stage = value in (0, 1, 2, 3) and not isinstance(value, bool)
        return {_STAGE: f"zero{int(value)}"} if is_stage else 'allowed: 0, 1, 2, 3 or "auto"'
    if path == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            return "must be a list of two numbers"
        return {f"training.adam_beta{number}": beta for number, beta in enumerate(value, start=1) if beta != "auto"}
    if path in PASSED_ON:
        return {_EXTRA + path: int(value) if PASSED_ON[path] is int else value}
    return {SCHEMA_FIELDS[path]: value} if path in SCHEMA_FIELDS and path != "train_batch_size" else {}


def _mention(document: Settings, path: str, value: Any) -> Mention:
    return Mention(document.place_of(path), path, show(masked(path.rpartition(".")[2], value)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
