"""The answer of `estimate_memory` for people: first what they asked, then a table of the other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ds_encdec.engines import ENGINES
from ds_encdec.memory.answer import LARGEST_WORLD, EngineTable
from ds_encdec.memory.breakdown import CATEGORIES, in_gib
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.job import Job
from ds_encdec.memory.question import Question
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Variant,
    as_overrides,
    has_other_name,
    offload_of,
    smallest_variants,
    variant,
)
from ds_encdec.quantities import count

if TYPE_CHECKING:
    from ds_encdec.memory.trace import TracedMemory

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
_COLUMNS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "narrow": {
        "states": ("weights", "master_weights", "gradients", "optimizer"),
        "activ.": ("activations",),
        "logits": ("logits",),
        "other": ("communication", "framework"),
    },
    "wide": {
        "weights": ("weights",),
        "grads": ("gradients",),
        "optimizer": ("master_weights", "optimizer"),
        "activ.": ("activations",),
        "logits": ("logits",),
        "other": ("communication", "framework"),
    },
    "all": {
        "weights": ("weights",),
        "master": ("master_weights",),
        "grads": ("gradients",),
        "moments": ("optimizer",),
        "activ.": ("activations",),
        "logits": ("logits",),
        "comm.": ("communication",),
        "context": ("framework",),
    },
}
"""The columns of a table and what their figures are sums of, by the room that there is."""
_MEANINGS = {
    "states": "weights, gradients, float32 master weights and Adam's moments",
    "grads": "gradients",
    "optimizer": "float32 master weights and Adam's moments",
    "master": "float32 master weights",
    "moments": "Adam's",
    "activ.": "what the backward pass needs",
    "other": "buckets, gathered parameters, CUDA context, NCCL, fragmentation",
    "comm.": "buckets, gathered parameters",
    "context": "CUDA context, NCCL, fragmentation",
    "host": "all ranks of a node",
}
LONGEST_LINE = 100
"""Columns that a paragraph takes."""
_BOTH = "optimizer+params"
_LARGE_HOST_BYTES = 2 * 2**40
"""More than this few machines have."""
_HELP = {
    "activations": "smaller data.max_encoder_length and data.max_decoder_length, or training.activation_offload=true",
    "logits": "a smaller model or vocabulary: it is mostly the float32 gradient of the head, whatever the chunks' size",
    "communication": "smaller buckets in infra.deepspeed_extra, or a smaller model",
    "framework": "a larger GPU",
}
"""Help for a setting that shards, offloads and recomputes everything already; else: more GPUs, or a smaller model."""


def show(
    console: Console, asked: Question, tables: Sequence[EngineTable], traced: TracedMemory | None, *, everything: bool
) -> None:
    """Print the answer. `everything`: both engines' tables, with each part of the figures and what does not exist."""
    kinds = ["all"] if everything else ["wide", "narrow"]
    if on_cpus := asked.job.device == "cpu":  # the settings of the tables save a GPU's memory
        tables = []
    shown = tables if everything else [table for table in tables[:1] if any(not row.reason for row in table.rows)]
    drawn = {kind: [_table(asked, table, kind, boxed=console.is_terminal) for table in shown] for kind in kinds}
    needed = {kind: max((_width(console, table) for table, _ in drawn[kind]), default=0) for kind in kinds}
    kind = next((kind for kind in kinds if needed[kind] <= console.width), kinds[-1])
    parts: list[RenderableType] = [
        _about(asked),
        _verdict(_configured(asked), asked.short_of(variant(asked.job, {})) is None and asked.runs(asked.job)),
        *(_verdict(_recommended(asked, table), table.recommendation is not None) for table in tables),
        *asked.remarks,
        *([] if traced is None else [_beside(asked, traced), traced.remark]),
        *(part for table_and_notes in drawn[kind] for part in table_and_notes),
    ]
    console.width = max(console.width, needed[kind])  # a terminal may break lines, but no figure is cut
    for part in filter(None, parts):  # what is to be pasted is not broken into lines
        console.print(part, soft_wrap=not isinstance(part, Table), markup=False, highlight=False)
        console.print()
    for line in () if on_cpus else _how_to_read(asked, kind):
        console.print(line, width=LONGEST_LINE, markup=False, highlight=False)


def _width(console: Console, table: Table) -> int:
    """The columns of a terminal that a table takes."""
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def _verdict(text: str, is_good: bool) -> Text:
    """The answer in a colour, up to its first colon, or to the end of its line."""
    answer = text.partition("\n")[0].partition(":")[0]
    return Text.assemble((answer, "bold green" if is_good else "bold red"), text[len(answer) :])


def _about(asked: Question) -> str:
    job, gpu = asked.job, asked.gpu
    place = f"{gpu.name} ({in_gib(gpu.usable_bytes)} GiB usable each)" if job.device == "cuda" else "CPU rank"
    trained = (
        f", of which {job.trainable_parameters:,} are trained" if job.trainable_parameters != job.parameters else ""
    )
    return (
        f"{job.config.model.model_name_or_path or 'from scratch'}: {job.parameters:,} parameters{trained}\n"
        f"{job.world_size} x {place} on {count(job.nodes, 'node')}\n"
        f"A micro-batch of {job.config.training.micro_batch_size} has {job.encoder_tokens:,} encoder and "
        f"{job.decoder_tokens:,} decoder tokens; {job.gradient_accumulation_steps} of them make a step of a rank."
    )


def _table(asked: Question, table: EngineTable, kind: str, *, boxed: bool) -> tuple[Table, str]:
    """The settings of an engine, and notes on what is not shown as it is named."""
    columns = _COLUMNS[kind]
    shown = Table(
        title=f"{ENGINES[table.job.engine].title}, GiB per GPU at its worst moment",
        title_justify="left",
        title_style="bold" if boxed else "",
        box=SIMPLE_HEAD if boxed else None,
        show_edge=False,
        pad_edge=False,
        padding=0 if boxed else (0, 1, 0, 0),
    )
    for name in ("", "stage", "offload", "recompute"):
        shown.add_column(name, no_wrap=True)
    for name in (*columns, "peak", "host"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("fits", no_wrap=True)
    own = [row for row in table.rows if not (row.overrides and has_other_name(row.job))]
    lines = (_cells(asked, row, columns) for row in own if kind == "all" or not row.reason)
    for cells in dict.fromkeys(lines):  # one line for what does not exist, however much it recomputes
        fits = Text(cells[-1], style="green" if cells[-1] == "yes" else "red")
        shown.add_row(*cells[:-1], fits, style="bold" if cells[0] else "")
    notes = [f"- {reason}" for reason in dict.fromkeys(row.reason for row in table.rows) if reason]
    if len(own) < len(table.rows):  # FSDP2
        notes.append("- zero1 is zero2 here, and parameters are offloaded with the optimizer: each is shown once")
    return shown, "\n".join(notes) if kind == "all" else ""


def _cells(asked: Question, row: Variant, columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    config = row.job.config
    offload = _offload_name(row.job)
    setting = ("" if row.overrides else "*", config.infra.sharding_stage, "both" if offload == _BOTH else offload)
    if row.reason:
        return (*setting, *("-" * (len(columns) + 4)))
    peak, host = row.estimate.peak, row.estimate.host.scaled(row.job.ranks_per_node)
    figures = [sum(getattr(peak, name) for name in names) for names in columns.values()]
    short_of = asked.short_of(row) if asked.runs(row.job) else "does not run"
    verdict = "yes" if short_of is None else f"no: {short_of}"
    cells = map(in_gib, (*figures, peak.total, host.total))
    return (*setting, config.training.activation_checkpointing, *cells, verdict)


def _how_to_read(asked: Question, kind: str) -> Iterator[str]:
    host = "Host memory is not checked: pass --host-memory."
    if asked.host_bytes is not None:
        host = f"A host has {in_gib(asked.host_bytes)} GiB, of which {HOST_HEADROOM:.0%} must stay free."
    yield "Each row is at its own worst moment of a step, which may be the optimizer's or an evaluation's."
    yield "offload both: the optimizer's states and the parameters."
    named = (*_COLUMNS[kind], "host")
    yield "; ".join(f"{name}: {_MEANINGS[name]}" for name in named if name in _MEANINGS) + "."
    yield f'* is the configured run. "fits" means {HEADROOM:.0%} of GPU memory stays free.'
    yield host
    yield "GPU figures are computed; none has been compared with a GPU run yet."
    if kind != "all":
        yield "--all shows both engines, each part of these figures, and why a setting does not exist."


def _offload_name(job: Job) -> str:
    infra = job.config.infra
    return offload_of(job) or f"{infra.offload_optimizer}+{infra.offload_params}"


def _configured(asked: Question) -> str:
    job, row = asked.job, variant(asked.job, {})
    held, short_of = row.estimate, asked.short_of(row)
    verdict = f"does not fit (short of: {short_of})" if short_of else "fits"
    if not asked.runs(job):
        verdict = f"does not run on a {asked.gpu.name}, which has no bfloat16"
    if job.device == "cpu":
        known = asked.host_bytes and f", of {in_gib(asked.host_bytes)} GiB that it has"
        return (
            f"The configured run ({ENGINES[job.engine].title}, {job.config.infra.sharding_stage}, checkpointing "
            f"{job.config.training.activation_checkpointing}) {verdict if known else 'on CPUs'}:\n"
            f"  Each host of {count(job.ranks_per_node, 'rank')} holds {in_gib(row.node_bytes)} GiB{known or ''}, at "
            f"their worst moment, the {held.moment}.{'' if known else ' Whether it fits: --host-memory.'}"
        )
    on_host = held.host.scaled(job.ranks_per_node)
    parts = (f"{name} {in_gib(part)}" for name, part in zip(_HOST_WORDS, astuple(on_host), strict=True) if part)
    return (
        f"The configured run ({ENGINES[job.engine].title}, {job.config.infra.sharding_stage}, offload "
        f"{_offload_name(job)}, checkpointing {job.config.training.activation_checkpointing}) {verdict}:\n"
        f"  {in_gib(held.peak.total)} of {in_gib(asked.gpu.usable_bytes)} GiB per GPU at its worst moment, the "
        f"{held.moment}; most of it is {_WORDS[_largest(row)]}.\n"
        f"  Each host of {count(job.ranks_per_node, 'rank')} holds {in_gib(on_host.total)} GiB: {', '.join(parts)}."
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
        f"Recommended with {name}:\n"
        f"  {as_overrides(best.overrides) or 'the configuration as it is'}\n"  # a line of its own: it is pasted
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
            f"With more GPUs this fits: --gpus {more.job.world_size} --nodes {more.job.nodes} "
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
