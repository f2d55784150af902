"""A run on 8 to 1,024 GPUs, before it is: memory, step time and what the ranks have to say to each other.

Nothing is measured here. Arithmetic is the model's operations at a given utilisation of the GPU's peak; communication
are rings at given bandwidths, with a time for every hop; the two overlap, so that a step takes as long as the longer
one. What is printed says so (`ASSUMPTIONS`). Imports no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil, log2
from typing import Any

from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape, with_assumed_batch_size
from ds_encdec.engines import ENGINES, load
from ds_encdec.gpus import Gpu, named_peak_flops, parse_gpu
from ds_encdec.memory.breakdown import GIB, Estimate
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.question import indivisible, planned_job
from ds_encdec.memory.traffic import Traffic
from ds_encdec.memory.variants import variant
from ds_encdec.model.parameter_count import training_flops
from ds_encdec.types import ConfigError

GPU_COUNTS = (8, 64, 256, 1024)
STAGES = ("zero2", "zero3", "zero3_hybrid")
LINK_HOP, NETWORK_HOP, HOST_HOP = 2e-6, 10e-6, 50e-6
"""Seconds of one hop of a ring between GPUs of a node, between nodes, and between two hosts' processes over TCP."""
SAVE_EXCHANGES, RANK_RECORD = 14, 100e-6
"""Host collectives of a save (tests/faults/test_control_traffic.py), and seconds that rank 0 takes for the record of
each rank in one of its two gathers (BENCHMARKS.md)."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The GPU and its share of its peak that the model's operations reach, and bandwidths in bytes/s.

    `link`: of a GPU to the others of its node, one way. `network`: of a node, all its adapters together.
    """

    gpu: Gpu
    mfu: float
    link: float
    network: float


@dataclass(frozen=True, slots=True)
class Row:
    """One number of GPUs and stage. Times are seconds of an optimizer step, but for `save_control_s`.

    `problem`: why there is no such run; then the rest is None.
    """

    gpus: int
    nodes: int
    sharding_stage: str
    problem: str | None = None
    gpu_bytes: float | None = None
    fits: bool | None = None
    host_bytes_per_node: float | None = None
    tokens_per_step: int | None = None
    sent_bytes: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    step_s: float | None = None
    tokens_per_second: float | None = None
    step_control_s: float | None = None
    save_control_s: float | None = None


def plan_scale(config: FullConfig, options: argparse.Namespace) -> dict[str, Any]:
    """The assumptions, and a row for each number of GPUs and stage, the configured one first. Raises ConfigError."""
    machines = Machines(parse_gpu(options.gpu), options.mfu, options.link_gbs * 1e9, options.network_gbs * 1e9)
    if named_peak_flops(machines.gpu) is None:
        raise ConfigError(f"--gpu {options.gpu}: its peak is not known: give one whose is, e.g. h100-80gb")
    per_node, left = divmod(config.infra.num_gpus, options.nodes)
    if left:
        raise ConfigError(f"--nodes {options.nodes}: {config.infra.num_gpus} GPUs do not divide into them")
    stages = dict.fromkeys((config.infra.sharding_stage, *STAGES))
    rows = [row for gpus in GPU_COUNTS for row in _rows(config, machines, gpus, min(gpus, per_node), list(stages))]
    return {"assumptions": _assumptions(machines, per_node), "rows": [asdict(row) for row in rows]}


def _assumptions(machines: Machines, per_node: int) -> list[str]:
    peak = (named_peak_flops(machines.gpu) or 0) / 1e12
    return [
        f"arithmetic: {machines.gpu.name}, {peak:g} TFLOP/s of bf16, of which the model's own operations reach "
        f"{machines.mfu:.0%} (--gpu, --mfu); every sequence is full",
        f"rings: {machines.link / 1e9:g} GB/s between the {per_node} GPUs of a node, {machines.network / 1e9:g} GB/s "
        f"from node to node (--link-gbs, --network-gbs), {LINK_HOP * 1e6:g} and {NETWORK_HOP * 1e6:g} µs a hop",
        "a step takes the longer of arithmetic and communication, which overlap; data, an optimizer on the host, "
        "evaluations and saves come on top",
        f"control: {HOST_HOP * 1e6:g} µs a hop over TCP. A step's is on its way while the step before is computed; a "
        "save's is waited for",
        "the batch of each GPU stays, and so a step grows with them, unless training.global_batch_size or "
        "data.num_lanes is set",
    ]


def _rows(config: FullConfig, machines: Machines, gpus: int, per_node: int, stages: Sequence[str]) -> Iterator[Row]:
    config = config.model_copy(update={"infra": config.infra.model_copy(update={"num_gpus": gpus})})
    nodes = gpus // per_node
    problems = [] if gpus % per_node == 0 else [f"{gpus} GPUs do not fill nodes of {per_node}"]
    problems = problems or list(indivisible(config, nodes))
    if problems:
        yield Row(gpus, nodes, "any", problem=problems[0])
        return
    config = with_assumed_batch_size(config, gpus)
    job = planned_job(config, run_sizes(config), nodes, machines.gpu)
    for stage in stages:
        found = variant(job, {"infra.sharding_stage": stage})
        if found.reason:
            yield Row(gpus, nodes, stage, problem=found.reason)
        else:
            yield _row(found.job, found.estimate, machines, stage)


def _row(job: Job, estimate: Estimate, machines: Machines, stage: str) -> Row:
    config, ranks = job.config, job.world_size
    sequences = config.training.micro_batch_size
    encoder, decoder = ([tokens // sequences] * sequences for tokens in (job.encoder_tokens, job.decoder_tokens))
    micro_batch = training_flops(job.sizes, encoder, decoder, job.trainable_parameters / job.parameters)
    flops = micro_batch * job.gradient_accumulation_steps
    compute = flops / ((named_peak_flops(machines.gpu) or 0) * machines.mfu)
    traffic = list(load(ENGINES[job.engine].traffic)(job))
    communication = sum(_seconds(one, job, machines) for one in traffic)
    step = max(compute, communication)
    tokens = (job.encoder_tokens + job.decoder_tokens) * job.gradient_accumulation_steps * ranks
    tree = 2 * ceil(log2(ranks)) * HOST_HOP
    return Row(
        ranks,
        job.nodes,
        stage,
        gpu_bytes=estimate.peak.total,
        fits=estimate.peak.total <= machines.gpu.usable_bytes,
        host_bytes_per_node=estimate.host.total * job.ranks_per_node,
        tokens_per_step=tokens,
        sent_bytes=sum(one.num_bytes * (1 - 1 / _ring(one, job)[0]) for one in traffic),
        compute_s=compute,
        communication_s=communication,
        step_s=step,
        tokens_per_second=tokens / step,
        step_control_s=tree,  # two at once
        save_control_s=SAVE_EXCHANGES * tree + 2 * ranks * RANK_RECORD,
    )


def _ring(traffic: Traffic, job: Job) -> tuple[int, int, int]:
    """Ranks of the ring, the nodes that it goes through, and how many such rings a node has."""
    replicas, shards = mesh_shape(job.config.infra, job.world_size, job.ranks_per_node)
    in_node = job.ranks_per_node
    if traffic.among == "all":
        return job.world_size, job.nodes, 1
    if traffic.among == "shards":
        return shards, ceil(shards / in_node), 1
    return replicas, job.nodes if shards < in_node else replicas, min(shards, in_node)


def _seconds(traffic: Traffic, job: Job, machines: Machines) -> float:
    """The time of these collectives, one behind the other, by the slowest link of their ring."""
    ranks, nodes, rings = _ring(traffic, job)
    bandwidth = min(machines.link, machines.network / rings) if nodes > 1 else machines.link
    between = min(nodes, ranks - 1) if nodes > 1 else 0
    latency = between * NETWORK_HOP + (ranks - 1 - between) * LINK_HOP
    return traffic.num_bytes * (1 - 1 / ranks) / bandwidth + traffic.calls * latency


def describe_scale(plan: dict[str, Any]) -> str:
    """The rows as a table, and below it what was assumed."""
    titles = (
        "GPUs", "nodes", "stage", "GiB/GPU", "GiB/host", "tokens/step", "GB sent", "arithmetic s", "communication s",
        "step s", "tokens/s", "control ms/step", "ms/save",
    )  # fmt: skip
    lines = [list(titles)]
    notes = []
    for row in plan["rows"]:
        place = [f"{row['gpus']:,}", f"{row['nodes']:,}", row["sharding_stage"]]
        if row["problem"]:
            lines.append(place + ["-"] * (len(titles) - len(place)))
            notes.append(f"{row['gpus']} GPUs, {row['sharding_stage']}: {row['problem']}")
            continue
        memory = f"{row['gpu_bytes'] / GIB:.1f}{'' if row['fits'] else '!'}"
        numbers = (
            f"{row['host_bytes_per_node'] / GIB:.0f}", f"{row['tokens_per_step']:,}", f"{row['sent_bytes'] / 1e9:.1f}",
            f"{row['compute_s']:.2f}", f"{row['communication_s']:.2f}", f"{row['step_s']:.2f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['step_control_s'] * 1e3:.1f}",
            f"{row['save_control_s'] * 1e3:.0f}",
        )  # fmt: skip
        lines.append([*place, memory, *numbers])
    if any(row["fits"] is False for row in plan["rows"]):
        notes.append("!: more than the GPU has (`ds-encdec estimate-memory` says what would fit)")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(
        [*table, *dict.fromkeys(notes), "Assumed, not measured:", *map("- {}".format, plan["assumptions"])]
    )
