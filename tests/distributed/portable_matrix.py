"""Every engine's checkpoints continued by every engine, on every number of ranks: for a test and for a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gloo_ranks import run_ranks
from portable_runs import ENGINES, SAVED_STEP, STEPS

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
