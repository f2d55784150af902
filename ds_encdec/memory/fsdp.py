"""The memory that FSDP2 (torch 2.13) holds on a rank for parameters, gradients and optimizer in the parts of a step.

The engine shards float32 parameters, gathers them in the compute dtype, and reduces gradients in float32. Each layer is
a group that is gathered and reduced at once; the root group has the rest, above all the embedding, and is the last to
be reduced. Every term names the place in torch/distributed/fsdp/_fully_shard/ that makes the tensor.

What layers compute with counts as `weights` where it stays from the forward pass to the backward pass, and as
`communication` where it comes and goes layer by layer (zero3). docs/memory.md has the principle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ds_encdec.config.shares import mesh_shape
from ds_encdec.memory.breakdown import Breakdown, EngineMemory, HostBreakdown
from ds_encdec.memory.job import Job
from ds_encdec.memory.zero_settings import power_of_two

_FLOAT32 = 4
"""Bytes of a number in shards, moments and reduced gradients."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters of a group: of the model; of the first rank, which holds most; and gathered.

    Dimension 0 is cut as `torch.chunk` does, and each rank's part is padded to the size of the first one's
    (_fsdp_param.py, padded_sharded_param_size), gathered ones included.
    """

    parameters: int
    shard: int
    gathered: int


@dataclass(frozen=True, slots=True)
class _Sharding:
    """The job's parameters on the mesh of config/shares.py, `replicas` × `shards` ranks.

    `layers`: groups beside the root's. `shard`: parameters that the rank holds. `trained`: share of the parameters that
    is trained. `frees_layers`: layers let go of gathered parameters between the forward and the backward pass.
    `accumulates`: earlier micro-batches of the step have left gradients; `accumulates_whole`: whole ones, because
    nothing is reduced before the last micro-batch. `offloads`: shards, moments and reduced gradients are on the host;
    `offloads_gradients`: in another memory (on a CPU they stay, and count at each moment).
    """

    job: Job
    replicas: int
    shards: int
    layer: _Group
    root: _Group
    layers: int
    shard: int
    trained: float
    frees_layers: bool
    accumulates: bool
    accumulates_whole: bool
    offloads: bool
    offloads_gradients: bool


def fsdp_memory(job: Job) -> EngineMemory:
    """The memory of `job` under FSDP2. See EngineMemory; `forward`, `backward` and `step` come on top of `resting`.

    `step` includes the reduction of the root's gradients: it comes after the backward pass, when no activations are
    left. Of ranks that hold different amounts it is the one with the most. Raises ConfigError for a hybrid that does
    not divide the ranks.
    """
    s = _sharding(job)
    states = _FLOAT32 * s.shard
    moments = 2 * states * s.trained
    return EngineMemory(
        resting=Breakdown() if s.offloads else Breakdown(master_weights=states, optimizer=moments),
        forward=_forward(s),
        backward=lambda done, unit: _backward(s, done, unit),
        step=_step(s),
        host=_host(s),
        reduces_every_micro_batch=s.accumulates and not s.accumulates_whole,
    )


def _sharding(job: Job) -> _Sharding:
    infra, shapes = job.config.infra, job.sizes.parameter_shapes
    replicas, shards = mesh_shape(infra, job.world_size, job.ranks_per_node)
    layer = _group([shape for name, shape in shapes.items() if name.startswith("decoder.layers.0.")], shards)
    root = _group([shape for name, shape in shapes.items() if ".layers." not in name], shards)
    layers, accumulates = (
        job.sizes.num_encoder_layers + job.sizes.num_hidden_layers,
        job.gradient_accumulation_steps > 1,
    )
    offloads = infra.offload_optimizer == "cpu"
    return _Sharding(
        job=job,
        replicas=replicas,
        shards=shards,
        layer=layer,
        root=root,
        layers=layers,
        shard=layers * layer.shard + root.shard,
        trained=job.trainable_parameters / job.parameters,
        frees_layers=infra.sharding_stage.startswith("zero3"),
        accumulates=accumulates,
        accumulates_whole=accumulates and not infra.fsdp_reduce_every_micro_batch,
        offloads=offloads,
        offloads_gradients=offloads and job.device != "cpu",
    )


def _group(shapes: Sequence[tuple[int, ...]], shards: int) -> _Group:
    shard = sum(-(-shape[0] // shards) * prod(shape[1:]) for shape in shapes)
    return _Group(sum(map(prod, shapes)), shard, shard * shards)


# -------------------------------------------------------------------------------------------------- parts of a step


def _forward(s: _Sharding) -> Breakdown:
    """In the head of the last micro-batch: the root is gathered, and so are layers that stay it."""
    # FSDPCommContext.all_gather_state: the last layer's buffer, until the root's forward pass is over. Layers that have
    # stayed gathered since an earlier micro-batch need none.
    gathers = s.shards > 1 and (s.frees_layers or not s.accumulates)
    return Breakdown(
        weights=_kept_weights(s, 0),
        gradients=_held_gradients(s, 0),
        communication=s.job.compute_bytes * s.layer.gathered if gathers else 0,
    )


def _backward(s: _Sharding, done: int, unit: int) -> Breakdown:
    """A layer or the embedding is in work. Layers that are done are reduced, and no longer gathered.

    All gradients of the layer count, though at its worst moment most of them are still to come. Where gloo reduces, the
    worst may come afterwards, with the layer's activations gone: they are counted there too.
    """
    compute, untied_head, buffer = s.job.compute_bytes, _untied_head(s, done), _FLOAT32 * s.layer.gathered * s.trained
    layers_done = (done - untied_head) / s.layer.parameters
    prefetched = compute * s.layer.gathered if s.frees_layers and s.shards > 1 else 0.0  # _backward_prefetch
    is_layer = unit == s.layer.parameters
    in_work = Breakdown(
        weights=_kept_weights(s, layers_done),
        gradients=_held_gradients(s, layers_done) + compute * (untied_head + unit),
        # FSDPCommContext.reduce_scatter_states: what the last layer was reduced from, until the next one is.
        communication=buffer * bool(layers_done)
        + is_layer * (prefetched + (compute * s.layer.gathered if s.frees_layers else 0.0)),
    )
    if not (_copies_to_reduce(s) and is_layer):
        return in_work
    # foreach_reduce: the layer's buffer, and gloo's clone of it; where earlier micro-batches are reduced, this one's
    # gradients are added to theirs.
    added = _FLOAT32 * s.layer.shard * s.trained if s.accumulates and not s.accumulates_whole else 0.0
    reducing = Breakdown(
        weights=_kept_weights(s, layers_done + 1),
        gradients=_held_gradients(s, layers_done + 1) + compute * untied_head + added,
        communication=2 * buffer + prefetched,
    )
    return max(in_work, reducing, key=lambda held: held.total)


def _untied_head(s: _Sharding, done: int) -> int:
    """Parameters of an untied head whose gradients wait for the root's reduction, of `done` parameters."""
    return 0 if s.job.sizes.tie_word_embeddings else min(done, s.job.embedding_parameters)


def _kept_weights(s: _Sharding, layers_done: float) -> float:
    """The root, and what is still gathered of layers that stay so until their backward pass."""
    kept = 0.0 if s.frees_layers else (s.layers - layers_done) * s.layer.gathered
    return s.job.compute_bytes * (kept + s.root.gathered)


def _copies_to_reduce(s: _Sharding) -> bool:
    """Gloo clones what it scatters (ProcessGroupGloo::_reduce_scatter_tensor_coalesced); NCCL does not."""
    return s.job.device == "cpu" and s.shards > 1


def _held_gradients(s: _Sharding, layers_done: float) -> float:
    """Gradients of the step on the device, beside the layer in work, once the last micro-batch has reduced some layers.

    Of earlier micro-batches they are whole (FSDPParam.unsharded_accumulated_grad, or the gathered parameter's own .grad
    where that is float32), or reduced, and then replicas have still to meet (FSDPParamGroup._partial_reduce_output).
    """
    reduced = layers_done * s.layer.shard
    if s.accumulates_whole:
        whole = s.job.parameters - layers_done * s.layer.parameters
        return _FLOAT32 * s.trained * (whole + (0 if s.offloads_gradients else reduced))
    if s.accumulates and (s.replicas > 1 or not s.offloads_gradients):
        return _FLOAT32 * s.trained * (s.shard - (reduced if s.offloads_gradients else 0))
    return 0.0 if s.offloads_gradients else _FLOAT32 * s.trained * reduced


def _step(s: _Sharding) -> Breakdown:
    """foreach_reduce of the root, before and after its gradients are copied; fused AdamW needs nothing beside them."""
    buffer, reduced = _FLOAT32 * s.trained * s.root.gathered, _FLOAT32 * s.trained * s.root.shard
    held = before = _held_gradients(s, s.layers)
    after = held + reduced
    if s.accumulates_whole:
        after -= _FLOAT32 * s.trained * s.root.parameters
    else:
        before += s.job.compute_bytes * s.trained * s.root.parameters
    copied = buffer if _copies_to_reduce(s) else 0.0
    worst = Breakdown(gradients=before, communication=buffer), Breakdown(gradients=after, communication=buffer + copied)
    return max(worst, key=lambda held: held.total)


# ------------------------------------------------------------------------------------------------------------- the host


def _host(s: _Sharding) -> HostBreakdown:
    """Offloaded shards, gradients and moments; and the copies of a background save."""
    pins = s.job.config.infra.pin_memory and s.job.device == "cuda"
    shapes = Counter(s.job.sizes.parameter_shapes.values())  # layers are alike
    shards = [(_FLOAT32 * _group([shape], s.shards).shard, times) for shape, times in shapes.items()]
    plain = sum(num_bytes * times for num_bytes, times in shards)
    # .pin_memory() of the shards, and .to("cpu", non_blocking=True) of the gradients: each a buffer of its own.
    held = sum(power_of_two(num_bytes) * times for num_bytes, times in shards) if pins else plain
    # engine/fsdp2.py: weights and both moments, each copied by one of the replicas (the mean of them), also where
    # the run waits for the save (training.async_save=false).
    save = 3 * held / s.replicas
    if not s.offloads:
        return HostBreakdown(save=save)
    gradients = held * s.trained if s.offloads_gradients else 0.0
    return HostBreakdown(states=held + gradients + 2 * plain * s.trained, save=save)
