"""A raw DeepSpeed JSON, read into the schema.

"auto", null and absent keys leave a field to the YAML file, the command line and the schema's default. What
the JSON sets must agree with what those set. One thing follows from the JSON without being written in it, because
DeepSpeed reads it so: a ZeRO stage given without an offload block means no offload, which gives way to the YAML file
and the command line.
"""

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ds_encdec.config.deepspeed_keys import IGNORED, PASSED_ON, SCHEMA_FIELDS, check_keys
from ds_encdec.config.settings import Mention, Problem, Settings, above, join, masked, show
from ds_encdec.config.validation import default_of, mention, wrong_value
from ds_encdec.config.yaml_text import compose, file_problem, read_text

logger = logging.getLogger(__name__)

_EXTRA = "infra.deepspeed_extra."
_HPZ = "zero_optimization.zero_hpz_partition_size"


def read_deepspeed_json(path: Path, problems: list[Problem], named_by: Mention | None = None) -> Settings:
    """The entries of a DeepSpeed JSON under DeepSpeed's own names. What is wrong with the file goes to `problems`.

    Their places are `file:line:column`, since such files are often written on one line; YAML's reader finds them, as
    JSON is also YAML but for odd characters. `named_by`: the setting that names the file, where one does.
    """
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
    """The dotted path and the place of every key inside of `node`, which stands at `path`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = join(path, key.value)
            yield here, key.start_mark
            yield from _keys(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(item, join(path, index))


@dataclass(frozen=True)
class _Claim:
    """A key of the JSON (`said` with its value there) sets `field` of the schema to `value`."""

    field: str
    value: Any
    said: Mention


def merge_deepspeed_json(settings: Settings, document: Settings, problems: list[Problem]) -> Settings:
    """`settings` with what `document` (see `read_deepspeed_json`) adds to them.

    Unknown keys, and values that disagree with `settings` or with each other, are appended to `problems`.
    """
    merger = _Merger(settings, document, problems)
    merger.read_keys()
    merger.claim_hybrid()
    merger.claim_lanes()
    return merger.merged()


@dataclass
class _Merger:
    """Collects what a JSON says about the fields of the schema."""

    settings: Settings
    document: Settings
    problems: list[Problem]
    claims: dict[str, _Claim] = field(default_factory=dict)

    def read_keys(self) -> None:
        for path, value, message in check_keys(self.document.values):
            said, block = _mention(self.document, path, value), above(path)
            switched_off = f"{block}.enabled" in self.document and not path.endswith(".enabled")
            if path in IGNORED and message is None and value and not switched_off:
                logger.warning("%s: `%s` does nothing here: %s", said.place, path, IGNORED[path])
            found = message or ([] if value is None else _meant(path, value))
            if isinstance(found, str):
                self._report(found, said)
                continue
            for name, meant in found:
                self._accept(name, meant, said)

    def claim_hybrid(self) -> None:
        """A secondary partition (hpZ) is what the schema calls zero3_hybrid."""
        hybrid = self.claims.get(_EXTRA + _HPZ)
        if hybrid is None or hybrid.value <= 1:
            self.claims.pop(_EXTRA + _HPZ, None)
            return
        stage = self.claims.pop("infra.sharding_stage", None)
        if stage is not None and stage.value != "zero3":
            message = "hpZ is part of ZeRO-3: set stage 3, or remove zero_hpz_partition_size"
            self._report(message, stage.said, hybrid.said)
        self._accept("infra.sharding_stage", "zero3_hybrid", hybrid.said)

    def claim_lanes(self) -> None:
        """`train_batch_size` fixes the micro-batches of one optimizer step, whatever the number of ranks."""
        total = self.document.get("train_batch_size")
        if total in (None, "auto"):
            return
        field = "training.per_device_train_batch_size"
        claim, said = self.claims.get(field), _mention(self.document, "train_batch_size", total)
        micro = claim.value if claim else self.settings.get(field, default_of(field))
        if not _is_count(total):
            self._report('must be a whole number >= 1, or "auto"', said)
        elif micro == "auto":  # the YAML file's: into how many micro-batches these sequences go is not known yet
            self._accept("training.global_batch_size", total, said)
        elif _is_count(micro) and total % micro:
            set_by = claim.said if claim else mention(self.settings, field)
            self._report("train_batch_size must be a multiple of the micro-batch size", said, set_by)
        elif _is_count(micro):
            self._accept("data.num_lanes", total // micro, said)

    def merged(self) -> Settings:
        """The settings, with every claim put in where nothing was set; where something was, the two must agree.

        DeepSpeed reads more into the JSON than is written there: a stage alone means no offload.
        """
        for claim in self.claims.values():
            present = self.settings.get(claim.field)
            if present is not None and not self._agree(present, claim):
                message = 'the two disagree: make them equal, or leave it to one (null here, or "auto" in the JSON)'
                self._report(message, mention(self.settings, claim.field), claim.said)
        stage, implied = self.claims.get("infra.sharding_stage"), list[_Claim]()
        if stage is not None:
            implied = [_Claim(f"infra.offload_{what}", "none", stage.said) for what in ("optimizer", "params")]
        result = deepcopy(self.settings)
        for claim in [*self.claims.values(), *implied]:
            if result.get(claim.field) is None:
                result.put(claim.field, claim.value, f"{claim.said.place} ({claim.said.field})")
        return result

    def _accept(self, field: str, value: Any, said: Mention) -> None:
        """Note a claim, unless another key of the same JSON says something else about the field."""
        claim = _Claim(field, value, said)
        earlier = self.claims.setdefault(field, claim)
        if not self._agree(earlier.value, claim):
            self._report(f"both set `{field}` and must agree", earlier.said, said)

    def _agree(self, earlier: Any, claim: _Claim) -> bool:
        """Return whether `claim` leaves its field at `earlier`. A value that is wrong by itself disagrees with nothing.

        One in `claim` is reported here; one in `earlier` is in the settings, and reported when they are validated.
        """
        if earlier == claim.value and isinstance(earlier, bool) == isinstance(claim.value, bool):
            return True
        wrong = wrong_value(claim.field, claim.value)
        if wrong is not None:
            self._report(wrong, claim.said)
        return wrong is not None or wrong_value(claim.field, earlier) is not None

    def _report(self, message: str, *mentions: Mention) -> None:
        self.problems.append(Problem(mentions, message))


def _meant(path: str, value: Any) -> list[tuple[str, Any]] | str:
    """The fields that a key sets, with their values, or what is wrong with its value. `claim_lanes` reads one more."""
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
