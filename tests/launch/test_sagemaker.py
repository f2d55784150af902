"""A job of SageMaker, by its container's folders and variables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import QUICKSTART, environment, free_port, overrides

from ds_encdec import train
from ds_encdec.base.types import ConfigError
from ds_encdec.config.sagemaker import container_arguments
from ds_encdec.config.schema import FullConfig, load_config


def channel(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"text": "a word or two, and some more of them. " * 40}) + "\n")
    return str(folder)


def test_hyperparameters_are_settings_in_any_words(tmp_path: Path) -> None:
    given = {
        "per_device_train_batch_size": "8",
        "max-steps": 100,
        "learning_rate": "2e-4",
        "bf16": "true",
        "config": "quickstart",
    }
    training = channel(tmp_path / "training", "a.jsonl", "b.json.gz")
    validation = channel(tmp_path / "validation", "c.jsonl")
    environ = {"SM_HPS": json.dumps(given), "SM_CHANNEL_TRAINING": training, "SM_CHANNEL_VALIDATION": validation}
    words = container_arguments(environ, ["training.seed=3"], ["--config"])
    options = [word for word in words if word.startswith("--")]
    settings = [word for word in words if word not in options]
    assert options == ["--resume=auto", "--config=quickstart"]
    config = load_config("quickstart", settings)
    assert config.training.per_device_train_batch_size == 8
    assert config.training.num_train_steps == 100
    assert config.training.learning_rate == 2e-4
    assert config.training.bf16 is True
    assert config.infra.output_dir == "/opt/ml/checkpoints"
    assert config.data.dataset_name == "json"
    assert config.data.data_files == (f"{training}/**/*.json.gz", f"{training}/**/*.jsonl")
    assert config.data.eval_files == (f"{validation}/**/*.jsonl",)
    assert load_config("quickstart", [*settings, "infra.output_dir=there"]).infra.output_dir == "there"


def test_hyperparameters_are_read_as_the_command_line_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Hugging Face estimator's: `resume` by a boolean, and a folder, which is then the only one."""
    seen: list[str | None] = []

    def load(options: argparse.Namespace, *_: object) -> tuple[FullConfig, list[str]]:
        seen.append(options.resume)
        return FullConfig(), []

    monkeypatch.setattr(train, "_load", load)
    for name, value in {"resume": "true", "resume_from_checkpoint": "there"}.items():
        monkeypatch.setenv("SM_HPS", json.dumps({name: value, "config": "quickstart"}))
        assert train.main(["--print-config"]) == 0
    assert seen == ["auto", "there"]
    words = container_arguments({"SM_HPS": '{"output_dir": "/opt/ml/model"}'}, [], [])
    assert load_config("quickstart", words[1:]).infra.output_dir == "/opt/ml/model"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SM_CHANNEL_TRAINING": "EMPTY"}, "no files of a kind that is read"),
        ({"SM_CHANNEL_TRAINING": "MIXED"}, "has json and text"),
    ],
)
def test_what_the_container_cannot_mean_is_named(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    folders = {"EMPTY": channel(tmp_path / "empty"), "MIXED": channel(tmp_path / "mixed", "a.txt", "b.json")}
    with pytest.raises(ConfigError, match=said.replace("{", r"\{")):
        container_arguments({name: folders.get(value, value) for name, value in variables.items()}, [], [])


@pytest.mark.distributed
def test_two_hosts_train_and_hand_over_the_model(tmp_path: Path) -> None:
    """As the training toolkit starts them with torch_distributed: torchrun on each host, hyperparameters twice."""
    training = channel(tmp_path / "training", *(f"{number}.jsonl" for number in range(8)))
    checkpoints, model, port = tmp_path / "checkpoints", tmp_path / "model", free_port()
    tiny = overrides(checkpoints, training__num_train_steps=4, training__save_steps=4, training__logging_steps=1)
    given = dict(word.split("=", 1) for word in tiny)
    given |= {"config": QUICKSTART, "infra.distributed_type": "fsdp", "data.num_lanes": "2"}
    given |= {"training.eval_samples": "0", "training.average_checkpoints": "0", "learning_rate": "2e-4"}
    hosts = ["algo-1", "algo-2"]
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    ranks = []
    for number, host in enumerate(hosts):
        container = {
            "SM_TRAINING_ENV": "{}",
            "SM_HPS": json.dumps(given),
            "SM_CHANNEL_TRAINING": training,
            "SM_MODEL_DIR": str(model),
            "SM_HOSTS": json.dumps(hosts),
            "SM_CURRENT_HOST": host,
            "SM_NUM_GPUS": "0",
        }
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        launcher = [sys.executable, "-m", "torch.distributed.run", *place, *meeting, "ds_encdec/train.py"]
        root = Path(__file__).parents[2]
        ranks.append(
            subprocess.Popen(
                [*launcher, *words],
                cwd=root,
                env=environment() | container,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    status = json.loads((checkpoints / "run.json").read_text())
    assert (status["state"], status["world_size"]) == ("completed", 2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
