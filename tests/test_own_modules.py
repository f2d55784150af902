"""Modules of the user's own in the working folder: they hide no library, and an error names the file that was taken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec import cli
from ds_encdec.base.plugins import load_plugin
from ds_encdec.base.types import ConfigError
from ds_encdec.launch.peers import named_error

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", [["-um", "ds_encdec.cli", "train"], ["ds_encdec/train.py"]], ids=" ".join)
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
    (tmp_path / "own_parts_here.py").write_text("def source(): ...\n")
    field, name = "data.dataset_name", "python:own_parts_here:sorce"
    with pytest.raises(ConfigError, match=rf"{field}={name} .*own_parts_here is {tmp_path}/own_parts_here.py. Write"):
        load_plugin(field, name)


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("metric_for_best_model", "(predictions, references)"),
        ("report_to", "(config, logging_dir, start_step)"),
    ],
)
def test_what_cannot_be_called_as_it_will_be_is_refused_by_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "parts_called.py").write_text("number = 3\ndef part(one, two, three, four): ...\n")
    for name, complaint in (
        ("part", f"must be a function of {given}: missing"),
        ("number", f"must be a function of {given}: 3 is not"),
    ):
        settings = [f"training.{setting}=parts_called:{name}", "training.eval_generate_samples=4"]
        assert cli.main(["validate", "quickstart", *settings]) == 2
        assert f"training.{setting}=parts_called:{name} {complaint}" in capsys.readouterr().err


def test_what_ends_a_run_has_the_users_line_and_no_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_loss.py").write_text("import json\ndef loss(logits, labels):\n    json.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting") as raised:
        load_plugin("training.loss", "late_loss:loss")(None, None)
    assert str(named_error(raised.value, 3)).endswith(f"({tmp_path}/late_loss.py:3)")
    raised.value.__traceback__ = raised.tb.tb_next.tb_next  # in json alone
    assert str(named_error(raised.value, 3)) == f"rank 3: JSONDecodeError: {raised.value}"
