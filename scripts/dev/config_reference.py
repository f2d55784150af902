"""Writes docs/configuration.md, its JSON schema and docs/coming-from.md; --check only compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ds_encdec.config.schema import FullConfig, editor_schema
from ds_encdec.config.sections import fields
from ds_encdec.config.settings import show
from ds_encdec.config.validation import default_of
from ds_encdec.config.words.other_tools import READERS, WORDS, Meaning, Word
from ds_encdec.config.yaml.deepspeed_keys import FIXED, IGNORED, PASSED_ON, SCHEMA_FIELDS

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"

HUGGING_FACE_DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "min_lr_ratio": 0.0,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "bf16": False,
    "activation_checkpointing": "none",
    "eval_samples": 0,
    "logging_steps": 500,
    "save_steps": 500,
    "save_total_limit": None,
    "report_to": (),
}
"""Those of its Trainer that are others here, by our fields of `training`."""


def _names(row: Word) -> str:
    parts = [(name, *name.rpartition(".")[::2]) for name in row.names.split()]
    return ", ".join(
        f"`{name}`" if not section or name in fields() else f"`{last}` (in `{section}`)"
        for name, section, last in parts
    )


def _here(row: Word) -> str:
    """A row's field, the meanings of single values, and why there is no field."""
    values = []
    for texts, meaning in row.values.items():
        names = texts.replace("true yes 1", "true").replace("false no none 0", "false").split()
        values.append(f"{', '.join(f'`{name}`' for name in names)}: {_meant(meaning)}")
    read = " ".join((READERS[row.reads].__doc__ or "").split()).removesuffix(".") if row.reads else ""
    parts = [f"`{row.field}`" if row.field else "", read[:1].lower() + read[1:], *values, row.why]
    return "; ".join(part for part in parts if part)


def _meant(meaning: Meaning) -> str:
    if isinstance(meaning, str):
        return meaning
    return ", ".join(f"`{name}={show(value)}`" for name, value in meaning.items()) or "nothing to set"


def _by_block(reasons: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Keys of one block that share their reason become one entry."""
    blocks: dict[tuple[str, str], list[str]] = {}
    for key, reason in reasons.items():
        blocks.setdefault((key.partition(".")[0], reason), []).append(key)
    for (block, reason), keys in blocks.items():
        yield (keys[0] if len(keys) == 1 else f"{block}.*" if len(keys) > 3 else "`, `".join(keys)), reason


def _sections() -> Iterator[dict[str, Any]]:
    """Every section with its rows, nested ones behind the one that holds them."""
    schema = FullConfig.model_json_schema()
    pending = list(schema["properties"].items())
    homes: dict[tuple[str, str], str] = {}
    while pending:
        path, field = pending.pop(0)
        section = _referenced(field, schema)
        others = [other for other, inner in pending if _referenced(inner, schema) is section]  # such as the phases
        rows, nested = [], []
        for name, inner in section["properties"].items():
            home = homes.setdefault((name, inner["description"]), path)
            meaning = inner["description"] if home == path else f"As in `{home}`."
            rows.append((f"`{name}`", _type(inner), _default(name, inner, section), meaning))
            if _referenced(inner, schema) is not None:
                nested.append((f"{path}.{name}", inner))
        yield {"path": ", ".join([path, *others]), "description": section["description"], "rows": rows}
        pending = nested + [one for one in pending if one[0] not in others]


def _referenced(field: dict[str, Any], schema: dict[str, Any]) -> Any:
    """The section that a field holds, alone, as an alternative, or in a list; None for a plain field."""
    if "$ref" in field:
        return schema["$defs"][field["$ref"].rpartition("/")[2]]
    inside = [*field.get("anyOf", ()), *([field["items"]] if isinstance(field.get("items"), dict) else [])]
    return next((found for part in inside if (found := _referenced(part, schema)) is not None), None)


def _type(field: dict[str, Any]) -> str:
    """A JSON-schema type in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(part) for part in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return "block"
    if field["type"] == "array":
        fewest = (
            f"{field['minItems']} to " if field.get("minItems", field.get("maxItems")) != field.get("maxItems") else ""
        )
        return f"{fewest}{field['maxItems']} numbers" if "maxItems" in field else f"list of {_type(field['items'])}"
    names = {"object": "block", "null": "null", "string": "text", "integer": "integer", "number": "number"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:g}" for key, sign in bounds.items() if key in field]
    return " ".join([names.get(field["type"], "true or false"), ", ".join(limits)]).strip()


def _default(name: str, field: dict[str, Any], section: dict[str, Any]) -> str:
    return "required" if name in section.get("required", ()) else _code(field.get("default", {}))


def _code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def documents() -> dict[str, str]:
    """The texts by their names in docs/; each page has a template beside this file."""
    environment = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    environment.keep_trailing_newline = True
    environment.filters |= {"cell": _cell, "code": _code}
    passed_on: dict[str, list[str]] = {}
    for key in PASSED_ON:
        block, _, name = key.rpartition(".")
        passed_on.setdefault(block, []).append(name)
    facts = {"sections": list(_sections()), "deepspeed_fields": SCHEMA_FIELDS, "passed_on": passed_on}
    facts |= {"ignored": list(_by_block(IGNORED)), "fixed": FIXED, "defaults": HUGGING_FACE_DEFAULTS}
    facts |= {"words": WORDS, "names": _names, "here": _here, "default_of": default_of}
    pages = ("configuration.md", "coming-from.md")
    written = {page: environment.get_template(f"{page}.j2").render(facts) for page in pages}
    return written | {"configuration.schema.json": editor_schema()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    check, code = parser.parse_args().check, 0
    for name, text in documents().items():
        path = DOCS / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run python scripts/dev/config_reference.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
