"""The DeepSpeed engine: ZeRO 0 to 3 with optimizer and parameter offload, behind `protocol.Engine`.

DeepSpeed averages gradients over ranks, so the loss *sum* of a micro-batch is multiplied by world size / losses of the
whole step, and `scale_wrt_gas=False` turns DeepSpeed's division by the accumulation steps off. DeepSpeed's
checkpoint files are collected inside its `save_checkpoint`, which ends with a barrier, and written later: no rank waits
for another while it writes. docs/engine.md lists them."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from transformers.initialization import no_init_weights

from ds_encdec.base.foreign_places import check, replaced, write
from ds_encdec.base.types import LossSum, SavedState, StepResult, WeightSource
from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schedules import lr_lambda
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.deepspeed import private
from ds_encdec.engine.deepspeed.gates import step_gate, wait_on_the_device
from ds_encdec.engine.deepspeed.json import accumulates_in_bf16, run_json
from ds_encdec.engine.protocol import TAG, EngineRecord, Piece, ReplicaDigest, StagedSave, Veto, write_record
from ds_encdec.engine.replicas import sum_of_bits
from ds_encdec.engine.sharded_engine import (
    Shard,
    ShardedEngine,
    compute_dtype,
    full_shape,
    local_tensors,
    model_to_train,
    prepare_for_training,
    unfilled,
)
from ds_encdec.engine.staging import Named, StagingArea, first_non_finite
from ds_encdec.engine.user_code import build_optimizer
from ds_encdec.launch.host_collectives import RunContext, attempt
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import TeacherSource, is_of_teacher
from ds_encdec.model.parameter_count import canonical_name, trained_shapes
from ds_encdec.registry.optimizers import OPTIMIZERS

logger = logging.getLogger(__name__)


class DeepSpeedEngine(ShardedEngine):
    """Implements `protocol.Engine` on `deepspeed.initialize`."""

    def __init__(
        self,
        config: FullConfig,
        context: RunContext,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
        gradient_accumulation_steps: int,
        teacher: TeacherSource | None = None,
    ) -> None:
        super().__init__(config, context, teacher)
        check("deepspeed")
        training, device = config.training, context.device
        ds_json = run_json(config, context.world, device, gradient_accumulation_steps)
        if context.world.is_main and accumulates_in_bf16(ds_json):
            logger.warning(
                "infra.sharding_stage=%s sums the gradients of %d micro-batches in bfloat16, which costs precision "
                "(with 8: 0.3 %%). zero2 and zero3 sum in float32.",
                config.infra.sharding_stage,
                gradient_accumulation_steps,
            )
        offload = ds_json["zero_optimization"].get("offload_optimizer", {})
        if offload.get("device") == "nvme":
            trained = sum(map(prod, trained_shapes(config, model_config).values()))
            share = trained * context.world.local_world_size // context.world.world_size
            self._collectives.on_every_rank(lambda: private.prepare_folder(Path(offload["nvme_path"]), share))
        self._area = StagingArea(pin_memory=config.infra.pin_memory and device.type == "cuda")
        # ZeRO-3 replaces torch's linear function for good; this restores it when the engine closes.
        self._undo.enter_context(replaced(torch.nn.functional, "linear", torch.nn.functional.linear))
        with _device_as_local_rank(device):
            if ds_json["zero_optimization"]["stage"] == 3:
                # Each module is partitioned as soon as it is made.
                with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=ds_json):
                    model = model_to_train(config, model_config, teacher)
            else:
                with unfilled(compute_dtype(training), device):
                    model = model_to_train(config, model_config, teacher)
            prepare_for_training(model, config)
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=self._parameter_groups(model),
                config=ds_json,
                # A user's own optimizer; AdamW is in the JSON.
                optimizer=None
                if training.optimizer in OPTIMIZERS
                else lambda groups: build_optimizer(groups, training),
                # Our schedules in DeepSpeed's form; it builds its own from the JSON.
                lr_scheduler=None
                if training.lr_scheduler_type in NATIVE_SCHEDULES
                else lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                    optimizer, lambda update_index: lr_lambda(update_index, training)
                ),
                dist_init_required=False,
            )
        # DeepSpeed saves parts of parameters by these names.
        write(self._engine, param_names={p: canonical_name(name) for name, p in model.named_parameters()})
        private.undo_first_step(self._engine)
        self.model = self._engine.module
        if weights or teacher:
            with private.states_mapped(self._engine):
                self._take_weights(weights)
        self._gate = step_gate(self._engine, self._undo)
        wait_on_the_device(self._engine, self._undo)

    def backward(self, loss_sum: LossSum, *, num_losses: int, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(self._scaled_loss(loss_sum, num_losses), scale_wrt_gas=False)

    def step(self, veto: Veto | None = None) -> StepResult:
        rate = float(self._engine.get_lr()[0])
        return StepResult(*self._gate.step(veto), rate)

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        engine, collector = self._engine, _Collector()
        frozen = {piece.name for shard in self._frozen() for piece in shard.pieces}
        excluded = not self._saves_frozen or (bool(frozen) and frozen.isdisjoint(self._shapes))
        record = self._record(engine.global_steps - engine.skipped_steps, private.loss_scaler_state(engine))
        with private.states_mapped(engine, of=self._training):
            states = list(self._states())  # makes states before the first step: every save has the same size
            with (
                replaced(engine, "checkpoint_engine", collector),
                # The first of these writes files, and the second would make DeepSpeed write.
                replaced(engine, "_copy_recovery_script", lambda folder: None),
                replaced(engine, "zero_nvme_offload_optimizer", lambda: False),
            ):
                engine.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=excluded)
            for state in collector.files.values():
                if "module" in state and any(True for _ in self._frozen()):
                    private.complete_frozen(engine, state, self._shapes.keys())
            # Host memory may run out on one rank alone.
            num_bytes, staged = self._collectives.on_every_rank(lambda: self._area.take_all(collector.files, copy=copy))
            named = self._named(collector.files, staged, states)
        judge = partial(first_non_finite, named, record.loss_scaler)
        return StagedSave(num_bytes, judge, partial(self._write, staged, record, directory))

    def _named(self, sources: Any, staged: Any, states: list[tuple[Shard, dict[str, Any]]]) -> list[Named]:
        """Return the tensors of DeepSpeed's files with names. How the files are laid out depends on the ZeRO stage, so
        the places of their `sources` in memory decide."""
        named = self._engine.param_names.items()
        shards = [Shard(one, (Piece(name, 0, one.numel()),)) for one, name in named], self._frozen()
        known = {
            tensor.data_ptr(): (kind, shard.pieces)
            for shard, state in [*((shard, {}) for shard in chain(*shards)), *states]
            for kind, tensor in {"weight": shard.weights, **state}.items()
            if isinstance(tensor, Tensor)
        }
        pairs = zip(local_tensors(sources), local_tensors(staged), strict=True)
        other = ("a tensor", [Piece("no parameter", 0, sys.maxsize)])
        return [(*known.get(source.data_ptr(), other), copied) for source, copied in pairs]

    def _write(self, staged: dict[Path, Any], record: EngineRecord, directory: Path) -> list[Path]:
        (directory / TAG).mkdir(exist_ok=True)
        for path, state in staged.items():
            with path.open("wb") as file:  # a file, not a path: torch then passes on the OSError of a full disk
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
            if not is_of_teacher(name):
                with deepspeed.zero.GatheredParameters([parameter]):  # no effect unless ZeRO-3 has partitioned it
                    yield name, parameter.detach()

    def load(self, saved: SavedState) -> None:
        with private.states_mapped(self._engine, of=self._training):
            super().load(saved)

    def replica_digest(self) -> ReplicaDigest | None:
        engine, stage = self._engine, self._engine.zero_optimization_stage()
        if stage == 3 or self._context.world.world_size == 1:
            return None  # each step gathers again what stage 3 keeps whole
        own = () if stage else ([shard.weights for shard in private.shards(engine)], engine.basic_optimizer.state)
        return ReplicaDigest(0, 1, sum_of_bits([engine.module.parameters(), *own]))

    def close(self) -> None:
        super().close()
        self._engine.destroy()
        private.remove_states(self._engine)

    def _take_weights(self, weights: WeightSource | None) -> None:
        """Copy `weights` and the teacher's exactly into the optimizer's float32 weights and the frozen parameters, then
        into the layers' parameters. Collective: rank 0 reads and broadcasts each, and all ranks raise its errors after
        the last broadcast, for which the others wait."""
        own, error = [*private.shards(self._engine), *self._frozen()], None
        full = torch.empty(0)

        def elements(_: str, start: int, stop: int) -> Tensor:
            return full.view(-1)[start:stop]

        for parameter, name in self._engine.param_names.items():
            if (source := self._source_of(name, weights)) is None:
                continue
            full = torch.zeros(full_shape(parameter), dtype=torch.float32, device=self.device)
            if self._context.world.is_main and error is None:
                _, error = attempt(lambda: full.copy_(source(name)))  # noqa: B023  it is called at once
            torch.distributed.broadcast(full, src=0)
            for shard in own:
                shard.fill(shard.weights, elements, only=name)
        self._collectives.raise_first(error)
        private.refresh_parameters(self._engine)

    def _states(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        return (
            (shard, private.optimizer_state(self._engine.basic_optimizer, shard.weights, self._training))
            for shard in private.shards(self._engine)
        )

    def _frozen(self) -> Iterator[Shard]:
        return private.frozen_shards(self._engine)

    def _continue_from(self, saved: SavedState) -> None:
        engine = self._engine
        private.refresh_parameters(engine)
        private.set_loss_scaler_state(engine, saved.loss_scaler)
        write(
            engine,
            global_steps=saved.applied_steps,
            skipped_steps=0,
            micro_steps=saved.applied_steps * engine.gradient_accumulation_steps(),
            global_samples=saved.applied_steps * engine.train_batch_size(),
        )
        scheduler, applied = engine.lr_scheduler, saved.applied_steps
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):  # but DeepSpeed's own
            scheduler.step(applied - 1)
            return
        rates = [peak * factor(applied) for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        # Not step(): torch warns when a schedule is stepped before its optimizer.
        write(scheduler, last_epoch=applied, _step_count=applied + 1, _last_lr=rates)

    def _held(self) -> Mapping[str, Iterable[Any]]:
        own_shards = private.shards(self._engine)
        return {
            "weights": private.computing_parameters(self._engine),
            "master_weights": [shard.weights for shard in own_shards],
            "gradients": private.gradients(self._engine, own_shards),
            "optimizer": self._engine.basic_optimizer.state,
        }


@contextmanager
def _device_as_local_rank(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to the device's number, as DeepSpeed reads it; a rank may see one device alone."""
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ}
    if device.type == "cuda":
        os.environ.update(dict.fromkeys(before, str(device.index)))
    try:
        yield
    finally:
        os.environ.update(before)


class _Collector(TorchCheckpointEngine):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[Path, Any] = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: folders are made when files are written."""

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = state_dict
