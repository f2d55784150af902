"""Traffic between the ranks in a step, by engine: the bytes that each puts into its collectives, and how often.

A ring moves an all-gather's or a reduce-scatter's whole tensor past every rank, less what that rank has itself, and an
all-reduce's twice. Ψ parameters under ZeRO-3 are gathered for each forward and each backward pass and their gradients
scattered (3Ψ, arXiv 1910.02054), below that gradients are reduced and new weights gathered (2Ψ). What differs between
the engines is how often, and in which dtype. The names of the sources are those of torch 2.13 and DeepSpeed 0.19.8.
"""

from collections import Counter
from collections.abc import Iterator
from math import ceil, prod
from typing import Literal, NamedTuple

from ds_encdec.config.shares import mesh_shape
from ds_encdec.memory.job import Job
from ds_encdec.memory.zero import gradient_bytes, kept_parameters


class Traffic(NamedTuple):
    """Collectives of one kind in an optimizer step.

    `among`: all ranks, the `shards` of one replica, or the `replicas` of one shard. `num_bytes`: of their tensors in
    all, those of an all-reduce twice. `calls`: how many there are.
    """

    what: Literal["weights", "gradients"]
    among: Literal["all", "shards", "replicas"]
    num_bytes: float
    calls: int


def fsdp_traffic(job: Job) -> Iterator[Traffic]:
    """A step of `engine/fsdp2.py`: each layer is a collective, and the root, which stays until its backward pass."""
    infra, micro_batches = job.config.infra, job.gradient_accumulation_steps
    replicas, shards = mesh_shape(infra, job.world_size, job.ranks_per_node)
    layers = sum(count.all for count in job.model.layers.values())
    root, units = job.parameters - layers, len(job.model.layers) + 1
    reductions = micro_batches if infra.fsdp_reduce_every_micro_batch else 1
    if shards > 1:
        frees = infra.sharding_stage.startswith("zero3")
        of_layers, of_root = (2 * micro_batches, micro_batches) if frees else (1, 1)
        calls = of_layers * (units - 1) + of_root
        yield Traffic("weights", "shards", job.compute_bytes * (of_layers * layers + of_root * root), calls)
        yield Traffic("gradients", "shards", 4 * reductions * job.trainable_parameters, reductions * units)
    if replicas > 1:  # once a step in any case (set_requires_all_reduce)
        yield Traffic("gradients", "replicas", 2 * 4 * job.trainable_parameters / shards, units)
    # engine/muon.py: each rank's rows go to one that has the whole matrix and come back, and then to other replicas.
    shapes = Counter(shape for _, shape in job.stepped_matrices)
    rounds = sum(ceil(times / job.world_size) for times in shapes.values())
    matrices = job.compute_bytes * sum(prod(shape) * times for shape, times in shapes.items())
    if rounds and shards > 1:
        yield Traffic("weights", "shards", 2 * matrices / job.world_size, 2 * rounds)
    if rounds and replicas > 1:
        yield Traffic("weights", "replicas", matrices / shards, rounds)


def deepspeed_traffic(job: Job) -> Iterator[Traffic]:
    """A step of DeepSpeed; below stage 3 gradients are all-reduced in buckets (use_multi_rank_bucket_allreduce)."""
    stage, micro_batches = job.config.infra.sharding_stage, job.gradient_accumulation_steps
    gradients = gradient_bytes(job) * job.trainable_parameters
    weights = job.compute_bytes * job.parameters
    units = len(job.model.layers) + 1
    if stage.startswith("zero3"):
        # hpZ keeps a second partition of the weights in each node, for the backward pass.
        backward: Literal["all", "shards"] = "shards" if stage == "zero3_hybrid" else "all"
        yield Traffic("weights", "all", micro_batches * weights, micro_batches * units)
        if again := job.parameters - kept_parameters(job):
            calls = micro_batches * ceil(units * again / job.parameters)
            yield Traffic("weights", backward, micro_batches * job.compute_bytes * again, calls)
        yield Traffic("gradients", "all", micro_batches * gradients, micro_batches * units)
        return
    reductions = micro_batches if stage == "zero2" else 1
    yield Traffic("gradients", "all", 2 * reductions * gradients, reductions * units)
    if stage != "zero0":
        yield Traffic("weights", "all", job.compute_bytes * job.trainable_parameters, units)
