"""Places inside DeepSpeed 0.19.8 that the engine uses: the tensors that a rank holds, and its optimizer's on a disk.

DeepSpeed gives its optimizer a few flat tensors, whose layout depends on the ZeRO stage; here all stages look alike, as
shards made of pieces. With `infra.offload_optimizer: nvme` it writes each sub-group's float32 weights and moments into
files, and leaves empty tensors until it steps it; sub-groups below 1 MiB are never swapped. All of these are private
places (foreign_places.py), which tests of parity, resumed runs and byte counts cover."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_encdec.base.foreign_places import write
from ds_encdec.base.quantities import disk_size
from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.protocol import Piece, end_to_end, own_parts
from ds_encdec.engine.sharded_engine import Shard
from ds_encdec.engine.user_code import kept_state
from ds_encdec.launch.disk import free_bytes
from ds_encdec.model.distillation import is_of_teacher
from ds_encdec.model.parameter_count import canonical_name
from ds_encdec.registry.optimizers import OPTIMIZERS

_GRADIENTS_OF_OPTIMIZER = (
    "averaged_gradients",  # stages 1 to 3, by group, from the backward pass to the step
    "all_grad_tensors",  # stage 1, while it accumulates
    "grads_in_partition",  # stage 2, in the backward pass
    "accumulated_grads_in_cpu",  # stages 1 and 2 with offload, from several micro-batches on
    "grad_partitions_flat_buffer",  # stage 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
)

# Bytes on the disk for each trained parameter: float32 weights, two moments, and the gradients of a step.
SWAPPED_BYTES = 16


def _own(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    sizes = {engine.param_names[parameter]: parameter.ds_numel for parameter in group}  # type: ignore[attr-defined]
    return own_parts(sizes, engine.global_rank, engine.dp_world_size)


def _linked(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    for parameter in group:
        # Under ZeRO 1 and 2, DeepSpeed links each parameter to its part on this rank.
        if (link := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            here = link.lp_fragment_address
            yield Piece(engine.param_names[parameter], here.start, here.numel, link.hp_fragment_address.start)


def _whole(group: list[nn.Parameter], engine: DeepSpeedEngine) -> Iterator[Piece]:
    return end_to_end({engine.param_names[parameter]: parameter.numel() for parameter in group})


# Each of DeepSpeed's optimizers, and its fields of flat float32 weights and of their parameters, by group.
_FLAT = (
    (DeepSpeedZeroOptimizer_Stage3, "fp32_partitioned_groups_flat", "fp16_groups", _own),
    (DeepSpeedZeroOptimizer, "single_partition_of_fp32_groups", "bit16_groups", _linked),
    (BF16_Optimizer, "fp32_groups_flat_partition", "bf16_groups", _linked),
)


def shards(engine: DeepSpeedEngine) -> list[Shard]:
    """Return all shards of this rank, in the order in which DeepSpeed steps them."""
    optimizer = engine.optimizer
    for kind, flats, groups, pieces in _FLAT:
        if isinstance(optimizer, kind):
            pairs = zip(getattr(optimizer, flats), getattr(optimizer, groups), strict=True)
            return [Shard(flat, tuple(pieces(group, engine))) for flat, group in pairs]
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        masters, parameters = (list(chain(*groups)) for groups in (optimizer.fp32_groups, optimizer.fp16_groups))
    else:
        masters = parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        Shard(master, tuple(_whole([parameter], engine))) for master, parameter in zip(masters, parameters, strict=True)
    ]


def frozen_shards(engine: DeepSpeedEngine) -> Iterator[Shard]:
    """Yield this rank's parts of the frozen parameters, in the dtype that layers compute in."""
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            cut = hasattr(parameter, "ds_tensor")
            pieces = (_own if cut else _whole)([parameter], engine)
            yield Shard(parameter.ds_tensor if cut else parameter, tuple(pieces))


def complete_frozen(engine: DeepSpeedEngine, state: dict[str, Any], kept: Set[str]) -> None:
    """Rewrite DeepSpeed's `state` to canonical names and exactly the parameters `kept`. DeepSpeed's exclusion of frozen
    parameters leaves a tied one's other name, and below stage 2 its zero_to_fp32.py does not find frozen ones."""
    for part in ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params"):
        if state.get(part):
            state[part] = {name: one for name, one in state[part].items() if not is_of_teacher(name)}
    module = {canonical_name(name): tensor for name, tensor in state["module"].items()}
    shapes = engine._get_zero_frozen_param_attributes(engine._get_param_shape_func)
    shapes = {name: shape for name, shape in shapes.items() if not is_of_teacher(name)}
    if kept.isdisjoint(shapes):
        module = {name: tensor for name, tensor in module.items() if name in kept}
    elif engine.zero_optimization_stage() < 3:
        state["frozen_param_shapes"] = shapes
        state["frozen_param_fragments"] = {name: module[name] for name in shapes}
    state["module"] = module


def optimizer_state(optimizer: torch.optim.Optimizer, weights: Tensor, training: TrainingConfig) -> dict[str, Any]:
    """Return the state of a shard; before the optimizer's first step it is made as that step would make it."""
    state: dict[str, Any] = optimizer.state[weights]
    if not state:
        # A GPU's fused kernel counts where the weights are, torch's other forms on the CPU.
        counts_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        place = weights.device if counts_on_device or training.optimizer not in OPTIMIZERS else torch.device("cpu")
        state.update(kept_state(training, place).zero(weights))
    return state


def computing_parameters(engine: DeepSpeedEngine) -> Iterator[Any]:
    """Yield the tensors that layers use: whole ones and, under stage 3, this rank's parts (hpZ: its node's)."""
    for parameter in engine.module.parameters():
        yield from (parameter, getattr(parameter, "ds_tensor", None), getattr(parameter, "ds_secondary_tensor", None))


def gradients(engine: DeepSpeedEngine, shards: Sequence[Shard]) -> Iterator[Any]:
    """Yield the current gradients of parameters and `shards`, as tensors, containers of them, or None."""
    return chain(
        (getattr(one, name, None) for one in engine.module.parameters() for name in ("grad", "grad_accum")),
        (shard.weights.grad for shard in shards),
        (getattr(engine.optimizer, name, None) for name in _GRADIENTS_OF_OPTIMIZER),
    )


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """Undo the step with zero gradients that DeepSpeed makes as it builds stage 0 in 16 bits: it decays weights."""
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def refresh_parameters(engine: DeepSpeedEngine) -> None:
    """Copy the float32 weights into the layers' parameters, as at the end of a step. Collective."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:
                write(parameter, ds_secondary_tensor=None)  # the epilogue drops those of trained parameters
        optimizer.checkpoint_event_prologue()  # partitions all parameters
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers those that stay whole; hpZ's second copies are dropped
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for low, high in zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True):
            low.data.copy_(high.data)


def loss_scaler_state(engine: DeepSpeedEngine) -> dict[str, float | int] | None:
    """Return the state of a dynamic loss scale (float16), or None without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not isinstance(scaler, DynamicLossScaler):
        return None
    return {
        "scale": float(scaler.cur_scale),
        "steps_since_overflow": scaler.cur_iter - scaler.last_overflow_iter - 1,
        "hysteresis": scaler.cur_hysteresis,
    }


def set_loss_scaler_state(engine: DeepSpeedEngine, state: Mapping[str, float | int] | None) -> None:
    """Restore a loss scale if both this run and the saved one have a dynamic one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if state is None or not isinstance(scaler, DynamicLossScaler):
        return
    write(
        scaler,
        cur_scale=state["scale"],
        last_overflow_iter=-1,
        cur_iter=int(state.get("steps_since_overflow", 0)),
        cur_hysteresis=int(state.get("hysteresis", scaler.delayed_shift)),
    )


def prepare_folder(folder: Path, num_parameters: int) -> None:
    """Check that `folder` can take the states of `num_parameters`, and compile DeepSpeed's async I/O, which takes
    minutes once. Raises ConfigError if the folder is not writable or too small, or the machine has no libaio."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"infra.nvme_path: {folder} cannot be written: {error.strerror}") from error
    needed, free = SWAPPED_BYTES * num_parameters, free_bytes(folder)
    reused = sum(file.stat().st_size for file in folder.rglob("*.swp"))  # files of a killed run, which are overwritten
    if free is not None and free + reused < needed:
        raise ConfigError(
            f"infra.nvme_path: {folder} has {disk_size(free + reused)} free, but the optimizer's states on this "
            f"machine take {disk_size(needed)} ({SWAPPED_BYTES} bytes for each trained parameter). Name a folder on a "
            "larger disk"
        )
    try:
        AsyncIOBuilder().load()
    except Exception as error:
        raise ConfigError(
            "infra.offload_optimizer=nvme: DeepSpeed's async_io cannot be compiled. Install a C++ compiler, ninja, for "
            "a GPU CUDA's toolkit (nvcc), and libaio with its headers (Debian, Ubuntu: apt-get install libaio-dev): "
            f"{error}"
        ) from error


@contextmanager
def states_mapped(engine: DeepSpeedEngine, *, of: TrainingConfig | None = None) -> Iterator[None]:
    """Map swapped tensors to their files inside the context, for saves and resumes. `of`: make missing moments."""
    swapper: Any = getattr(engine.optimizer, "optimizer_swapper", None)
    infos = list(swapper.swap_params_info.values()) if swapper is not None else []
    try:
        for info in infos:
            _map(info)
            if of is not None and not info.has_state_tensors:
                weights = info.tensors[0].compute_tensor
                optimizer_state(engine.basic_optimizer, weights, of)
                swapper._get_param_swap_info(weights)  # registers the moments made above
                aligned = swapper._io_aligned_numel(info.numel()) * weights.element_size()
                for one in info.tensors[1:]:
                    with open(one.swap_path, "wb") as file:
                        file.truncate(aligned)
                _map(info)
        yield
    finally:
        for info in infos:
            info.release_memory()
            for one in info.tensors:  # writes through a map: DeepSpeed reads past the kernel's cache
                with open(one.swap_path, "rb") as file:
                    os.fsync(file)


def _map(info: Any) -> None:
    for one in info.tensors:
        one.compute_tensor.data = torch.from_file(one.swap_path, shared=True, size=info.numel(), dtype=info.dtype())


def remove_states(engine: DeepSpeedEngine) -> None:
    """Delete the files of this rank, which no other run can use, and the run's folders if they are then empty."""
    swapper: Any = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        shutil.rmtree(swapper.swap_folder, ignore_errors=True)
        with suppress(OSError):
            for folder in Path(swapper.swap_folder).parents[:3]:  # optimizer, zero_stage_3, and the run's own
                folder.rmdir()
