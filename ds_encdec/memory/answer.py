"""The answer of `estimate_memory`: a table for each engine, the configured run, what to choose; as JSON, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ds_encdec.engines import ENGINES
from ds_encdec.memory.job import Job
from ds_encdec.memory.question import EstimateRequest
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Change,
    Variant,
    changed,
    nearest,
    offload_of,
    recommend,
    variant,
    variants,
)

if TYPE_CHECKING:
    from ds_encdec.memory.trace import TracedMemory


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The settings of one engine: `overrides` are relative to the configured run, which is `job` under this engine."""

    job: Job
    rows: Sequence[Variant]
    recommendation: Variant | None
    nearest: Sequence[Variant]


def estimate_tables(request: EstimateRequest) -> list[EngineTable]:
    """The tables of all engines, the configured one first."""
    return [_table(request, engine) for engine in sorted(ENGINES, key=lambda name: name != request.job.engine)]


def _table(request: EstimateRequest, engine: str) -> EngineTable:
    needed: Change = {}  # changes without which the job does not run so on this GPU, the same for all settings
    if engine != request.job.engine:
        needed["infra.distributed_type"] = engine
        instead = ENGINES[engine].instead.items()
        needed |= {name: taken for name, (refused, taken) in instead if attrgetter(name)(request.job.config) == refused}
    if not request.runs(request.job):
        needed |= {"training.bf16": False, "training.fp16": True}  # FSDP2 and zero0 refuse fp16
    base = changed(request.job, needed)
    best = recommend(base, request.fits)
    near = nearest(base, request.fits) if best is None and engine == request.job.engine else []
    rows, best_rows, near = (
        [replace(row, overrides=needed | row.overrides) for row in some]
        for some in (variants(base), [best] if best else [], near)
    )
    return EngineTable(base, rows, best_rows[0] if best_rows else None, near)


def as_json(request: EstimateRequest, tables: Sequence[EngineTable], traced: TracedMemory | None) -> dict[str, Any]:
    """The answer as JSON; docs/estimate-memory.md lists the keys. Sizes are bytes."""
    job = request.job
    found: dict[str, Any] = {
        "inputs": {
            "model": job.config.model.model_name_or_path,
            "sizes": asdict(job.sizes),
            "gpus": job.world_size,
            "nodes": job.nodes,
            "device": job.device,
            "gpu": request.gpu.name if job.device == "cuda" else None,
            "gpu_usable_bytes": request.gpu.usable_bytes if job.device == "cuda" else None,
            "headroom": HEADROOM,
            "host_headroom": HOST_HEADROOM,
            "host_memory_bytes": request.host_bytes,
            "engine": job.engine,
            **_batch(job),
            "loss_chunk_tokens": job.config.model.loss_chunk_tokens,
        },
        "parameters": {"total": job.parameters, "trainable": job.trainable_parameters},
        "configured": _row(request, variant(job, {})),
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
    if traced is not None:
        seen = {name: held if name in traced.categories else None for name, held in asdict(traced.peak).items()}
        found["trace"] = {
            "bytes": {**seen, "peak": traced.peak.total},
            "moment": traced.moment,
            "seconds": traced.seconds,
            "remark": traced.remark,
        }
    return found


def _row(request: EstimateRequest, row: Variant) -> dict[str, Any]:
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
    short_of = request.short_of(row) if request.runs(row.job) else "does not run"
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
