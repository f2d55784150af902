"""A whole run beside a teacher, from the configuration to the export, and its resume."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_encdec import cli
from ds_encdec.tokenizer.load import builtin_tokenizer

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "ds_configs" / "quickstart_distillation.yaml"


def decoder(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads)).save_pretrained(folder)
    builtin_tokenizer(["some words of a text"], 300).save_pretrained(folder)


def settings(folder: Path, **changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "model.model_name_or_path": folder / "decoder",
        "data.data_files": folder / "text.jsonl",
        "data.eval_files": folder / "text.jsonl",
        "data.num_lanes": 1,
        "training.teacher": folder / "teacher",
        "training.bf16": "false",
        "training.num_train_steps": 2,
        "training.warmup_steps": 1,
        "training.save_steps": 1,
        "training.eval_steps": 2,
        "training.eval_samples": 4,
        "training.logging_steps": 1,
        "infra.output_dir": folder / "run",
        "infra.num_gpus": 1,
        "infra.device": "cpu",
        "infra.distributed_type": "fsdp",
    }
    return [f"{name}={value}" for name, value in (given | changes).items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distilled")
    decoder(path / "decoder")
    shutil.copytree(path / "decoder", path / "teacher")
    rows = [
        {"text": f"{number} is what a line of text number {number} says, once and again. " * 9} for number in range(40)
    ]
    (path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, *words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ds_encdec" / "train.py"), "--config", str(CONFIG), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *settings(folder, **changes)], capture_output=True, text=True, env=environment, timeout=600
    )


@pytest.mark.launch
def test_a_run_has_the_figure_and_its_checkpoints_name_the_teacher_whose_weights_decide_a_resume(folder: Path) -> None:
    first = train(folder)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("train", "eval"):
        found = [line for line in lines if f"{name}/distillation_loss" in line]
        assert found
        assert all(line[f"{name}/distillation_loss"] > 0 and line[f"{name}/loss"] > 5 for line in found)
    checkpoint = folder / "run" / "checkpoints" / "final"
    record = json.loads((checkpoint / "model" / "teacher.json").read_text())
    assert (record["name_or_path"], list(record["files"])) == (str(folder / "teacher"), ["model.safetensors"])
    exported = load_file(folder / "run" / "export" / "final" / "model.safetensors")
    assert exported
    assert not any(name.startswith("teacher") for name in exported)

    stored = folder / "teacher" / "model.safetensors"
    weights = load_file(stored)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] * 1.01}, stored, {"format": "pt"})
    refused = train(folder, "--resume", "auto", **{"training.num_train_steps": 3})
    assert refused.returncode == 5
    assert f"was trained beside the teacher {folder / 'teacher'}" in refused.stdout + refused.stderr
    shutil.copy(folder / "decoder" / "model.safetensors", stored)
    resumed = train(folder, "--resume", "auto", **{"training.num_train_steps": 3})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert json.loads((checkpoint / "model" / "teacher.json").read_text()) == record


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training.teacher": "nowhere/at/all"}, "there is no such folder"),
        ({"training.teacher": "source", "data.use_mode_tokens": "true"}, "a decoder knows no mode tokens"),
        ({"data.ul2_task_weights": "[1,0,0,0,0]"}, "raise S in data.ul2_task_weights"),
    ],
)
def test_validate_says_what_a_teacher_lacks(
    folder: Path, changes: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(CONFIG), *settings(folder, **changes)]) == 2
    output = capsys.readouterr()
    assert problem in output.out + output.err
    assert "training.teacher" in output.out + output.err


def test_validate_takes_the_quickstart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(CONFIG), *settings(folder)]) == 0, capsys.readouterr()
