"""Memory of FSDP2 (torch 2.13) on a rank for parameters, gradients and optimizer, in each part of a step.

Each layer is a group that is gathered and reduced at once; the root group has the rest, above all the embedding, and is
reduced last. Every term names the place in torch/distributed/fsdp/_fully_shard/ that makes the tensor. Gathered
parameters count as `weights` if they stay from the forward to the backward pass, else (zero3) as `communication`."""

from collections import Counter
from collections.abc import Iterable
from math import inf, prod
from typing import NamedTuple

from ds_encdec.config.shares import mesh_shape
from ds_encdec.memory.breakdown import Breakdown, Count, EngineMemory, HostBreakdown, power_of_two
from ds_encdec.memory.job import Job

_FLOAT32 = 4  # Bytes of a number in shards, moments and reduced gradients
# Bytes of a number in 4 bits: 64 numbers share a scale of 8 bits, and 256 scales one of float32.
_NF4 = 1 / 2 + (1 + 4 / 256) / 64


def fsdp_memory(job: Job) -> EngineMemory:
    """Return the memory of `job` on the rank with the most. Raises ConfigError if a hybrid does not fit the ranks."""
    s = _Sharding(job)
    states, frozen = (0, 0) if s.offloads else (_FLOAT32 * s.trained_shard, s.compute * s.frozen_shard)
    each, of_matrix = job.moments
    moments = (not s.offloads) * _FLOAT32 * (each * s.trained_shard - (each - of_matrix) * s.matrices.shard)
    # FSDPCommContext.all_gather_state: the last layer's buffer, until the root's forward pass is over. Layers still
    # gathered since an earlier micro-batch need none.
    gathers = s.shards > 1 and (s.frees_layers or not s.accumulates)
    return EngineMemory(
        resting=Breakdown(weights=frozen + s.quantized, master_weights=states, optimizer=moments),
        # In the head of the last micro-batch: the root is gathered, and so are layers that stay it.
        forward=Breakdown(
            weights=s.kept_weights(0), gradients=s.held_gradients(0), communication=gathers * s.gathered_layer
        ),
        backward=s.backward,
        step=s.step(),
        host=s.host(),
        reduces_every_micro_batch=s.accumulates and not s.accumulates_whole,
        frozen_shares=s.shards,
        gathers=1.0 if s.frees_layers else inf,
        offloads_frozen=s.offloads,
        # torch's own, which the mesh takes unless it has two dimensions.
        communicators=3 if s.replicas > 1 and s.shards > 1 else 1,
    )


class _Group(NamedTuple):
    """Parameters of a group, or its trained ones: in the model, on the first rank (which has the most), and gathered.
    Parts are padded to the first one's size, gathered ones included (_fsdp_param.py, padded_sharded_param_size)."""

    parameters: float
    shard: float
    gathered: float


class _Sharding:
    """The job's parameters on the mesh of config/shares.py, `replicas` × `shards` ranks. `layers`: number of groups
    beside the root's; `units`, `in_layers`: their parameters, and the sum. `layer` (the mean), `root`: groups of all
    parameters; `trained_layer`, `trained_root`: of those with gradients. `trained_shard`, `frozen_shard`: parameters on
    the rank. `matrices`: those of `Job.stepped_matrices`. `gathered_layer`: bytes. `quantized`: bytes of 4-bit
    matrices, which every rank has whole. `frees_layers`: layers free gathered parameters before the backward pass.
    `accumulates`: earlier micro-batches have left gradients; `accumulates_whole`: unreduced ones. `offloads`: states
    are on the host; `keeps_gradients`: reduced gradients stay in the same memory. `clones`: gloo copies what it
    scatters (_reduce_scatter_tensor_coalesced)."""

    def __init__(self, job: Job) -> None:
        infra = job.config.infra
        self.job, self.compute, model = job, job.compute_bytes, job.model
        self.replicas, self.shards = mesh_shape(infra, job.world_size, job.ranks_per_node)
        self.layers = job.sizes.num_encoder_layers + job.sizes.num_hidden_layers
        self.units, self.in_layers = set(model.layers.values()), sum(layer.all for layer in model.layers.values())
        lora = job.config.model.lora
        packs = lora is not None and lora.quantize != "none"  # matrices that FSDP2 does not know: model/lora.py
        in_4_bits = {kind for kind in model.kinds if packs and kind[1:] == (True, False) and len(kind[0]) > 1}
        self.quantized = _NF4 * sum(prod(kind[0]) * model.kinds[kind] for kind in in_4_bits)

        def group(*, in_layer: bool, only_trained: bool) -> _Group:
            """Return the root's group, or the mean of the layers'."""
            found = self._group(
                (kind[0], times)
                for kind, times in model.kinds.items()
                if kind[1] is in_layer and (kind[2] or not only_trained) and kind not in in_4_bits
            )
            return _Group(*(numel / self.layers for numel in found)) if in_layer else found

        self.layer, self.trained_layer = (group(in_layer=True, only_trained=only) for only in (False, True))
        self.root, self.trained_root = (group(in_layer=False, only_trained=only) for only in (False, True))
        self.trained_shard = self.layers * self.trained_layer.shard + self.trained_root.shard
        self.frozen_shard = self.layers * self.layer.shard + self.root.shard - self.trained_shard
        self.matrices = self._group((shape, 1) for _, shape in job.stepped_matrices)
        self.gathered_layer = self.compute * self.layer.gathered
        self.frees_layers = infra.sharding_stage.startswith("zero3")
        self.accumulates = job.gradient_accumulation_steps > 1
        self.accumulates_whole = self.accumulates and not infra.fsdp_reduce_every_micro_batch
        self.offloads = infra.offload_optimizer == "cpu"
        self.keeps_gradients = not self.offloads or job.device == "cpu"
        self.clones = job.device == "cpu" and self.shards > 1

    def _group(self, shapes: Iterable[tuple[tuple[int, ...], int]]) -> _Group:
        parts = [
            (times * prod(shape), times * -(-shape[0] // self.shards) * prod(shape[1:])) for shape, times in shapes
        ]
        parameters, shard = (sum(part[index] for part in parts) for index in (0, 1))
        return _Group(parameters, shard, shard * self.shards)

    def backward(self, done: Count, unit: Count) -> Breakdown:
        """Return the worst moment of a layer or the embedding; with gloo it may be the reduction after the layer."""
        # An untied head's gradients wait for the root's reduction.
        head = 0 if self.job.sizes.tie_word_embeddings else min(done.all, self.job.embedding_parameters)
        untied_head = min(head, self.job.model.of("lm_head.").trained)
        layers_done = (done.all - head) / self.in_layers * len(self.job.model.layers)
        is_layer = unit in self.units
        buffer = _FLOAT32 * self.trained_layer.gathered
        prefetched = self.gathered_layer * (self.frees_layers and self.shards > 1)  # _backward_prefetch
        in_work = Breakdown(
            weights=self.kept_weights(layers_done),
            gradients=self.held_gradients(layers_done) + self.compute * (untied_head + unit.trained),
            # FSDPCommContext.reduce_scatter_states: the last layer's reduction input, until the next reduction.
            communication=buffer * bool(layers_done)
            + is_layer * (prefetched + self.gathered_layer * self.frees_layers),
        )
        if not (self.clones and is_layer):
            return in_work
        # foreach_reduce: the layer's buffer, and gloo's clone of it; gradients are added to earlier, reduced ones.
        added = _FLOAT32 * self.trained_layer.shard * (self.accumulates and not self.accumulates_whole)
        reducing = Breakdown(
            weights=self.kept_weights(layers_done + 1),
            gradients=self.held_gradients(layers_done + 1) + self.compute * untied_head + added,
            communication=2 * buffer + prefetched,
        )
        return max(in_work, reducing, key=lambda held: held.total)

    def kept_weights(self, layers_done: float) -> float:
        """Return the bytes of the root, and of layers that stay gathered until their backward pass."""
        layers = 0 if self.frees_layers else self.layers - layers_done
        return self.compute * self.root.gathered + layers * self.gathered_layer

    def held_gradients(self, layers_done: float) -> float:
        """Return the gradients on the device once the last micro-batch has reduced some, without the running layer's.
        Earlier ones are whole (unsharded_accumulated_grad), or not summed over replicas (_partial_reduce_output)."""
        reduced = layers_done * self.trained_layer.shard
        if self.accumulates_whole:
            whole = self.job.trainable_parameters - layers_done * self.trained_layer.parameters
            held = whole + reduced * self.keeps_gradients
        elif self.accumulates and (self.replicas > 1 or self.keeps_gradients):
            held = self.trained_shard - reduced * (not self.keeps_gradients)
        else:
            held = reduced * self.keeps_gradients
        return _FLOAT32 * held

    def step(self) -> Breakdown:
        """Return the worst of foreach_reduce of the root, before or after its gradients are copied, and Muon's work."""
        held, root = self.held_gradients(self.layers), self.trained_root
        buffer = _FLOAT32 * root.gathered
        whole = root.parameters * self.accumulates_whole
        return max(
            Breakdown(gradients=held + self.compute * (root.parameters - whole), communication=buffer),
            Breakdown(gradients=held + _FLOAT32 * (root.shard - whole), communication=buffer * (1 + self.clones)),
            Breakdown(
                gradients=held + _FLOAT32 * root.shard * self.keeps_gradients, optimizer=self._orthogonalization()
            ),
            key=lambda held: held.total,
        )

    def _orthogonalization(self) -> float:
        """Return the bytes of the largest round of engine/muon.py: a rank's rows of its matrices, and one whole one."""
        most = 0.0
        for (height, width), times in Counter(shape for _, shape in self.job.stepped_matrices).items():
            rows, whole = -(-height // self.shards) * width, height * width
            working = (2 + (self.shards > 1)) * whole + 2 * min(height, width) ** 2
            telling = ((self.replicas + 1) * self.shards * rows + whole) * (self.replicas > 1)
            most = max(most, min(times, self.replicas * self.shards) * rows + max(working, telling))
        return most * (_FLOAT32 if self.job.emulates_bf16 else self.compute)

    def host(self) -> HostBreakdown:
        """Return offloaded shards, gradients and moments, and the copies of a background save."""
        job, model = self.job, self.job.model
        # .pin_memory() of the shards, and .to("cpu", non_blocking=True) of the gradients: a buffer each.
        size = power_of_two if job.config.infra.pin_memory and job.device == "cuda" else float
        matrices, kept = {name for name, _ in job.stepped_matrices}, job.moments
        shapes = Counter((shape, name in model.trained, kept[name in matrices]) for name, shape in model.shapes.items())
        plain = held = frozen = copied = 0.0
        for (shape, is_trained, moments), times in shapes.items():  # layers are alike
            elements = self._group([(shape, 1)]).shard
            plain += _FLOAT32 * elements * times * is_trained * moments
            held += size(_FLOAT32 * elements) * times * is_trained
            copied += size(_FLOAT32 * elements) * times * is_trained * (1 + moments)
            frozen += size(self.compute * elements) * times * (not is_trained)
        states = held + held * (not self.keeps_gradients) + plain + frozen
        # engine/fsdp2.py: weights and moments, each copied by one of the replicas (the mean of them), also
        # where the run waits for the save (training.async_save=false).
        saved = (copied + frozen * (job.config.model.lora is None)) / self.replicas
        return HostBreakdown(states=states * self.offloads, save=saved)
