"""The DeepSpeed engine: ZeRO 0 to 3 with optimizer and parameter offload, behind `protocol.Engine`.

Averaging. DeepSpeed averages gradients over ranks and would divide by the accumulation steps; here every
micro-batch's loss is a *sum* over tokens, and the divisor is the number of target tokens of the whole
step. So the loss is multiplied by world size / target tokens and `scale_wrt_gas=False` turns the other
division off. Micro-batch boundaries are told to DeepSpeed explicitly; its own count is not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ds_encdec.config.rules import NATIVE_SCHEDULES
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.engine.forward import backward_seed, compute_dtype, packed_forward
from ds_encdec.engine.held_bytes import held_bytes
from ds_encdec.engine.optimizer_shards import (
    adam_state,
    loss_scaler_state,
    refresh_parameters,
    set_adam_step,
    set_loss_scaler_state,
    shards,
    undo_first_step,
)
from ds_encdec.engine.protocol import StagedSave, Veto
from ds_encdec.engine.record import EngineRecord
from ds_encdec.engine.same_model import check_same_model
from ds_encdec.engine.sharded_model import build_model, full_shape, load_weights, set_master_weights
from ds_encdec.engine.step_gate import step_gate
from ds_encdec.engine.ties import assert_ties
from ds_encdec.engine.zero_files import HostBuffers, StagingArea, collect, staged_save
from ds_encdec.engine.zero_tensors import computing_parameters, gradients
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.optim.param_groups import parameter_groups
from ds_encdec.optim.schedules import lr_lambda
from ds_encdec.types import MOMENTS, Batch, LossSum, SavedState, StepResult, WeightSource


class DeepSpeedEngine:
    """`protocol.Engine` on `deepspeed.initialize`. Every method is collective: all ranks, same order."""

    def __init__(
        self,
        config: FullConfig,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
        ds_json: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Build the model from `weights` (rank 0 reads them) and give it to DeepSpeed.

        Without `weights` the parameters hold anything until `load`. `ds_json`: the complete DeepSpeed configuration,
        without "auto" values. The process group exists.
        """
        training = config.training
        checkpointing = training.activation_checkpointing
        assert checkpointing != "selective"  # the schema leaves that to FSDP2
        self.device = device
        self._config = config
        self._collectives = HostCollectives(timedelta(minutes=config.infra.distributed_timeout_minutes))
        self._buffers = HostBuffers(pin_memory=config.infra.pin_memory and device.type == "cuda")
        with _device_as_local_rank(device):
            model = build_model(model_config, ds_json, dtype=compute_dtype(training), device=device)
        rounded = load_weights(model, weights) if weights else []
        apply_activation_checkpointing(
            model,
            checkpointing,
            every_n=training.activation_checkpointing_every_n,
            offload=training.activation_offload,
        )
        groups = parameter_groups(model, training.weight_decay)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = tuple(tuple(names[parameter] for parameter in group["params"]) for group in groups)
        with _device_as_local_rank(device):
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=groups,
                config=ds_json,
                lr_scheduler=_scheduler_hook(training),
                dist_init_required=False,
            )
        assert_ties(model)
        undo_first_step(self._engine)
        if weights:
            set_master_weights(model, shards(self._engine), weights, rounded, device)
        self.model: torch.nn.Module = self._engine.module
        self._gate = step_gate(self._engine)
        self._loaded_loss_scaler: Mapping[str, float | int] | None = None
        self._engine.train()

    def forward(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        return packed_forward(self._engine, batch.to(self.device))

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """See protocol.Engine. A step without any target has a zero gradient."""
        self._engine.set_gradient_accumulation_boundary(last)
        scale = dist.get_world_size() / max(target_tokens, 1)
        self._engine.backward(backward_seed(loss_sum, scale), scale_wrt_gas=False)

    def step(self, veto: Veto | None = None) -> StepResult:
        """See protocol.Engine. A step with a non-finite norm is skipped, whatever the dtype and stage."""
        learning_rate = float(self._engine.get_lr()[0])
        applied, grad_norm = self._gate.step(veto)
        return StepResult(applied=applied, grad_norm=grad_norm, learning_rate=learning_rate)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        self._engine.eval()
        try:
            return self.forward(batch)
        finally:
            self._engine.train()

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """See protocol.Engine. DeepSpeed's own files, see zero_files."""
        files = collect(self._engine, directory)
        if copy:
            self._buffers.rewind()
        area = StagingArea(self._buffers if copy else None)
        record = EngineRecord(
            format="deepspeed",
            sharding_stage=self._config.infra.sharding_stage,
            world_size=dist.get_world_size(),
            applied_steps=self._engine.global_steps - self._engine.skipped_steps,
            groups=self._groups,
            loss_scaler=loss_scaler_state(self._engine) or self._loaded_loss_scaler,
        )
        # Host memory may run out on one rank alone.
        return self._collectives.on_every_rank(lambda: staged_save(self._engine, directory, files, area, record))

    def load(self, saved: SavedState) -> None:
        """See protocol.Engine. Between two steps, before the first one, or after any."""
        self._collectives.on_every_rank(lambda: self._fill_optimizer(saved))
        engine = self._engine
        refresh_parameters(engine)
        set_loss_scaler_state(engine, saved.loss_scaler)
        self._loaded_loss_scaler = saved.loss_scaler
        engine.global_steps, engine.skipped_steps = saved.applied_steps, 0
        engine.micro_steps = saved.applied_steps * engine.gradient_accumulation_steps()
        engine.global_samples = saved.applied_steps * engine.train_batch_size()
        set_applied_steps(engine.lr_scheduler, saved.applied_steps)

    def _fill_optimizer(self, saved: SavedState) -> None:
        """Read what this rank's optimizer holds. Not collective. Raises CheckpointError."""
        shapes = {name: tuple(full_shape(parameter)) for name, parameter in self.model.named_parameters()}
        check_same_model(saved, {name: shapes[name] for group in self._groups for name in group})
        for shard in shards(self._engine):
            shard.fill(shard.weights, partial(saved.read, "weight"))
            state = adam_state(self._engine.basic_optimizer, shard.weights)
            set_adam_step(state, saved.applied_steps)
            for kind in MOMENTS:
                shard.fill(state[kind], partial(saved.read, kind))

    def held_bytes(self) -> dict[str, int]:
        """See protocol.Engine. DeepSpeed's buckets for communication and offloading are not among them."""
        held = shards(self._engine)
        return held_bytes(
            self.device,
            {
                "weights": computing_parameters(self._engine),
                "master_weights": [shard.weights for shard in held],
                "gradients": gradients(self._engine, held),
                "optimizer": self._engine.basic_optimizer.state,
            },
        )

    def close(self) -> None:
        """See protocol.Engine. Afterwards drop the last reference to the engine."""
        self._engine.destroy()


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
