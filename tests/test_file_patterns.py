"""Brackets in the paths of files: what is there by its name is no pattern, wherever files are named."""

import json
import os
from glob import iglob
from pathlib import Path

import pytest

from ds_encdec.base.file_patterns import named_files
from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.command_line import container_arguments
from ds_encdec.config.data_sections import DataConfig, MixtureSource
from ds_encdec.config.schema import read_config
from ds_encdec.data.sources.local_files import expand_files
from ds_encdec.data.sources.tables import open_hub_data
from ds_encdec.training.absent import look_here

NAMES = ("part1.jsonl", "part[1].jsonl", "run[2]/a.jsonl", "run2/b.jsonl", "run[2]/deep[x]/c.jsonl", "[3].jsonl")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one row each, in a folder with brackets."""
    here = tmp_path / "it's [all] here"
    for name in NAMES:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": "a", path.name.replace(".", "_"): 1}))
    monkeypatch.chdir(here)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("part[1].jsonl", ["part[1].jsonl"]),
        ("part[12].jsonl", ["part1.jsonl"]),
        ("part[[]1].jsonl", ["part[1].jsonl"]),
        ("run[2]/*.jsonl", ["run[2]/a.jsonl"]),
        ("run[2]/**/*.jsonl", ["run[2]/a.jsonl", "run[2]/deep[x]/c.jsonl"]),
        ("run[2345]/*", ["run2/b.jsonl"]),
        ("*/[b-z].jsonl", ["run2/b.jsonl"]),
        ("[3].jsonl", ["[3].jsonl"]),
        ("run[2]", []),
    ],
)
def test_a_path_goes_before_a_pattern(name: str, found: list[str]) -> None:
    here = os.getcwd()
    assert sorted(map(os.path.normpath, named_files(name))) == found
    assert sorted(os.path.relpath(path) for path in named_files(f"{here}/{name}")) == found
    os.chdir("/")
    assert sorted(os.path.relpath(path, here) for path in named_files(name, here)) == found


def test_every_reader_of_names_agrees() -> None:
    data = DataConfig(dataset_name="json", data_files=("part[1].jsonl",), text_column="words")
    assert expand_files(data.data_files or ()) == (os.path.abspath("part[1].jsonl"),)
    files = ["data.dataset_name=json", "data.data_files=part[1].jsonl", "data.text_column=words"]
    loaded = read_config(Path("quickstart"), files)
    look_here(loaded)
    with pytest.raises(ConfigError, match=r"it has text, part\[1\]_jsonl"):
        loaded.valid()
    with pytest.raises(DataError, match=r"data\.eval_files: no file matches no\[1\] "):
        expand_files(["no[1]"], "data.eval_files")


def test_a_channel_of_sagemaker() -> None:
    variables = {"SM_CHANNEL_TRAIN": os.path.abspath("run[2]")}
    (files,) = (one for one in container_arguments(variables, [], ()) if one.startswith("data.data_files"))
    (pattern,) = json.loads(files.partition("=")[2])
    assert sorted(os.path.relpath(path) for path in iglob(pattern, recursive=True)) == [NAMES[2], NAMES[4]]


def test_a_folder_that_the_hubs_library_takes_for_a_pattern() -> None:
    with pytest.raises(DataError, match=r"run\[2\].*data\.data_files='FOLDER/\*\*'"):
        open_hub_data(MixtureSource(dataset_name=os.path.abspath("run[2]"), weight=1), 1, streaming=True)
