"""An answer about memory as text: a table for each engine, the configured run in words, and what to choose."""

from __future__ import annotations

from collections.abc import Sequence

from ds_encdec.memory.answer import ENGINES, LARGEST_WORLD, Answer, EngineTable
from ds_encdec.memory.breakdown import CATEGORIES, Estimate
from ds_encdec.memory.gpus import GIB
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import (
    HEADROOM,
    Recommendation,
    Variant,
    as_overrides,
    fits,
    offload_of,
    smallest_variants,
)
from ds_encdec.memory.zero_settings import zero_settings

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
_HEADER = (
    "",
    "stage",
    "offload",
    "recompute",
    "weights",
    "master",
    "gradients",
    "optimizer",
    "activ.",
    "logits",
    "commun.",
    "framew.",
    "peak",
    "host",
    "fits",
)
_WORDS_COLUMNS = 4
_FLOAT32 = 4
"""Bytes."""
_HELP = {
    "weights": "a higher stage, more GPUs or a smaller model",
    "master_weights": "a higher stage, infra.offload_optimizer=cpu or more GPUs",
    "gradients": "infra.sharding_stage=zero2 or zero3, and with FSDP2 infra.fsdp_reduce_every_micro_batch=true",
    "optimizer": "a higher stage, infra.offload_optimizer=cpu or more GPUs",
    "activations": "smaller data.max_encoder_length and data.max_decoder_length, or training.activation_offload=true",
    "logits": "a smaller model.loss_chunk_tokens, and a smaller training.per_device_eval_batch_size",
    "communication": "smaller buckets in infra.deepspeed_extra",
    "framework": "a larger GPU",
}


def gib(number: float) -> str:
    """Bytes in GiB with one decimal."""
    return f"{number / GIB:,.1f}"


def describe(found: Answer) -> str:
    """The whole answer."""
    parts = [_about(found)]
    parts += [_describe_table(found, table) for table in found.tables]
    parts.append(_configured(found))
    parts += [_recommended(found, table) for table in found.tables]
    if found.tables[0].recommendation is None:
        parts.append(_what_would_help(found))
    return "\n\n".join(parts)


def _about(found: Answer) -> str:
    job, gpu = found.job, found.gpu
    nodes = job.world_size // job.ranks_per_node
    name = job.config.model.model_name_or_path or "model.architecture"
    training = f"{job.parameters:,} parameters"
    if job.trainable_parameters != job.parameters:
        training += f", of which {job.trainable_parameters:,} are trained"
    lines = [
        f"{name}: {training}",
        f"{job.world_size} x {gpu.name} ({gib(gpu.usable_bytes)} GiB usable each) on {nodes} node(s); a micro-batch of "
        f"{job.config.training.micro_batch_size} has {job.encoder_tokens:,} + {job.decoder_tokens:,} tokens, "
        f"{job.gradient_accumulation_steps} make a step of a rank.",
        f"GiB per GPU at the worst moment of a step; host: GiB per node. It fits where {HEADROOM:.0%} of the GPU stay "
        "free. * is the configured run.",
    ]
    if not gpu.has_bf16 and job.config.training.bf16:
        lines.append(f"A {gpu.name} has no bfloat16: torch emulates it slowly; train with training.bf16=false.")
    return "\n".join(lines)


def _describe_table(found: Answer, table: EngineTable) -> str:
    cells = [_dashes(row) if row.estimate is None else _cells(found, row, row.estimate) for row in table.rows]
    rows = [_HEADER, *dict.fromkeys(cells)]  # one line for what does not exist, however much it recomputes
    reasons = dict.fromkeys(f"- {row.reason}" for row in table.rows if row.estimate is None)
    return "\n".join([ENGINES[table.engine], _aligned(rows), *reasons])


def _cells(found: Answer, row: Variant, estimated: Estimate) -> tuple[str, ...]:
    return (
        "" if row.overrides else "*",
        row.job.config.infra.sharding_stage,
        _offload_name(row.job),
        row.job.config.training.activation_checkpointing,
        *(gib(getattr(estimated.peak, name)) for name in CATEGORIES),
        gib(estimated.peak.total),
        gib(estimated.host.total * row.job.ranks_per_node),
        "yes" if found.fits(estimated) else "no",
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
    estimated, job = found.estimate, found.job
    verdict = "fits" if found.fits(estimated) else "does not fit"
    return (
        f"The configured run ({ENGINES[job.engine]}, {_setting(job)}) {verdict}: {gib(estimated.peak.total)} of "
        f"{gib(found.gpu.usable_bytes)} GiB per GPU at its worst moment, the {estimated.moment}; most of it is "
        f"{_WORDS[_largest(estimated)]}. {_host(found, estimated)}"
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
    host = estimated.host.scaled(found.job.ranks_per_node)
    text = (
        f"Each host of {found.job.ranks_per_node} rank(s) holds {gib(host.total)} GiB: offloaded states "
        f"{gib(host.states)}, parameters {gib(host.parameters)}, activations {gib(host.activations)}, copies for saves "
        f"{gib(host.save)}, processes {gib(host.process)}"
    )
    return f"{text}; it has {gib(found.host_bytes)}." if found.host_bytes is not None else f"{text}."


def _recommended(found: Answer, table: EngineTable) -> str:
    best, name = table.recommendation, ENGINES[table.engine]
    if best is None:
        return f"{name}: nothing fits."
    arguments = as_overrides(best.overrides) or "the configuration as it is"
    return f"Recommended with {name}: {arguments}\n  {_why(found, best)}"


def _why(found: Answer, best: Recommendation) -> str:
    needs = (
        f"{gib(best.estimate.peak.total)} GiB per GPU, {gib(best.estimate.host.total * best.job.ranks_per_node)} GiB "
        "per host"
    )
    batch, steps = best.job.config.training.micro_batch_size, best.job.gradient_accumulation_steps
    before = (found.job.config.training.micro_batch_size, found.job.gradient_accumulation_steps)
    bf16 = ""
    if best.job.engine == "deepspeed" and steps > 1 and zero_settings(best.job).accumulation < _FLOAT32:
        bf16 = f"\n  It adds the gradients of its {steps} micro-batches up in 16 bits; zero2 and zero3 use float32."
    changed = "" if (batch, steps) == before else f" instead of {before[0]} and {before[1]}"
    return (
        f"{needs}; micro-batch {batch} and accumulation {steps}{changed}: {batch * steps * best.job.world_size:,} "
        f"sequences a step, as configured.{bf16}"
    )


def _what_would_help(found: Answer) -> str:
    smallest = [row.estimate for row in smallest_variants(found.job) if row.estimate is not None]
    lines = [_smallest(found, min(smallest, key=lambda estimated: estimated.peak.total))] if smallest else []
    lines += [
        f"This fits: {as_overrides(near.overrides)} ({gib(near.estimate.peak.total)} GiB)" for near in found.nearest
    ]
    if found.gpus_needed is None:
        lines.append(f"More of these GPUs alone do not help (up to {LARGEST_WORLD:,}).")
    else:
        lines.append(f"On {found.gpus_needed} of these GPUs a setting of the table fits.")
    return "\n".join(lines)


def _smallest(found: Answer, least: Estimate) -> str:
    least_of_all = (
        f"Even a micro-batch of 1 with everything sharded, recomputed and offloaded needs {gib(least.peak.total)} GiB "
        "per GPU"
    )
    if fits(least, found.gpu.usable_bytes):
        host = gib(least.host.total * found.job.ranks_per_node)
        return f"{least_of_all}, which it has, and {host} GiB per host, which it has not."
    largest = _largest(least)
    return (
        f"{least_of_all}. Most of it is {_WORDS[largest]} ({gib(getattr(least.peak, largest))} GiB); what helps: "
        f"{_HELP[largest]}."
    )
