"""The program's own arguments; what its verbs do is tested with them."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_encdec import cli, train
from ds_encdec.base.types import CheckpointError, DataError
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import World
from ds_encdec.memory.gpus import has_gpu

ROOT = Path(__file__).parents[1]


def test_called_with_nothing_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "prepare:\n    init " in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb_ends_with_an_example_that_is_read(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert ("[section.field=value ...]" in shown) is cli.VERBS[verb].takes_settings
    *_, example = shown.rstrip().splitlines()
    assert example == f"  {cli.VERBS[verb].example}"
    assert len(example) <= 80
    words = shlex.split(cli.VERBS[verb].example)
    assert words[:2] == ["ds-encdec", verb]
    cli.read_verb(words[1:])


MISTYPED = """
trian
report folder --token hf_0123 --api-key=sk-1
train --profile 0
generate --model . --text x --max_new_token 3
evaluate --model . --split valid
"""


def test_what_is_mistyped_is_answered_with_its_neighbour(
    capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]
) -> None:
    """Of arguments that nothing takes only the names are shown: their values may be secret."""
    for line in MISTYPED.strip().splitlines():
        assert cli.main(line.split()) == 2
    golden(re.sub(r" \(choose from .*?\)", "", capsys.readouterr().err))  # the quotes depend on Python


QUICKSTART = "ds_encdec/train.py --config quickstart infra.output_dir=output/never"
NOT_FOR_MISTAKES = {"rich", "psutil", "numpy", "torch", "transformers", "deepspeed", "datasets", "pyarrow"}
NOT_FOR_HELP = NOT_FOR_MISTAKES | {"pydantic", "yaml", "importlib.metadata", "tokenizers", "jinja2", "matplotlib"}


@pytest.mark.parametrize(
    ("command", "code", "absent"),
    [
        ("-m ds_encdec.cli --help", 0, NOT_FOR_HELP),
        ("-m ds_encdec.cli train --help", 0, NOT_FOR_HELP),
        ("-m ds_encdec.cli --version", 0, NOT_FOR_MISTAKES),
        ("-m ds_encdec.cli validate ds_configs/quickstart.yaml", 0, NOT_FOR_MISTAKES),
        ("ds_encdec/train.py trainning.max_steps=1", 2, NOT_FOR_MISTAKES - {"psutil"}),  # it looks at its launcher
        pytest.param(
            f"{QUICKSTART} infra.device=cuda",
            2,
            {"torch", "transformers", "deepspeed"},
            marks=pytest.mark.skipif(has_gpu(), reason="this machine has a GPU"),
        ),
        (f"{QUICKSTART} model.decoder_layers=99", 2, {"torch", "transformers", "deepspeed"}),
        (f"{QUICKSTART} --resume nowhere", 5, {"torch", "transformers", "deepspeed"}),
        (f"{QUICKSTART} data.dataset_name=text data.data_files=nothing*", 4, {"torch", "transformers", "deepspeed"}),
    ],
)
def test_what_answers_at_once_imports_little(command: str, code: int, absent: set[str]) -> None:
    words = [sys.executable, "-X", "importtime", *command.split()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert result.returncode == code
    assert "ds_encdec.base.arguments" in imported
    assert imported & absent == set()


def configured(folder: Path, **data: object) -> FullConfig:
    return FullConfig.model_validate({"data": data, "infra": {"output_dir": str(folder), "device": "cpu"}})


def test_a_new_run_that_is_refused_at_once_says_so_in_its_folder(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", dataset_name="text", data_files=["nowhere*"])
    with pytest.raises(DataError, match=r"data.data_files: no file matches nowhere\*"):
        train._refuse_early(config, None, World())
    status = RunFolder(config.infra.output_dir).read_status()
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert "nowhere*" in status["reason"]


def test_what_a_run_does_not_read_may_be_away(tmp_path: Path) -> None:
    text = {"dataset_name": "text", "data_files": [__file__]}
    train._refuse_early(configured(tmp_path / "run", **text, test_files=["no*"]), None, World())
    prepared = configured(tmp_path / "run", dataset_name="text", data_files=["no*"], prepared_dir=str(tmp_path))
    with pytest.raises(DataError, match="nothing is prepared there"):
        train._refuse_early(prepared, None, World())
    (tmp_path / "source-0").mkdir()
    (tmp_path / "source-0" / "index.json").touch()
    train._refuse_early(prepared, str(tmp_path), World())
    with pytest.raises(CheckpointError, match="no such folder"):
        train._refuse_early(prepared, str(tmp_path / "step-00000002"), World())
