"""Readers of the user's own, `data.dataset_name: python:MODULE:FUNCTION`, through the loader of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_parts import byte_tokenizer, documents_of, make_config, make_data, texts, write_json_lines

from ds_encdec.base.types import CheckpointError, ConfigError, DataError
from ds_encdec.config.schema import read_config
from ds_encdec.data.build import prepare_data
from ds_encdec.training.absent import look_here

# Its file is open, so workers that shared its position would read nonsense.
READER = """
import json
class Lines:
    def __init__(self, path):
        self.file = open(path)
        self.starts = [0]
        while self.file.readline():
            self.starts.append(self.file.tell())
    def __len__(self):
        return len(self.starts) - 1
    def __getitem__(self, number):
        self.file.seek(self.starts[number])
        return {rows}
def lines():
    return Lines({path!r})
def nothing():
    return 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `own_lines` in the working folder, whose rows are those of a JSON file."""
    monkeypatch.chdir(tmp_path)
    path = write_json_lines(tmp_path / "a.jsonl", texts(300))
    (tmp_path / "own_lines.py").write_text(
        READER.replace("{rows}", "json.loads(self.file.readline())").format(path=path)
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "own_lines.py"
    sys.modules.pop("own_lines", None)


def own(**changes: object) -> dict[str, object]:
    return {"dataset_name": "python:own_lines:lines"} | changes


def test_a_run_goes_on_behind_the_rows_it_has_read_with_any_workers(module: Path) -> None:
    data = make_data(make_config(**own()))
    assert {key.rpartition("/")[0] for key in documents_of(next(data.loader))} == {"python:own_lines:lines"}
    saved, lanes = json.loads(json.dumps(data.saved())), data.loader.state()
    second = [batch.documents for batch in next(data.loader)]
    resumed = make_data(make_config(**own(preprocessing_num_workers=2)), saved=saved)
    resumed.loader.load_state(lanes)
    assert [batch.documents for batch in next(resumed.loader)] == second
    resumed.loader.close()
    # Another text of the module is other data.
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(CheckpointError, match=r"source 0 \(python own_lines:lines, .* there, source 1 "):
        make_data(make_config(**own()), saved=saved)


def test_prepared_rows_are_those_of_the_code_that_read_them(module: Path) -> None:
    config = make_config(**own(prepared_dir="out"))
    list(prepare_data(config, *byte_tokenizer(), 1))
    make_data(config)
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(DataError, match=r"reader's code: '\w+' there, '\w+' now"):
        make_data(config)


def test_rows_that_cannot_be_read_are_named(module: Path) -> None:
    with pytest.raises(DataError, match=r"python:own_lines:lines/\d+ has no such column; it has text, id"):
        make_data(make_config(**own(text_column="body")))
    module.write_text(module.read_text().replace("json.loads(self.file.readline())", "1 / 0"))
    sys.modules.pop("own_lines")
    with pytest.raises(DataError, match=r"python:own_lines:lines/\d+: ZeroDivisionError: division by zero"):
        make_data(make_config(**own()))
    with pytest.raises(DataError, match=r"must return an object with a length and numbered rows \(TypeError"):
        make_data(make_config(dataset_name="python:own_lines:nothing"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.dataset_name=python:own_lines:gone", "module 'own_lines' has no attribute 'gone'"),
        ("data.dataset_name=python:own_lines", "write `python:module:function`"),
        ("data.eval_dataset_name=python:gone:x", "No module named 'gone'"),
        ("training.callbacks=own_lines:Gone", "training.callbacks=own_lines:Gone cannot be imported"),
        ("training.callbacks=Gone", "allowed: `module:name`"),
        ("training.report_to=own_lines:Gone", "training.report_to=own_lines:Gone cannot be imported"),
        ("training.lr_scheduler_type=own_lines:gone", "training.lr_scheduler_type=own_lines:gone cannot be imported"),
        ("infra.upload_to=nowhere://x", "Protocol not known: nowhere"),
    ],
)
def test_what_is_not_there_is_found_before_a_run(module: Path, setting: str, message: str) -> None:
    loaded = read_config("ds_configs/quickstart.yaml", [setting])
    look_here(loaded)
    with pytest.raises(ConfigError) as caught:
        loaded.valid()
    assert "1 problem:" in str(caught.value)
    assert message in str(caught.value)
