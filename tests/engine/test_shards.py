"""Where parameters lie in flat tensors, how one is filled, its Adam state, and the loss scale of float16."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.deepspeed.private import loss_scaler_state, optimizer_state, set_loss_scaler_state
from ds_encdec.engine.protocol import Piece, end_to_end, own_parts
from ds_encdec.engine.sharded_engine import Shard, set_step

NUMELS = {"a": 7, "b": 1, "c": 6}


def engine_with(scaler: Any) -> DeepSpeedEngine:
    return cast(DeepSpeedEngine, SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler)))


def dynamic_scaler() -> DynamicLossScaler:
    return DynamicLossScaler(
        init_scale=2.0**16, scale_window=4, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=False
    )


def test_a_shard_is_filled_by_ranges_and_its_padding_zeroed() -> None:
    shard = Shard(torch.full((8,), 9.0), (Piece("a", 2, 3, 0), Piece("b", 0, 2, 4)))
    values = {"a": torch.arange(10.0), "b": torch.tensor([20.0, 21.0])}
    shard.fill(shard.weights, lambda name, start, stop: values[name][start:stop])
    assert shard.weights.tolist() == [2, 3, 4, 0, 20, 21, 0, 0]
    shard.fill(shard.weights, lambda name, start, stop: torch.tensor([30.0, 31.0])[start:stop], only="b")
    assert shard.weights.tolist() == [2, 3, 4, 0, 30, 31, 0, 0]


def test_a_state_made_for_torch_is_what_its_own_first_step_makes() -> None:
    untouched, stepped = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    stepped.grad = torch.zeros(4)
    optimizer = torch.optim.AdamW([untouched, stepped])
    optimizer.step()
    made, own = optimizer_state(optimizer, untouched, TrainingConfig()), optimizer.state[stepped]
    set_step(made, 1)
    assert made.keys() == own.keys()
    for key, value in own.items():
        assert torch.equal(made[key], value)
        assert (made[key].dtype, made[key].requires_grad) == (value.dtype, False)


@pytest.mark.parametrize(("options", "device"), [({"fused": True}, "meta"), ({"foreach": True}, "cpu"), ({}, "cpu")])
def test_a_fused_kernel_counts_where_the_weights_are(options: dict[str, bool], device: str) -> None:
    """As its own first step would. A device without data stands in for a GPU."""
    weights = torch.ones(4, device="meta", requires_grad=True)
    state = optimizer_state(torch.optim.AdamW([weights], **options), weights, TrainingConfig())  # type: ignore[arg-type]
    assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")


@pytest.mark.parametrize("before", range(12))
def test_a_loss_scale_goes_on_as_if_never_interrupted(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # the scaler logs on rank 0
    overflows = [index in (2, 3, 5, 14) for index in range(24)]
    straight, resumed = dynamic_scaler(), dynamic_scaler()
    for overflow in overflows[:before]:
        straight.update_scale(overflow)
    set_loss_scaler_state(engine_with(resumed), loss_scaler_state(engine_with(straight)))
    for overflow in overflows[before:]:
        assert resumed.cur_scale == straight.cur_scale
        straight.update_scale(overflow)
        resumed.update_scale(overflow)


def test_without_a_dynamic_loss_scale_there_is_nothing_to_carry_over() -> None:
    static = LossScaler(scale=1.0)
    assert loss_scaler_state(engine_with(static)) is None
    set_loss_scaler_state(engine_with(static), {"scale": 8.0})
    assert static.cur_scale == 1.0
    fresh = dynamic_scaler()
    set_loss_scaler_state(engine_with(fresh), None)
    assert fresh.cur_scale == 2.0**16


def test_whole_parameters_follow_each_other_with_their_padding() -> None:
    assert list(end_to_end(NUMELS)) == [Piece("a", 0, 7, 0), Piece("b", 0, 1, 7), Piece("c", 0, 6, 8)]
    assert [piece.offset for piece in end_to_end(NUMELS, [1, 3, 0])] == [0, 8, 12]
    with pytest.raises(ValueError, match="shorter"):
        list(end_to_end(NUMELS, [1, 3]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_parts_of_all_ranks_are_every_element_once(ranks: int) -> None:
    """Also where a parameter has fewer elements than there are ranks."""
    parts = [list(own_parts(NUMELS, rank, ranks)) for rank in range(ranks)]
    for name, numel in NUMELS.items():
        held = [range(piece.start, piece.start + piece.length) for own in parts for piece in own if piece.name == name]
        assert [element for elements in held for element in elements] == list(range(numel))
    sizes = {name: -(-numel // ranks) for name, numel in NUMELS.items()}
    for own in parts:  # padding keeps the place of each parameter the same on all ranks
        assert all(piece.offset == sum(list(sizes.values())[: list(sizes).index(piece.name)]) for piece in own)
