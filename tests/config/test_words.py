"""Configurations in the words of other tools: they run, or each word's name here is told."""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest

from ds_encdec import train
from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig, load_config, read_config
from ds_encdec.config.sections import fields
from ds_encdec.config.words.other_tools import READERS, WORDS

Golden = Callable[[object], None]
FOLDER = Path(__file__).parent / "other_tools"

RUN = "trainer_flat trainer_in_a_section accelerate_fsdp accelerate_deepspeed axolotl_full llamafactory_pretrain"
RUN += " flat_habits story08_fsdp"
REFUSED = ("trainer_seq2seq", "axolotl_lora", "llamafactory_sft", "torchtitan")


def problems(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    (path := tmp_path / "run.yaml").write_text(text)
    return path


@pytest.mark.parametrize("name", RUN.split())
def test_it_runs(name: str, golden: Golden) -> None:
    defaults = FullConfig().dump_yaml().splitlines()
    lines = load_config(FOLDER / f"{name}.yaml").dump_yaml().splitlines()
    golden("\n".join(line for line in lines if line not in defaults))


@pytest.mark.parametrize("name", REFUSED)
def test_each_name_here_is_reported(name: str, golden: Golden) -> None:
    found = problems(FOLDER / f"{name}.yaml").replace(f"{FOLDER}/", "")
    golden(found)
    assert not [word for word in ("allowed: ", "did you mean", "hf_abcdefgh") if word in found]


def test_the_table_is_sound() -> None:
    names = [name for row in WORDS for name in row.names.split()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert {*names} & {path.rpartition(".")[2] for path in fields()} == set()
    for row in WORDS:
        assert row.why or not row.ignored
        assert not row.reads or row.reads in READERS
        assert all(isinstance(text, str) for text in row.values), row  # YAML reads `no` as false
        meant = [row.field] if row.field else []
        meant += [field for value in row.values.values() if not isinstance(value, str) for field in value]
        assert set(meant) <= fields().keys(), row


DISAGREEING = (
    "lr: 1e-4\ntraining:\n  learning_rate: 3e-4\n",
    "training:\n  lr: 1e-4\nmax_lr: 3e-4",
    "fsdp_sharding_strategy: SHARD_GRAD_OP\ninfra: {sharding_stage: zero3}",
    "fsdp_activation_checkpointing: false\ntraining: {activation_checkpointing: full}",
    "fsdp_cpu_offload: false\ninfra: {offload_optimizer: cpu}",
    "use_cpu: true\ndevice: auto",
)


def test_a_field_in_two_words_that_differ_is_one_problem(tmp_path: Path, golden: Golden) -> None:
    golden("\n".join(problems(written(tmp_path, text)) for text in DISAGREEING))
    for text in DISAGREEING[:2]:
        assert load_config(written(tmp_path, text.replace("3e-4", "1e-4"))).training.learning_rate == 1e-4


def test_a_configuration_built_in_python_may_use_words_too() -> None:
    words = {"infra": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "distributed_type": "fsdp"}, "lr": 1e-4}
    config = FullConfig.model_validate(words)
    assert (config.infra.sharding_stage, config.training.learning_rate) == ("zero2", 1e-4)
    with pytest.raises(ValueError, match=r"both are infra\.sharding_stage"):
        FullConfig.model_validate({"infra": {"fsdp_sharding_strategy": "NO_SHARD", "sharding_stage": "zero3"}})


FULL_IN_WORDS = ("finetuning_type: full", "use_lora: false", "adapter: none", "full_ft: true", "model: {lora: null}")


@pytest.mark.parametrize("full", FULL_IN_WORDS[:-1])
def test_the_command_line_turns_a_files_lora_off_and_on(tmp_path: Path, full: str) -> None:
    path = written(tmp_path, "model: {lora: {r: 8}}")
    assert load_config(path, [full.replace(": ", "=")]).model.lora is None
    assert load_config(written(tmp_path, full)).model.lora is None
    lora = load_config(written(tmp_path, full), ["lora_r=4"]).model.lora
    assert lora is not None
    assert lora.r == 4


def test_the_command_line_speaks_other_words_too(tmp_path: Path) -> None:
    path = written(tmp_path, "training: {learning_rate: 1e-4, num_train_steps: 50}\noptim: adamw_torch\n")
    config = load_config(path, ["--max_steps", "10", "lr=2e-4", "--output_dir=here", "seed=3", "fsdp_config={}"])
    assert (config.training.num_train_steps, config.training.learning_rate, config.training.seed) == (10, 2e-4, 3)
    assert (config.infra.output_dir, config.training.warmup_steps) == ("here", 1)
    muon = load_config(None, ["optim=muon", "infra.distributed_type=fsdp"])
    assert (config.training.optimizer, muon.training.optimizer) == ("adamw", "muon")
    assert load_config(path, ["lr=2e-4", "training.learning_rate=1e-3"]).training.learning_rate == 1e-3
    lora = load_config(written(tmp_path, "lora_r: 8"), ["use_lora=true", "lora_alpha=16", "full_ft=false"]).model.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha) == (8, 16)
    assert "not a field here: AdamW, Muon and your own" in problems(path, "training.optim=adafactor")


TRANSLATED = {
    "infra.distributed_type=MULTI_GPU": ("infra.sharding_stage", "zero0"),
    "mixed_precision=no": ("training.bf16", False),
    "full_ft=false": ("model.lora.r", 32),
    "lr_scheduler={decay_type: linear}": ("training.lr_scheduler_type", "linear"),
    "train_file=a.JSON.xz": ("data.dataset_name", "json"),
    "fsdp=[full_shard, offload]": ("infra.offload_optimizer", "cpu"),
    "fsdp=hybrid_shard": ("infra.sharding_stage", "zero3_hybrid"),
    "infra.fsdp_sharding_strategy=4": ("infra.sharding_stage", "zero3_hybrid"),
    "training={lr: 1e-3, seed: 5, bf16: auto}": ("training.learning_rate", 1e-3),
}


@pytest.mark.parametrize("argument", TRANSLATED)
def test_values_are_translated(argument: str) -> None:
    field, value = TRANSLATED[argument]
    assert attrgetter(field)(load_config(None, [argument])) == value


WITHOUT_A_FIELD = """
fsdp=full_shrd fsdp_config.x.y=3 deepspeed.stage=3 train_file=a.arrow train_file=a.random val_check_interval=100
do_train=false batch_size=8 training.max_steps=x save_strategy=epoch training.save_strategy=epoch hub_token=[abc
training.fp8=true training.num_cycles=2 validation_split_percentage=5 cache_dir=/big model.hf_config=a/b
fsdp_config=fsdp.json
"""


def test_what_has_no_meaning_here_is_reported(golden: Golden) -> None:
    found = [problems(None, argument) for argument in WITHOUT_A_FIELD.split()]
    golden("\n".join(text.partition("\n")[2] for text in found))
    assert all(text.startswith("The configuration has 1 problem:") for text in found)


def test_what_was_read_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "lr: 1e-4\ntf32: true\nremove_unused_columns: false\n")
    assert train.main(["--config", str(path), "--print-config"]) == 0
    first, second, third, rest = capsys.readouterr().out.split("\n", 3)
    assert first == f"# {path}:1: lr = 0.0001 is read as training.learning_rate = 0.0001"
    assert second.startswith(f"# {path}:2: tf32 = true is left out: ")
    assert third.endswith("left out: only the columns that the templates or data.text_column name are read")
    again = load_config(written(tmp_path, rest))
    assert again == load_config(None, ["lr=1e-4"])


NAMES_LEFT = """
adam_beta1 adam_beta2 adam_epsilon bf16 eval_steps fp16 gradient_accumulation_steps learning_rate logging_steps lr
max_grad_norm max_steps num_train_epochs save_steps warmup_steps weight_decay
"""
"""Names of the Trainer's that may be `auto`, too."""


def test_what_is_left_to_the_trainer_is_not_set(tmp_path: Path) -> None:
    accelerate = "deepspeed_config: {gradient_clipping: auto, zero_stage: auto, zero3_init_flag: auto}\n"
    assert load_config(written(tmp_path, f"{accelerate}mixed_precision: auto\n")) == load_config(None)
    loaded = read_config(written(tmp_path, "".join(f"{name}: auto\n" for name in NAMES_LEFT.split())))
    assert loaded.valid() == load_config(None)
    assert len([note for note in loaded.translated if note.endswith(" is left out")]) == len(NAMES_LEFT.split())
