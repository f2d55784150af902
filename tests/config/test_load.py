"""The origins of settings: defaults, YAML, the command line; what YAML means; and the way back to a file."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_encdec.base.types import ConfigError
from ds_encdec.commands.phases.plan import TrainingPhase, plan_phase
from ds_encdec.config.schema import (
    DataConfig,
    FullConfig,
    InfraConfig,
    MixtureSource,
    ModelConfig,
    load_config,
    load_saved,
)
from ds_encdec.config.yaml.text import parse_value, write_yaml
from ds_encdec.data.survey import with_steps_of_epochs

ARCHITECTURE = """\
model:
  tokenizer_name_or_path: builtin
  architecture: {vocab_size: 4096, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
                 num_key_value_heads: 2, head_dim: 16, intermediate_size: 128}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> FullConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_the_command_line_replaces_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    text = "training:\n  seed: 1\n  save_steps: 2\n"
    config = load(tmp_path, text, "training.seed=3")
    assert (config.training.seed, config.training.save_steps, config.training.eval_steps) == (3, 2, 500)


def test_epochs_take_the_place_of_a_files_steps(tmp_path: Path) -> None:
    text = "data: {dataset_name: builtin}\ntraining:\n  num_train_steps: 100000\n"
    epochs = "training.num_train_epochs=3"
    with pytest.raises(ConfigError, match=r"length of the run twice: .*num_train_steps=null"):
        load(tmp_path, f"{text}  num_train_epochs: 3\n")
    assert load(tmp_path, text, epochs, "max_steps=100000").training.num_train_epochs is None
    config = load(tmp_path, text, epochs)
    assert (config.training.num_train_epochs, config.training.num_train_steps) == (3, 100_000)
    assert load(tmp_path, config.dump_yaml()) == config
    assert load(tmp_path, f"{text}  num_train_epochs: 3\n", "max_steps=70").training.num_train_epochs is None
    with pytest.raises(ConfigError, match="must be a whole number"):
        load(tmp_path, text, "training.num_train_steps=null")


def test_a_share_of_the_steps_is_the_warm_up(tmp_path: Path) -> None:
    steps, share = "training.num_train_steps=70", "training.warmup_ratio=0.1"
    training = load(tmp_path, "training: {warmup_ratio: 0.5}", steps, share).training
    assert (training.warmup_steps, training.warmup_ratio) == (7, None)
    assert load(tmp_path, "training: {warmup_steps: 1000}", steps, share).training.warmup_steps == 7
    assert load(tmp_path, "training: {warmup_ratio: 0.5}", "warmup_steps=9").training.warmup_steps == 9
    with pytest.raises(ConfigError, match="the warm-up twice"):
        load(tmp_path, "training: {warmup_steps: 5}\nwarmup_ratio: 0.03")
    assert load_config(None, [share, "warmup_steps=5"]).training.warmup_steps == 5
    later = load(tmp_path, "data: {dataset_name: builtin}", "training.num_train_epochs=2", share)
    assert later.training.warmup_ratio == 0.1
    assert with_steps_of_epochs(load(tmp_path, later.dump_yaml()), 30).training.warmup_steps == 3
    with pytest.raises(ConfigError, match="warm-up must end before the run"):
        with_steps_of_epochs(load(tmp_path, "warmup_steps: 1000\nnum_train_epochs: 2\ndataset_name: builtin"), 1000)
    assert plan_phase(later, TrainingPhase.MEDIUM, 20).config.training.warmup_steps == 2


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (ARCHITECTURE, "model.model_name_or_path", None),  # an architecture displaces the default checkpoint
        ("training: {report_to: none}", "training.report_to", ()),
        ("report_to=tensorboard,wandb", "training.report_to", ("tensorboard", "wandb")),
        ("data: {dataset_name: json, data_files: 'a,b.jsonl'}", "data.data_files", ("a,b.jsonl",)),
        ("data: {ul2_task_weights: {S: 3, R1: 0.5}}", "data.ul2_task_weights", (0.5, 0, 0, 0, 3)),
        ("training: &shared\n  seed: 5\ndata:\n  <<: {text_column: body}\n", "training.seed", 5),
        ("data:\n  <<: {text_column: body}\n  streaming: false\n", "data.text_column", "body"),
        ("training:\n  # seed: 1\n", "training.seed", 42),  # an empty section
        ("training.learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("data.ul2_task_weights.X2=2", "data.ul2_task_weights", (0, 0, 0, 2, 0)),
        ("infra.wandb_run_name='a=1'", "infra.wandb_run_name", "a=1"),
        ("infra.deepspeed_extra.aio.block_size=1e8", "infra.deepspeed_extra", {"aio": {"block_size": 1e8}}),
    ],
)
def test_values_of_files_and_of_overrides(tmp_path: Path, text: str, field: str, value: Any) -> None:
    config = load(tmp_path, text) if ":" in text else load_config(None, [text])
    assert attrgetter(field)(config) == value


DIALECT: dict[str, Any] = {"1e-4": 1e-4, "2E5": 2e5, "1.5e-3": 1.5e-3, ".5": 0.5, "-3": -3, "1_000": 1000}
DIALECT |= {"true": True, "null": None, "": None, "[1, 2e1]": [1, 20.0]}
DIALECT |= {text: text for text in ("007", "1:30", "2024-01-01", "no", "on", "none")}


def test_yaml_dialect() -> None:
    assert repr({text: parse_value(text) for text in DIALECT}) == repr(DIALECT)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), children),
        max_leaves=8,
    )
)
@example("x\x85y")
@example("\u2028")
def test_every_value_survives_the_file(value: Any) -> None:
    read = parse_value(write_yaml({"key": value}))["key"]
    assert read == value
    assert repr(read) == repr(value)  # 1, 1.0 and True are equal in Python


FULL = FullConfig(
    model=ModelConfig(num_sentinel_tokens=256),
    data=DataConfig(
        mixture=(
            MixtureSource(weight=0.25, dataset_name="json", data_files=("1e-4", "b*.jsonl")),
            MixtureSource(weight=1, dataset_name="org/corpus", dataset_config="2024-01-01", text_column="yes"),
        ),
        ul2_task_weights=(0.1, 1e-9, 0, 1, 4),
    ),
    infra=InfraConfig(
        wandb_run_name="123",
        wandb_entity="null",
        output_dir="ärger: # 1",
        deepspeed_extra={"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": False}},
    ),
)


@pytest.mark.parametrize("config", [FullConfig(), FULL], ids=["defaults", "unusual values"])
def test_saved_configurations_load_back_equal(config: FullConfig, tmp_path: Path) -> None:
    config.to_yaml(tmp_path / "config.yaml")
    assert FullConfig.from_yaml(tmp_path / "config.yaml") == config
    assert load_config(tmp_path / "config.yaml") == config
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 1  # type: ignore[misc]


def test_what_a_run_has_saved_is_not_judged_by_later_rules(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    saved = FullConfig(data=DataConfig(mixture=(MixtureSource(dataset_name="builtin", weight=1.0),)))
    values = saved.model_dump(mode="json")
    values["data"]["text_column"] = "content"
    values["training"]["torch_adam"] = False  # a field once
    path.write_text(write_yaml(values))
    with pytest.raises(ConfigError, match="text_column"):
        load_config(path)
    assert load_saved(path).data.text_column == "content"
    path.write_text("training: {save_steps: often}")
    with pytest.raises(ConfigError, match=r"config\.yaml is no configuration that a run has saved"):
        load_saved(path)
