"""The package as a library: its front door, and docs/library.md, whose code is run as it stands.

The page's `my_parts.py` is a module of an outside package here.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_encdec
from ds_encdec import Qwen3ForSeq2SeqLM
from ds_encdec.checkpoint.manifest import verify_checkpoint

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL | re.MULTILINE)


def test_every_name_of_the_front_door_is_the_one_that_type_checkers_see() -> None:
    tree = ast.parse(Path(str(ds_encdec.__file__)).read_text())
    seen = {
        str(alias.asname): f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_encdec.")
        for alias in node.names
    }
    assert seen == ds_encdec._HOMES
    assert sorted(ds_encdec.__all__) == sorted(seen)
    assert re.match(r"\d", ds_encdec.__version__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ds_encdec.nothing


SMALL = ["data.max_encoder_length=64", "data.max_decoder_length=64", "training.eval_samples=8", "training.bf16=false"]
"""What the page's runs are given besides, to be over sooner."""


def written(folder: Path) -> None:
    """The files of the page in `folder`, and in `folder`/site the outside package."""
    small = "".join(f'"{setting}", ' for setting in SMALL)
    site = folder / "site"
    site.mkdir()
    for _, text in BLOCKS:
        name, rest = text.split("\n", 1)[0].removeprefix("# "), text.split("\n", 1)[1]
        if name.startswith("my_parts.py"):
            with (site / "my_parts.py").open("a") as file:
                file.write(rest)
        elif name.endswith(".py"):  # one run is copied elsewhere besides
            upload = f'"infra.output_dir=runs/parts",\n        "infra.upload_to=file://{folder}/bucket",'
            text = rest.replace('"infra.output_dir=runs/parts",', upload)
            (folder / name).write_text(text.replace('"infra.output_dir=', f'{small}"infra.output_dir='))
    (folder / "front_door.py").write_text(BLOCKS[0][1])


def ran(folder: Path, *names: str) -> str:
    """What one process prints that runs the scripts `names` of `folder` one after the other."""
    code = "import runpy, sys\nfor name in sys.argv[1:]: runpy.run_path(name)"
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    result = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.launch
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    written(tmp_path)
    said = ran(tmp_path, "front_door.py", "train.py", "own_loop.py", "own_parts.py")
    assert "the fourth step is the same" in said
    assert re.search(r"^\d\.\d+ GiB expected on each GPU$", said, re.MULTILINE)
    assert re.search(r"^INFO:ds_encdec\.training\.build:finished at step 10", said, re.MULTILINE)  # set up by train.py
    assert re.search(r"^10 \d{4,5}$", said, re.MULTILINE)
    assert Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "runs" / "mine" / "model").config.vocab_size == 4096

    run = tmp_path / "runs" / "parts"
    moments = re.findall(r"^\('(\w+)', (\d)", said, re.MULTILINE)
    steps = [("step", str(step)) for step in (1, 2, 3, 4)]
    assert moments == [*steps[:2], ("evaluation", "2"), *steps[2:], ("evaluation", "4"), ("save", "4")]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= line["eval/my_parts:word_overlap"] <= 100 for line in lines if "eval/loss" in line] == [True, True]
    assert "eval/my_parts:word_overlap=" in (run / "logs" / "notebook.txt").read_text()
    (rate,) = (line["train/learning_rate"] for line in lines if "train/loss" in line)
    assert rate == pytest.approx(3e-3 / 3)  # the triangle, at the last update of four
    saved = json.loads((run / "checkpoints" / "final" / "trainer.json").read_text())
    assert saved["state"]["best_by"] == "highest my_parts:word_overlap"
    losses = [line["train/loss"] for line in lines if "train/loss" in line]  # of all four steps
    assert (saved["saved"]["reason"], 0 < saved["saved"]["loss"] < 2 * losses[0]) == ("end", True)
    (source,) = saved["data"]["fingerprint"]["sources"]
    assert (source["kind"], source["name"], source["size"]) == ("python", "my_parts:poems", 600)
    assert source["own edition"] == 2
    assert json.loads((tmp_path / "bucket" / "run.json").read_text())["state"] == "completed"
    assert verify_checkpoint(tmp_path / "bucket" / "checkpoints" / "step-00000004").step == 4
    assert Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "bucket" / "export" / "final").config.vocab_size == 4096
