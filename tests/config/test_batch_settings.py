"""The batch in its three forms: numbers, a global batch, and a size that is still to be found."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.shares import (
    global_batch_size,
    micro_batch_candidates,
    micro_batches_per_step,
    plan_lanes,
    with_assumed_batch_size,
    with_micro_batch_size,
)


def load(**training: Any) -> FullConfig:
    return load_config(None, [f"training.{name}={value}" for name, value in training.items()])


def test_auto_keeps_what_the_default_micro_batch_makes() -> None:
    config = load(per_device_train_batch_size="auto", gradient_accumulation_steps=3)
    assert global_batch_size(config, 2) == 24
    assert micro_batch_candidates(config, 2) == [12, 6, 4, 3, 2, 1]
    with pytest.raises(ConfigError, match="give a number"):
        micro_batches_per_step(config, 2)


@pytest.mark.parametrize("size", [12, 6, 4, 3, 2, 1])
def test_every_candidate_keeps_the_global_batch(size: int, tmp_path: Path) -> None:
    found = with_micro_batch_size(load(per_device_train_batch_size="auto", global_batch_size=24), size, 2)
    assert found.training.micro_batch_size == size
    assert size * found.training.gradient_accumulation_steps * 2 == 24 == global_batch_size(found, 2)
    found.to_yaml(tmp_path / "config.yaml")
    assert FullConfig.from_yaml(tmp_path / "config.yaml") == found
    assert micro_batches_per_step(found, 3) * size == 24  # on whatever ranks it starts again


def test_lanes_fall_evenly_on_the_ranks() -> None:
    assert plan_lanes(load(gradient_accumulation_steps=4), world_size=2) == (8, 4)
    assert plan_lanes(load_config(None, ["data.num_lanes=12"]), world_size=3) == (12, 4)
    # A saved run's lanes win: its step does not change with the number of ranks.
    assert plan_lanes(load(gradient_accumulation_steps=4), world_size=4, saved_lanes=8) == (8, 2)


def test_ranks_must_divide_the_lanes_and_the_global_batch() -> None:
    with pytest.raises(ConfigError, match=r"data\.num_lanes=8 cannot be divided evenly among 3 ranks.*: 1, 2, 4, 8\."):
        plan_lanes(load_config(None, ["data.num_lanes=8"]), world_size=3)
    with pytest.raises(ConfigError, match=r"global_batch_size=25 .* 2 ranks: make it a multiple of 2, such as 26"):
        micro_batch_candidates(load(per_device_train_batch_size="auto", global_batch_size=25), 2)


def test_who_cannot_try_assumes_a_size_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    number = load(per_device_train_batch_size=8)
    with caplog.at_level(logging.WARNING):
        assert with_assumed_batch_size(number, 2) is number
        assert not caplog.messages
        auto = load(per_device_train_batch_size="auto", global_batch_size=18)
        assert with_assumed_batch_size(auto, 2).training.micro_batch_size == 3
    (message,) = caplog.messages
    assert "taken to be 3, of a global batch of 18" in message


def test_a_deepspeed_json_may_give_the_global_batch(tmp_path: Path) -> None:
    document = tmp_path / "ds.json"
    document.write_text(json.dumps({"train_batch_size": 96, "train_micro_batch_size_per_gpu": "auto"}))
    config = load_config(None, ["training.per_device_train_batch_size=auto"], document)
    assert (config.training.global_batch_size, config.data.num_lanes) == (96, None)
