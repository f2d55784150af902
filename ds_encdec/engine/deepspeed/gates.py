"""Guarded steps of DeepSpeed 0.19.8, and a host that does not wait for its device in them.

A gate shows the global gradient norm to the caller's veto in the middle of DeepSpeed's step and, on refusal or if it is
not finite, sends DeepSpeed down its path for overflow: gradients cleared, parameters, moments and schedule untouched,
`skipped_steps` counted. The norm is computed on the device, in float32 and with one reduction, and read once, the
host's only wait in a step. A sum of squares is finite only if all its terms are, so the norm also answers DeepSpeed's
checks for overflow. All of these are private places (foreign_places.py)."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import deepspeed.runtime.bf16_optimizer as bf16_module
import deepspeed.runtime.fp16.unfused_optimizer as unfused_module
import deepspeed.runtime.zero.stage3 as stage3_module
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_encdec.base.foreign_places import replaced, write
from ds_encdec.engine.protocol import Veto


def wait_on_the_device(engine: DeepSpeedEngine, undo: ExitStack) -> None:
    """Until `undo`, replace DeepSpeed's waits of the host by waits between the device's streams: for buckets of
    gradients, backward passes, modules' parameters (stage 3 on one rank) and offloaded gradients. The host reads
    nothing before the norm, so this is safe; with states on NVMe it does, and nothing is replaced."""
    accelerator, optimizer = get_accelerator(), engine.optimizer
    if accelerator.is_synchronized_device() or getattr(optimizer, "swap_optimizer", False):
        return

    # Make the current stream wait for `stream` when the optimizer's `method` calls `owner.synchronize`.
    def ordered(method: str, owner: Any, stream: Any) -> None:
        native = getattr(optimizer, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            with replaced(owner, "synchronize", lambda *_: accelerator.current_stream().wait_stream(stream)):
                return native(*args, **kwargs)

        undo.enter_context(replaced(optimizer, method, run))

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        stream, native_wait = optimizer.reduce_and_partition_stream, NoGatherCoalescedHandle.wait
        ordered("independent_gradient_partition_epilogue", stream, stream)

        # Leave copies to their stream, for which the fetching stream waits next.
        def wait(self: Any, **kwargs: Any) -> None:
            with replaced(accelerator, "resolves_data_dependency", lambda: True):
                native_wait(self, **kwargs)

        undo.enter_context(replaced(NoGatherCoalescedHandle, "wait", wait))
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        ordered("independent_gradient_partition_epilogue", accelerator, optimizer.reduction_stream)

        def wait_for_copies() -> None:
            for event in optimizer._pending_offload_events.values():
                accelerator.current_stream().wait_event(event)
            optimizer._pending_offload_events.clear()

        undo.enter_context(replaced(optimizer, "_wait_for_offload_copies", wait_for_copies))
        # A gradient larger than the bucket is reduced where it lies, and may be freed while a stream works on it.
        undo.enter_context(
            replaced(optimizer, "_record_gradient_stream", lambda tensor, stream: tensor.record_stream(stream))
        )


class StepGate:
    """Decides of each step whether it is applied. Until `undo`, each subclass calls `_skips_step` where DeepSpeed's
    optimizer computes the gradient norm."""

    def __init__(self, engine: DeepSpeedEngine, undo: ExitStack) -> None:
        self._engine = engine
        self._veto: Veto | None = None
        self._norm: Tensor | None = None
        self._read = math.inf

    def step(self, veto: Veto | None) -> tuple[bool, Tensor]:
        """Step; return whether it was applied, and the norm before clipping (float32 scalar; inf if not finite)."""
        self._veto, self._norm = veto, None
        applied = self._run()
        if applied and self._norm is None:
            raise RuntimeError(
                f"deepspeed {version('deepspeed')} does not read the gradient norm where 0.19.8 does "
                f"({type(self).__name__}), so this step was neither guarded nor clipped. Install deepspeed==0.19.8"
            )
        return applied, torch.tensor(torch.inf, device=self._engine.device) if self._norm is None else self._norm

    def _run(self) -> bool:
        self._engine.step()
        return self._engine.was_step_applied()

    def _skips_step(self, norm: Tensor) -> bool:
        """Record the norm, free of any loss scale, and return the decision, the same on every rank."""
        self._read = float(norm)  # the step's one wait for the device
        if not math.isfinite(self._read):
            return True
        self._norm = norm
        return self._veto is not None and self._veto(norm)


class ZeroGate(StepGate):
    """Guards ZeRO 1, 2 and 3, where the optimizer gets the norm from a method, then looks at `overflow`."""

    def __init__(self, engine: DeepSpeedEngine, undo: ExitStack, method: str, parameters: str) -> None:
        """`method` of the optimizer returns the norm; its field `parameters` has this rank's, by group."""
        super().__init__(engine, undo)
        self._parameters = parameters
        self._this_step = ExitStack()
        replacements: dict[str, Callable[..., Any]] = {
            method: self._observe,
            "unscale_and_clip_grads": self._clip,
            "check_overflow": lambda partition_gradients=True: None,  # the norm shows whether there was one
        }
        if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            replacements["update_offload_overflow_tracker"] = lambda gradient: None
        for name, function in replacements.items():
            undo.enter_context(replaced(engine.optimizer, name, function))

    def _observe(self) -> float:
        optimizer = self._engine.optimizer
        if self._skips_step(self._global_norm() / optimizer.loss_scale):
            write(optimizer, overflow=True)
            if self._norm is not None:
                # A veto is no overflow: a dynamic loss scale must not fall for it in this step.
                self._this_step.enter_context(replaced(optimizer, "_update_scale", lambda overflow: None))
        return self._read * optimizer.loss_scale

    def _global_norm(self) -> Tensor:
        """Return the norm of all ranks' gradients, times the loss scale; float32 scalar on the device. Collective."""
        optimizer = self._engine.optimizer
        noted = getattr(optimizer, "norm_for_param_grads", None)  # with offload, as the gradients left the device
        norms: list[Tensor] = []
        for index, parameters in enumerate(getattr(optimizer, self._parameters)):
            if noted is not None:
                known = map(noted.get, map(optimizer.get_param_id, parameters))
                norms += [norm.float() for norm in known if norm is not None]
            elif gradients := list(optimizer.averaged_gradients[index]):
                norms += torch._foreach_norm(gradients, 2, dtype=torch.float32)
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._engine.device)
        torch.distributed.all_reduce(total, group=optimizer.dp_process_group)
        return total.sqrt()

    def _clip(self, gradients: Any, scaled_norm: float) -> None:
        optimizer = self._engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            gradients = [optimizer.fp32_partitioned_groups_flat[gradients].grad]
        scale = optimizer.loss_scale
        if optimizer.clip_grad > 0.0:
            scale *= max(1.0, (scaled_norm / optimizer.loss_scale + 1e-6) / optimizer.clip_grad)
        for gradient in gradients if scale != 1.0 else ():
            gradient.mul_(1.0 / scale)

    def _run(self) -> bool:
        optimizer = self._engine.optimizer
        with self._this_step, replaced(stage3_module, "combine_grad_norm_groups", lambda norm: norm):
            applied = super()._run()
        if not applied and isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
            # DeepSpeed drops the sums of an offloaded optimizer only in an applied step: the next one would include
            # the gradients of a skipped one. In place, since every parameter refers to this dict.
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
        return applied


class Bf16Gate(StepGate):
    """Guards ZeRO 1 in bf16 with float32 accumulation, where the norm from a function decides whether to skip."""

    def _run(self) -> bool:
        with replaced(bf16_module, "get_global_norm_of_tensors", self._observe):
            return super()._run()

    def _observe(self, input_tensors: list[Tensor], **_: Any) -> float:
        # Every rank has all gradients by then; an infinite norm skips the step.
        return math.inf if self._skips_step(_norm(input_tensors)) else self._read


class ReplicatedGate(StepGate):
    """Guards ZeRO 0: every rank has all averaged gradients; DeepSpeed in float32 has no norm and skips nothing."""

    def __init__(self, engine: DeepSpeedEngine, undo: ExitStack) -> None:
        super().__init__(engine, undo)
        undo.enter_context(replaced(engine, "clip_fp32_gradients", self._clip))
        if isinstance(engine.optimizer, unfused_module.FP16_UnfusedOptimizer):  # the norm already shows any overflow
            for method in ("check", "has_overflow"):
                undo.enter_context(replaced(engine.optimizer.overflow_checker, method, lambda *_, **__: False))

    def _run(self) -> bool:
        engine = self._engine
        if not self._skips_step(_norm([p.grad for p in engine.module.parameters() if p.grad is not None])):
            groups = iter([self._read])  # the first group has the norm of all
            with replaced(unfused_module, "get_weight_norm", lambda *_, **__: next(groups, 0.0)):
                return super()._run()
        engine.zero_grad()
        write(engine, **{name: getattr(engine, name) + 1 for name in ("micro_steps", "global_steps", "skipped_steps")})
        return False

    def _clip(self) -> None:
        engine = self._engine
        assert self._norm is not None
        torch.nn.utils.clip_grads_with_norm_(engine.module.parameters(), engine.gradient_clipping(), self._norm)


def _norm(gradients: list[Tensor]) -> Tensor:
    # Every rank has all gradients, equal to the bit, but with other threads or another device it adds in another order,
    # and replicas that clip by norms with another last bit drift apart.
    square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    torch.distributed.all_reduce(square)
    return (square / torch.distributed.get_world_size()).sqrt()


def step_gate(engine: DeepSpeedEngine, undo: ExitStack) -> StepGate:
    """Return the gate that fits the optimizer DeepSpeed has built; `undo` removes it."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return ZeroGate(engine, undo, "_get_norm_groups", "fp16_groups")
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return ZeroGate(engine, undo, "scaled_global_norm", "params_in_partition")
    return (Bf16Gate if isinstance(engine.optimizer, bf16_module.BF16_Optimizer) else ReplicatedGate)(engine, undo)
