"""The common half of the engines: set up and run the model, fill its state from any checkpoint, and count its bytes.

The state is filled by shards, each with its ranges of parameters: one loop reads a checkpoint for all engines. For
dropout, torch's generators are seeded for each micro-batch with the run's seed and its lane and number, and restored
afterwards: masks are equal on any number of ranks, in any engine, in a resumed run, and in recomputed layers."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from ds_encdec.base.foreign_places import check
from ds_encdec.base.types import MOMENTS, Batch, CheckpointError, LossSum, SavedState, WeightSource, is_hidden_matrix
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.training_sections import CROSS_ENTROPY, TrainingConfig
from ds_encdec.engine.protocol import Engine, EngineRecord, Piece
from ds_encdec.engine.user_code import load_loss
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.model.activation_checkpointing import GRAPHS, apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import DistilledSeq2SeqLM, TeacherSource, is_of_teacher, lesson_of, of_teacher
from ds_encdec.model.lora import choose_trained, detach_frozen, merged_in_turn
from ds_encdec.model.modeling import PackedLossOutput, Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import canonical_name
from ds_encdec.model.weights import keyed_seed
from ds_encdec.objectives.protocol import losses_of, run_packed
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.registry.optimizers import row_of

logger = logging.getLogger(__name__)

Read = Callable[[str, int, int], Tensor]  # elements [start, stop) of the flattened parameter of this name
HOST_STATES = "host_states"  # the category of tensors in host memory for an accelerator


@dataclass(frozen=True, slots=True)
class Shard:
    """Frozen weights, or float32 ones that the optimizer steps. Elements in no piece are padding."""

    weights: Tensor
    pieces: tuple[Piece, ...]

    def fill(self, target: Tensor, read: Read, *, only: str | None = None) -> None:
        """Fill `target`, the weights or a moment, by `read`, and padding with 0; with `only`, that parameter alone."""
        flat = target.detach().view(-1)
        if only is None:
            flat.zero_()
        for piece in self.pieces:
            if only in (None, piece.name):
                stop = piece.start + piece.length
                flat[piece.offset : piece.offset + piece.length] = read(piece.name, piece.start, stop)


class ShardedEngine(ABC):
    """The common half of the engines. A subclass builds `model`, and `_engine`, which runs forward passes."""

    model: nn.Module
    _engine: Any

    def __init__(self, config: FullConfig, context: RunContext, teacher: TeacherSource | None = None) -> None:
        check("torch", "transformers", "peft")
        self.device = context.device
        self._undo = context.undo.enter_context(ExitStack())
        if config.training.torch_compile is True:
            limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
            self._undo.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        self._context, self._training, self._infra = context, config.training, config.infra
        self._collectives = context.collectives
        self.objective = losses_of(config, context.collectives)
        self._lora = config.model.lora
        self._saves_frozen = self._lora is None  # beside adapters a checkpoint names the base instead
        self._teacher = teacher
        self._masks_of = partial(masks_of, seed=config.training.seed) if draws_masks(config) else nullcontext

    def close(self) -> None:
        self._undo.close()

    def losses(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        return self.objective(self._run, [batch.to(self.device) for batch in batches])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        self._engine.eval()
        try:
            yield from self.losses(batches)
        finally:
            self._engine.train()

    def _run(self, batch: Batch) -> PackedLossOutput:
        teacher = self._teacher
        told = {} if teacher is None else {"lesson": lesson_of(batch, by_decoder=teacher.is_decoder)}
        with self._masks_of(batch):
            return run_packed(self._engine, batch, **told)

    def _scaled_loss(self, loss_sum: LossSum, num_losses: int) -> Tensor:
        """Return the scalar to call backward on, which engines average over ranks to a mean of `num_losses`. The
        gradient of an infinite loss is NaN, so that all ranks skip the step. Does not wait for the device."""
        scale = self._context.world.world_size / max(num_losses, 1)
        return loss_sum.total * torch.where(torch.isfinite(loss_sum.total.detach()), scale, torch.nan)

    def load(self, saved: SavedState) -> None:
        self._collectives.on_every_rank(lambda: self._fill(saved))
        self._continue_from(saved)

    def held_bytes(self) -> dict[str, int]:
        """Count each storage once, in its first category; buffers of an engine's library are not counted."""
        num_bytes, counted = {HOST_STATES: 0}, set[tuple[torch.device, int]]()
        for category, items in self._held().items():
            num_bytes[category] = 0
            for tensor in local_tensors(items):
                storage = tensor.untyped_storage()
                if (key := (tensor.device, storage.data_ptr())) not in counted:
                    counted.add(key)
                    num_bytes[category if tensor.device.type == self.device.type else HOST_STATES] += storage.nbytes()
        return num_bytes

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._iter_full() if self._lora is None else merged_in_turn(self._iter_full(), self._lora)

    @abstractmethod
    def _iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield as `full_parameters` does, but adapters by their own names, each pair behind its matrix."""

    @abstractmethod
    def _states(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        """Yield this rank's shards with their optimizer states: `step`, and moments, which may be DTensors."""

    @abstractmethod
    def _frozen(self) -> Iterator[Shard]:
        """Yield this rank's parts of the frozen parameters."""

    @abstractmethod
    def _continue_from(self, saved: SavedState) -> None:
        """Take over the counters of `saved`, whose weights and moments are filled in already. Collective."""

    @abstractmethod
    def _held(self) -> Mapping[str, Iterable[Any]]:
        """Return the engine's own tensors by category, in containers of any depth; other objects are skipped."""

    def _parameter_groups(self, model: Qwen3ForSeq2SeqLM) -> list[dict[str, Any]]:
        has_matrices = row_of(self._training.optimizer).matrix_moments is not None
        groups = parameter_groups(model, self._training.weight_decay, matrices_apart=has_matrices)
        names = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
        self._names = tuple(tuple(names[parameter] for parameter in group["params"]) for group in groups)
        self._shapes = {
            name: tuple(full_shape(one))
            for one, name in names.items()
            if one.requires_grad or (self._saves_frozen and not is_of_teacher(name))
        }
        return groups

    def _source_of(self, name: str, weights: WeightSource | None) -> WeightSource | None:
        """Return where the parameter `name` comes from, the student's from `weights`; None: from a checkpoint."""
        if self._teacher is None or not is_of_teacher(name):
            return weights
        return of_teacher(self._teacher.base.weights)

    def _record(self, applied_steps: int, loss_scaler: Mapping[str, float | int] | None = None) -> EngineRecord:
        return EngineRecord(
            self._context.engine_spec.state_format,
            self._infra.sharding_stage,
            self._context.world.world_size,
            applied_steps,
            self._names,
            loss_scaler,
        )

    def _fill(self, saved: SavedState) -> None:
        theirs, ours = saved.shapes, self._shapes
        if differing := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
            there, here = (
                f"has shape {list(side[differing[0]])}" if differing[0] in side else "does not exist"
                for side in (theirs, ours)
            )
            raise CheckpointError(
                f"the checkpoint is of another model: {differing[0]} {there} in it and {here} in this run's model "
                f"(parameters that differ: {len(differing)})"
            )
        for shard in self._frozen():
            if all(piece.name in self._shapes for piece in shard.pieces):
                shard.fill(shard.weights, partial(saved.read, "weight"))
        for shard, state in self._states():
            shard.fill(shard.weights, partial(saved.read, "weight"))
            for kind in MOMENTS:
                if kind in state:
                    shard.fill(local_part(state[kind]), partial(saved.read, kind))
            set_step(state, saved.applied_steps)


def parameter_groups(model: nn.Module, weight_decay: float, *, matrices_apart: bool = False) -> list[dict[str, Any]]:
    """Return the optimizer's groups: with and without weight decay and, if `matrices_apart`, hidden matrices, marked
    `is_matrix`. A parameter's module and name decide, never its shape, under ZeRO-3 [0] until it is gathered.
    Embeddings decay, shared parameters appear once, and frozen ones and empty groups are left out."""
    kinds = ({"weight_decay": weight_decay}, {"weight_decay": 0.0}, {"weight_decay": weight_decay, "is_matrix": True})
    kind_of: dict[nn.Parameter, int] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Norms are known by class name: every model family has its own RMSNorm, without a common base class.
            kind = int(type(module).__name__.endswith("Norm") or name == "bias")
            kind = 2 if matrices_apart and is_hidden_matrix(f"{path}.{name}") else kind
            if parameter.requires_grad:
                kind_of.setdefault(parameter, kind)
    members = [[parameter for parameter, kind in kind_of.items() if kind == number] for number in range(len(kinds))]
    return [{"params": params, **settings} for params, settings in zip(members, kinds, strict=True) if params]


def draws_masks(config: FullConfig) -> bool:
    """Return whether a forward pass in training mode draws random numbers."""
    training, lora = config.training, config.model.lora
    return bool(training.residual_dropout or training.attention_dropout or (lora is not None and lora.lora_dropout))


def prepare_for_training(model: Qwen3ForSeq2SeqLM, config: FullConfig) -> None:
    """Set up recomputation, offload, compilation and dropout as configured, before an engine wraps `model`."""
    training = config.training
    apply_activation_checkpointing(
        model,
        training.recomputation,
        every_n=training.activation_checkpointing_every_n,
        offload=training.activation_offload,
        compile_layers=training.torch_compile is True,  # not while it is `auto`
        random=draws_masks(config),
    )
    regularize(model, training)
    model.lm_head.per_token = OBJECTIVES[config.data.objective].weighs_tokens


def regularize(model: Qwen3ForSeq2SeqLM, training: TrainingConfig) -> None:
    """Set the dropout and loss settings that `model` follows in training mode and in its packed form."""
    model.attention_dropout = training.attention_dropout
    model.lm_head.label_smoothing, model.lm_head.z_loss = training.label_smoothing, training.z_loss
    model.lm_head.own_loss = None if training.loss == CROSS_ENTROPY else load_loss(training.loss)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.residual_dropout = training.residual_dropout


@contextmanager
def masks_of(batch: Batch, seed: int) -> Iterator[None]:
    """Seed torch by `seed` and `batch`, on the CPU and on the device of `batch`, and restore both afterwards."""
    device = batch.labels.device
    key = keyed_seed(seed, f"dropout:{batch.lane}:{batch.number}")
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng(devices=[] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        torch.default_generator.manual_seed(key)
        if not on_cpu:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(key)
        yield


def model_to_train(
    config: FullConfig, model_config: Qwen3Seq2SeqConfig, teacher: TeacherSource | None
) -> Qwen3ForSeq2SeqLM:
    """Return the model of a run, with its adapters and frozen parameters, beside its teacher, without values."""
    model = (Qwen3ForSeq2SeqLM if teacher is None else DistilledSeq2SeqLM)(model_config)
    choose_trained(model, config)
    if config.model.lora is not None and config.model.lora.quantize != "none":
        detach_frozen(model)
    if isinstance(model, DistilledSeq2SeqLM) and teacher is not None:
        model.attach(teacher, config.training)
    return model


def empty_model(config: Qwen3Seq2SeqConfig, dtype: torch.dtype, device: torch.device) -> Qwen3ForSeq2SeqLM:
    """Return the model, unfilled, in `dtype` on `device`. Leaves the random generators as they are."""
    with unfilled(dtype, device):
        return Qwen3ForSeq2SeqLM(config)


@contextmanager
def unfilled(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make modules in `dtype` on `device` whose caller fills every parameter."""
    with local_torch_dtype(dtype), no_init_weights(), device:
        yield


def unsharded_copy(
    engine: Engine, config: Qwen3Seq2SeqConfig, dtype: torch.dtype, collectives: HostCollectives
) -> Qwen3ForSeq2SeqLM:
    """Return a plain model with the current weights of `engine`, in `dtype`. Collective; OutOfMemoryError."""
    model = collectives.on_every_rank(lambda: empty_model(config, dtype, engine.device))
    places = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in engine.full_parameters():
            places[name].copy_(parameter)
    return model.eval()


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """Return the dtype of activations, and of the parameters that layers compute with."""
    return torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32


def set_step(state: dict[str, Any], applied_steps: int) -> None:
    """Set a shard's own step counter, if it has one, to `applied_steps`."""
    counter = state.get("step")
    if isinstance(counter, Tensor):
        counter.fill_(applied_steps)
    elif counter is not None:
        state["step"] = type(counter)(applied_steps)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the full shape of a parameter, also if ZeRO-3 has partitioned it and left [0]."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows. Gradients must be off, or they become a node of autograd's graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_tensors(item: Any) -> Iterator[Tensor]:
    """Yield this rank's part of each tensor in `item`, in containers of any depth."""
    if isinstance(item, Tensor):
        yield local_part(item.detach())
    elif isinstance(item, Iterable) and not isinstance(item, str):
        for one in item.values() if isinstance(item, Mapping) else item:
            yield from local_tensors(one)
