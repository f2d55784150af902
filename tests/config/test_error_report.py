"""The report that a person reads who made mistakes: all of them, each with its place, field, value and fix."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import load_config

Golden = Callable[[object], None]


def report(path: Path | None, *overrides: str) -> str:
    """The error report, with the folder of `path` cut away."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "", "")


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def reports(*cases: tuple[object, ...]) -> str:
    """The reports of several cases, each a file or None with settings; long lines are cut."""
    found = (f"> {' '.join(overrides)}\n{report(path, *overrides)}" for path, *overrides in cases)
    return "\n\n".join(re.sub(r"(?m)^(.{160}).+", r"\1...", text) for text in found)


MANY_MISTAKES = """\
model:
  num_sentinel_tokens: 0
  architecture:
    vocab_size: 4096
    hidden_size: 128
    num_hidden_layer: 2
    num_attention_heads: 6
data:
  ul2_task_weights: [1, 1, 1, 1]
  mixture:
    - {weight: 1, dataset_name: builtin}
    - weight: heavy
      dataset_nam: builtin
  streaming: yes
training:
  learning_rte: 1e-4
  learning_rate: 0
  adam_beta1: 1.5
  num_train_steps: 10.5
  warmup_steps: true
  lr_scheduler_type: cosin
  report_to: [tensorbord]
  bf16: true
  fp16: true
  seed: 1
  seed: 2
infra:
  offload_params: cpu
  sharding_stage: zero2
  max_grad_norm: 3
  wandb_run_name: 2024
  nvme_path: [a]
trainning:
  seed: 1
"""


def test_all_problems_at_once(tmp_path: Path, golden: Golden) -> None:
    golden(report(written(tmp_path, MANY_MISTAKES), "training.save_step=5", "infra.num_gpus=0"))


NO_CONFIGURATIONS = (
    *("", "- model\n- data\n", "model:\n\tseed: 1\n", "model: seed: 1\n", "model: {}\n seed: 1\n", "a: \x00\n"),
    *("training: [1]\n", "a: !!python/object:os.system {}\n", "training.seed: 3\n", "training: {? [a] : 3}\n"),
)


def test_files_that_are_no_configuration(tmp_path: Path, golden: Golden) -> None:
    golden("\n\n".join(f"{text!r}\n{report(written(tmp_path, text))}" for text in NO_CONFIGURATIONS))


ARGUMENTS = """
foo --training.seed --lr hub-token=hf_0123 --hub-token=hf_0123 --training.learning-rate=1 =3 training.seed=[1 seed=x
training.seed.x=3 trainin.seed=3 training.learning_rate=.inf training.learning_rate=1e400 training.learning_rate=5
training.learning_rate=.nan training.learning_rate= save_step=200 infra.save_step=200 learning_rat=1 saves_steps=1
per_device_train_batchsize=2 warmup_step=2 gradient_checkpoint=true training.gradient_checkpoint=true
fsdp_config.fsdp_offload_param=true training.max_step=4 training.colour=red data.objective=stf
training.eval_files=a.json --eval_files=3 data.data_files=3 data.ul2_task_weights=[1,x,true,1]
training.report_to=tensorbord
"""


def test_the_command_line(golden: Golden) -> None:
    golden(reports(*((None, argument) for argument in ARGUMENTS.split())))


def test_one_problem_is_reported_once(tmp_path: Path, golden: Golden) -> None:
    one = written(tmp_path, "training: {seed: 1}", "one.yaml")
    scratch = written(tmp_path, SCRATCH.replace("vocab_size: 4096", "vocab_size: many"))
    golden(reports((None, "training.seed=-1", "training.seed=-1"), (one, "training.seed.x=3"), (scratch,)))


SCRATCH = """\
model:
  tokenizer_name_or_path: builtin
  architecture:
    vocab_size: 4096
    hidden_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    intermediate_size: 256
"""


def test_contradictions_beside_a_mistake_in_the_same_section(tmp_path: Path) -> None:
    wrong = SCRATCH.replace("hidden_size: 128", "hidden_size: wide")
    alone = report(written(tmp_path, wrong))
    both = report(written(tmp_path, wrong.replace("value_heads: 2", "value_heads: 3")))
    assert "divide" not in alone
    assert both.split("\n", 1)[1].startswith(alone.split("\n", 1)[1])
    assert both.endswith("one must divide the other")


TYPOS = (
    SCRATCH.replace("num_key_value_heads: 2", "num_key_value_head: 3"),
    "training: {warmup_step: 5, num_train_steps: 10}",
    # What is set under its right name is not excused by a typo beside it.
    "training: {warmup_step: 5, warmup_steps: 20, num_train_steps: 10}",
    # A source of a mixture is mended in its place, so that the other one is still looked at.
    "data: {mixture: [{weight: 1, dataset_nam: text}, {weight: 1, dataset_name: text}]}",
)


def test_what_a_typo_explains_is_not_reported_beside_it(tmp_path: Path, golden: Golden) -> None:
    golden("\n\n".join(reports((written(tmp_path, text),)) for text in TYPOS))
