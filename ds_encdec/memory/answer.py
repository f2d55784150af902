"""The answer of `estimate_memory`, as text and as JSON: a table for each engine, the configured run, what to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ds_encdec.engines import ENGINES
from ds_encdec.memory.breakdown import CATEGORIES, in_gib
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.job import Job
from ds_encdec.memory.question import Question
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Change,
    Variant,
    as_overrides,
    changed,
    has_other_name,
    nearest,
    offload_of,
    recommend,
    smallest_variants,
    variant,
    variants,
)

if TYPE_CHECKING:
    from ds_encdec.memory.trace import TracedMemory

LARGEST_WORLD = 4096
"""GPUs up to which a number that would fit is looked for."""
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
_HOST_WORDS = ("offloaded states", "parameters", "activations", "copies for saves", "processes")
_HEADER = (
    *(" ", "stage", "offload", "recompute"),
    *("weights", "master", "gradients", "optimizer", "activ.", "logits", "commun.", "framew.", "peak", "host", "fits"),
)
_LARGE_HOST_BYTES = 2 * 2**40
"""More than this few machines have."""
_HELP = {
    "activations": "smaller data.max_encoder_length and data.max_decoder_length, or training.activation_offload=true",
    "logits": "a smaller model or vocabulary: it is mostly the float32 gradient of the head, whatever the chunks' size",
    "communication": "smaller buckets in infra.deepspeed_extra, or a smaller model",
    "framework": "a larger GPU",
}
"""Help for a setting that shards, offloads and recomputes everything already; else: more GPUs, or a smaller model."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The settings of one engine. `overrides` of all its rows are relative to the configured run.

    `job`: the configured one under this engine. Where nothing of the configured engine's is recommended: `nearest`,
    changes to the run that fit, and `more_gpus`, a setting that fits on as many GPUs as its job says, a power of two
    times those asked about (None: not up to `LARGEST_WORLD`).
    """

    job: Job
    rows: Sequence[Variant]
    recommendation: Variant | None
    nearest: Sequence[Variant] = ()
    more_gpus: Variant | None = None


def answer(asked: Question) -> list[EngineTable]:
    """The tables of all engines, the configured one first."""
    return [_table(asked, engine) for engine in sorted(ENGINES, key=lambda name: name != asked.job.engine)]


def _table(asked: Question, engine: str) -> EngineTable:
    needed: Change = {}  # changes without which the job does not run so on this GPU, the same for all settings
    if engine != asked.job.engine:
        needed["infra.distributed_type"] = engine
        instead = ENGINES[engine].instead.items()
        needed |= {name: taken for name, (refused, taken) in instead if attrgetter(name)(asked.job.config) == refused}
    if not asked.runs(asked.job):
        needed |= {"training.bf16": False, "training.fp16": True}  # FSDP2 and zero0 refuse fp16
    base = changed(asked.job, needed)

    def of_configured(row: Variant) -> Variant:
        return replace(row, overrides=needed | row.overrides)

    best = recommend(base, asked.fits)
    table = EngineTable(base, [*map(of_configured, variants(base))], best and of_configured(best))
    if best is not None or engine != asked.job.engine:
        return table
    worlds = [base.world_size << doublings for doublings in range(1, LARGEST_WORLD.bit_length())]
    larger = (
        row for size in worlds if size <= LARGEST_WORLD for row in smallest_variants(replace(base, world_size=size))
    )
    more = next(map(of_configured, filter(asked.fits, larger)), None)
    return replace(table, nearest=[*map(of_configured, nearest(base, asked.fits))], more_gpus=more)


def _nodes(job: Job) -> int:
    return job.world_size // job.ranks_per_node


# -------------------------------------------------------------------------------------------------------------- JSON


def as_json(asked: Question, tables: Sequence[EngineTable], traced: TracedMemory | None) -> dict[str, Any]:
    """The answer as JSON; docs/estimate-memory.md lists the keys. Sizes are bytes."""
    job, more = asked.job, tables[0].more_gpus
    found: dict[str, Any] = {
        "inputs": {
            "model": job.config.model.model_name_or_path,
            "sizes": asdict(job.sizes),
            "gpus": job.world_size,
            "nodes": _nodes(job),
            "gpu": asked.gpu.name,
            "gpu_usable_bytes": asked.gpu.usable_bytes,
            "headroom": HEADROOM,
            "host_headroom": HOST_HEADROOM,
            "host_memory_bytes": asked.host_bytes,
            "engine": job.engine,
            **_batch(job),
            "loss_chunk_tokens": job.config.model.loss_chunk_tokens,
        },
        "parameters": {"total": job.parameters, "trainable": job.trainable_parameters},
        "configured": _row(asked, variant(job, {})),
        "engines": {
            table.job.engine: {
                "rows": [_row(asked, row) for row in table.rows],
                "recommendation": table.recommendation and _row(asked, table.recommendation),
                "nearest": [_row(asked, near) for near in table.nearest],
            }
            for table in tables
        },
        "more_gpus": more and {"gpus": more.job.world_size, "nodes": _nodes(more.job), **_row(asked, more)},
        "remarks": asked.remarks,
    }
    if traced is not None:
        seen = {name: held if name in traced.categories else None for name, held in asdict(traced.peak).items()}
        found["trace"] = {
            "bytes": {**seen, "peak": traced.peak.total},
            "moment": traced.moment,
            "seconds": traced.seconds,
            "remark": traced.remark,
        }
    return found


def _row(asked: Question, row: Variant) -> dict[str, Any]:
    infra = row.job.config.infra
    setting: dict[str, Any] = {
        "overrides": row.overrides,
        "configured": not row.overrides,
        "sharding_stage": infra.sharding_stage,
        "offload": offload_of(row.job),
        "activation_checkpointing": row.job.config.training.activation_checkpointing,
        **_batch(row.job),
        "exists": not row.reason,
        "reason": row.reason,
    }
    if row.reason:
        return setting
    host = row.estimate.host.scaled(row.job.ranks_per_node)
    short_of = asked.short_of(row) if asked.runs(row.job) else "does not run"
    return setting | {
        "bytes": {**asdict(row.estimate.peak), "peak": row.estimate.peak.total},
        "moment": row.estimate.moment,
        "host_bytes_per_node": {**asdict(host), "total": host.total},
        "fits": short_of is None,
        "short_of": short_of,
    }


def _batch(job: Job) -> dict[str, int]:
    return {
        "per_device_train_batch_size": job.config.training.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "encoder_tokens": job.encoder_tokens,
        "decoder_tokens": job.decoder_tokens,
    }


# -------------------------------------------------------------------------------------------------------------- text


def describe(asked: Question, tables: Sequence[EngineTable], traced: TracedMemory | None) -> str:
    """The answer as text."""
    parts = (
        _about(asked),
        *(_describe_table(asked, table) for table in tables),
        _configured(asked),
        *(_recommended(asked, table) for table in tables),
        *asked.remarks,
        *([] if traced is None else [_beside(asked, traced), traced.remark]),
    )
    return "\n\n".join(filter(None, parts))


def _about(asked: Question) -> str:
    job, gpu = asked.job, asked.gpu
    trained = (
        f", of which {job.trainable_parameters:,} are trained" if job.trainable_parameters != job.parameters else ""
    )
    host = "Host memory is not checked: pass --host-memory."
    if asked.host_bytes is not None:
        host = f"A host has {in_gib(asked.host_bytes)} GiB, of which {HOST_HEADROOM:.0%} must stay free."
    return (
        f"{job.config.model.model_name_or_path or 'model.architecture'}: {job.parameters:,} parameters"
        f"{trained}\n"
        f"{job.world_size} x {gpu.name} ({in_gib(gpu.usable_bytes)} GiB usable each) on {_nodes(job)} node(s)\n"
        f"A micro-batch of {job.config.training.micro_batch_size} has {job.encoder_tokens:,} encoder and "
        f"{job.decoder_tokens:,} decoder tokens; {job.gradient_accumulation_steps} of them make a step of a rank.\n"
        "GiB per GPU at the worst moment of a step; host: GiB per node. * is the configured run.\n"
        f'"fits" means {HEADROOM:.0%} of GPU memory stays free. {host}\n'
        "GPU figures are computed; none has been compared with a GPU run yet."
    )


def _describe_table(asked: Question, table: EngineTable) -> str:
    shown = [row for row in table.rows if not (row.overrides and has_other_name(row.job))]
    # One line for what does not exist, however much it recomputes.
    rows = list(dict.fromkeys([_HEADER, *(_cells(asked, row) for row in shown)]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = "<<<<" + ">" * (len(widths) - 4)  # words, then figures
    lines = [
        " ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]
    notes = [f"- {reason}" for reason in dict.fromkeys(row.reason for row in table.rows) if reason]
    if len(shown) < len(table.rows):  # FSDP2
        notes.append("- zero1 is zero2 here, and parameters are offloaded with the optimizer: each is shown once")
    return "\n".join([ENGINES[table.job.engine].title, *lines, *notes])


def _cells(asked: Question, row: Variant) -> tuple[str, ...]:
    held, config = _row(asked, row), row.job.config
    setting = ("" if row.overrides else "*", config.infra.sharding_stage, _offload_name(row.job))
    if row.reason:
        return setting + ("-",) * (len(_HEADER) - len(setting))
    peak, host = row.estimate.peak, row.estimate.host.scaled(row.job.ranks_per_node)
    figures = [*(getattr(peak, name) for name in CATEGORIES), peak.total, host.total]
    verdict = "yes" if held["fits"] else f"no: {held['short_of']}"
    return (*setting, config.training.activation_checkpointing, *map(in_gib, figures), verdict)


def _offload_name(job: Job) -> str:
    infra = job.config.infra
    return offload_of(job) or f"{infra.offload_optimizer}+{infra.offload_params}"


def _configured(asked: Question) -> str:
    job, row = asked.job, variant(asked.job, {})
    held, short_of = row.estimate, asked.short_of(row)
    verdict = f"does not fit (short of: {short_of})" if short_of else "fits"
    if not asked.runs(job):
        verdict = f"does not run on a {asked.gpu.name}, which has no bfloat16"
    on_host = held.host.scaled(job.ranks_per_node)
    parts = (f"{name} {in_gib(part)}" for name, part in zip(_HOST_WORDS, astuple(on_host), strict=True) if part)
    return (
        f"The configured run ({ENGINES[job.engine].title}, {job.config.infra.sharding_stage}, offload "
        f"{_offload_name(job)}, checkpointing {job.config.training.activation_checkpointing}) {verdict}:\n"
        f"  {in_gib(held.peak.total)} of {in_gib(asked.gpu.usable_bytes)} GiB per GPU at its worst moment, the "
        f"{held.moment}; most of it is {_WORDS[_largest(row)]}.\n"
        f"  Each host of {job.ranks_per_node} rank(s) holds {in_gib(on_host.total)} GiB: {', '.join(parts)}."
        f"{_unjudged(asked, row)}"
    )


def _largest(row: Variant) -> str:
    return max(CATEGORIES, key=lambda name: getattr(row.estimate.peak, name))


def _unjudged(asked: Question, row: Variant) -> str:
    """A warning of a host that few have, where --host-memory does not say what it has."""
    unknown = asked.host_bytes is None and row.node_bytes > _LARGE_HOST_BYTES
    return " Few machines have that: give --host-memory." if unknown else ""


def _recommended(asked: Question, table: EngineTable) -> str:
    best, name = table.recommendation, ENGINES[table.job.engine].title
    if all(row.reason for row in table.rows):
        return f"{name} cannot run this: {table.rows[0].reason}."
    if best is None:
        return "\n".join([f"{name}: nothing fits.", *_what_would_help(asked, table)])
    batch, steps = best.job.config.training.micro_batch_size, best.job.gradient_accumulation_steps
    before = (asked.job.config.training.micro_batch_size, asked.job.gradient_accumulation_steps)
    was = "" if (batch, steps) == before else f" instead of {before[0]} and {before[1]}"
    in_16_bits = f"\n  It adds the gradients of its {steps} micro-batches up in 16 bits."
    return (
        f"Recommended with {name}: {as_overrides(best.overrides) or 'the configuration as it is'}\n"
        f"  {in_gib(best.estimate.peak.total)} GiB per GPU, {in_gib(best.node_bytes)} GiB per host."
        f"{_unjudged(asked, best)}\n"
        f"  Micro-batch {batch} and accumulation {steps}{was}: {batch * steps * best.job.world_size:,} sequences a "
        f"step, as configured.{in_16_bits if engine_memory(best.job).sums_in_16_bits else ''}"
    )


def _what_would_help(asked: Question, table: EngineTable) -> list[str]:
    smallest = [row for row in smallest_variants(table.job) if not row.reason]
    lines = [_smallest(asked, smallest)] if smallest else []
    lines += [
        f"This fits: {as_overrides(near.overrides)} ({in_gib(near.estimate.peak.total)} GiB)" for near in table.nearest
    ]
    if (more := table.more_gpus) is not None:
        lines.append(
            f"With more GPUs this fits: --gpus {more.job.world_size} --nodes {_nodes(more.job)} "
            f"{as_overrides(more.overrides)} ({in_gib(more.estimate.peak.total)} GiB)"
        )
    elif table.job.engine == asked.job.engine and not table.nearest:
        lines.append(f"More of these GPUs alone do not help (up to {LARGEST_WORLD:,}).")
    return lines


def _smallest(asked: Question, smallest: Sequence[Variant]) -> str:
    """`smallest`: a micro-batch of 1 with everything sharded and recomputed, with each offload."""
    if on_host := [row.node_bytes for row in smallest if asked.short_of(row) != "GPU"]:
        return (
            "The GPUs have room for a micro-batch of 1 with everything sharded and recomputed, but then a host needs "
            f"{in_gib(min(on_host))} GiB at least, more than it has. training.async_save=false, fewer "
            "data.preprocessing_num_workers, and fewer GPUs per host (--nodes) need less."
        )
    least = min(smallest, key=lambda row: row.estimate.peak.total)
    largest = _largest(least)
    return (
        "Even a micro-batch of 1 with everything sharded, recomputed and offloaded needs "
        f"{in_gib(least.estimate.peak.total)} GiB per GPU. Most of it is {_WORDS[largest]} "
        f"({in_gib(getattr(least.estimate.peak, largest))} GiB); what helps: "
        f"{_HELP.get(largest, 'more GPUs, or a smaller model')}."
    )


def _beside(asked: Question, traced: TracedMemory) -> str:
    """A traced peak beside the formula's, each at its own worst moment; a dash for a category that is not traced."""
    formula = variant(asked.job, {}).estimate
    rows = [
        (name, held, in_gib(getattr(traced.peak, name)) if name in traced.categories else "-")
        for name, held in asdict(formula.peak).items()
    ]
    comparable = sum(getattr(formula.peak, name) for name in traced.categories)
    rows.append(("traced ones", comparable, in_gib(traced.peak.total)))
    return "\n".join(
        [
            f"The configured run traced; GiB per GPU (formula: {formula.moment}; trace: {traced.moment})",
            f"{'':16}{'formula':>10}{'traced':>10}",
            *(f"{name:16}{in_gib(held):>10}{seen:>10}" for name, held, seen in rows),
        ]
    )
