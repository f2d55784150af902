"""What `estimate_memory` answers: the tables of both engines, the configured run, and the settings to choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_encdec.memory.breakdown import CATEGORIES, Breakdown, Estimate
from ds_encdec.memory.gpus import Gpu
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import (
    HEADROOM,
    Recommendation,
    Value,
    Variant,
    changed,
    fits,
    fitting_settings,
    offload_of,
    recommend,
    smallest_variants,
    variants,
)
from ds_encdec.types import EngineName

ENGINES: dict[EngineName, str] = {"deepspeed": "DeepSpeed", "fsdp": "FSDP2"}
"""What people call them."""
LARGEST_WORLD = 4096
"""GPUs up to which a number that would fit is looked for."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The settings of one engine. `overrides` of rows and recommendation are relative to the configured run."""

    engine: EngineName
    rows: tuple[Variant, ...]
    recommendation: Recommendation | None


@dataclass(frozen=True, slots=True)
class Answer:
    """`job` as configured, and its `estimate`; the configured engine's table comes first.

    Where nothing of that engine's table fits: `nearest` are changes that would, `gpus_needed` the number of GPUs, in
    powers of two times the nodes' own, from which a setting does (None: not up to `LARGEST_WORLD`). `host_bytes`: of a
    node, None where not given.
    """

    job: Job
    gpu: Gpu
    host_bytes: int | None
    estimate: Estimate
    tables: tuple[EngineTable, ...]
    nearest: tuple[Recommendation, ...]
    gpus_needed: int | None

    def fits(self, estimated: Estimate) -> bool:
        """Whether that much fits on the GPU asked about, and on its host if that is known."""
        return fits(estimated, self.gpu.usable_bytes, _share(self.job, self.host_bytes))


def _share(job: Job, host_bytes: int | None) -> float | None:
    """Of a node's memory, the part of each of its ranks."""
    return None if host_bytes is None else host_bytes / job.ranks_per_node


def answer(job: Job, estimated: Estimate, gpu: Gpu, host_bytes: int | None = None) -> Answer:
    """Everything there is to say about `job`, whose own estimate is `estimated`, on such GPUs and hosts."""
    engines = sorted(ENGINES, key=lambda engine: engine != job.engine)
    tables = tuple(_table(job, engine, gpu, host_bytes) for engine in engines)
    nearest: tuple[Recommendation, ...] = ()
    gpus_needed = None
    if tables[0].recommendation is None:
        nearest = tuple(fitting_settings(job, gpu.usable_bytes, host_bytes=_share(job, host_bytes)))
        gpus_needed = _gpus_needed(job, gpu, host_bytes)
    return Answer(job, gpu, host_bytes, estimated, tables, nearest, gpus_needed)


def _table(job: Job, engine: EngineName, gpu: Gpu, host_bytes: int | None) -> EngineTable:
    switched: dict[str, Value] = {} if engine == job.engine else {"infra.distributed_type": engine}
    base = changed(job, switched)
    rows = [dataclasses.replace(row, overrides=switched | row.overrides) for row in variants(base)]
    best = recommend(base, gpu.usable_bytes, _share(job, host_bytes))
    if best is not None:
        best = dataclasses.replace(best, overrides=switched | best.overrides)
    return EngineTable(engine, tuple(rows), best)


def _gpus_needed(job: Job, gpu: Gpu, host_bytes: int | None) -> int | None:
    world_size = 2 * job.world_size
    while world_size <= LARGEST_WORLD:
        for row in smallest_variants(dataclasses.replace(job, world_size=world_size)):
            if row.estimate is not None and fits(row.estimate, gpu.usable_bytes, _share(job, host_bytes)):
                return world_size
        world_size *= 2
    return None


def as_json(found: Answer) -> dict[str, Any]:
    """The answer as JSON; docs/estimate-memory.md lists the keys. Sizes are bytes."""
    job = found.job
    return {
        "inputs": {
            "model": job.config.model.model_name_or_path,
            "sizes": {name: getattr(job.sizes, name) for name in _SIZES},
            "gpus": job.world_size,
            "nodes": job.world_size // job.ranks_per_node,
            "gpu": found.gpu.name,
            "gpu_usable_bytes": found.gpu.usable_bytes,
            "headroom": HEADROOM,
            "host_memory_bytes": found.host_bytes,
            "engine": job.engine,
            **_batch(job),
            "loss_chunk_tokens": job.config.model.loss_chunk_tokens,
        },
        "parameters": {"total": job.parameters, "trainable": job.trainable_parameters},
        "configured": _row(found, Variant({}, job, found.estimate)),
        "engines": {table.engine: _table_as_json(found, table) for table in found.tables},
        "nearest": [_row(found, Variant(near.overrides, near.job, near.estimate)) for near in found.nearest],
        "gpus_needed": found.gpus_needed,
    }


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_encoder_layers",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)


def _table_as_json(found: Answer, table: EngineTable) -> dict[str, Any]:
    best = table.recommendation
    return {
        "rows": [_row(found, row) for row in table.rows],
        "recommendation": None if best is None else _row(found, Variant(best.overrides, best.job, best.estimate)),
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
        "fits": found.fits(row.estimate),
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
