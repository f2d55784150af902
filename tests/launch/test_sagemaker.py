"""A job of SageMaker, by its container's folders and variables."""

import json
from pathlib import Path

import pytest
from tiny_run import QUICKSTART, launcher, overrides, run

from ds_encdec.base.types import ConfigError
from ds_encdec.config.command_line import container_arguments
from ds_encdec.config.schema import load_config


def channel(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"text": "a word or two, and some more of them. " * 40}) + "\n")
    return str(folder)


def test_hyperparameters_are_settings_in_any_words(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": "8", "max-steps": 100, "learning_rate": "2e-4", "bf16": "true"}
    given["config"] = "quickstart"
    training = channel(tmp_path / "training", "a.jsonl", "b.json.gz")
    validation = channel(tmp_path / "validation", "c.jsonl")
    environ = {"SM_HPS": json.dumps(given), "SM_CHANNEL_TRAINING": training, "SM_CHANNEL_VALIDATION": validation}
    words = container_arguments(environ, ["training.seed=3"], ["--config"])
    settings = [word for word in words if not word.startswith("--")]
    assert {"--resume=auto", "--config=quickstart"} == {*words} - {*settings}
    config = load_config("quickstart", settings)
    training_config = config.training
    assert (training_config.per_device_train_batch_size, training_config.num_train_steps) == (8, 100)
    assert (training_config.learning_rate, training_config.bf16) == (2e-4, True)
    assert config.infra.output_dir == "/opt/ml/checkpoints"
    assert config.data.dataset_name == "json"
    assert config.data.data_files == (f"{training}/**/*.json.gz", f"{training}/**/*.jsonl")
    assert config.data.eval_files == (f"{validation}/**/*.jsonl",)
    assert load_config("quickstart", [*settings, "infra.output_dir=there"]).infra.output_dir == "there"


def test_a_channel_with_files_of_two_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="json and text"):
        container_arguments({"SM_CHANNEL_TRAINING": channel(tmp_path / "there", "a.txt", "b.json")}, [], [])


@pytest.mark.launch
def test_a_job_trains_and_hands_over_the_model(tmp_path: Path) -> None:
    checkpoints, model = tmp_path / "checkpoints", tmp_path / "model"
    tiny = overrides(checkpoints, training__num_train_steps=4, training__save_steps=4, training__eval_samples=0)
    given = dict(word.split("=", 1) for word in tiny) | {"config": QUICKSTART, "infra.distributed_type": "fsdp"}
    given |= {"training.average_checkpoints": "0", "learning_rate": "2e-4"}
    container = {
        "SM_TRAINING_ENV": "{}",
        "SM_HPS": json.dumps(given),
        "SM_CHANNEL_TRAINING": channel(tmp_path / "training", *(f"{number}.jsonl" for number in range(8))),
        "SM_MODEL_DIR": str(model),
        "SM_HOSTS": '["algo-1"]',
    }
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    done = run([*launcher("torchrun"), *words], tmp_path, **container)
    assert done.returncode == 0, done.stdout
    status = json.loads((checkpoints / "run.json").read_text())
    assert (status["state"], status["world_size"]) == ("completed", 2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
