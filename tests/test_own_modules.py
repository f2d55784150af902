"""Modules of the user's own in the working folder: they hide no library, and an error names the file that was taken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec.plugins import load_plugin
from ds_encdec.types import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "start", [["-m", "ds_encdec.train"], ["-um", "ds_encdec.cli", "train"], ["ds_encdec/train.py"]], ids=" ".join
)
def test_they_hide_no_library(tmp_path: Path, start: list[str]) -> None:
    for name in ("typing_extensions", "annotated_types", "pydantic", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    (tmp_path / "ds_encdec").symlink_to(ROOT / "ds_encdec")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [sys.executable, *start, "--print-config"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "model_name_or_path:" in ended.stdout


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")  # so that what is appended is taken off again
    (tmp_path / "tabnanny.py").write_text("def source(): ...\n")
    (tmp_path / "own_parts_here.py").write_text("def source(): ...\n")
    field, name = "data.dataset_name", "python:own_parts_here:sorce"
    with pytest.raises(ConfigError, match=rf"{field}={name} .*own_parts_here is {tmp_path}/own_parts_here.py. Write"):
        load_plugin(field, name)
    shadowed = rf"tabnanny is .*/tabnanny.py, and {tmp_path}/tabnanny.py is hidden by it: give that another name"
    with pytest.raises(ConfigError, match=shadowed):
        load_plugin(field, "python:tabnanny:source")
