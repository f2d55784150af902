"""The generated reference and what it is generated from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ds_encdec.config.schema import SCHEMA_ID, FullConfig, Section
from ds_encdec.config.sections import fields, section_in

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "docs" / "configuration.schema.json"


def test_every_section_and_field_has_a_docstring() -> None:
    for path, field in {"": FullConfig, **fields()}.items():
        section = FullConfig if not path else section_in(field.annotation)
        assert section is None or section.__doc__ != Section.__doc__, path
        found = {} if section is None else section.docstrings()
        for name in () if section is None else section.model_fields:
            assert found.get(name, "").endswith("."), (path, name)


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "dev" / "config_reference.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_json_schema_knows_choices_bounds_and_texts() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert (schema["$schema"], schema["$id"]) == ("https://json-schema.org/draft/2020-12/schema", SCHEMA_ID)
    training = schema["$defs"]["TrainingConfig"]["properties"]
    assert training["activation_checkpointing"]["enum"] == ["none", "full", "every_n", "selective", "auto"]
    assert training["adam_beta1"]["exclusiveMaximum"] == 1
    assert training["num_train_steps"]["description"] == "Optimizer steps of the run; null with `num_train_epochs`."
    assert "title" not in training["num_train_steps"]
    assert schema["$defs"]["TrainingConfig"]["additionalProperties"] is False


def test_shipped_files_name_the_schema_to_editors() -> None:
    for path in (ROOT / "ds_configs").glob("*.yaml"):
        mark, _, named = path.read_text().partition("\n")[0].partition("=")
        assert mark == "# yaml-language-server: $schema", path
        assert (path.parent / named).resolve() == SCHEMA, path
