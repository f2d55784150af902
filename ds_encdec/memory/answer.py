"""The answer of `estimate_memory`: the tables of both engines, the configured run, and the settings to choose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_encdec.engines import ENGINES, EngineName
from ds_encdec.gpus import Gpu
from ds_encdec.memory.breakdown import CATEGORIES, Breakdown
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Recommendation,
    Room,
    Value,
    Variant,
    changed,
    nearest,
    offload_of,
    recommend,
    smallest_variants,
    value_of,
    variants,
)

LARGEST_WORLD = 4096
"""GPUs up to which a number that would fit is looked for."""
_WITHOUT_BF16: dict[str, Value] = {"training.bf16": False, "training.fp16": True}
"""The numbers that a GPU without bfloat16 can train with. FSDP2 and zero0 refuse fp16."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The settings of one engine. `overrides` of rows and recommendation are relative to the configured run.

    `job`: the configured one under this engine. `nearest`: where nothing of the configured engine's is
    recommended, changes to the run that fit.
    """

    engine: EngineName
    job: Job
    rows: tuple[Variant, ...]
    recommendation: Recommendation | None
    nearest: tuple[Recommendation, ...]

    @property
    def exists(self) -> bool:
        """Return whether the engine can do any of it at all."""
        return any(row.estimate is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Answer:
    """`job` as configured, and the row of it; the configured engine's table comes first.

    Where nothing of that engine fits: `more_gpus` is a setting that does on as many GPUs as its job says, a power of
    two times those asked about (None: not up to `LARGEST_WORLD`). `host_bytes`: of a node, None where not given.
    """

    job: Job
    gpu: Gpu
    host_bytes: int | None
    configured: Recommendation
    tables: tuple[EngineTable, ...]
    more_gpus: Recommendation | None

    @property
    def room(self) -> Room:
        """The memory that a rank may use."""
        return Room(
            self.gpu.usable_bytes, None if self.host_bytes is None else self.host_bytes / self.job.ranks_per_node
        )

    def fits(self, row: Variant) -> bool:
        """Return whether the row fits on the GPU asked about, which can run it, and on its host if that is known."""
        return row.estimate is not None and runs_on(self.gpu, row.job) and self.room.fits(row.estimate)

    def short_of(self, row: Variant) -> str:
        """Name what a row that does not fit lacks."""
        if row.estimate is None or not runs_on(self.gpu, row.job):
            return "does not run"
        return "host" if Room(self.gpu.usable_bytes).fits(row.estimate) else "GPU"


def runs_on(gpu: Gpu, job: Job) -> bool:
    """Return whether `gpu` computes in the dtypes of `job`."""
    return gpu.has_bf16 or not job.config.training.bf16


def answer(job: Job, gpu: Gpu, host_bytes: int | None = None) -> Answer:
    """Everything there is to say about `job` on such GPUs and hosts."""
    found = Answer(job, gpu, host_bytes, Recommendation({}, job, estimate(job)), (), None)
    engines = sorted(ENGINES.values(), key=lambda row: row.name != job.engine)
    tables = tuple(_table(found, row.name) for row in engines)
    more = None
    if tables[0].recommendation is None and tables[0].exists:
        more = _more_gpus(found)
    return dataclasses.replace(found, tables=tables, more_gpus=more)


def _table(asked: Answer, engine: EngineName) -> EngineTable:
    needed = _needed(asked.job, engine, asked.gpu)
    base = changed(asked.job, needed)
    rows = tuple(dataclasses.replace(row, overrides=needed | row.overrides) for row in variants(base))
    best = recommend(base, asked.room)
    if best is not None:
        best = dataclasses.replace(best, overrides=needed | best.overrides)
    close = nearest(base, asked.room) if best is None and engine == asked.job.engine else []
    close = [dataclasses.replace(near, overrides=needed | near.overrides) for near in close]
    return EngineTable(engine, base, rows, best, tuple(close))


def _needed(job: Job, engine: EngineName, gpu: Gpu) -> dict[str, Value]:
    """The changes without which `job` does not run under `engine` on `gpu`, the same for all settings."""
    needed: dict[str, Value] = {}
    if engine != job.engine:
        needed["infra.distributed_type"] = engine
        for field, (refused, taken) in ENGINES[engine].instead.items():
            if value_of(job.config, field) == refused:
                needed[field] = taken
    return needed if runs_on(gpu, job) else needed | _WITHOUT_BF16


def _more_gpus(asked: Answer) -> Recommendation | None:
    """A setting that fits on the fewest GPUs, in nodes like those asked about."""
    needed = _needed(asked.job, asked.job.engine, asked.gpu)
    base = changed(asked.job, needed)
    for doublings in itertools.count(1):
        world_size = base.world_size << doublings
        if world_size > LARGEST_WORLD:
            return None
        for row in smallest_variants(dataclasses.replace(base, world_size=world_size)):
            if row.estimate is not None and asked.room.fits(row.estimate):
                return Recommendation(needed | row.overrides, row.job, row.estimate)
    return None


def as_json(found: Answer) -> dict[str, Any]:
    """The answer as JSON; docs/estimate-memory.md lists the keys. Sizes are bytes."""
    job, more = found.job, found.more_gpus
    return {
        "inputs": {
            "model": job.config.model.model_name_or_path,
            "sizes": dataclasses.asdict(job.sizes),
            "gpus": job.world_size,
            "nodes": _nodes(job),
            "gpu": found.gpu.name,
            "gpu_usable_bytes": found.gpu.usable_bytes,
            "headroom": HEADROOM,
            "host_headroom": HOST_HEADROOM,
            "host_memory_bytes": found.host_bytes,
            "engine": job.engine,
            **_batch(job),
            "loss_chunk_tokens": job.config.model.loss_chunk_tokens,
        },
        "parameters": {"total": job.parameters, "trainable": job.trainable_parameters},
        "configured": _row(found, found.configured),
        "engines": {table.engine: _table_as_json(found, table) for table in found.tables},
        "more_gpus": None
        if more is None
        else {"gpus": more.job.world_size, "nodes": _nodes(more.job), **_row(found, more)},
    }


def _nodes(job: Job) -> int:
    return job.world_size // job.ranks_per_node


def _table_as_json(found: Answer, table: EngineTable) -> dict[str, Any]:
    return {
        "rows": [_row(found, row) for row in table.rows],
        "recommendation": None if table.recommendation is None else _row(found, table.recommendation),
        "nearest": [_row(found, near) for near in table.nearest],
    }


def _row(found: Answer, row: Variant) -> dict[str, Any]:
    infra = row.job.config.infra
    setting = {
        "overrides": row.overrides,
        "configured": not row.overrides,
        "sharding_stage": infra.sharding_stage,
        "offload": offload_of(row.job),
        "activation_checkpointing": row.job.config.training.activation_checkpointing,
        **_batch(row.job),
        "exists": row.estimate is not None,
        "reason": row.reason,
    }
    if row.estimate is None:
        return setting
    host = row.estimate.host.scaled(row.job.ranks_per_node)
    return setting | {
        "bytes": breakdown_as_json(row.estimate.peak),
        "moment": row.estimate.moment,
        "host_bytes_per_node": {**dataclasses.asdict(host), "total": host.total},
        "fits": found.fits(row),
        "short_of": None if found.fits(row) else found.short_of(row),
    }


def breakdown_as_json(held: Breakdown) -> Mapping[str, float]:
    """The categories in bytes, and their sum as `peak`."""
    return {**{name: getattr(held, name) for name in CATEGORIES}, "peak": held.total}


def _batch(job: Job) -> dict[str, int]:
    return {
        "per_device_train_batch_size": job.config.training.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "encoder_tokens": job.encoder_tokens,
        "decoder_tokens": job.decoder_tokens,
    }
