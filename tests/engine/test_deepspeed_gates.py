"""The gates of DeepSpeed's steps, on stand-ins that ask for the norm elsewhere, as another release may."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from ds_encdec.engine.deepspeed.gates import Bf16Gate, ReplicatedGate, StepGate, ZeroGate


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
