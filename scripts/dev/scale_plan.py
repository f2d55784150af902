"""Computes a run on 8 to 1,024 GPUs: memory, step time and what the ranks send each other.

    python scripts/dev/scale_plan.py [--gpu h100-80gb] [--per-node 8] [section.field=value ...]

Nothing is measured. Arithmetic is the model's operations at `MFU` of the GPU's peak in bf16, with every sequence full.
Communication is rings at the bandwidths below, with a time for every hop. Both overlap, so a step takes the longer of
the two; an optimizer on the host, data, evaluations and saves come on top. The batch of each GPU stays, so a step grows
with their number unless `training.global_batch_size` or `data.num_lanes` is set.

A ring moves an all-gather's or a reduce-scatter's whole tensor past every rank, less what that rank has itself, and an
all-reduce's twice. Under ZeRO-3 weights are gathered for each forward and each backward pass and gradients scattered
(arXiv 1910.02054); below that gradients are reduced and new weights gathered.
"""

import argparse
from collections.abc import Iterator
from math import ceil, log2
from typing import NamedTuple

from ds_encdec.base.quantities import GIB
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.shares import mesh_shape, with_assumed_batch_size
from ds_encdec.memory.gpus import Gpu, parse_gpu, peak_flops
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.question import indivisible, planned_job
from ds_encdec.memory.variants import Variant, variant
from ds_encdec.model.parameter_count import training_flops

GPU_COUNTS = (8, 64, 256, 1024)
STAGES = ("zero2", "zero3", "zero3_hybrid")
MFU = 0.4
LINK, NETWORK = 250e9, 50e9
"""Bytes/s from a GPU to the others of its node, and from a node to other nodes, all its adapters together."""
LINK_HOP, NETWORK_HOP, HOST_HOP = 2e-6, 10e-6, 50e-6
"""Seconds of one hop of a ring between GPUs of a node, between nodes, and between two hosts' processes over TCP."""
SAVE_EXCHANGES, RANK_RECORD = 14, 100e-6
"""Host collectives of a save (tests/faults/test_control_traffic.py), and rank 0's seconds for the record of each rank
in one of its two gathers (BENCHMARKS.md)."""
MAX_LIVE_PARAMETERS = 10**9
"""DeepSpeed's default of `stage3_max_live_parameters`: as many weights stay gathered until the backward pass."""
COLUMNS = (
    "GPUs", "nodes", "stage", "GiB/GPU", "GiB/host", "tokens/step", "GB sent", "arithmetic s", "communication s",
    "step s", "tokens/s", "control ms/step", "ms/save",
)  # fmt: skip


class Traffic(NamedTuple):
    """Collectives of one kind in a step: among which ranks, the bytes of their tensors (those of an all-reduce twice),
    and how many collectives there are."""

    among: str
    num_bytes: float
    calls: int


def fsdp_traffic(job: Job) -> Iterator[Traffic]:
    """A step of FSDP2: each layer is a collective, and the root, which stays until its backward pass."""
    infra, micro_batches = job.config.infra, job.gradient_accumulation_steps
    replicas, shards = mesh_shape(infra, job.world_size, job.ranks_per_node)
    layers = sum(parameters.all for parameters in job.model.layers.values())
    root, units = job.parameters - layers, len(job.model.layers) + 1
    reductions = micro_batches if infra.fsdp_reduce_every_micro_batch else 1
    if shards > 1:
        frees = infra.sharding_stage.startswith("zero3")
        of_layers, of_root = (2 * micro_batches, micro_batches) if frees else (1, 1)
        weights = job.compute_bytes * (of_layers * layers + of_root * root)
        yield Traffic("shards", weights, of_layers * (units - 1) + of_root)
        yield Traffic("shards", 4 * reductions * job.trainable_parameters, reductions * units)
    if replicas > 1:  # once a step in any case
        yield Traffic("replicas", 2 * 4 * job.trainable_parameters / shards, units)


def deepspeed_traffic(job: Job) -> Iterator[Traffic]:
    """A step of DeepSpeed, whose gradients are all-reduced in buckets below stage 3."""
    stage, micro_batches = job.config.infra.sharding_stage, job.gradient_accumulation_steps
    gradients, weights = job.compute_bytes * job.trainable_parameters, job.compute_bytes * job.parameters
    units = len(job.model.layers) + 1
    if stage.startswith("zero3"):
        yield Traffic("all", micro_batches * weights, micro_batches * units)
        if again := max(0, job.parameters - MAX_LIVE_PARAMETERS):
            # hpZ keeps a second partition of the weights in each node, for the backward pass.
            backward = "shards" if stage == "zero3_hybrid" else "all"
            calls = micro_batches * ceil(units * again / job.parameters)
            yield Traffic(backward, micro_batches * job.compute_bytes * again, calls)
        yield Traffic("all", micro_batches * gradients, micro_batches * units)
        return
    reductions = micro_batches if stage == "zero2" else 1
    yield Traffic("all", 2 * reductions * gradients, reductions * units)
    if stage != "zero0":
        yield Traffic("all", job.compute_bytes * job.trainable_parameters, units)


def ring(traffic: Traffic, job: Job) -> tuple[int, int, int]:
    """Ranks of the ring, the nodes that it goes through, and how many such rings a node has."""
    replicas, shards = mesh_shape(job.config.infra, job.world_size, job.ranks_per_node)
    in_node = job.ranks_per_node
    if traffic.among == "all":
        return job.world_size, job.nodes, 1
    if traffic.among == "shards":
        return shards, ceil(shards / in_node), 1
    return replicas, job.nodes if shards < in_node else replicas, min(shards, in_node)


def seconds(traffic: Traffic, job: Job) -> float:
    """The time of these collectives, one behind the other, by the slowest link of their ring."""
    ranks, nodes, rings = ring(traffic, job)
    bandwidth = min(LINK, NETWORK / rings) if nodes > 1 else LINK
    between = min(nodes, ranks - 1) if nodes > 1 else 0
    latency = between * NETWORK_HOP + (ranks - 1 - between) * LINK_HOP
    return traffic.num_bytes * (1 - 1 / ranks) / bandwidth + traffic.calls * latency


def row(planned: Variant, gpu: Gpu) -> list[str]:
    """The cells of a number of GPUs and a stage, from "GiB/GPU" on."""
    job, estimate = planned.job, planned.estimate
    sequences = job.config.training.micro_batch_size
    encoder, decoder = ([tokens // sequences] * sequences for tokens in (job.encoder_tokens, job.decoder_tokens))
    flops = training_flops(job.sizes, encoder, decoder, job.trainable_parameters / job.parameters)
    compute = flops * job.gradient_accumulation_steps / ((peak_flops(gpu.name.upper()) or 0) * MFU)
    traffic = list((fsdp_traffic if job.engine == "fsdp" else deepspeed_traffic)(job))
    communication = sum(seconds(one, job) for one in traffic)
    sent = sum(one.num_bytes * (1 - 1 / ring(one, job)[0]) for one in traffic)
    step = max(compute, communication)
    tokens = (job.encoder_tokens + job.decoder_tokens) * job.gradient_accumulation_steps * job.world_size
    tree = 2 * ceil(log2(job.world_size)) * HOST_HOP
    save = SAVE_EXCHANGES * tree + 2 * job.world_size * RANK_RECORD
    too_much = "!" if estimate.peak.total > gpu.usable_bytes else ""
    return [
        f"{estimate.peak.total / GIB:.1f}{too_much}", f"{estimate.host.total * job.ranks_per_node / GIB:.0f}",
        f"{tokens:,}", f"{sent / 1e9:.1f}", f"{compute:.2f}", f"{communication:.2f}", f"{step:.2f}",
        f"{tokens / step:,.0f}", f"{tree * 1e3:.1f}", f"{save * 1e3:.0f}",
    ]  # fmt: skip


def rows(config: FullConfig, gpu: Gpu, per_node: int) -> Iterator[list[str]]:
    """A line for each number of GPUs and stage, the configured stage first; one with a reason where there is no run."""
    for gpus in GPU_COUNTS:
        planned = config.model_copy(update={"infra": config.infra.model_copy(update={"num_gpus": gpus})})
        nodes = max(1, gpus // per_node)
        if problems := list(indivisible(planned, nodes)):
            yield [f"{gpus:,}", f"{nodes:,}", problems[0]]
            continue
        job = planned_job(with_assumed_batch_size(planned, gpus), run_sizes(planned), nodes, gpu)
        for stage in dict.fromkeys((config.infra.sharding_stage, *STAGES)):
            found = variant(job, {"infra.sharding_stage": stage})
            yield [f"{gpus:,}", f"{nodes:,}", stage, *([found.reason] if found.reason else row(found, gpu))]


def main() -> None:
    """Print the table; `!` beside a figure: more memory than the GPU has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML file, or a shipped one's name (default: the schema's run)")
    parser.add_argument("--gpu", type=parse_gpu, default="h100-80gb", help="whose peak is known (default h100-80gb)")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (default 8)")
    options, overrides = parser.parse_known_args()
    lines = [list(COLUMNS), *rows(load_config(options.config, overrides), options.gpu, options.per_node)]
    widths = [max(len(line[column]) for line in lines if len(line) == len(COLUMNS)) for column in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=False)))


if __name__ == "__main__":
    main()
