"""An answer about memory as text: a table for each engine, the configured run in words, and what to choose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ds_encdec.engines import ENGINES
from ds_encdec.memory.answer import LARGEST_WORLD, Answer, EngineTable, runs_on
from ds_encdec.memory.breakdown import CATEGORIES, Estimate, in_gib
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Recommendation,
    Room,
    Variant,
    adds_up_in_16_bits,
    as_overrides,
    has_other_name,
    offload_of,
    smallest_variants,
)

_WORDS = {
    "weights": "weights",
    "master_weights": "master weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's moments",
    "activations": "activations",
    "logits": "logits",
    "communication": "communication buffers and gathered parameters",
    "framework": "the CUDA context, NCCL and fragmentation",
}
_FIGURES = "weights master gradients optimizer activ. logits commun. framew. peak host fits"
_HEADER = (" ", "stage", "offload", "recompute", *_FIGURES.split())
_WORDS_COLUMNS = 4
_LARGE_HOST_BYTES = 2 * 2**40
"""More than this few machines have."""
_HELP = {
    "activations": "smaller data.max_encoder_length and data.max_decoder_length, or training.activation_offload=true",
    "logits": "a smaller model or vocabulary: it is mostly the float32 gradient of the head, whatever the chunks' size",
    "communication": "smaller buckets in infra.deepspeed_extra, or a smaller model",
    "framework": "a larger GPU",
}
"""Help for a setting that shards, offloads and recomputes everything already; else: more GPUs, or a smaller model."""


def describe(found: Answer) -> str:
    """The whole answer."""
    parts = [_about(found), *map(partial(_describe_table, found), found.tables), _configured(found)]
    parts += [_recommended(found, table) for table in found.tables]
    return "\n\n".join(parts)


def _about(found: Answer) -> str:
    job, gpu = found.job, found.gpu
    nodes = job.world_size // job.ranks_per_node
    name = job.config.model.model_name_or_path or "model.architecture"
    training = f"{job.parameters:,} parameters"
    if job.trainable_parameters != job.parameters:
        training += f", of which {job.trainable_parameters:,} are trained"
    host = "Host memory is not checked: pass --host-memory."
    if found.host_bytes is not None:
        host = f"A host has {in_gib(found.host_bytes)} GiB, of which {HOST_HEADROOM:.0%} must stay free."
    return "\n".join(
        [
            f"{name}: {training}",
            f"{job.world_size} x {gpu.name} ({in_gib(gpu.usable_bytes)} GiB usable each) on {nodes} node(s)",
            f"A micro-batch of {job.config.training.micro_batch_size} has {job.encoder_tokens:,} encoder and "
            f"{job.decoder_tokens:,} decoder tokens; {job.gradient_accumulation_steps} of them make a step of a rank.",
            "GiB per GPU at the worst moment of a step; host: GiB per node. * is the configured run.",
            f'"fits" means {HEADROOM:.0%} of GPU memory stays free. {host}',
            "GPU figures are computed; none has been compared with a GPU run yet.",
        ]
    )


def _describe_table(found: Answer, table: EngineTable) -> str:
    shown = [row for row in table.rows if not (row.overrides and has_other_name(row.job))]
    cells = [_dashes(row) if row.estimate is None else _cells(found, row, row.estimate) for row in shown]
    rows = [_HEADER, *dict.fromkeys(cells)]  # one line for what does not exist, however much it recomputes
    notes = [f"- {reason}" for reason in dict.fromkeys(row.reason for row in table.rows if row.estimate is None)]
    if len(shown) < len(table.rows):  # FSDP2
        notes.append("- zero1 is zero2 here, and parameters are offloaded with the optimizer: each is shown once")
    return "\n".join([ENGINES[table.engine].title, _aligned(rows), *notes])


def _cells(found: Answer, row: Variant, estimated: Estimate) -> tuple[str, ...]:
    return (
        "" if row.overrides else "*",
        row.job.config.infra.sharding_stage,
        _offload_name(row.job),
        row.job.config.training.activation_checkpointing,
        *(in_gib(getattr(estimated.peak, name)) for name in CATEGORIES),
        in_gib(estimated.peak.total),
        in_gib(estimated.host.total * row.job.ranks_per_node),
        "yes" if found.fits(row) else f"no: {found.short_of(row)}",
    )


def _dashes(row: Variant) -> tuple[str, ...]:
    setting = ("", row.job.config.infra.sharding_stage, _offload_name(row.job))
    return setting + ("-",) * (len(_HEADER) - len(setting))


def _offload_name(job: Job) -> str:
    infra = job.config.infra
    return offload_of(job) or f"{infra.offload_optimizer}+{infra.offload_params}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " ".join(
            cell.ljust(width) if column < _WORDS_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _configured(found: Answer) -> str:
    row, job = found.configured, found.job
    estimated = row.estimate
    verdict = "fits" if found.fits(row) else f"does not fit (short of: {found.short_of(row)})"
    if not runs_on(found.gpu, job):
        verdict = f"does not run on a {found.gpu.name}, which has no bfloat16"
    return (
        f"The configured run ({ENGINES[job.engine].title}, {_setting(job)}) {verdict}:\n"
        f"  {in_gib(estimated.peak.total)} of {in_gib(found.gpu.usable_bytes)} GiB per GPU at its worst moment, the "
        f"{estimated.moment}; most of it is {_WORDS[_largest(estimated)]}.\n"
        f"  {_host(found, estimated)}"
    )


def _setting(job: Job) -> str:
    infra = job.config.infra
    return (
        f"{infra.sharding_stage}, offload {_offload_name(job)}, checkpointing "
        f"{job.config.training.activation_checkpointing}"
    )


def _largest(estimated: Estimate) -> str:
    return max(CATEGORIES, key=lambda name: getattr(estimated.peak, name))


def _host(found: Answer, estimated: Estimate) -> str:
    ranks, host = found.job.ranks_per_node, estimated.host.scaled(found.job.ranks_per_node)
    parts = {
        "offloaded states": host.states,
        "parameters": host.parameters,
        "activations": host.activations,
        "copies for saves": host.save,
        "processes": host.process,
    }
    named = ", ".join(f"{name} {in_gib(held)}" for name, held in parts.items() if held)
    return f"Each host of {ranks} rank(s) holds {in_gib(host.total)} GiB: {named}.{_unjudged(found, host.total)}"


def _unjudged(found: Answer, host_bytes: float) -> str:
    """A warning of a host that few have, where --host-memory does not say what it has."""
    if found.host_bytes is not None or host_bytes <= _LARGE_HOST_BYTES:
        return ""
    return " Few machines have that: give --host-memory."


def _recommended(found: Answer, table: EngineTable) -> str:
    best, name = table.recommendation, ENGINES[table.engine].title
    if best is not None:
        arguments = as_overrides(best.overrides) or "the configuration as it is"
        return f"Recommended with {name}: {arguments}\n  {_why(found, best)}"
    if not table.exists:
        return f"{name} cannot run this: {table.rows[0].reason}."
    return "\n".join([f"{name}: nothing fits.", *_what_would_help(found, table)])


def _why(found: Answer, best: Recommendation) -> str:
    host = best.estimate.host.total * best.job.ranks_per_node
    batch, steps = best.job.config.training.micro_batch_size, best.job.gradient_accumulation_steps
    before = (found.job.config.training.micro_batch_size, found.job.gradient_accumulation_steps)
    bf16 = ""
    if adds_up_in_16_bits(best.job):
        bf16 = f"\n  It adds the gradients of its {steps} micro-batches up in 16 bits."
    was = "" if (batch, steps) == before else f" instead of {before[0]} and {before[1]}"
    return (
        f"{in_gib(best.estimate.peak.total)} GiB per GPU, {in_gib(host)} GiB per host.{_unjudged(found, host)}\n"
        f"  Micro-batch {batch} and accumulation {steps}{was}: {batch * steps * best.job.world_size:,} sequences a "
        f"step, as configured.{bf16}"
    )


def _what_would_help(found: Answer, table: EngineTable) -> list[str]:
    smallest = [row.estimate for row in smallest_variants(table.job) if row.estimate is not None]
    lines = [_smallest(found, smallest)] if smallest else []
    lines += [
        f"This fits: {as_overrides(near.overrides)} ({in_gib(near.estimate.peak.total)} GiB)" for near in table.nearest
    ]
    if table.engine != found.job.engine:
        return lines
    if (more := found.more_gpus) is not None:
        nodes = more.job.world_size // more.job.ranks_per_node
        lines.append(
            f"With more GPUs this fits: --gpus {more.job.world_size} --nodes {nodes} {as_overrides(more.overrides)} "
            f"({in_gib(more.estimate.peak.total)} GiB)"
        )
    elif not table.nearest:
        lines.append(f"More of these GPUs alone do not help (up to {LARGEST_WORLD:,}).")
    return lines


def _smallest(found: Answer, smallest: Sequence[Estimate]) -> str:
    """`smallest`: a micro-batch of 1 with everything sharded and recomputed, with each offload."""
    if on_host := [estimated.host.total for estimated in smallest if Room(found.gpu.usable_bytes).fits(estimated)]:
        host = in_gib(min(on_host) * found.job.ranks_per_node)
        return (
            "The GPUs have room for a micro-batch of 1 with everything sharded and recomputed, but then a host needs "
            f"{host} GiB at least, more than it has. training.async_save=false, fewer "
            "data.preprocessing_num_workers, and fewer GPUs per host (--nodes) need less."
        )
    least = min(smallest, key=lambda estimated: estimated.peak.total)
    largest = _largest(least)
    most = in_gib(getattr(least.peak, largest))
    return (
        "Even a micro-batch of 1 with everything sharded, recomputed and offloaded needs "
        f"{in_gib(least.peak.total)} GiB per GPU. Most of it is {_WORDS[largest]} ({most} GiB); what helps: "
        f"{_HELP.get(largest, 'more GPUs, or a smaller model')}."
    )
