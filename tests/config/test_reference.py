"""The generated reference and what it is generated from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ds_encdec.config.rules import fields, section_in
from ds_encdec.config.schema import FullConfig, Section

ROOT = Path(__file__).resolve().parents[2]


def test_every_section_and_field_has_a_docstring() -> None:
    for path, field in {"": FullConfig, **fields()}.items():
        section = FullConfig if not path else section_in(field.annotation)
        assert section is None or section.__doc__ != Section.__doc__, path
        found = {} if section is None else section.docstrings()
        for name in () if section is None else section.model_fields:
            assert found.get(name, "").endswith("."), (path, name)


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "config_reference.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_reference_has_every_field() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for path in fields():
        if "." in path:
            assert f"| `{path.rpartition('.')[2]}` |" in text, path


def test_the_json_schema_knows_choices_bounds_and_texts() -> None:
    definitions = FullConfig.model_json_schema()["$defs"]
    training = definitions["TrainingConfig"]["properties"]
    assert training["activation_checkpointing"]["enum"] == ["none", "full", "every_n", "selective"]
    assert training["adam_beta1"]["exclusiveMaximum"] == 1
    assert training["num_train_steps"]["description"] == "Optimizer steps of the run; null with `num_train_epochs`."
    assert definitions["TrainingConfig"]["additionalProperties"] is False
