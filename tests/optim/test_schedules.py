"""Schedules against DeepSpeed's classes, against written-out values, and for their shape."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import itertools
from typing import Any

import pytest
import torch
from transformers import get_inverse_sqrt_schedule, get_polynomial_decay_schedule_with_warmup

from ds_encdec.base.types import ConfigError
from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schedules import learning_rate, lr_lambda
from ds_encdec.config.schema import FullConfig, TrainingConfig, load_config
from ds_encdec.engine.deepspeed.json import render_deepspeed_json


def training(schedule: str, **fields: object) -> TrainingConfig:
    given = {"learning_rate": 1.0, "num_train_steps": 20, "warmup_steps": 4, **fields}
    return TrainingConfig.model_validate({"lr_scheduler_type": schedule, **given})


def rates(config: TrainingConfig, count: int) -> list[float]:
    return [learning_rate(index, config) for index in range(count)]


@pytest.mark.parametrize("schedule", NATIVE_SCHEDULES)
@pytest.mark.parametrize("warmup_type", ["linear", "log"])
@pytest.mark.parametrize(("warmup_steps", "steps"), [(4, 20), (1, 7), (9, 4)])
def test_native_sequences_are_deepspeeds(schedule: str, warmup_type: str, warmup_steps: int, steps: int) -> None:
    """Its own class, made of the rendered JSON, is stepped after every update, as its engine does."""
    from deepspeed.runtime import lr_schedules

    how = {"warmup_type": warmup_type, "warmup_steps": warmup_steps, "num_train_steps": steps}
    config = training(schedule, learning_rate=3e-4, **how)
    run = {"world_size": 1, "gradient_accumulation_steps": 1, "device": "cpu"}
    whole = FullConfig().model_copy(update={"training": config})  # unchecked: warm-up may fill the run
    block = render_deepspeed_json(whole, **run)["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    theirs = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    found = []
    for _ in range(steps + 5):
        found.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    assert rates(config, steps + 5) == pytest.approx(found, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "polynomial", "inverse_sqrt"])
def test_own_schedules_rise_from_their_first_update_and_fall_after_warmup(schedule: str) -> None:
    config = training(schedule, learning_rate=3e-4)
    sequence = [lr_lambda(index, config) for index in range(40)]
    assert sequence[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(sequence[4:]))
    assert rates(config, 40) == pytest.approx([3e-4 * factor for factor in sequence])


WRITTEN_OUT: list[tuple[str, dict[str, Any], list[float]]] = [
    ("linear", {}, [1, 0.75, 0.5, 0.25, 0, 0]),
    # From 1 to 0.2 at quarters: 0.2 + 0.4 (1 + cos x).
    ("cosine", {"min_lr_ratio": 0.2}, [1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2]),
    ("constant", {}, [1] * 6),
]


@pytest.mark.parametrize(("schedule", "fields", "expected"), WRITTEN_OUT)
def test_own_schedules_written_out(schedule: str, fields: dict[str, Any], expected: list[float]) -> None:
    assert rates(training(schedule, warmup_steps=0, num_train_steps=4, **fields), 6) == pytest.approx(expected)


def test_wsd_is_stable_until_its_decay() -> None:
    config = training("wsd", num_train_steps=100, warmup_steps=10, wsd_decay_fraction=0.2, min_lr_ratio=0.1)
    sequence = rates(config, 120)
    assert sequence[9:81] == [1.0] * 72
    assert sequence[81] < 1.0
    assert sequence[90] == pytest.approx(0.55)  # half of the decay: midway between 1 and 0.1
    assert sequence[100:] == pytest.approx([0.1] * 20)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_power": 2.5, "min_lr_ratio": 0.2}, {"power": 2.5}),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_timescale": 7}, {"timescale": 7}),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0}, {}),
    ],
)
def test_hugging_faces_formulas(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Equal from the end of the warm-up on; there its schedules are one update behind ours, the first rate being 0."""
    config = TrainingConfig(**{"learning_rate": 1e-3, "num_train_steps": 50, "warmup_steps": 10} | settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    warmup = config.warmup_steps
    if config.lr_scheduler_type == "polynomial":
        arguments |= {"lr_end": config.min_lr_ratio * config.learning_rate, "num_training_steps": 50}
        theirs = get_polynomial_decay_schedule_with_warmup(optimizer, warmup, **arguments)
    else:
        theirs = get_inverse_sqrt_schedule(optimizer, warmup, **arguments)
    (formula,) = theirs.lr_lambdas
    for index in range(50):
        assert lr_lambda(index, config) == pytest.approx(formula(index + (index < warmup)), rel=1e-12)


def test_a_number_that_a_schedule_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_lr_ratio"):
        load_config(None, ["training.lr_scheduler_type=inverse_sqrt", "training.min_lr_ratio=0.2"])
