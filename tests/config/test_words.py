"""Configurations in the words of other tools: they run, or each word's name here is told."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments

from ds_encdec import cli, train
from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig, load_config, read_config
from ds_encdec.config.sections import fields
from ds_encdec.config.words.other_tools import BY_NAME, READERS, THEIR_SECTIONS, WORDS
from ds_encdec.config.yaml.text import write_yaml

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
    """With what is read of it that is not the default."""
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


def test_every_argument_of_the_trainer_is_known() -> None:
    homes = {path.rpartition(".")[2] for path in fields()}
    known = homes | BY_NAME.keys() | THEIR_SECTIONS
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - known == set()


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


@pytest.mark.parametrize("full", FULL_IN_WORDS)
@pytest.mark.parametrize("lora", ["lora_rank: 8", "use_lora: true", "lora_alpha: 16"])
def test_full_and_lora_at_a_time_are_one_problem_in_any_order(tmp_path: Path, full: str, lora: str) -> None:
    if full[:8] != lora[:8]:  # else the file says one key twice
        for lines in ((full, lora), (lora, full)):
            found = problems(written(tmp_path, "\n".join(lines)))
            assert "1 problem" in found
            assert "make them equal, or remove one" in found


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


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("sharding_stage=3", "infra.sharding_stage", "zero3"),
        ("infra.distributed_type=MULTI_GPU", "infra.sharding_stage", "zero0"),
        ("mixed_precision=no", "training.bf16", False),
        ("max_steps=-1", "training.num_train_steps", 100_000),
        ("full_ft=false", "model.lora.r", 32),
        ("lora_target=q_proj,v_proj", "model.lora.target_modules", ("q_proj", "v_proj")),
        ("eval_strategy=no", "training.eval_samples", 0),
        ("lr_scheduler={decay_type: cosine}", "training.lr_scheduler_type", "cosine"),
        ("lr_scheduler={decay_type: linear}", "training.lr_scheduler_type", "linear"),
        ("val_set_size=0", "training.eval_samples", 0),
        ("train_file=a.JSON.xz", "data.dataset_name", "json"),
        ("train_file=a.csv.bz2", "data.dataset_name", "csv"),
        ("fsdp=[full_shard, offload]", "infra.offload_optimizer", "cpu"),
        ("fsdp=hybrid_shard", "infra.sharding_stage", "zero3_hybrid"),
        ("fsdp_reshard_after_forward=never", "infra.sharding_stage", "zero2"),
        ("infra.fsdp_sharding_strategy=4", "infra.sharding_stage", "zero3_hybrid"),
        ("training={lr: 1e-3, seed: 5, bf16: auto}", "training.seed", 5),
        ("training={lr: 1e-3, seed: 5, bf16: auto}", "training.learning_rate", 1e-3),
    ],
)
def test_values_are_translated(argument: str, field: str, value: Any) -> None:
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


def test_of_trainers_arguments_as_dumped_only_one_has_to_go(tmp_path: Path) -> None:
    values = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True).to_dict()
    text = write_yaml(json.loads(json.dumps(values, default=str)))
    found = problems(written(tmp_path, text))
    assert "1 problem" in found
    assert "do_train = false" in found
    assert load_config(written(tmp_path, text.replace("do_train: false\n", ""))).training.num_train_epochs == 3


def test_what_is_found_goes_before_the_number_beside_it(tmp_path: Path) -> None:
    size, auto = "per_device_train_batch_size: 16", "auto_find_batch_size: true"
    for first, second in ((size, auto), (auto, size)):
        as_file = load_config(written(tmp_path, f"{first}\n{second}"))
        assert as_file.training.per_device_train_batch_size == "auto"
    assert load_config(written(tmp_path, auto), ["micro_batch_size=3"]).training.per_device_train_batch_size == 3


def test_lists_are_told_once_and_secrets_never(tmp_path: Path) -> None:
    text = "training: {colour: red, taste: sour, my_api_key: sk-123}\nhub: {password: [pw-456], tokenizer: builtin}"
    text += "\nauthorization: Bearer sk-123\nauthor: Ada"
    found = problems(written(tmp_path, text))
    assert found.count("activation_checkpointing_every_n") == 1
    assert not [secret for secret in ("sk-123", "pw-456") if secret in found]
    assert all(said in found for said in ('my_api_key = "***"', "builtin", "Ada"))


def test_a_deepspeed_json_is_no_configuration() -> None:
    assert "--deepspeed_config ds_configs/zero2.json reads it" in problems(Path("ds_configs/zero2.json"))


def test_a_value_behind_its_name_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--config", "ds_configs/quickstart.yaml"]):
        assert cli.main(["validate", "--elsewhere", *more, "seed=3", "--max_steps", "30"]) == 0
        assert "max_steps = 30 is read as training.num_train_steps = 30" in capsys.readouterr().out
    assert cli.main(["validate", "--max_steps", "30", "--lr", "nowhere.yaml"]) == 2


def test_float16_of_a_trainers_file_says_what_it_takes_the_place_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "max_steps: 30\nfp16: true\n")
    assert cli.main(["validate", "--elsewhere", str(path)]) == 0
    note = f"{path}:2 (fp16): training.fp16 = true sets training.bf16 = false, which is true by default\n"
    assert note in capsys.readouterr().out
    assert cli.main(["validate", "--elsewhere", str(path), "bf16=false"]) == 0
    assert "by default" not in capsys.readouterr().out


def test_what_was_read_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "lr: 1e-4\ntf32: true\nremove_unused_columns: false\n")
    assert train.main(["--config", str(path), "--print-config"]) == 0
    first, second, third, rest = capsys.readouterr().out.split("\n", 3)
    assert first == f"# {path}:1: lr = 0.0001 is read as training.learning_rate = 0.0001"
    assert second.startswith(f"# {path}:2: tf32 = true is left out: ")
    assert third.endswith("left out: only the columns that the templates or data.text_column name are read")
    again = load_config(written(tmp_path, rest))
    assert again == load_config(None, ["lr=1e-4"])


KEYS_LEFT = """
train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps gradient_clipping bf16.enabled fp16.enabled
optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps
scheduler.params.total_num_steps zero_optimization.reduce_bucket_size zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold
"""
"""The keys that Hugging Face's guide of DeepSpeed gives as `auto`."""
NAMES_LEFT = """
adam_beta1 adam_beta2 adam_epsilon bf16 eval_steps fp16 gradient_accumulation_steps learning_rate logging_steps lr
max_grad_norm max_steps num_train_epochs save_steps warmup_steps weight_decay
"""
"""Names of the Trainer's that may be `auto`, too."""


def test_what_is_left_to_the_trainer_is_not_set(tmp_path: Path) -> None:
    document: dict[str, Any] = {}
    for path in KEYS_LEFT.split():
        *blocks, key = path.split(".")
        block = document
        for name in blocks:
            block = block.setdefault(name, {})
        block[key] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(document))
    assert load_config(None, deepspeed_config=tmp_path / "ds.json") == load_config(None)

    keys = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
    keys += ("offload_param_device", "zero3_init_flag", "zero3_save_16bit_model")
    block = ", ".join(f"{key}: auto" for key in keys)
    accelerate = written(tmp_path, f"deepspeed_config: {{{block}}}\nmixed_precision: auto\nnum_processes: auto")
    assert load_config(accelerate) == load_config(None)

    trainer = written(tmp_path, "".join(f"{name}: auto\n" for name in NAMES_LEFT.split()))
    loaded = read_config(trainer)
    assert loaded.valid() == load_config(None)
    assert len([note for note in loaded.notes() if note.endswith(" is left out")]) == len(NAMES_LEFT.split())


BLOCKS = """
dataset: {num_workers: 3}
lr_scheduler: {total_iterations: 100, warmup_iterations: 7}
checkpoint: {chkpt_saving_iterations: 20}
dist: {backend: nccl}
fsdp: full_shard auto_wrap offload
fsdp_config: {min_num_params: 0, xla: false, xla_fsdp_v2: false, limit_all_gathers: true, sync_module_states: true,
  use_orig_params: true, forward_prefetch: false, backward_prefetch: backward_pre, cpu_ram_efficient_loading: true,
  transformer_layer_cls_to_wrap: [X], activation_checkpointing: true, fsdp_ignored_modules: null}
"""


def test_blocks_of_a_guide_and_of_the_trainer(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, BLOCKS))
    infra, training = config.infra, config.training
    assert (training.num_train_steps, training.warmup_steps, training.save_steps) == (100, 7, 20)
    assert config.data.preprocessing_num_workers == 3
    assert (infra.distributed_type, infra.sharding_stage, infra.offload_optimizer) == ("fsdp", "zero3", "cpu")
