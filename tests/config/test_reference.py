"""The generated reference, and what it and changed configurations are made of."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ds_encdec.config.schema import Mark, marked

ROOT = Path(__file__).resolve().parents[2]


def script(path: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_reference_is_up_to_date() -> None:
    script("scripts/dev/config_reference.py", "--check")


def test_mutated_configurations_are_accepted_or_refused_with_their_places() -> None:
    shown = script("tests/nightly/mutate_configs.py", "--count", "500")
    assert 50 <= int(re.search(r"\b0: (\d+)", shown)[1]) <= 250, "mutations must reach both ends"  # type: ignore[index]


def test_shipped_files_name_the_schema_to_editors() -> None:
    for path in (ROOT / "ds_configs").glob("*.yaml"):
        mark, _, named = path.read_text().partition("\n")[0].partition("=")
        assert mark == "# yaml-language-server: $schema", path
        assert (path.parent / named).resolve() == ROOT / "docs" / "configuration.schema.json", path


def test_fields_of_each_mark(golden: Callable[[object], None]) -> None:
    # Mark.ORDER makes the fingerprint of the data: with a field more or less no earlier checkpoint can be resumed.
    golden("\n".join(f"{mark.name}: {' '.join(marked(mark))}" for mark in Mark))
