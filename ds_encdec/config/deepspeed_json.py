"""A raw DeepSpeed JSON, read into the schema.

"auto", null and absent keys leave a field to the YAML file, the command line and the schema's default. What
the JSON sets must agree with what those set. Three things follow from the JSON without being written in it,
because DeepSpeed reads it so: fp16 switches bf16 off, and a ZeRO stage given without an offload block
means no offload; they give way to the YAML file and the command line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.config.deepspeed_keys import IGNORED, PASSED_ON, SCHEMA_FIELDS, check_keys
from ds_encdec.config.report import Mention, Problem, show
from ds_encdec.config.settings import Settings
from ds_encdec.config.validation import default_of, mention
from ds_encdec.config.yaml_text import file_problem, key_lines, read_text

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

logger = logging.getLogger(__name__)

_HPZ = "zero_optimization.zero_hpz_partition_size"


def read_deepspeed_json(path: Path, problems: list[Problem]) -> Settings:
    """The entries of a DeepSpeed JSON under DeepSpeed's own names. What is wrong with the file goes to `problems`."""
    text = read_text(path, problems)
    if text is None:
        return Settings()
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated.extend(key for key in dict.fromkeys(keys) if keys.count(key) > 1)
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        problems.append(file_problem(path, error.lineno, f"not valid JSON: {error.msg}"))
        return Settings()
    if not isinstance(values, dict):
        problems.append(file_problem(path, None, "a DeepSpeed configuration is one { ... } block"))
        return Settings()
    lines = key_lines(text)
    for key in repeated:
        line = max((line for name, line in lines.items() if name.rpartition(".")[2] == key), default=None)
        problems.append(file_problem(path, line, f"`{key}` is set twice in one block"))
    places = dict.fromkeys(values, str(path)) | {name: f"{path}:{line}" for name, line in lines.items()}
    return Settings(values, places)


@dataclass(frozen=True)
class _Claim:
    """`field` of the schema is set to `value` by the JSON's `key`, which `shown` is the value of."""

    field: str
    value: Any
    key: str
    shown: Any


def merge_deepspeed_json(
    schema: type[FullConfig], settings: Settings, document: Settings, problems: list[Problem]
) -> Settings:
    """`settings` with what `document` (see `read_deepspeed_json`) adds to them.

    Unknown keys, and values that disagree with `settings` or with each other, are appended to `problems`.
    """
    claims: dict[str, _Claim] = {}
    extra: dict[str, Any] = {}
    for path, value, message in check_keys(document.values):
        if message is not None:
            problems.append(Problem((_json_mention(document, path, value),), message))
        elif path in IGNORED:
            _warn_ignored(document, path, value)
        elif path in PASSED_ON and value is not None:
            extra[path] = int(value) if PASSED_ON[path] is int else value
        elif path in SCHEMA_FIELDS and value is not None:
            for claim in _translate(document, path, value, problems):
                _accept(claim, claims, document, problems)
    _claim_hybrid(document, claims, extra, problems)
    _claim_lanes(schema, settings, document, claims, problems)
    return _merged(schema, settings, document, claims, extra, problems)


def _translate(document: Settings, path: str, value: Any, problems: list[Problem]) -> Iterator[_Claim]:
    """What a key of `SCHEMA_FIELDS` says in the schema's terms."""
    if path == "zero_optimization.stage":
        if value in (0, 1, 2, 3) and not isinstance(value, bool):
            yield _Claim("infra.sharding_stage", f"zero{int(value)}", path, value)
        else:
            problems.append(Problem((_json_mention(document, path, value),), 'allowed: 0, 1, 2, 3 or "auto"'))
    elif path == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            problems.append(Problem((_json_mention(document, path, value),), "must be a list of two numbers"))
            return
        for field, beta in zip(("training.adam_beta1", "training.adam_beta2"), value, strict=True):
            if beta != "auto":
                yield _Claim(field, beta, path, value)
    elif path != "train_batch_size":
        yield _Claim(SCHEMA_FIELDS[path], value, path, value)


def _claim_hybrid(
    document: Settings, claims: dict[str, _Claim], extra: dict[str, Any], problems: list[Problem]
) -> None:
    """A secondary partition (hpZ) smaller than the world is what the schema calls zero3_hybrid."""
    size = extra.get(_HPZ, 1)
    if size <= 1:
        extra.pop(_HPZ, None)
        return
    stage = claims.pop("infra.sharding_stage", None)
    if stage is not None and stage.value != "zero3":
        mentions = (_json_mention(document, stage.key, stage.shown), _json_mention(document, _HPZ, size))
        problems.append(Problem(mentions, "hpZ is part of ZeRO-3: set stage 3, or remove zero_hpz_partition_size"))
    claims["infra.sharding_stage"] = _Claim("infra.sharding_stage", "zero3_hybrid", _HPZ, size)


def _claim_lanes(
    schema: type[FullConfig],
    settings: Settings,
    document: Settings,
    claims: dict[str, _Claim],
    problems: list[Problem],
) -> None:
    """`train_batch_size` fixes the micro-batches of one optimizer step, whatever the number of ranks."""
    total = document.get("train_batch_size")
    if total in (None, "auto"):
        return
    field = "training.per_device_train_batch_size"
    claim = claims.get(field)
    micro = claim.value if claim else settings.get(field, default_of(schema, field))
    micro_mention = _json_mention(document, claim.key, micro) if claim else mention(schema, settings, field)
    total_mention = _json_mention(document, "train_batch_size", total)
    if not _is_count(total):
        problems.append(Problem((total_mention,), 'must be a whole number >= 1, or "auto"'))
    elif _is_count(micro) and total % micro:
        message = "train_batch_size must be a multiple of the micro-batch size"
        problems.append(Problem((total_mention, micro_mention), message))
    elif _is_count(micro):
        _accept(_Claim("data.num_lanes", total // micro, "train_batch_size", total), claims, document, problems)


def _accept(claim: _Claim, claims: dict[str, _Claim], document: Settings, problems: list[Problem]) -> None:
    """Note `claim`, unless another key of the same JSON says something else about the field."""
    earlier = claims.setdefault(claim.field, claim)
    if not _same(earlier.value, claim.value):
        mentions = (
            _json_mention(document, earlier.key, earlier.shown),
            _json_mention(document, claim.key, claim.shown),
        )
        problems.append(Problem(mentions, f"both set `{claim.field}` and must agree"))


def _merged(
    schema: type[FullConfig],
    settings: Settings,
    document: Settings,
    claims: dict[str, _Claim],
    extra: dict[str, Any],
    problems: list[Problem],
) -> Settings:
    result = settings.copy()

    def take(field: str, value: Any, key: str, shown: Any) -> None:
        """Set `field`, unless YAML or the command line did: then the two must agree."""
        present = settings.get(field)
        if present is None:
            result.put(field, value, f"{document.place_of(key)} ({key})")
        elif not _same(present, value):
            mentions = (mention(schema, settings, field), _json_mention(document, key, shown))
            message = 'the two disagree: make them equal, or leave it to one (in the JSON with "auto")'
            problems.append(Problem(mentions, message))

    for claim in claims.values():
        take(claim.field, claim.value, claim.key, claim.shown)
    for key, value in extra.items():
        take(f"infra.deepspeed_extra.{key}", value, key, value)
    for field, (value, key) in _implied(claims).items():
        if field not in result:
            take(field, value, key, value)
    return result


def _implied(claims: dict[str, _Claim]) -> dict[str, tuple[Any, str]]:
    """What DeepSpeed would read into the JSON: field → (value, the key it follows from)."""
    implied: dict[str, tuple[Any, str]] = {}
    half = claims.get("training.fp16")
    if half is not None and half.value is True:
        implied["training.bf16"] = (False, half.key)
    stage = claims.get("infra.sharding_stage")
    if stage is not None:
        implied["infra.offload_optimizer"] = ("none", stage.key)
        implied["infra.offload_params"] = ("none", stage.key)
    return implied


def _warn_ignored(document: Settings, path: str, value: Any) -> None:
    block = path.rpartition(".")[0]
    switched_off = f"{block}.enabled" in document and not path.endswith(".enabled")
    if value and not switched_off:
        logger.warning("%s: `%s` does nothing here: %s", document.place_of(path), path, IGNORED[path])


def _json_mention(document: Settings, path: str, value: Any) -> Mention:
    return Mention(document.place_of(path), path, show(value))


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
