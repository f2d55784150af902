"""The report that a person reads who made mistakes: all of them, each with its place, field, value and fix."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from ds_encdec.config.schema import load_config
from ds_encdec.config.sections import fields
from ds_encdec.config.validation import stand_in, wrong_value
from ds_encdec.marked_errors import marked
from ds_encdec.types import ConfigError


def report(path: Path | None, *overrides: str) -> str:
    """The error report, with the folder of `path` cut away."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "", "")


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_weights_of_a_wrong_number() -> None:
    assert report(None, "data.ul2_task_weights=[1, 2, 3, 1]").splitlines() == [
        "The configuration has 1 problem:",
        "  command line: data.ul2_task_weights = [1, 2, 3, 1]",
        "      must be 5 weights, of R1, R2, X1, X2, S",
    ]


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

# One entry a problem, in the order of the report. No contradiction is reported about a field that is wrong by itself.
EXPECTED = """\
The configuration has 26 problems:
  run.yaml:2: model.num_sentinel_tokens = 0
      must be >= 1
  run.yaml:3: model.architecture.num_key_value_heads
      the field is required
  run.yaml:3: model.architecture.head_dim
      the field is required
  run.yaml:3: model.architecture.intermediate_size
      the field is required
  run.yaml:6: model.architecture.num_hidden_layer = 2
      unknown key; did you mean `num_hidden_layers`?
  run.yaml:9: data.ul2_task_weights = [1, 1, 1, 1]
      must be 5 weights, of R1, R2, X1, X2, S
  run.yaml:12: data.mixture.1.weight = "heavy"
      must be a number
  run.yaml:13: data.mixture.1.dataset_nam = "builtin"
      unknown key; did you mean `dataset_name`?
  run.yaml:14: data.streaming = "yes"
      must be true or false
  run.yaml:16: training.learning_rte = 0.0001
      unknown key; did you mean `learning_rate`?
  run.yaml:17: training.learning_rate = 0
      must be > 0.0
  run.yaml:18: training.adam_beta1 = 1.5
      must be < 1.0
  run.yaml:19: training.num_train_steps = 10.5
      must be a whole number
  run.yaml:20: training.warmup_steps = true
      must be a whole number
  run.yaml:21: training.lr_scheduler_type = "cosin"
      allowed: WarmupDecayLR, WarmupLR, WarmupCosineLR, cosine, linear, constant, wsd, polynomial, inverse_sqrt, \
`module:name`; did you mean `cosine`?
  run.yaml:22: training.report_to = ["tensorbord"]
      allowed: wandb, tensorboard, `module:name`; did you mean `tensorboard`?
  run.yaml:23: training.bf16 = true
  run.yaml:24: training.fp16 = true
      at most one may be true; both false is float32
  run.yaml:26: training.seed
      the key is already set in line 25
  run.yaml:29: infra.sharding_stage = "zero2"
  run.yaml:28: infra.offload_params = "cpu"
      parameters can be offloaded only where they are sharded: set zero3, or offload_params=none
  run.yaml:30: infra.max_grad_norm = 3
      unknown key here; did you mean `training.max_grad_norm`?
  run.yaml:31: infra.wandb_run_name = 2024
      must be text (put a number between quotes)
  run.yaml:32: infra.nvme_path = ["a"]
      must be text (put a number between quotes)
  run.yaml:33: trainning = {"seed": 1}
      unknown key; did you mean `training`?
  command line: training.save_step = 5
      unknown key; did you mean `save_steps`?
  command line: infra.num_gpus = 0
      must be >= 1
  default: model.tokenizer_name_or_path = null
      a model from scratch has no tokenizer: name one, or `builtin`
"""


def test_all_problems_at_once(tmp_path: Path) -> None:
    found = report(written(tmp_path, MANY_MISTAKES), "training.save_step=5", "infra.num_gpus=0")
    assert found == EXPECTED.rstrip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml\n      the file is empty"),
        ("# only a comment\n", "run.yaml\n      the file is empty"),
        ("- model\n- data\n", "run.yaml:1\n      the file holds a list;"),
        ("just words", "run.yaml:1\n      the file holds a single value;"),
        ("model:\n\tseed: 1\n", "run.yaml:2\n      not valid YAML: found a tab: indent with spaces"),
        ("model: seed: 1\n", "run.yaml:1\n      not valid YAML: mapping values are not allowed here: indent"),
        ("model: {}\n seed: 1\n", "run.yaml:2\n      not valid YAML: a line that is indented otherwise"),
        ("model: {a: 1\n", "run.yaml:2\n      not valid YAML: expected ',' or '}'"),
        ("a: \x00\n", "run.yaml:1\n      not valid YAML: the character U+0000 is not allowed"),
        ("a: *nowhere\n", "run.yaml:1\n      not valid YAML: found undefined alias 'nowhere'"),
        (
            "a: !!python/object:os.system {}\n",
            "run.yaml:1: a\n      not valid YAML: unknown tag !!python/object",
        ),
        ("training_seed: 3\n", "unknown key; behind a section stands a dot: `training.seed`"),
        ("training.seed: 3\n", "run.yaml:1: training.seed\n      not a key: sections are nested"),
        ("training: {? [a] : 3}\n", "run.yaml:1: training.a list or a mapping\n      not a key"),
        ("training: 5\n", "run.yaml:1: training = 5\n      must be a mapping"),
        ("training: [1]\n", "run.yaml:1: training = [1]\n      must be a mapping"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    found = report(written(tmp_path, text))
    assert message in found


def test_missing_unreadable_and_binary_files(tmp_path: Path) -> None:
    assert "nowhere.yaml\n      no such file" in report(tmp_path / "nowhere.yaml")
    assert "found by name: quickstart, quickstart_sft, qwen3" in report(Path("nothere"))
    assert "cannot be read: Is a directory" in report(tmp_path)
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert "not a text file in UTF-8" in report(binary)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("foo", "command line: foo\n      not a setting; write `section.field=value`"),
        (
            "--training.seed",
            "command line: --training.seed\n      not a setting: its value is missing; write `--training.seed",
        ),
        ("--lr", "command line: --lr\n      not a setting: its value is missing; write `--lr VALUE`"),
        ("hub-token=hf_0123", "command line: hub-token\n      not a setting;"),
        ("--hub-token=hf_0123", "command line: --hub-token\n      not a setting;"),
        ("--training.learning-rate=1", "not a setting; its words are joined by underscores: training.learning_rate"),
        ("=3", "command line: =3\n      not a setting;"),
        ("training.seed=[1", 'command line: training.seed\n      "[1" is not a YAML value'),
        ("seed=x", 'command line: training.seed = "x"\n      must be a whole number'),
        ("training.seed.x=3", 'command line: training.seed = {"x": 3}\n      must be a whole number'),
        ("trainin.seed=3", 'command line: trainin = {"seed": 3}\n      unknown key; did you mean `training`?'),
        (
            "training.learning_rate=.inf",
            "command line: training.learning_rate = Infinity\n      must be a finite number",
        ),
        ("training.learning_rate=1e400", "training.learning_rate = Infinity\n      must be a finite number"),
        ("training.learning_rate=5", "training.learning_rate = 5\n      must be <= 1.0"),
        ("training.learning_rate=.nan", "command line: training.learning_rate = NaN\n"),
        ("training.learning_rate=", "command line: training.learning_rate = null\n      must be a number"),
        ("save_step=200", "unknown key; did you mean `save_steps` (here `training.save_steps`)?"),
        ("infra.save_step=200", "unknown key here; did you mean `training.save_steps`?"),
        ("learning_rat=1", "unknown key; did you mean `learning_rate` (here `training.learning_rate`)?"),
        ("saves_steps=1", "unknown key; did you mean `save_steps` (here"),
        ("per_device_train_batchsize=2", "did you mean `per_device_train_batch_size` (here"),
        ("warmup_step=2", "did you mean `warmup_steps` (here"),
        ("gradient_checkpoint=true", "did you mean `gradient_checkpointing`?"),
        ("training.gradient_checkpoint=true", "did you mean `gradient_checkpointing`?"),
        ("fsdp_config.fsdp_offload_param=true", "did you mean `fsdp_offload_params` (here `infra.offload_optimizer`)?"),
        ("training.max_step=4", "unknown key; did you mean `max_steps` (here `training.num_train_steps`)?"),
        (
            "training.colour=red",
            "unknown key; allowed: activation_checkpointing, activation_checkpointing_every_n,",
        ),
        ("data.objective=stf", "allowed: 'ul2' or 'sft'; did you mean `sft`?"),
        ("training.eval_files=a.json", "unknown key here; did you mean `data.eval_files`?"),
        ("--eval_files=3", "command line: data.eval_files = 3\n      must be a list"),
        ("data.data_files=3", "command line: data.data_files = 3\n      must be a list"),
    ],
)
def test_the_command_line(argument: str, message: str) -> None:
    assert message in report(None, argument)


def test_a_setting_inside_a_plain_value(tmp_path: Path) -> None:
    found = report(written(tmp_path, "training: {seed: 1}"), "training.seed.x=3")
    assert "command line: training.seed.x\n      no such field" in found


def test_one_problem_is_reported_once() -> None:
    assert report(None, "training.seed=-1", "training.seed=-1") == (
        "The configuration has 1 problem:\n  command line: training.seed = -1\n      must be >= 0"
    )


def test_a_required_field_with_a_wrong_value_is_one_problem() -> None:
    sizes = "{vocab_size: many, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    sizes += "num_key_value_heads: 2, head_dim: 16, intermediate_size: 128}"
    found = report(None, f"model.architecture={sizes}", "model.tokenizer_name_or_path=builtin")
    assert found.splitlines()[1:] == [
        '  command line: model.architecture.vocab_size = "many"',
        "      must be a whole number",
    ]


@pytest.mark.parametrize("text", ["training:\n  report_to: tensorbord\n", None])
def test_a_single_value_that_stands_for_a_list(tmp_path: Path, text: str | None) -> None:
    path, overrides = (written(tmp_path, text), ()) if text else (None, ("training.report_to=tensorbord",))
    assert report(path, *overrides).splitlines()[1:] == [
        f'  {"run.yaml:2" if text else "command line"}: training.report_to = "tensorbord"',
        "      allowed: wandb, tensorboard, `module:name`; did you mean `tensorboard`?",
    ]


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
HEADS = """\
  run.yaml:7: model.architecture.num_attention_heads = 4
  run.yaml:8: model.architecture.num_key_value_heads = 3
      every key/value head must serve equally many query heads: one must divide the other"""


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("hidden_size", "hidden_sise", "hidden_sise = 128\n      unknown key; did you mean `hidden_size`?"),
        ("hidden_size: 128", "hidden_size: wide", 'hidden_size = "wide"\n      must be a whole number'),
        ("hidden_size: 128", "colour: red", "the field is required"),
    ],
)
def test_contradictions_beside_a_mistake_in_the_same_section(
    tmp_path: Path, before: str, after: str, problem: str
) -> None:
    alone = report(written(tmp_path, SCRATCH.replace(before, after)))
    both = report(written(tmp_path, SCRATCH.replace(before, after).replace("value_heads: 2", "value_heads: 3")))
    assert problem in alone
    assert "divide" not in alone
    assert both.split("\n", 1)[1] == alone.split("\n", 1)[1] + "\n" + HEADS


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (SCRATCH.replace("num_key_value_heads: 2", "num_key_value_head: 3"), ["model.architecture.num_key_value_head"]),
        ("training: {warmup_step: 5, num_train_steps: 10}", ["training.warmup_step"]),
        ("warmup_step: 5\ntraining: {num_train_steps: 20, lr_scheduler_type: WarmupLR}", ["warmup_step"]),
        ("trainning: {warmup_steps: 5}\nmodel: {model_name_or_path: null}", ["trainning", "model.model_name_or_path"]),
        # What is set under its right name is not excused by a typo beside it.
        (
            "training: {warmup_step: 5, warmup_steps: 20, num_train_steps: 10}",
            ["training.warmup_step", "training.warmup_steps"],
        ),
        # A source of a mixture is mended in its place, so that the other one is still looked at.
        (
            "data: {mixture: [{weight: 1, dataset_nam: text}, {weight: 1, dataset_name: text}]}",
            ["data.mixture.0.dataset_nam", "data.mixture.1.dataset_name"],
        ),
    ],
)
def test_what_a_typo_explains_is_not_reported_beside_it(tmp_path: Path, text: str, problems: list[str]) -> None:
    found = report(written(tmp_path, text))
    assert f"{len(problems)} problem" in found.splitlines()[0]
    for field in problems:
        assert f": {field} = " in found


def test_every_required_field_has_a_valid_stand_in() -> None:
    required = [path for path, info in fields().items() if info.is_required()]
    assert len(required) > 8
    for path in required:
        assert wrong_value(path, stand_in(path)) is None, path


def test_long_values_are_cut() -> None:
    line = report(None, f"training.seed=[{', '.join('7' * 200)}]").splitlines()[1]
    assert line.endswith("...")
    assert len(line) < 120


def test_on_a_terminal_the_wrong_part_of_each_line_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    long = f"model: {{architecture: {{{'  ' * 60}hidden_size: 0}}}}"
    text = f"""\
training:
  learning_rate: fast  # too
  seed: 7
  my_token: hf_0123
  nested: {{"api-key": sk-1, seed: abc}}
num_sentinel_tokens: abc
{long}
data: {{dataset_name: builtin, max_encoder_lenght: 5}}
"""
    written(tmp_path, text)
    plain = report(Path("run.yaml"), "infra.sharding_stage=zero9")
    lines = marked(plain, 80).plain.splitlines()
    told = [line for line in lines if not re.match(" [ 0-9]{7} [|] ", line)]
    assert " ".join(told).split() == plain.split()
    assert max(len(line) for line in told if line.startswith("      ")) <= 80 < max(map(len, plain.splitlines()))
    shown = list(itertools.pairwise(lines))
    found = {above[: above.index(" |")].strip(): above[below.index("^") :][: below.count("^")]
             for above, below in shown if re.fullmatch(" {9}[|] +\\^+", below)}  # fmt: skip
    assert found == {"2": "fast", "6": "abc", "7": "0", "8": "max_encoder_lenght"}
    assert not re.search("hf_0123|sk-1", " ".join(lines))
    assert max(len(line) for pair in shown if "^" in pair[1] for line in pair) <= 80
