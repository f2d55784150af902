"""The DeepSpeed engine: ZeRO 0 to 3 with optimizer and parameter offload, behind `protocol.Engine`.

Averaging. DeepSpeed averages gradients over ranks and would divide by the accumulation steps; here every
micro-batch's loss is a *sum* over tokens, and the divisor is the number of target tokens of the whole
step. So the loss is multiplied by world size / target tokens and `scale_wrt_gas=False` turns the other
division off. Micro-batch boundaries are set explicitly; DeepSpeed's own count is not used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.initialization import no_init_weights

from ds_encdec.config.rules import NATIVE_SCHEDULES
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.engine.ds_json import accumulates_in_bf16, run_json
from ds_encdec.engine.forward import backward_seed, compute_dtype
from ds_encdec.engine.optimizer_shards import (
    adam_state,
    computing_parameters,
    gradients,
    loss_scaler_state,
    refresh_parameters,
    set_loss_scaler_state,
    shards,
    undo_first_step,
)
from ds_encdec.engine.protocol import StagedSave, Veto
from ds_encdec.engine.sharded_engine import Shard, ShardedEngine, assert_ties, full_shape
from ds_encdec.engine.step_gate import step_gate
from ds_encdec.engine.zero_files import HostBuffers, StagingArea, collect, staged_save
from ds_encdec.launch.host_collectives import RunContext, attempt
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.optim.schedules import lr_lambda
from ds_encdec.types import CheckpointError, LossSum, SavedState, StepResult, WeightSource

logger = logging.getLogger(__name__)


def compile_optimizer(config: FullConfig) -> None:
    """Have the optimizer that a run will load compiled, if that is needed: minutes, once on a machine.

    DeepSpeed's own Adam is C++ or CUDA. The other ranks of a node wait for the one that compiles. Comes after
    `init_process_group`, which says where to.
    """
    if config.training.torch_adam:
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    builder = FusedAdamBuilder if config.infra.offload_optimizer == "none" else CPUAdamBuilder
    builder().load()


class DeepSpeedEngine(ShardedEngine):
    """`protocol.Engine` on `deepspeed.initialize`."""

    def __init__(
        self,
        config: FullConfig,
        context: RunContext,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
        gradient_accumulation_steps: int,
    ) -> None:
        """Build the model from `weights` (rank 0 reads them) and give it to DeepSpeed.

        Without `weights` the parameters hold anything until `load`. The process group exists.
        """
        super().__init__(config, context)
        training, device = config.training, context.device
        checkpointing = training.activation_checkpointing
        assert checkpointing != "selective"  # the schema leaves that to FSDP2
        ds_json = run_json(config, context.world, device, gradient_accumulation_steps)
        if context.world.is_main and accumulates_in_bf16(ds_json):
            logger.warning(
                "%s adds the gradients of %d micro-batches up in bfloat16, which costs precision (with 8: 0.3 %%); "
                "infra.sharding_stage=zero2 and zero3 use float32.",
                config.infra.sharding_stage,
                gradient_accumulation_steps,
            )
        self._buffers = HostBuffers(pin_memory=config.infra.pin_memory and device.type == "cuda")
        with _device_as_local_rank(device):
            model = _build_model(model_config, ds_json, dtype=compute_dtype(training), device=device)
        rounded = _load_weights(model, weights) if weights else []
        apply_activation_checkpointing(
            model,
            checkpointing,
            every_n=training.activation_checkpointing_every_n,
            offload=training.activation_offload,
        )
        with _device_as_local_rank(device):
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=self._parameter_groups(model),
                config=ds_json,
                lr_scheduler=_scheduler_hook(training),
                dist_init_required=False,
            )
        assert_ties(model)
        undo_first_step(self._engine)
        if weights:
            _set_master_weights(model, shards(self._engine), weights, rounded, device)
        self.model = self._engine.module
        self._gate = step_gate(self._engine)
        self._engine.train()

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """See protocol.Engine. A step without any target has a zero gradient."""
        self._engine.set_gradient_accumulation_boundary(last)
        scale = self._context.world.world_size / max(target_tokens, 1)
        self._engine.backward(backward_seed(loss_sum, scale), scale_wrt_gas=False)

    def step(self, veto: Veto | None = None) -> StepResult:
        """See protocol.Engine. A step with a non-finite norm is skipped, whatever the dtype and stage."""
        learning_rate = float(self._engine.get_lr()[0])
        applied, grad_norm = self._gate.step(veto)
        return StepResult(applied=applied, grad_norm=grad_norm, learning_rate=learning_rate)

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """See protocol.Engine. DeepSpeed's own files, see zero_files."""
        engine = self._engine
        files = collect(engine, directory)
        if copy:
            self._buffers.rewind()
        area = StagingArea(self._buffers if copy else None)
        record = self._record(engine.global_steps - engine.skipped_steps, loss_scaler_state(engine))
        # Host memory may run out on one rank alone.
        return self._collectives.on_every_rank(lambda: staged_save(engine, directory, files, area, record))

    def close(self) -> None:
        """See protocol.Engine. Afterwards drop the last reference to the engine."""
        self._engine.destroy()

    def _states(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        for shard in shards(self._engine):
            yield shard, adam_state(self._engine.basic_optimizer, shard.weights)

    def _continue_from(self, saved: SavedState) -> None:
        engine = self._engine
        refresh_parameters(engine)
        set_loss_scaler_state(engine, saved.loss_scaler)
        engine.global_steps, engine.skipped_steps = saved.applied_steps, 0
        engine.micro_steps = saved.applied_steps * engine.gradient_accumulation_steps()
        engine.global_samples = saved.applied_steps * engine.train_batch_size()
        set_applied_steps(engine.lr_scheduler, saved.applied_steps)

    def _held(self) -> Mapping[str, Iterable[Any]]:
        held = shards(self._engine)
        return {
            "weights": computing_parameters(self._engine),
            "master_weights": [shard.weights for shard in held],
            "gradients": gradients(self._engine, held),
            "optimizer": self._engine.basic_optimizer.state,
        }


@contextmanager
def _device_as_local_rank(device: torch.device) -> Iterator[None]:
    """Inside, LOCAL_RANK is the device's number: DeepSpeed takes it for that, and a rank may see one device alone."""
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ}
    if device.type == "cuda":
        os.environ.update(dict.fromkeys(before, str(device.index)))
    try:
        yield
    finally:
        os.environ.update(before)


def _scheduler_hook(training: TrainingConfig) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """Our schedules as DeepSpeed wants them; None for its own, which it builds from the JSON."""
    if training.lr_scheduler_type in NATIVE_SCHEDULES:
        return None
    return lambda optimizer: LambdaLR(optimizer, lambda update_index: lr_lambda(update_index, training))


def set_applied_steps(scheduler: Any, applied: int) -> None:
    """Put a schedule, and its optimizer's rates, where they are after `applied` steps of its present configuration.

    `scheduler`: a LambdaLR, or a class of deepspeed/runtime/lr_schedules.py, whose counter starts at -1.
    """
    if not isinstance(scheduler, LambdaLR):
        scheduler.step(applied - 1)
        return
    groups = scheduler.optimizer.param_groups
    rates = [peak * factor(applied) for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    # Not step(): torch warns when a schedule is stepped before its optimizer.
    vars(scheduler).update(last_epoch=applied, _step_count=applied + 1, _last_lr=rates)


def _build_model(
    model_config: Qwen3Seq2SeqConfig, ds_json: dict[str, Any], *, dtype: torch.dtype, device: torch.device
) -> Qwen3ForSeq2SeqLM:
    """The model, its parameters not yet filled.

    Under ZeRO-3 each module is partitioned as soon as it is made, so no rank ever holds more than one module in full.
    Otherwise the model is made in `dtype` on `device`.
    """
    before = torch.get_default_dtype()
    with no_init_weights():  # a weight source or a checkpoint fills every parameter
        if ds_json["zero_optimization"]["stage"] == 3:
            with deepspeed.zero.Init(config_dict_or_path=ds_json):
                return Qwen3ForSeq2SeqLM(model_config)
        torch.set_default_dtype(dtype)
        try:
            with device:
                return Qwen3ForSeq2SeqLM(model_config)
        finally:
            torch.set_default_dtype(before)


def _load_weights(model: nn.Module, weights: WeightSource) -> list[str]:
    """Copy `weights` into the parameters, one at a time; a tied one once. Collective; rank 0 reads.

    Without sharding the other ranks' parameters are left as they are, for DeepSpeed to broadcast. Returns, on every
    rank, the names of the parameters whose dtype cannot hold what the source gave: see `_set_master_weights`. What
    rank 0 fails to read, or CheckpointError for another shape, is raised by all ranks.
    """
    rounded: list[str] = []

    def put(name: str, parameter: nn.Parameter, source: Tensor | None) -> None:
        with _gathered(parameter):
            if source is not None:
                parameter.data.copy_(source)
        if source is not None and not torch.equal(source.to(parameter.dtype).to(source.dtype), source):
            rounded.append(name)

    _from_rank_zero(dict(model.named_parameters()), weights, put)
    carried = [rounded]
    dist.broadcast_object_list(carried, src=0)
    return carried[0]


def _set_master_weights(
    model: nn.Module, shards: Sequence[Shard], weights: WeightSource, names: Sequence[str], device: torch.device
) -> None:
    """Give the optimizer's float32 weights of the parameters `names` the exact values of `weights`.

    DeepSpeed made them from bf16 or fp16 parameters. After `deepspeed.initialize`. Collective; rank 0 reads and
    broadcasts one parameter at a time, through `device`.
    """

    def put(name: str, parameter: nn.Parameter, source: Tensor | None) -> None:
        full = torch.zeros(full_shape(parameter), dtype=torch.float32, device=device)
        if source is not None:
            full.copy_(source)
        dist.broadcast(full, src=0)
        for shard in shards:
            shard.fill_parameter(name, full.view(-1))

    parameters = dict(model.named_parameters())
    _from_rank_zero({name: parameters[name] for name in names}, weights, put)


def _from_rank_zero(
    parameters: Mapping[str, nn.Parameter],
    weights: WeightSource,
    put: Callable[[str, nn.Parameter, Tensor | None], None],
) -> None:
    """Call `put` with each parameter and what rank 0 reads for it, None elsewhere; all raise what it could not read.

    Reads come before the collectives of `put`, in which the other ranks would wait for a failed one for ever.
    """
    error: Exception | None = None
    for name, parameter in parameters.items():
        source = None
        if dist.get_rank() == 0 and error is None:
            source, error = attempt(partial(_read, weights, name, parameter))
        put(name, parameter, source)
    carried = [error]
    dist.broadcast_object_list(carried, src=0)
    if carried[0] is not None:
        raise carried[0]


def _read(weights: WeightSource, name: str, parameter: nn.Parameter) -> Tensor:
    source = weights(name)
    if source.shape != full_shape(parameter):
        raise CheckpointError(
            f"{name}: the source has shape {list(source.shape)}, the model {list(full_shape(parameter))}"
        )
    return source


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[object]:
    """Inside, the parameter is whole; what rank 0 wrote into it goes to all ranks afterwards (under ZeRO-3)."""
    if hasattr(parameter, "ds_id"):
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return nullcontext()
