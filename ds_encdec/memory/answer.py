"""The answer of `estimate_memory`, printed or as JSON: a table per engine, the configured run, and a recommendation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ds_encdec.base.quantities import count, in_gib
from ds_encdec.memory import variants
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.job import Job
from ds_encdec.memory.question import EstimateRequest
from ds_encdec.registry.engines import ENGINES

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
# Columns of the table, each with the categories that it sums.
_COLUMNS: Mapping[str, Sequence[str]] = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optimizer": ("master_weights", "optimizer"),
    "activ.": ("activations",),
    "logits": ("logits",),
    "other": ("communication", "framework"),
}
COLUMNS = 100  # Width of the table and of paragraphs. A narrower terminal breaks lines, but cuts no figure


@dataclass(frozen=True, slots=True)
class EngineTable:
    """One engine's settings. `job` is the configured run under it; `overrides` are relative to that run."""

    job: Job
    rows: Sequence[variants.Variant]
    recommendation: variants.Variant | None
    nearest: Sequence[variants.Variant]


def estimate_tables(request: EstimateRequest) -> list[EngineTable]:
    """Return the tables of all engines, the configured one first."""
    tables, job = [], request.job
    for engine in sorted(ENGINES, key=lambda name: name != job.engine):
        needed: variants.Change = {}  # changes that every setting needs to run on this GPU
        if engine != job.engine:
            instead = ENGINES[engine].instead.items()
            taken = {name: value for name, (refused, value) in instead if attrgetter(name)(job.config) == refused}
            needed = {"infra.distributed_type": engine, **taken}
        if not request.runs(job):
            needed |= {"training.bf16": False, "training.fp16": True}  # FSDP2 and zero0 refuse fp16
        base = variants.changed(job, needed)
        best = variants.recommend(base, request.fits)
        near = variants.nearest(base, request.fits) if best is None and engine == job.engine else []
        rows, recommended, near = (
            [replace(row, overrides=needed | row.overrides) for row in some]
            for some in (variants.variants(base), [best] if best else [], near)
        )
        tables.append(EngineTable(base, rows, next(iter(recommended), None), near))
    return tables


def as_json(request: EstimateRequest, tables: Sequence[EngineTable]) -> dict[str, Any]:
    """Return the answer as JSON, sizes in bytes; docs/estimate-memory.md lists the keys."""
    job, on_gpu = request.job, request.job.device == "cuda"
    return {
        "inputs": {
            "model": job.config.model.model_name_or_path,
            "sizes": asdict(job.sizes),
            "gpus": job.world_size,
            "nodes": job.nodes,
            "device": job.device,
            "gpu": request.gpu.name if on_gpu else None,
            "gpu_usable_bytes": request.gpu.usable_bytes if on_gpu else None,
            "headroom": variants.HEADROOM,
            "host_headroom": variants.HOST_HEADROOM,
            "host_memory_bytes": request.host_bytes,
            "engine": job.engine,
            **_batch(job),
            "loss_chunk_tokens": job.config.model.loss_chunk_tokens,
        },
        "parameters": {"total": job.parameters, "trainable": job.trainable_parameters},
        "configured": _row(request, variants.variant(job, {})),
        "engines": {
            table.job.engine: {
                "rows": [_row(request, row) for row in table.rows],
                "recommendation": table.recommendation and _row(request, table.recommendation),
                "nearest": [_row(request, near) for near in table.nearest],
            }
            for table in tables
        },
        "remarks": request.remarks,
    }


def _row(request: EstimateRequest, row: variants.Variant) -> dict[str, Any]:
    setting: dict[str, Any] = {
        "overrides": row.overrides,
        "configured": not row.overrides,
        "sharding_stage": row.job.config.infra.sharding_stage,
        "offload": variants.offload_of(row.job),
        "activation_checkpointing": row.job.config.training.activation_checkpointing,
        **_batch(row.job),
        "exists": not row.reason,
        "reason": row.reason,
    }
    if row.reason:
        return setting
    host, short_of = row.estimate.host.scaled(row.job.ranks_per_node), _short_of(request, row)
    return setting | {
        "bytes": {**row.estimate.peak._asdict(), "peak": row.estimate.peak.total},
        "moment": row.estimate.moment,
        "host_bytes_per_node": {**host._asdict(), "total": host.total},
        "fits": short_of is None,
        "short_of": short_of,
    }


def _short_of(request: EstimateRequest, row: variants.Variant) -> str | None:
    return request.short_of(row) if request.runs(row.job) else "does not run"


def _batch(job: Job) -> dict[str, int]:
    return {
        "per_device_train_batch_size": job.config.training.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "encoder_tokens": job.encoder_tokens,
        "decoder_tokens": job.decoder_tokens,
    }


def show(console: Console, request: EstimateRequest, tables: Sequence[EngineTable], *, everything: bool) -> None:
    """Print the answer. `everything` adds the other engine's table and the settings that do not exist."""
    job, on_cpus, configured = request.job, request.job.device == "cpu", variants.variant(request.job, {})
    tables = [] if on_cpus else tables  # their settings save a GPU's memory
    shown = tables if everything else [table for table in tables[:1] if any(not row.reason for row in table.rows)]
    trained = f", of which {job.trainable_parameters:,} are trained" * (job.trainable_parameters != job.parameters)
    place = "CPU rank" if on_cpus else f"{request.gpu.name} ({in_gib(request.gpu.usable_bytes)} GiB usable each)"
    parts: list[RenderableType] = [
        f"{job.config.model.model_name_or_path or 'from scratch'}: {job.parameters:,} parameters{trained}\n"
        f"{job.world_size} x {place} on {count(job.nodes, 'node')}\n"
        f"A micro-batch of {job.config.training.micro_batch_size} has {job.encoder_tokens:,} encoder and "
        f"{job.decoder_tokens:,} decoder tokens; {job.gradient_accumulation_steps} of them make a step of a rank.",
        _verdict(_configured(request, configured), _short_of(request, configured) is None),
        *(_verdict(_recommended(request, table), table.recommendation is not None) for table in tables),
        *request.remarks,
    ]
    for table in shown:
        reasons = dict.fromkeys(row.reason for row in table.rows if row.reason and everything)
        parts += [
            _drawn(request, table, everything, boxed=console.is_terminal),
            "\n".join(f"- {reason}" for reason in reasons),
        ]
    console.width = max(console.width, COLUMNS)
    for part in filter(None, parts):  # lines that are to be pasted are not broken
        console.print(part, soft_wrap=not isinstance(part, Table), markup=False, highlight=False)
        console.print()
    for line in () if on_cpus else _how_to_read(request, everything):
        console.print(line, width=COLUMNS, markup=False, highlight=False)


def _verdict(text: str, is_good: bool) -> Text:
    answer = text.partition("\n")[0].partition(":")[0]
    return Text.assemble((answer, "bold green" if is_good else "bold red"), text[len(answer) :])


def _drawn(request: EstimateRequest, table: EngineTable, everything: bool, *, boxed: bool) -> Table:
    shown = Table(
        title=f"{ENGINES[table.job.engine].title}, GiB per GPU at its worst moment",
        title_justify="left",
        title_style="bold" if boxed else "",
        box=SIMPLE_HEAD if boxed else None,
        show_edge=False,
        pad_edge=False,
        padding=0 if boxed else (0, 1, 0, 0),
    )
    for name in ("", "stage", "offload", "recompute", *_COLUMNS, "peak", "host", "fits"):
        shown.add_column(name, justify="right" if name in (*_COLUMNS, "peak", "host") else "left", no_wrap=True)
    # One line for a setting that does not exist, whatever it recomputes.
    for *cells, fits in dict.fromkeys(_cells(request, row) for row in table.rows if everything or not row.reason):
        shown.add_row(*cells, Text(fits, "green" if fits == "yes" else "red"), style="bold" if cells[0] else "")
    return shown


def _cells(request: EstimateRequest, row: variants.Variant) -> tuple[str, ...]:
    config, peak, host = row.job.config, row.estimate.peak, row.estimate.host.scaled(row.job.ranks_per_node)
    setting = (
        "" if row.overrides else "*",
        config.infra.sharding_stage,
        _offload_name(row.job).replace("optimizer+params", "both"),
    )
    if row.reason:
        return (*setting, *("-" * (len(_COLUMNS) + 4)))
    figures = [sum(getattr(peak, name) for name in names) for names in _COLUMNS.values()]
    cells, short_of = map(in_gib, (*figures, peak.total, host.total)), _short_of(request, row)
    return (*setting, config.training.activation_checkpointing, *cells, f"no: {short_of}" if short_of else "yes")


def _how_to_read(request: EstimateRequest, everything: bool) -> list[str]:
    return [
        "Each row is at its own worst moment of a step, which may be the optimizer's or an evaluation's.",
        "offload both: the optimizer's states and the parameters.",
        "grads: gradients; optimizer: float32 master weights and Adam's moments; activ.: what the backward pass needs; "
        "other: buckets, gathered parameters, CUDA context, NCCL, fragmentation; host: all ranks of a node.",
        f'* is the configured run. "fits" means {variants.HEADROOM:.0%} of GPU memory stays free.',
        f"A host has {in_gib(request.host_bytes)} GiB, of which {variants.HOST_HEADROOM:.0%} must stay free."
        if request.host_bytes
        else "Host memory is not checked: pass --host-memory.",
        "GPU figures are computed; none has been compared with a GPU run yet.",
        *([] if everything else ["--all shows both engines, and why a setting does not exist."]),
    ]


def _offload_name(job: Job) -> str:
    return variants.offload_of(job) or f"{job.config.infra.offload_optimizer}+{job.config.infra.offload_params}"


def _configured(request: EstimateRequest, row: variants.Variant) -> str:
    job, estimate, short_of = row.job, row.estimate, _short_of(request, row)
    verdict = f"does not fit (short of: {short_of})" if short_of else "fits"
    if not request.runs(job):
        verdict = f"does not run on a {request.gpu.name}, which has no bfloat16"
    run = f"The configured run ({ENGINES[job.engine].title}, {job.config.infra.sharding_stage}"
    recomputes = f"checkpointing {job.config.training.activation_checkpointing})"
    ranks = count(job.ranks_per_node, "rank")
    if job.device == "cpu":
        known = f" of {in_gib(request.host_bytes)}" if request.host_bytes else ""
        return (
            f"{run}, {recomputes} {verdict if known else 'on CPUs'}:\n"
            f"  Each host of {ranks} holds {in_gib(row.node_bytes)}{known} GiB at its worst moment, the "
            f"{estimate.moment}.{'' if known else ' Judge it with --host-memory.'}"
        )
    on_host = estimate.host.scaled(job.ranks_per_node)
    parts = (f"{name} {in_gib(part)}" for name, part in zip(_HOST_WORDS, on_host, strict=True) if part)
    return (
        f"{run}, offload {_offload_name(job)}, {recomputes} {verdict}:\n"
        f"  {in_gib(estimate.peak.total)} of {in_gib(request.gpu.usable_bytes)} GiB per GPU at its worst moment, the "
        f"{estimate.moment}; most of it is {_largest(row)}.\n"
        f"  Each host of {ranks} holds {in_gib(on_host.total)} GiB: {', '.join(parts)}."
    )


def _largest(row: variants.Variant) -> str:
    return _WORDS[max(_WORDS, key=lambda name: getattr(row.estimate.peak, name))]


def _recommended(request: EstimateRequest, table: EngineTable) -> str:
    best, name = table.recommendation, ENGINES[table.job.engine].title
    if all(row.reason for row in table.rows):
        return f"{name} cannot run this: {table.rows[0].reason}."
    if best is None:
        lines = [f"{name}: nothing fits."]
        if smallest := [row for row in variants.smallest_variants(table.job) if not row.reason]:
            least = min(smallest, key=lambda row: row.estimate.peak.total)
            lines.append(
                "Even a micro-batch of 1 with everything sharded, recomputed and offloaded needs "
                f"{in_gib(least.estimate.peak.total)} GiB per GPU, mostly {_largest(least)}, and at least "
                f"{in_gib(min(row.node_bytes for row in smallest))} GiB per host: use more GPUs or a smaller model."
            )
        lines += [
            f"This fits: {variants.as_overrides(near.overrides)} ({in_gib(near.estimate.peak.total)} GiB)"
            for near in table.nearest
        ]
        return "\n".join(lines)
    batch, steps = best.job.config.training.micro_batch_size, best.job.gradient_accumulation_steps
    before = (request.job.config.training.micro_batch_size, request.job.gradient_accumulation_steps)
    was = "" if (batch, steps) == before else f" instead of {before[0]} and {before[1]}"
    in_16_bits = f"\n  It adds the gradients of its {steps} micro-batches up in 16 bits."
    return (
        f"Recommended with {name}:\n"
        f"  {variants.as_overrides(best.overrides) or 'the configuration as it is'}\n"  # a separate line, for pasting
        f"  {in_gib(best.estimate.peak.total)} GiB per GPU, {in_gib(best.node_bytes)} GiB per host.\n"
        f"  Micro-batch {batch} and accumulation {steps}{was}: {batch * steps * best.job.world_size:,} sequences a "
        f"step, as configured.{in_16_bits if engine_memory(best.job).sums_in_16_bits else ''}"
    )
