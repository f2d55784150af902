"""A raw DeepSpeed JSON: what it sets, leaves open, may not say; and that we know the installed DeepSpeed's keys."""

import json
import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.yaml.deepspeed_keys import KEYS

Golden = Callable[[object], None]


def load(tmp_path: Path, document: dict[str, Any] | str, *overrides: str, text: str = "") -> FullConfig:
    json_path = tmp_path / "ds.json"
    json_path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1))
    yaml_path = tmp_path / "run.yaml"
    yaml_path.write_text(text)
    return load_config(yaml_path if text else None, overrides, json_path)


def report(tmp_path: Path, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *arguments, **keywords)
    return str(caught.value).replace(f"{tmp_path}/", "")


def changed(config: FullConfig) -> str:
    """The lines of a configuration that are not the defaults."""
    defaults = FullConfig().dump_yaml().splitlines()
    return "\n".join(line for line in config.dump_yaml().splitlines() if line not in defaults)


COMPLETE = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 20, "total_num_steps": 500, "warmup_type": "log", "cos_min_ratio": 0.05},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "nvme_path": "/local", "pin_memory": False, "fast_init": True},
        "offload_param": {"device": "cpu"},
        "stage3_prefetch_bucket_size": 5e7,
        "sub_group_size": 1000,
    },
    "activation_checkpointing": {"cpu_checkpointing": True},
    "communication_data_type": "fp32",
}


def test_every_key_reaches_its_field_and_the_result_stands_on_its_own(tmp_path: Path, golden: Golden) -> None:
    config = load(tmp_path, COMPLETE)
    golden(changed(config))
    (tmp_path / "ds.json").unlink()
    config.to_yaml(tmp_path / "config.yaml")
    assert FullConfig.from_yaml(tmp_path / "config.yaml") == config


def _all_auto(value: Any) -> Any:
    return {key: _all_auto(child) for key, child in value.items()} if isinstance(value, dict) else "auto"


def test_auto_leaves_everything_to_the_schema(tmp_path: Path) -> None:
    assert load(tmp_path, _all_auto(COMPLETE)) == FullConfig()
    text = "training: {learning_rate: 5e-4, adam_beta2: 0.95}"
    config = load(tmp_path, {"optimizer": {"params": {"lr": "auto", "betas": [0.8, "auto"]}}}, text=text)
    assert (config.training.learning_rate, config.training.adam_beta1, config.training.adam_beta2) == (5e-4, 0.8, 0.95)


DISAGREEING: tuple[tuple[dict[str, Any] | str, str], ...] = (
    (
        {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "sub_group_size": 5}},
        "training:\n  max_grad_norm: 1.0\ninfra:\n  deepspeed_extra: {zero_optimization: {sub_group_size: 6}}\n",
    ),
    ('{"optimizer": {"params": {"lr": 1e-3}},\n"scheduler": {"params": {"warmup_max_lr": 2e-3}}}', ""),
    ({"train_batch_size": 256}, "data:\n  num_lanes: 32\n"),
    # Mistakes of both files are reported together, and a wrong type is no disagreement.
    ({"gradient_cliping": 1}, "model: {nam: x}"),
    ({"bf16": {"enabled": "true"}}, "training: {bf16: true}"),
    ({"bf16": {"enabled": True}}, "training: {bf16: 'true'}"),
    ({"optimizer": {"params": {"lr": 1e-3}}, "scheduler": {"params": {"warmup_max_lr": "1e-3"}}}, ""),
    ({"gradient_clipping": 1}, "infra: 5\n"),
    # A file of one line has columns, also where it is no YAML.
    ('{"log_level": 1, "communication_data_type": "\x7f", "bf16": {"enable": true}, "gradient_cliping": 1}', ""),
)


def test_disagreement_names_both_places_and_both_values(tmp_path: Path, golden: Golden) -> None:
    for document, text in DISAGREEING:
        golden(report(tmp_path, document, "infra.sharding_stage=zero3", text=text))


FOLLOWING: tuple[dict[str, Any], ...] = (
    {"fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": None}},
    {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
    {"train_batch_size": 256},
)


def test_what_follows_from_the_json(tmp_path: Path, golden: Golden) -> None:
    golden("\n".join(f"{document}\n{changed(load(tmp_path, document))}" for document in FOLLOWING))


def test_what_only_follows_gives_way_to_what_is_written(tmp_path: Path) -> None:
    config = load(tmp_path, {"zero_optimization": {"stage": 2}}, text="infra: {offload_optimizer: cpu}")
    assert (config.infra.sharding_stage, config.infra.offload_optimizer) == ("zero2", "cpu")


MISTAKES: tuple[dict[str, Any] | str, ...] = (
    {"gradient_cliping": 1},
    {"stage": 3},
    {"zero_optimization": {"stgae": 3}},
    {"aio": {"block_sze": 1}},
    {"optimizer": {"params": {"betas": 0.9}}},
    {"optimizer": {"params": {"max_grad_norm": 1}}},
    {"gradient_clipping": "high"},
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": True},
    {"zero_optimization": {"reduce_bucket_size": 0.5}},
    {"zero_optimization": {"cpu_offload": True}},
    {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 4}},
    {"gradient_allreduce_op": "sum"},
    {"checkpoint": {"writer": {"type": "fast"}}},
    {"elasticity": {"enabled": True}},
    {"train_batch_size": 30},
    {"train_batch_size": "many"},
    "{",
    '{\n "a": 1,\n}',
    "[]",
    '{\n\t"fp16": {"enabled": true,\n\t"enabled": false}}',
)


def test_mistakes(tmp_path: Path, golden: Golden) -> None:
    found = (f"{document}\n{report(tmp_path, document).partition(chr(10))[2]}" for document in MISTAKES)
    golden("\n".join(re.sub(r"(?m)^(.{160}).+", r"\1...", text) for text in found))


IGNORED: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": {"partition_activations": True}},
    {"activation_checkpointing": {"contiguous_memory_optimization": True, "profile": True}},
    {"tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"}},
    {"elasticity": {"enabled": False}, "dataloader_drop_last": False},
)


def test_what_does_nothing_is_accepted_with_a_warning(
    tmp_path: Path, golden: Golden, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ds_encdec"):
        assert [load(tmp_path, document) for document in IGNORED] == [FullConfig()] * len(IGNORED)
    golden("\n".join(caplog.messages))


def test_which_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, clipping in ((there, 2.0), (here, 3.0)):
        folder.mkdir()
        (folder / "ds.json").write_text(json.dumps({"gradient_clipping": clipping}))
    (there / "run.yaml").write_text("infra: {deepspeed_config: ds.json}")
    monkeypatch.chdir(here)
    assert load_config(there / "run.yaml").training.max_grad_norm == 2.0
    assert load_config(None, ["infra.deepspeed_config=ds.json"]).training.max_grad_norm == 3.0
    assert load_config(there / "run.yaml", (), Path("ds.json")).training.max_grad_norm == 3.0
    with pytest.raises(ConfigError, match=r"gone\.json\n      no such file"):
        load_config(None, (), Path("gone.json"))


# Sections that DeepSpeed reads key by key, without a schema of its own that one could ask.
READ_BY_HAND = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")


class Recorder(dict[str, Any]):
    """A configuration that notes every key DeepSpeed asks it for."""

    def __init__(self, asked: set[str], path: str = "", **values: Any) -> None:
        super().__init__(**values)
        self.asked, self.path = asked, path

    def _note(self, key: str) -> None:
        self.asked.add(self.path + key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


@pytest.fixture(scope="module")
def asked() -> set[str]:
    """Every key that DeepSpeed's parser looks up outside its pydantic models."""
    from deepspeed.runtime.config import DeepSpeedConfig

    names: set[str] = set()
    blocks = {block: Recorder(names, f"{block}.") for block in READ_BY_HAND}
    optimizer = Recorder(names, "optimizer.", type="AdamW", params={})
    timers = Recorder(names, "timers.")
    DeepSpeedConfig(
        Recorder(names, train_micro_batch_size_per_gpu=1, optimizer=optimizer, timers=timers, scheduler={}, **blocks)
    )
    return names


def test_every_key_that_deepspeed_reads_is_listed(asked: set[str]) -> None:
    known = KEYS | {key[:end] for key in KEYS for end in range(len(key)) if key[end] == "."}
    assert {key for key in asked if key not in known} == set()
    assert len(asked) > 60, "the recorder missed most of them"


def test_the_snapshot_is_of_the_installed_deepspeed() -> None:
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "dev" / "deepspeed_keys.py"))
    assert json.loads(script["SNAPSHOT"].read_text()) == script["snapshot"]()
    assert len(script["snapshot"]()["blocks"]) == 13
