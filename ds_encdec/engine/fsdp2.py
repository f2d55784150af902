"""The FSDP2 engine: sharded, hybrid and plain data parallel training in torch alone (docs/engine.md has its stages).

Each layer is one FSDP unit; the root unit holds the rest, including the embedding, which stays gathered until its
backward pass ends. Trained parameters are float32 master weights, frozen ones have the compute dtype. FSDP2 averages
gradients over all ranks, so the loss *sum* is multiplied by world size / target tokens of the whole step.
`CHECKPOINT/dcp/` holds torch.distributed.checkpoint's files (see `protocol.DCP_FOLDER`); frozen weights are there in
the compute dtype. One replica writes each tensor."""

import errno
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.initialization import no_init_weights

from ds_encdec.base.types import MOMENTS, CheckpointError, LossSum, SavedState, StepResult, WeightSource
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape
from ds_encdec.engine.muon import build_sharded
from ds_encdec.engine.protocol import DCP_FOLDER, EngineRecord, Piece, ReplicaDigest, StagedSave, Veto, write_record
from ds_encdec.engine.replicas import sum_of_bits
from ds_encdec.engine.sharded_engine import (
    Shard,
    ShardedEngine,
    compute_dtype,
    local_part,
    model_to_train,
    prepare_for_training,
)
from ds_encdec.engine.staging import StagingArea, first_non_finite
from ds_encdec.engine.user_code import kept_state
from ds_encdec.launch.disk import disk_error
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import DistilledSeq2SeqLM, TeacherSource, is_of_teacher
from ds_encdec.model.lora import quantize_into, quantized_matrices
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import canonical_name


class FSDP2Engine(ShardedEngine):
    """Implements `protocol.Engine` on `fully_shard`."""

    def __init__(
        self,
        config: FullConfig,
        context: RunContext,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
        gradient_accumulation_steps: int = 1,
        teacher: TeacherSource | None = None,
    ) -> None:
        """Build the model, sharded from the start; every rank reads its own rows of `weights`. Raises ConfigError for a
        hybrid that does not divide the ranks, and on all ranks what any rank's `weights` raise."""
        super().__init__(config, context, teacher)
        replicas, shards = mesh_shape(config.infra, context.world.world_size, context.world.local_world_size)
        dimensions = {"replicate": replicas, "shard": shards}
        if replicas == 1 and config.infra.sharding_stage != "zero0":
            del dimensions["replicate"]  # all ranks shard the parameters
        mesh = init_device_mesh(context.device.type, (*dimensions.values(),), mesh_dim_names=(*dimensions,))
        # A save may write states from a background thread, in this group.
        self._writers = context.collectives.background.group
        model = _build_model(config, model_config, mesh, context.device, teacher)
        self.model = self._engine = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._mesh = mesh
        # By canonical name; tied parameters appear once. A gathered module shows other tensors; these stay the shards.
        self._parameters = {canonical_name(name): cast(DTensor, one) for name, one in model.named_parameters()}
        if weights is not None or teacher is not None:
            self._collectives.on_every_rank(lambda: self._fill_from(weights))
        self.optimizer = build_sharded(self._parameter_groups(model), config.training, context.device)
        for group in self.optimizer.param_groups:  # zero moments: the first step allocates none, every state is saved
            for one in group["params"]:
                kept = kept_state(config.training, one.device, is_matrix=group.get("is_matrix", False))
                self.optimizer.state[one] = kept.zero(one)
        self._area = StagingArea(pin_memory=config.infra.pin_memory and self.device.type == "cuda")
        self._applied_steps = 0

    @torch.no_grad()
    def _fill_from(self, weights: WeightSource | None) -> None:
        for name, parameter in self._parameters.items():
            if (source := self._source_of(name, weights)) is not None:
                parameter.to_local().copy_(source(name, _local_rows(parameter)))
        if weights is not None:
            quantize_into(self.model, weights, compute_dtype(self._training), self.device)

    def backward(self, loss_sum: LossSum, *, num_losses: int, last: bool) -> None:
        reshards = last or self._infra.sharding_stage.startswith("zero3")
        for unit in self._units:
            unit.set_requires_gradient_sync(last or self._infra.fsdp_reduce_every_micro_batch, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)  # between replicas once per step in any case
            unit.set_reshard_after_backward(reshards, recurse=False)
        self._scaled_loss(loss_sum, num_losses).backward()

    @torch.no_grad()
    def step(self, veto: Veto | None = None) -> StepResult:
        rate = learning_rate(self._applied_steps, self._training)
        gradients = [local_part(one.grad) for one in self._parameters.values() if one.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients).to(self.device).square()
        if self._context.world.world_size > 1:  # replicas, too: another order of sums has another last bit
            dist.all_reduce(squares)
        replicas = self._mesh.size(0) if self._mesh.ndim > 1 else 1
        norm = (squares / replicas).sqrt()  # equal on all ranks
        finite = bool(torch.isfinite(norm))  # the one device synchronisation of a step
        applied = finite and not (veto is not None and veto(norm))
        if applied:
            if self._training.max_grad_norm and gradients:
                factor = (self._training.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(gradients, factor.to(gradients[0].device))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._applied_steps += 1
        self.optimizer.zero_grad()
        return StepResult(applied, norm if finite else torch.full_like(norm, torch.inf), rate)

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        states = self.optimizer.state
        saved = {name: parameter for name, parameter in self._parameters.items() if name in self._shapes}
        tensors = {f"weight.{name}": cast(DTensor, parameter.detach()) for name, parameter in saved.items()} | {
            f"{kind}.{name}": states[parameter][kind]
            for kind, (name, parameter) in product(MOMENTS, saved.items())
            if kind in states.get(parameter, ())
        }
        mesh = self._mesh
        replicas, replica = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
        elements, mine = [0] * replicas, []
        for key, tensor in tensors.items():  # each goes to the replica with the fewest elements so far
            writer = elements.index(min(elements))
            elements[writer] += tensor.numel()
            mine += [key] * (writer == replica)
        # If there are host copies, a save at once goes through them, too: DCP keeps its copies from a GPU until its
        # file is closed. Host memory may run out on one rank alone.
        own = {key: tensors[key] for key in mine}
        staged = self._collectives.on_every_rank(lambda: self._area.take_all(own, copy=copy))[1]
        tensors |= staged
        local = {tuple(key.split(".", 1)): local_part(tensor) for key, tensor in staged.items()}
        num_bytes = sum(tensor.nbytes for tensor in local.values())
        named = [(kind, [Piece(name, 0, part.numel())], part) for (kind, name), part in local.items()]
        write = partial(_write, tensors, frozenset(mine), self._record(self._applied_steps), directory, self._writers)
        return StagedSave(num_bytes, partial(first_non_finite, named), write)

    def _iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype, quantized = compute_dtype(self._training), quantized_matrices(self.model)
        for name in [canonical_name(name) for name, _ in self.model.named_parameters()]:
            if is_of_teacher(name):
                continue
            if name in quantized:
                yield name, quantized[name].unpacked()
            else:
                yield name, cast(DTensor, self._parameters[name].detach().to(self.device, dtype)).full_tensor()

    @torch.no_grad()
    def replica_digest(self) -> ReplicaDigest | None:
        mesh = self._mesh
        if mesh.ndim == 1 or mesh.size(0) == 1:
            return None
        quantized = quantized_matrices(self.model).values()
        packed = [(one.weight, vars(state := one.quant_state), vars(state.state2)) for one in quantized]
        held = [self._parameters, self.optimizer.state, packed]
        return ReplicaDigest(mesh.get_local_rank(1), mesh.size(1), sum_of_bits(held))

    def close(self) -> None:
        super().close()
        self.optimizer.zero_grad()
        del self.model, self._engine, self._units, self._parameters, self.optimizer, self._area

    def _states(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        return (
            (_shard(name, parameter), self.optimizer.state[parameter])
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        )

    def _frozen(self) -> Iterator[Shard]:
        return (_shard(name, parameter) for name, parameter in self._parameters.items() if not parameter.requires_grad)

    def _continue_from(self, saved: SavedState) -> None:
        for unit in self._units:
            unit.reshard()  # an evaluation leaves old parameters gathered
        self._applied_steps = saved.applied_steps

    def _held(self) -> Mapping[str, Iterable[Any]]:
        shards = self._parameters.values()
        return {
            "master_weights": [parameter for parameter in shards if parameter.requires_grad],
            "weights": [*shards, *self.model.parameters()],  # those not counted yet: frozen, and gathered ones
            "gradients": [parameter.grad for parameter in shards],
            "optimizer": self.optimizer.state,
        }


def _build_model(
    config: FullConfig,
    model_config: Qwen3Seq2SeqConfig,
    mesh: DeviceMesh,
    device: torch.device,
    teacher: TeacherSource | None,
) -> Qwen3ForSeq2SeqLM:
    infra, dtype = config.infra, compute_dtype(config.training)
    with torch.device("meta"), no_init_weights():
        model = model_to_train(config, model_config, teacher)
    prepare_for_training(model, config)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.to(dtype)
    offloaded = infra.offload_optimizer == "cpu"  # under FSDP2 the parameters are the float32 master weights
    shard = partial(
        fully_shard,
        mesh=mesh,
        # The model casts by itself, and a cast here would copy the layout, and so its masks, for each layer.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=infra.pin_memory and device.type != "cpu")
        if offloaded
        else OffloadPolicy(),
    )
    models = [model, model.teacher] if isinstance(model, DistilledSeq2SeqLM) else [model]
    units = [layer for one in models for stack in (one.encoder, one.decoder) for layer in stack.layers]
    for unit in (*units, *models[1:]):
        shard(unit, reshard_after_forward=infra.sharding_stage.startswith("zero3"))
    # The backward pass begins with the embedding, which the root holds: freeing it would gain nothing.
    shard(model, reshard_after_forward=False)
    if isinstance(model, DistilledSeq2SeqLM):  # not what ran before the root's end, the teacher, which has no backward
        cast(FSDPModule, model).set_modules_to_backward_prefetch([cast(FSDPModule, model.decoder.layers[-1])])
    model.to_empty(device="cpu" if offloaded else device)
    return model


def _local_rows(parameter: DTensor) -> slice:
    mesh, height, rows = parameter.device_mesh, len(parameter), len(parameter.to_local())
    most = -(-height // mesh.size(mesh.ndim - 1))  # rows are cut as torch.chunk does
    start = min(mesh.get_local_rank(mesh.ndim - 1) * most, height)
    assert rows == min(most, height - start)
    return slice(start, start + rows)


def _shard(name: str, parameter: DTensor) -> Shard:
    local = parameter.to_local().detach()
    piece = Piece(name, _local_rows(parameter).start * prod(parameter.shape[1:]), local.numel())
    return Shard(local, (piece,) if piece.length else ())


class _DiskWriter(dcp.FileSystemWriter):
    """Writes for DCP; errors still show that the disk refused after DCP has sent them to another rank."""

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[dcp.storage.WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal = disk_error(error)
            if refusal is None:
                raise
            raise refusal from error


def _write(
    tensors: dict[str, DTensor],
    keys: frozenset[str],
    record: EngineRecord,
    directory: Path,
    group: dist.ProcessGroup | None,
) -> list[Path]:
    # A collective of `group`: this rank writes its `keys` of all `tensors`.
    folder, rank = directory / DCP_FOLDER, dist.get_rank()
    # Copy only tensors on a GPU ahead. For copies on the host, DCP's default would only make a background thread of
    # every rank open a context on GPU 0, which is that thread's device.
    ahead = 10_000_000 if any(tensors[key].to_local().is_cuda for key in keys) else 0
    # Not synced: the checkpoint manager flushes each file to disk as it hashes it.
    writer = _DiskWriter(folder, sync_files=False, overwrite=False, per_thread_copy_ahead=ahead)
    try:
        dcp.save(tensors, storage_writer=writer, planner=_PlanOf(keys), process_group=group)
    except dcp.CheckpointException as failure:  # a BaseException, with every rank's error
        where, (error, _) = min(failure.failures.items())
        if isinstance(error, OSError):
            raise OSError(
                error.errno or errno.EIO, f"rank {where}: {error.strerror or error}", str(folder)
            ) from failure
        if is_out_of_memory(error):
            raise out_of_memory(error, where) from failure
        raise CheckpointError(
            f"{folder} could not be written: rank {where}: {type(error).__name__}: {error}"
        ) from failure
    rest = [folder / ".metadata", write_record(record, directory)] if rank == 0 else []
    return [*sorted(folder.glob(f"__{rank}_*.distcp")), *rest]


# Plans to write `keys` alone. Every rank names all tensors, so that the files list them in the model's order.
class _PlanOf(dcp.DefaultSavePlanner):
    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__()
        self._keys = keys

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if item.index.fqn in self._keys])
        return self.plan
