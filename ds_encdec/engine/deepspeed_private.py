"""Places inside DeepSpeed 0.19.8 that the engine reaches for: the tensors that a rank holds, and a step's norm.

Shards. DeepSpeed gives its optimizer a few flat tensors instead of the model's parameters. Which elements of which
parameter stand where in them depends on the ZeRO stage; here all stages look alike: shards, each with the pieces it is
made of.

Gates. DeepSpeed computes the global gradient norm in the middle of its step and goes straight on to clip and update. It
also has a path that drops a step, for overflow: gradients cleared, parameters, moments and schedule untouched,
`skipped_steps` counted. A gate stands where the norm appears, shows it to the caller's veto and, on refusal or when it
is not finite, sends DeepSpeed down that path: a skipped step leaves every later step bit-identical to a run in which it
never happened. The norm is computed once.

All of these are private places. The parity tests and those of resumed runs hold them down, and one counts what they
hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_encdec.engine.protocol import Piece, Veto, end_to_end, own_parts
from ds_encdec.engine.sharded_engine import Shard
from ds_encdec.model.trained import canonical_name
from ds_encdec.types import MOMENTS

_GRADIENTS_OF_PARAMETER = ("grad", "grad_accum")
_GRADIENTS_OF_OPTIMIZER = (
    "averaged_gradients",  # stages 1 to 3, by group, from the backward pass to the step
    "all_grad_tensors",  # stage 1, while it accumulates
    "grads_in_partition",  # stage 2, in the backward pass
    "accumulated_grads_in_cpu",  # stages 1 and 2 with offload, from several micro-batches on
    "grad_partitions_flat_buffer",  # stage 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
)


def _own(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    """ZeRO 3: this rank's parts."""
    sizes = {engine.param_names[parameter]: parameter.ds_numel for parameter in group}  # type: ignore[attr-defined]
    return own_parts(sizes, engine.global_rank, engine.dp_world_size)


def _linked(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    """ZeRO 1 and 2: DeepSpeed links each parameter that this rank has a part of to that part."""
    for parameter in group:
        link = parameter._hp_mapping  # type: ignore[attr-defined]
        if link is not None:
            here, there = link.lp_fragment_address, link.hp_fragment_address
            yield Piece(engine.param_names[parameter], here.start, here.numel, there.start)


def _whole(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    """ZeRO 0: whole parameters."""
    return end_to_end({engine.param_names[parameter]: parameter.numel() for parameter in group})


_FLAT = (
    (DeepSpeedZeroOptimizer_Stage3, "fp32_partitioned_groups_flat", "fp16_groups", _own),
    (DeepSpeedZeroOptimizer, "single_partition_of_fp32_groups", "bit16_groups", _linked),
    (BF16_Optimizer, "fp32_groups_flat_partition", "bf16_groups", _linked),
    (FP16_Optimizer, "fp32_groups_flat", "fp16_groups", _whole),
)
"""The fields in which each of DeepSpeed's optimizers has its flat float32 weights, by group, and their parameters."""


def shards(engine: DeepSpeedEngine) -> list[Shard]:
    """All shards of this rank, in the order in which DeepSpeed steps them."""
    optimizer = engine.optimizer
    for kind, flats, groups, pieces in _FLAT:
        if isinstance(optimizer, kind):
            found = zip(getattr(optimizer, flats), getattr(optimizer, groups), strict=True)
            return [Shard(flat, tuple(pieces(group, engine))) for flat, group in found]
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        masters, parameters = (list(chain(*groups)) for groups in (optimizer.fp32_groups, optimizer.fp16_groups))
    else:
        masters = parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = zip(masters, parameters, strict=True)
    return [Shard(master, tuple(_whole([parameter], engine))) for master, parameter in found]


def frozen_shards(engine: DeepSpeedEngine) -> Iterator[Shard]:
    """The parts that this rank has of the parameters that no optimizer steps, in the dtype that layers compute in."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            continue
        cut = hasattr(parameter, "ds_tensor")
        yield Shard(parameter.ds_tensor if cut else parameter, tuple((_own if cut else _whole)([parameter], engine)))


def complete_frozen(engine: DeepSpeedEngine, state: dict[str, Any], kept: Set[str]) -> None:
    """Make `state`, which DeepSpeed saves, name parameters as checkpoints do and hold all that is `kept`, no more.

    DeepSpeed's exclusion of frozen parameters leaves a tied one's other name. At stage 1, and 0, it saves frozen ones
    where its zero_to_fp32.py does not look.
    """
    module = {canonical_name(name): tensor for name, tensor in state["module"].items()}
    shapes = engine._get_zero_frozen_param_attributes(engine._get_param_shape_func)
    if kept.isdisjoint(shapes):
        module = {name: tensor for name, tensor in module.items() if name in kept}
    elif engine.zero_optimization_stage() < 3:
        state["frozen_param_shapes"] = shapes
        state["frozen_param_fragments"] = {name: module[name] for name in shapes}
    state["module"] = module


def adam_state(optimizer: torch.optim.Optimizer, weights: Tensor) -> dict[str, Any]:
    """The Adam state of a shard; made, as the optimizer itself would in its first step, where there is none yet."""
    state: dict[str, Any] = optimizer.state[weights]
    if not state:
        in_float32 = isinstance(optimizer, DeepSpeedCPUAdam) and optimizer.fp32_optimizer_states
        of_torch = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        # A GPU's fused kernel counts where the weights are, torch's other forms on the CPU.
        counts_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        state["step"] = torch.zeros((), device=weights.device if counts_on_device else "cpu") if of_torch else 0
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(weights, dtype=torch.float32 if in_float32 else None, requires_grad=False)
    return state


def computing_parameters(engine: DeepSpeedEngine) -> Iterator[Any]:
    """The tensors that layers compute with: under stage 3 this rank's part (with hpZ its node's), and what is whole."""
    names = ("ds_tensor", "ds_secondary_tensor")
    parts = (getattr(parameter, name, None) for parameter in engine.module.parameters() for name in names)
    return chain(engine.module.parameters(), parts)


def gradients(engine: DeepSpeedEngine, shards: Sequence[Shard]) -> Iterator[Any]:
    """The gradients that there are now, as tensors, containers of them, or None: of parameters, and of `shards`."""
    return chain(
        (getattr(one, name, None) for one in engine.module.parameters() for name in _GRADIENTS_OF_PARAMETER),
        (shard.weights.grad for shard in shards),
        (getattr(engine.optimizer, name, None) for name in _GRADIENTS_OF_OPTIMIZER),
    )


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """Stage 0 in 16 bit: DeepSpeed makes an optimizer step when it builds the wrapper, with zero gradients.

    It counts, and it decays the float32 weights. Here they are what the parameters are again.
    """
    if isinstance(engine.optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def refresh_parameters(engine: DeepSpeedEngine) -> None:
    """Give the layers' parameters the values of the float32 weights, as at the end of a step. Collective."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:
                parameter.ds_secondary_tensor = None  # the epilogue drops those of what is trained
        optimizer.checkpoint_event_prologue()  # no parameter is whole
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers those that stay whole; hpZ's second copies are dropped
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        flat = isinstance(optimizer, FP16_Optimizer)
        lows = optimizer.fp16_groups_flat if flat else chain(*optimizer.fp16_groups)
        highs = optimizer.fp32_groups_flat if flat else chain(*optimizer.fp32_groups)
        for low, high in zip(lows, highs, strict=True):
            low.data.copy_(high.data)


def loss_scaler_state(engine: DeepSpeedEngine) -> dict[str, float | int] | None:
    """The state of a dynamic loss scale (float16), or None without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not isinstance(scaler, DynamicLossScaler):
        return None
    return {
        "scale": float(scaler.cur_scale),
        "steps_since_overflow": scaler.cur_iter - scaler.last_overflow_iter - 1,
        "hysteresis": scaler.cur_hysteresis,
    }


def set_loss_scaler_state(engine: DeepSpeedEngine, state: Mapping[str, float | int] | None) -> None:
    """Go on with a loss scale where both this run and the saved one have a dynamic one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if state is None or not isinstance(scaler, DynamicLossScaler):
        return
    vars(scaler).update(
        cur_scale=state["scale"],
        last_overflow_iter=-1,
        cur_iter=int(state.get("steps_since_overflow", 0)),
        cur_hysteresis=int(state.get("hysteresis", scaler.delayed_shift)),
    )


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
        optimizer = self._engine.optimizer
        try:
            applied = super()._run()
        finally:
            vars(optimizer).pop("_update_scale", None)
        if not applied and isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
            # DeepSpeed drops the sums of an offloaded optimizer only with a step that is applied: the next step would
            # be made of the refused one's gradients, too. In place: every parameter knows this very dict.
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
        return applied


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


_GATES: tuple[tuple[type, Callable[[DeepSpeedEngine], StepGate]], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, partial(ZeroGate, method="_get_norm_groups", combine=combine_grad_norm_groups)),
    (DeepSpeedZeroOptimizer, partial(ZeroGate, method="scaled_global_norm", combine=torch.as_tensor)),
    (BF16_Optimizer, Bf16Gate),
)


def step_gate(engine: DeepSpeedEngine) -> StepGate:
    """The gate that fits the optimizer DeepSpeed has built."""
    return next((gate for kind, gate in _GATES if isinstance(engine.optimizer, kind)), ReplicatedGate)(engine)
