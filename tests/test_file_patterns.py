"""Brackets in the paths of files: what is there by its name is no pattern, wherever files are named."""

import json
import os
from glob import iglob
from pathlib import Path

import pytest

from ds_encdec.base.file_patterns import named_files
from ds_encdec.base.types import DataError
from ds_encdec.config.command_line import container_arguments
from ds_encdec.config.data_sections import MixtureSource
from ds_encdec.data.sources.local_files import expand_files
from ds_encdec.data.sources.tables import open_hub_data

NAMES = ("part1.jsonl", "part[1].jsonl", "run[2]/a.jsonl", "run2/b.jsonl", "run[2]/deep[x]/c.jsonl")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one row each, in a folder with brackets."""
    here = tmp_path / "it's [all] here"
    for name in NAMES:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": "a"}))
    monkeypatch.chdir(here)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("part[1].jsonl", ["part[1].jsonl"]),
        ("part[12].jsonl", ["part1.jsonl"]),
        ("part[[]1].jsonl", ["part[1].jsonl"]),
        ("run[[]2]/**/*.jsonl", ["run[2]/a.jsonl", "run[2]/deep[x]/c.jsonl"]),
        ("run[2345]/*", ["run2/b.jsonl"]),
        ("run[2]", []),
    ],
)
def test_a_path_goes_before_a_pattern(name: str, found: list[str]) -> None:
    here = os.getcwd()
    assert sorted(map(os.path.normpath, named_files(name))) == found
    os.chdir("/")
    assert sorted(os.path.relpath(path, here) for path in named_files(name, here)) == found


def test_every_reader_of_names_agrees() -> None:
    assert expand_files(("part[1].jsonl",)) == (os.path.abspath("part[1].jsonl"),)
    with pytest.raises(DataError, match=r"data\.eval_files: no file matches no\[1\] "):
        expand_files(["no[1]"], "data.eval_files")
    with pytest.raises(DataError, match=r"run\[2\].*data\.data_files='FOLDER/\*\*'"):
        open_hub_data(MixtureSource(dataset_name=os.path.abspath("run[2]"), weight=1), 1, streaming=True)


def test_a_channel_of_sagemaker() -> None:
    variables = {"SM_CHANNEL_TRAIN": os.path.abspath("run[2]")}
    (files,) = (one for one in container_arguments(variables, [], ()) if one.startswith("data.data_files"))
    (pattern,) = json.loads(files.partition("=")[2])
    assert sorted(os.path.relpath(path) for path in iglob(pattern, recursive=True)) == [NAMES[2], NAMES[4]]
