"""Whole runs, many in one start of ranks: saved by one engine on some ranks, continued by another on others.

The real path from configuration to checkpoint (`build.run_training`), on real text. Only the process group is that of
the ranks, and the loader is listened to, to know which samples each step was made of. For a test and for a table.
"""

import gc
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from gloo_ranks import run_ranks

from ds_encdec.base.types import Batch, Preempted, TrainingState
from ds_encdec.config.schema import load_config
from ds_encdec.data.loader import LaneLoader
from ds_encdec.engine import select
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import discover
from ds_encdec.training import build
from ds_encdec.training.loop_state import Trainer

sys.path.append(str(Path(__file__).parents[1] / "launch"))

from tiny_run import QUICKSTART, TINY

SAVED_STEP, STEPS = 4, 24

ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO-3 offload": {"infra.sharding_stage": "zero3", "infra.offload_optimizer": "cpu"},
    "ZeRO-2": {"infra.sharding_stage": "zero2"},
    "ZeRO-1": {"infra.sharding_stage": "zero1"},
    "FSDP2": {"infra.distributed_type": "fsdp", "infra.sharding_stage": "zero3"},
    "HSDP": {"infra.distributed_type": "fsdp", "infra.sharding_stage": "zero3_hybrid"},
    "DDP": {"infra.distributed_type": "ddp", "infra.sharding_stage": "zero0"},
}
# A float32 run of a tiny model, the same for every engine.
RUN: dict[str, Any] = TINY | {
    "data.num_lanes": 4,
    "training.warmup_steps": 6,  # still warming up when it is saved
    "training.bf16": False,
    "training.activation_checkpointing": "none",
    "training.save_steps": 1000,
    "training.eval_samples": 0,
    "training.logging_steps": 1,
    "training.report_to": "none",
    "training.average_checkpoints": 0,
    "training.export_at_end": False,
    "infra.offload_optimizer": "none",
}
ADAPTERS: dict[str, Any] = {
    "model.lora.r": 4,  # and a dropout of 0.1
    "training.activation_checkpointing": "full",  # which draws the same again
}
WORLD_SIZES = (1, 2, 4)


class Side(NamedTuple):
    engine: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.engine} on {self.world_size}"


SIDES = tuple(Side(engine, world_size) for engine in ENGINES for world_size in WORLD_SIZES)
ONE_OF_EACH = tuple(Side(engine, WORLD_SIZES[index % 3]) for index, engine in enumerate(ENGINES))
# Those of the tests, each of which goes on from the one before it; their runs make four steps after the save, with the
# end of the warmup and the beginning of the decay.
TESTED_SIDES = (Side("ZeRO-3 offload", 1), Side("HSDP", 4), Side("ZeRO-2", 1), Side("DDP", 2))
TESTED_STEPS = 8
Changes = Mapping[str, Any] | None  # of portable_runs.RUN
Pair = tuple[Side, Side]  # who saves and who loads


class Continued(NamedTuple):
    """A continued run against the uninterrupted one."""

    loss_difference: float  # the largest, in nats
    same_samples: bool


def uninterrupted(folder: Path, steps: int = STEPS, changes: Changes = None) -> dict[str, Any]:
    """The run of `steps` that all continuations must be like."""
    side = Side("DDP", 1)
    run = {"output_dir": str(folder / "uninterrupted"), "steps": steps, "changes": changes}
    return _by_world_size({side: run})[side]


def save_all(sides: Sequence[Side], folder: Path, steps: int = STEPS, changes: Changes = None) -> dict[Side, Path]:
    """Each side trains SAVED_STEP of `steps` and is stopped: the checkpoints."""
    folders = {side: folder / f"saved by {side}" for side in sides}
    common = {"steps": steps, "stop_after": SAVED_STEP, "changes": changes}
    _by_world_size({side: {"output_dir": str(path), **common} for side, path in folders.items()})
    return {side: path / "checkpoints" / f"step-{SAVED_STEP:08d}" for side, path in folders.items()}


def continue_all(
    pairs: Sequence[Pair],
    saved: Mapping[Side, Path],
    reference: Mapping[str, Any],
    folder: Path,
    steps: int = STEPS,
    changes: Changes = None,
) -> dict[Pair, Continued]:
    """The second side of each pair goes on from the checkpoint of the first, to the end of `steps`."""
    arguments = {
        (saver, loader): {
            "output_dir": str(folder / f"saved by {saver}, continued by {loader}"),
            "steps": steps,
            "resume": str(saved[saver]),
            "changes": changes,
        }
        for saver, loader in pairs
    }
    found = _by_world_size(arguments, side=lambda pair: pair[1])
    return {pair: _compare(result, reference, steps) for pair, result in found.items()}


def _compare(continued: Mapping[str, Any], reference: Mapping[str, Any], steps: int) -> Continued:
    compared = range(SAVED_STEP + 1, steps + 1)
    assert list(continued["losses"]) == list(compared)
    return Continued(
        max(abs(continued["losses"][step] - reference["losses"][step]) for step in compared),
        continued["samples"] == reference["samples"][SAVED_STEP:],
    )


def _by_world_size(runs: Mapping[Any, dict[str, Any]], side: Callable[[Any], Side] = lambda key: key) -> dict[Any, Any]:
    """Start each number of ranks once, for all of its runs; rank 0's results."""
    found = {}
    for world_size in WORLD_SIZES:
        keys = [key for key in runs if side(key).world_size == world_size]
        if keys:
            given = [{"engine": side(key).engine, **runs[key]} for key in keys]
            results, *_ = run_ranks("portable_runs.py:train_runs", world_size, {"runs": given})
            found |= dict(zip(keys, results, strict=True))
    return found


class ListeningLoader:
    """A LaneLoader that notes what each step was made of, and asks the run to stop after `stop_after` steps."""

    def __init__(self, loader: LaneLoader, stop_after: int | None) -> None:
        self._loader = loader
        self._stop_after = stop_after
        self.samples: list[list[tuple[int, str]]] = []

    def __next__(self) -> list[Batch]:
        batches = next(self._loader)
        self.samples.append([(lane, _digest(batch)) for lane, batch in zip(self._loader.lanes, batches, strict=True)])
        if len(self.samples) - 1 == self._stop_after:  # the next step, which is then not taken
            os.kill(os.getpid(), signal.SIGTERM)
        return batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def train_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train_run(**run) for run in runs]


def train_run(
    engine: str,
    output_dir: str,
    steps: int,
    resume: str | None = None,
    stop_after: int | None = None,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train to the end, `steps`, or for `stop_after` and a checkpoint. On every rank: losses and samples by step."""
    world_size = dist.get_world_size()
    settings = RUN | ENGINES[engine] | {"infra.output_dir": output_dir, "training.num_train_steps": steps}
    settings |= changes or {}
    if engine == "HSDP":
        settings["infra.hybrid_shard_size"] = max(1, world_size // 2)
    config = load_config(Path(QUICKSTART), [f"{name}={value}" for name, value in settings.items()])
    listening: list[ListeningLoader] = []

    def train(trainer: Trainer) -> TrainingState:
        trainer.loader = ListeningLoader(trainer.loader, stop_after)  # type: ignore[assignment]
        listening.append(trainer.loader)  # type: ignore[arg-type]
        try:
            return real_train(trainer)
        except Preempted:
            trainer.engine.close()
            raise

    # The ranks are a group already, and go on with other runs afterwards.
    real_train, real_join, real_shutdown = build.train, select.init_process_group, build.shutdown
    build.train, build.shutdown = train, dist.barrier
    select.init_process_group = lambda world, device, timeout, engine, first, **_: first() or engine
    try:
        with StopRequest(discover(os.environ)) as stop:
            build.run_training(config, stop, resume=resume)
    except Preempted:
        assert stop_after is not None
    finally:
        build.train, select.init_process_group, build.shutdown = real_train, real_join, real_shutdown
    gc.collect()
    dist.barrier()
    return {"losses": _losses(Path(output_dir)), "samples": _samples(listening[0])}


def _losses(output_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def _samples(listening: ListeningLoader) -> list[list[str]]:
    """Of every step, one digest per lane, in lane order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, listening.samples)
    return [[digest for _, digest in sorted(itertools.chain(*ranks))] for ranks in zip(*everyone, strict=True)]


def _digest(batch: Batch) -> str:
    ids = batch.encoder_ids.numpy().tobytes() + batch.labels.numpy().tobytes()
    return hashlib.sha256("\n".join(batch.documents).encode() + ids).hexdigest()
