"""Shards of flat tensors, their Adam states, the loss scale of float16, the copies of saves in host memory; and the
gates of DeepSpeed's steps, on stand-ins that ask for the norm elsewhere, as another release may."""

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor, nn

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.deepspeed.gates import Bf16Gate, ReplicatedGate, StepGate, ZeroGate
from ds_encdec.engine.deepspeed.private import loss_scaler_state, optimizer_state, set_loss_scaler_state
from ds_encdec.engine.protocol import Piece, own_parts
from ds_encdec.engine.sharded_engine import Shard, set_step
from ds_encdec.engine.staging import StagingArea, first_non_finite


def test_a_shard_is_filled_by_ranges_and_its_padding_zeroed() -> None:
    shard = Shard(torch.full((8,), 9.0), (Piece("a", 2, 3, 0), Piece("b", 0, 2, 4)))
    values = {"a": torch.arange(10.0), "b": torch.tensor([20.0, 21.0])}
    shard.fill(shard.weights, lambda name, start, stop: values[name][start:stop])
    assert shard.weights.tolist() == [2, 3, 4, 0, 20, 21, 0, 0]
    shard.fill(shard.weights, lambda name, start, stop: torch.tensor([30.0, 31.0])[start:stop], only="b")
    assert shard.weights.tolist() == [2, 3, 4, 0, 30, 31, 0, 0]


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_parts_of_all_ranks_are_every_element_once(ranks: int) -> None:
    """Also where a parameter has fewer elements than there are ranks."""
    numels = {"a": 7, "b": 1, "c": 6}
    parts = [list(own_parts(numels, rank, ranks)) for rank in range(ranks)]
    for name, numel in numels.items():
        held = [range(piece.start, piece.start + piece.length) for own in parts for piece in own if piece.name == name]
        assert [element for elements in held for element in elements] == list(range(numel))


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


@pytest.mark.parametrize("counter", [3, 3.0])
def test_a_states_counter_is_set_whatever_its_type(counter: float) -> None:
    state = {"step": counter, "exp_avg": torch.zeros(2)}
    set_step(state, 7)
    assert (state["step"], type(state["step"])) == (7, type(counter))


@pytest.mark.parametrize(("options", "device"), [({"fused": True}, "meta"), ({}, "cpu")])
def test_a_fused_kernel_counts_where_the_weights_are(options: dict[str, Any], device: str) -> None:
    weights = torch.ones(4, device="meta", requires_grad=True)
    state = optimizer_state(torch.optim.AdamW([weights], **options), weights, TrainingConfig())
    assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")


def engine_with(scaler: Any) -> DeepSpeedEngine:
    return cast(DeepSpeedEngine, SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler)))


def dynamic_scaler() -> DynamicLossScaler:
    return DynamicLossScaler(
        init_scale=2.0**16, scale_window=4, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=False
    )


@pytest.mark.parametrize("before", [3, 7])
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
    static, fresh = LossScaler(scale=1.0), dynamic_scaler()
    assert loss_scaler_state(engine_with(static)) is None
    set_loss_scaler_state(engine_with(static), {"scale": 8.0})
    set_loss_scaler_state(engine_with(fresh), None)
    assert (static.cur_scale, fresh.cur_scale) == (1.0, 2.0**16)


def tied_state() -> tuple[dict[str, Any], Tensor]:
    """A tensor, a view of it and its transpose, beside one of its own; and the first."""
    flat = torch.arange(12.0)
    parameter = nn.Parameter(flat.view(3, 4))
    state = OrderedDict(flat=flat, part=[flat[4:8]], matrix=(parameter.t(), torch.Size([3])), own=torch.ones(5), step=3)
    return state, flat


@pytest.mark.parametrize("copied", [True, False])
def test_shared_storage_stays_shared_and_counts_once(copied: bool) -> None:
    state, flat = tied_state()
    num_bytes, taken = StagingArea(pin_memory=False).take_all(state, copy=copied)
    assert isinstance(taken, OrderedDict)
    assert (taken["matrix"][1:], taken["step"]) == ((torch.Size([3]),), 3)
    assert num_bytes == (12 + 5) * 4
    for found, given in ((taken["part"][0], flat[4:8]), (taken["matrix"][0], flat.view(3, 4).t())):
        assert torch.equal(found, given)
        assert found.untyped_storage().data_ptr() == taken["flat"].untyped_storage().data_ptr()
        assert not found.requires_grad
    flat.zero_()
    assert bool(taken["part"][0].any()) is copied


def test_later_saves_use_the_memory_of_the_first_copy() -> None:
    area = StagingArea(pin_memory=False)
    state, flat = tied_state()
    assert area.take_all(state, copy=False)[1]["flat"].data_ptr() == flat.data_ptr()
    _, first = area.take_all(state, copy=True)
    _, second = area.take_all({"a": torch.full((12,), 7.0), "b": torch.zeros(9)}, copy=True)
    assert second["a"].data_ptr() == first["flat"].data_ptr() != flat.data_ptr()
    assert (first["flat"].tolist(), first["own"].tolist()) == ([7.0] * 12, [1.0] * 5)
    assert second["b"].tolist() == [0.0] * 9  # another size: new memory
    assert area.take_all(state, copy=False)[1]["flat"].data_ptr() == first["flat"].data_ptr()


def test_copies_go_on_in_pageable_memory_where_none_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(*sizes: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    _, taken = StagingArea(pin_memory=True).take_all(tied_state()[0], copy=True)
    assert taken["flat"].tolist() == list(range(12))
    (warning,) = caplog.messages
    assert "pageable memory" in warning
    assert "CUDA error: out of memory" in warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("numel", [7, 300_000])
def test_one_element_that_is_not_finite_is_found_and_named(dtype: torch.dtype, value: float, numel: int) -> None:
    largest = torch.full((3, numel), torch.finfo(dtype).max, dtype=dtype)  # their sum would be infinite
    pieces = (Piece("a.weight", 0, numel), Piece("b.weight", 40, 2 * numel - 2, numel))
    staged = [("weight", (), torch.empty(0)), ("step", pieces[:1], torch.tensor(3)), ("exp_avg", pieces, largest)]
    assert first_non_finite(staged) is None
    assert first_non_finite(staged, {"scale": 2.0**16}) is None
    for place, name in ((0, "a.weight"), (numel - 1, "a.weight"), (numel, "b.weight"), (3 * numel - 3, "b.weight")):
        largest.view(-1)[place] = value
        assert first_non_finite(staged) == f"exp_avg of {name} is {value}"
        largest.view(-1)[place] = 0
    largest.view(-1)[-1] = value  # in no piece: padding
    assert first_non_finite(staged) is None
    assert first_non_finite([], {"scale": value}) == f"scale of the loss scaler is {value}"


class Optimizer:
    """Has the methods of a ZeRO optimizer, of which its steps use none."""

    loss_scale, clip_grad, overflow = 1.0, 1.0, False

    def nothing(self, *_: Any) -> None: ...

    scaled_global_norm = unscale_and_clip_grads = check_overflow = update_offload_overflow_tracker = nothing


def engine(applied: bool = True) -> Any:
    optimizer = Optimizer()
    return SimpleNamespace(
        optimizer=optimizer,
        device=torch.device("cpu"),
        step=lambda: None,
        was_step_applied=lambda: applied,
        clip_fp32_gradients=None,
        module=torch.nn.Linear(1, 1),
    )


STAGE_2 = partial(ZeroGate, method="scaled_global_norm", parameters="params_in_partition")


@pytest.mark.parametrize("gate", [STAGE_2, Bf16Gate])
def test_a_step_that_was_applied_without_its_norm_is_an_error(gate: Callable[..., StepGate]) -> None:
    with ExitStack() as undo:
        with pytest.raises(RuntimeError, match=r"deepspeed \d.* does not read the gradient norm"):
            gate(engine(), undo).step(veto=lambda norm: True)
        applied, norm = gate(engine(applied=False), undo).step(None)
    assert (applied, float(norm)) == (False, float("inf"))


def test_gates_are_taken_out_again() -> None:
    with ExitStack() as undo:
        opened = engine()
        STAGE_2(opened, undo)
        ReplicatedGate(opened, undo)
        assert vars(opened.optimizer)
        assert opened.clip_fp32_gradients
    assert vars(opened.optimizer) == {}
    assert opened.clip_fp32_gradients is None
