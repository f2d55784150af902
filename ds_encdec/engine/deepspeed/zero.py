"""The DeepSpeed engine: ZeRO 0 to 3 with optimizer and parameter offload, behind `protocol.Engine`.

DeepSpeed averages gradients over ranks and would divide by the accumulation steps. Here a micro-batch's loss is a *sum*
over tokens, divided by the target tokens of the whole step: it is multiplied by world size / target tokens, and
`scale_wrt_gas=False` turns the other division off. Micro-batch boundaries are set explicitly.

DeepSpeed's own checkpoint files are collected inside its `save_checkpoint`, which ends with a barrier, and written
later: so no rank waits for another while it writes.

CHECKPOINT/
  engine.json        what wrote these files (protocol.py)
  latest             the tag, for zero_to_fp32.py (stages 1-3)
  zero_to_fp32.py    DeepSpeed's script: `python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT` (stages 1-3)
  zero/
    *mp_rank_00_model_states.pt, *_optim_states.pt

Stage 0 has no zero_to_fp32.py: its weights stand in full in `mp_rank_00_model_states.pt`.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.initialization import no_init_weights

from ds_encdec.base.foreign_places import check, replaced, write
from ds_encdec.base.types import CheckpointError, LossSum, SavedState, StepResult, WeightSource
from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schedules import lr_lambda
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine import user_optimizer
from ds_encdec.engine.deepspeed.gates import step_gate, wait_on_the_device
from ds_encdec.engine.deepspeed.json import accumulates_in_bf16, run_json
from ds_encdec.engine.deepspeed.private import (
    complete_frozen,
    computing_parameters,
    frozen_shards,
    gradients,
    loss_scaler_state,
    optimizer_state,
    refresh_parameters,
    set_loss_scaler_state,
    shards,
    undo_first_step,
)
from ds_encdec.engine.deepspeed.swapped_states import prepare_folder, remove_states, states_mapped
from ds_encdec.engine.protocol import TAG, EngineRecord, StagedSave, Veto, write_record
from ds_encdec.engine.regularization import prepare_for_training
from ds_encdec.engine.sharded_engine import (
    Shard,
    ShardedEngine,
    assert_ties,
    compute_dtype,
    empty_model,
    full_shape,
)
from ds_encdec.engine.staging import StagingArea
from ds_encdec.launch.host_collectives import RunContext, attempt
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import choose_trained
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.trained import canonical_name, trained_shapes
from ds_encdec.registry.optimizers import OPTIMIZERS

logger = logging.getLogger(__name__)


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
        """Build the model from `weights`, which rank 0 reads. Without them parameters hold anything until `load`."""
        super().__init__(config, context)
        check("deepspeed")
        training, device = config.training, context.device
        assert training.activation_checkpointing != "selective"  # the schema leaves that to FSDP2
        ds_json = run_json(config, context.world, device, gradient_accumulation_steps)
        if context.world.is_main and accumulates_in_bf16(ds_json):
            logger.warning(
                "%s adds the gradients of %d micro-batches up in bfloat16, which costs precision (with 8: 0.3 %%); "
                "infra.sharding_stage=zero2 and zero3 use float32.",
                config.infra.sharding_stage,
                gradient_accumulation_steps,
            )
        offload = ds_json["zero_optimization"].get("offload_optimizer", {})
        if offload.get("device") == "nvme":
            trained = sum(map(prod, trained_shapes(config, model_config).values()))
            share = trained * context.world.local_world_size // context.world.world_size
            self._collectives.on_every_rank(lambda: prepare_folder(Path(offload["nvme_path"]), share))
        self._area = StagingArea(pin_memory=config.infra.pin_memory and device.type == "cuda")
        # ZeRO-3 puts its own in the place of torch's linear layers and leaves it there: here until this engine closes.
        self._undo.enter_context(replaced(torch.nn.functional, "linear", torch.nn.functional.linear))
        with _device_as_local_rank(device):
            model = _build_model(config, model_config, ds_json, dtype=compute_dtype(training), device=device)
            prepare_for_training(model, config)
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=self._parameter_groups(model),
                config=ds_json,
                # A user's own optimizer; AdamW is in the JSON.
                optimizer=None
                if training.optimizer in OPTIMIZERS
                else lambda groups: user_optimizer.build(groups, training, device),
                # Our schedules as DeepSpeed wants them. Its own it builds from the JSON.
                lr_scheduler=None
                if training.lr_scheduler_type in NATIVE_SCHEDULES
                else lambda optimizer: LambdaLR(optimizer, lambda update_index: lr_lambda(update_index, training)),
                dist_init_required=False,
            )
        assert_ties(model)
        # By these names it saves parts of parameters.
        write(self._engine, param_names={p: canonical_name(name) for name, p in model.named_parameters()})
        undo_first_step(self._engine)
        self.model = self._engine.module
        if weights:
            with states_mapped(self._engine):
                self._take_weights(weights)
        self._gate = step_gate(self._engine, self._undo)
        wait_on_the_device(self._engine, self._undo)
        self._engine.train()

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(self._scaled_loss(loss_sum, target_tokens), scale_wrt_gas=False)

    def step(self, veto: Veto | None = None) -> StepResult:
        learning_rate = float(self._engine.get_lr()[0])
        return StepResult(*self._gate.step(veto), learning_rate)

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        engine = self._engine
        record = self._record(engine.global_steps - engine.skipped_steps, loss_scaler_state(engine))
        with states_mapped(engine, of=self._training):
            for _ in self._states():  # makes them before the first step: a save is as large then as later
                pass
            files = self._collect(directory)
            # Host memory may run out on one rank alone.
            num_bytes, staged = self._collectives.on_every_rank(lambda: self._area.take_all(files, copy=copy))
        return StagedSave(num_bytes, partial(self._write, staged, record, directory))

    def _collect(self, directory: Path) -> dict[Path, Any]:
        """Collect what DeepSpeed would write from this rank, by file; the tensors are the live ones. Collective."""
        engine, collector = self._engine, _Collector()
        with (
            replaced(engine, "checkpoint_engine", collector),
            # The first of these writes, and the second would make it write.
            replaced(engine, "_copy_recovery_script", lambda folder: None),
            replaced(engine, "zero_nvme_offload_optimizer", lambda: False),
        ):
            excluded = not self._saves_frozen
            engine.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=excluded)
        for state in collector.files.values():
            if "module" in state and any(True for _ in self._frozen()):
                complete_frozen(engine, state, self._shapes.keys())
        return collector.files

    def _write(self, staged: dict[Path, Any], record: EngineRecord, directory: Path) -> list[Path]:
        """Write this rank's part of a checkpoint. Not collective."""
        (directory / TAG).mkdir(exist_ok=True)
        for path, state in staged.items():
            with path.open("wb") as file:  # a file, not a path: torch then lets the OSError of a full disk through
                torch.save(state, file)
        written = list(staged)
        if self._context.world.is_main:
            written.append(write_record(record, directory))
            if self._engine.zero_optimization_stage() > 0:
                self._engine._copy_recovery_script(str(directory))
                (directory / "latest").write_text(TAG)
                written += [directory / name for name in ("zero_to_fp32.py", "zero_to_torch.py", "latest")]
        return written

    def _iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, name in self._engine.param_names.items():
            with deepspeed.zero.GatheredParameters([parameter]):  # does nothing to what ZeRO-3 has not taken apart
                yield name, parameter.detach()

    def load(self, saved: SavedState) -> None:
        with states_mapped(self._engine, of=self._training):
            super().load(saved)

    def close(self) -> None:
        super().close()
        self._engine.destroy()
        remove_states(self._engine)

    def _take_weights(self, weights: WeightSource) -> None:
        """Give the optimizer's float32 weights the exact values of `weights`, then the layers' parameters theirs.

        Rank 0 reads each parameter once and broadcasts it. Collective: its errors, CheckpointError for another shape
        among them, are raised by all ranks after the last broadcast, for which the others wait.
        """
        held, error = [*shards(self._engine), *self._frozen()], None
        for parameter, name in self._engine.param_names.items():
            error = self._take_parameter(name, full_shape(parameter), weights if error is None else None, held) or error
        self._collectives.raise_first(error)
        refresh_parameters(self._engine)

    def _take_parameter(
        self, name: str, shape: torch.Size, weights: WeightSource | None, held: Iterable[Shard]
    ) -> Exception | None:
        """Keep what this rank holds of a parameter of rank 0's `weights`, zeros without; returns rank 0's error."""
        full, error = torch.zeros(shape, dtype=torch.float32, device=self.device), None
        if self._context.world.is_main and weights is not None:
            _, error = attempt(partial(_read, weights, name, full))
        dist.broadcast(full, src=0)
        for shard in held:
            shard.fill(shard.weights, lambda _, start, stop: full.view(-1)[start:stop], only=name)
        return error

    def _states(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        for shard in shards(self._engine):
            yield shard, optimizer_state(self._engine.basic_optimizer, shard.weights, self._training)

    def _frozen(self) -> Iterator[Shard]:
        return frozen_shards(self._engine)

    def _continue_from(self, saved: SavedState) -> None:
        engine = self._engine
        refresh_parameters(engine)
        set_loss_scaler_state(engine, saved.loss_scaler)
        write(
            engine,
            global_steps=saved.applied_steps,
            skipped_steps=0,
            micro_steps=saved.applied_steps * engine.gradient_accumulation_steps(),
            global_samples=saved.applied_steps * engine.train_batch_size(),
        )
        set_applied_steps(engine.lr_scheduler, saved.applied_steps)

    def _held(self) -> Mapping[str, Iterable[Any]]:
        held = shards(self._engine)
        return {
            "weights": computing_parameters(self._engine),
            "master_weights": [shard.weights for shard in held],
            "gradients": gradients(self._engine, held),
            "optimizer": self._engine.basic_optimizer.state,
        }


def _read(weights: WeightSource, name: str, out: Tensor) -> None:
    """Copy a parameter of `weights` into `out`. Raises CheckpointError for another shape."""
    source = weights(name)
    if source.shape != out.shape:
        raise CheckpointError(f"{name}: the source has shape {list(source.shape)}, the model {list(out.shape)}")
    out.copy_(source)


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


def set_applied_steps(scheduler: Any, applied: int) -> None:
    """Put a LambdaLR, or DeepSpeed's schedule, and its optimizer's rates, where they are after `applied` steps."""
    if not isinstance(scheduler, LambdaLR):
        scheduler.step(applied - 1)
        return
    groups = scheduler.optimizer.param_groups
    rates = [peak * factor(applied) for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    # Not step(): torch warns when a schedule is stepped before its optimizer.
    write(scheduler, last_epoch=applied, _step_count=applied + 1, _last_lr=rates)


def _build_model(
    config: FullConfig,
    model_config: Qwen3Seq2SeqConfig,
    ds_json: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Qwen3ForSeq2SeqLM:
    """The model with its adapters, not yet filled. ZeRO-3 partitions each module as soon as it is made."""
    if ds_json["zero_optimization"]["stage"] == 3:
        with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=ds_json):
            model = Qwen3ForSeq2SeqLM(model_config)
            choose_trained(model, config)
    else:
        model = empty_model(model_config, dtype, device)
        choose_trained(model, config)
    return model


class _Collector(TorchCheckpointEngine):
    """DeepSpeed's writer of files, which here only notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[Path, Any] = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made when files are written."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = state_dict
