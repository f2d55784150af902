"""The gradient norm of a step, and the power to refuse the step, inside DeepSpeed's own `step()`.

DeepSpeed computes the global norm in the middle of its step and goes straight on to clip and update. It
also has a path that drops a step, for overflow: gradients cleared, parameters, moments and schedule
untouched, `skipped_steps` counted. A gate stands where the norm appears, shows it to the caller's
veto and, on refusal or when it is not finite, sends DeepSpeed down that path: a skipped step leaves
every later step bit-identical to a run in which it never happened. The norm is computed once.

These are private places of DeepSpeed 0.19.8; the parity tests hold them down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_encdec.engine.protocol import Veto


class StepGate:
    """One guarded step at a time. Subclasses place `_refuses` where their optimizer has its norm."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._veto: Veto | None = None
        self._norm: Tensor | None = None

    def step(self, veto: Veto | None) -> tuple[bool, Tensor]:
        """Step; returns whether it was applied, and the norm before clipping (float32 scalar; inf if not finite)."""
        self._veto, self._norm = veto, None
        applied = self._run()
        return applied, torch.tensor(torch.inf, device=self._engine.device) if self._norm is None else self._norm

    def _run(self) -> bool:
        self._engine.step()
        return self._engine.was_step_applied()

    def _refuses(self, norm: Tensor | float) -> bool:
        """Record the norm (already free of any loss scale) and decide; the same on every rank."""
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device).detach()
        if not torch.isfinite(norm):  # a device synchronisation, as DeepSpeed's own check is
            return True
        self._norm = norm
        return self._veto is not None and self._veto(norm)


class ZeroGate(StepGate):
    """ZeRO 1, 2 and 3: the optimizer asks one of its own methods for the norm, then looks at `overflow`."""

    def __init__(self, engine: DeepSpeedEngine, method: str, combine: Callable[[Any], Tensor]) -> None:
        super().__init__(engine)
        self._native = getattr(engine.optimizer, method)
        self._combine = combine
        setattr(engine.optimizer, method, self._observe)

    def _observe(self) -> Any:
        found = self._native()
        optimizer = self._engine.optimizer
        if self._refuses(self._combine(found) / optimizer.loss_scale):
            optimizer.overflow = True
            if self._norm is not None:
                # A veto is no overflow: a dynamic loss scale must not fall for it. Hides the method once.
                optimizer._update_scale = lambda overflow: None
        return found

    def _run(self) -> bool:
        try:
            return super()._run()
        finally:
            vars(self._engine.optimizer).pop("_update_scale", None)


class Bf16Gate(StepGate):
    """ZeRO 1 in bf16 with float32 accumulation, which DeepSpeed gives an optimizer of its own.

    It takes the norm of whatever `get_grads_for_norm` returns, and drops the step when that is not
    finite. So it is given the finished norm in place of the gradients, or infinity.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self._native = engine.optimizer.get_grads_for_norm
        engine.optimizer.get_grads_for_norm = self._observe

    def _observe(self, for_clipping: bool = False) -> Any:
        found = self._native(for_clipping=for_clipping)
        if for_clipping:
            return found
        norm = get_global_norm_of_tensors(found[0])
        norm = torch.where(norm < 0, torch.inf, norm)  # DeepSpeed's mark of a norm that is not finite
        return [norm.new_tensor([torch.inf]) if self._refuses(norm) else norm.reshape(1)], {}


class ReplicatedGate(StepGate):
    """ZeRO 0: every rank holds all gradients, averaged; DeepSpeed reports no norm in float32 and skips nothing."""

    def _run(self) -> bool:
        engine = self._engine
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        if not self._refuses(torch.linalg.vector_norm(torch.stack(norms))):
            return super()._run()
        engine.zero_grad()
        engine.micro_steps += 1
        engine.global_steps += 1
        engine.skipped_steps += 1
        return False


def step_gate(engine: DeepSpeedEngine) -> StepGate:
    """The gate that fits the optimizer DeepSpeed has built."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return ZeroGate(engine, "_get_norm_groups", combine_grad_norm_groups)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return ZeroGate(engine, "scaled_global_norm", torch.as_tensor)
    if isinstance(optimizer, BF16_Optimizer):
        return Bf16Gate(engine)
    return ReplicatedGate(engine)
