"""Runs on hosts of a rig, their ranks forked where no launcher is asked for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_runs import Finished, ForkedRuns
from rig import Rig
from tiny_run import QUICKSTART, TINY

FSDP = {"infra.distributed_type": "fsdp", "infra.offload_optimizer": "none"}
DEEPSPEED = {"infra.distributed_type": "deepspeed"}
SETTINGS = TINY | {"data.num_lanes": 4, "training.logging_steps": 1, "infra.start_timeout_minutes": 1}

ENDLESS = {
    "training__num_train_steps": 100_000,
    "training__lr_scheduler_type": "constant",
    "training__save_steps": 20,
    "training__eval_samples": 0,
    "training__logging_steps": 5,
    "infra__distributed_timeout_minutes": 1,
}
"""Changes of a run's arguments for one that is to be ended."""


def words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def arguments(folder: Path, engine: Mapping[str, Any] = FSDP, **changes: Any) -> list[str]:
    """The words of train.py for a run of six steps; `changes` use `__` for the dot."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config", QUICKSTART, *words(SETTINGS | engine | changed | {"infra.output_dir": folder})]


def run(
    rig: Rig,
    forked: ForkedRuns,
    hosts: Mapping[str, int],
    own: Sequence[str],
    *,
    on: Mapping[str, Sequence[str]] | None = None,
    variables: Mapping[str, Any] | None = None,
    unset: Sequence[str] = (),
) -> Finished:
    """Run train.py with arguments of one's `own` on so many ranks of each host, as torchrun would start it.

    `on`: further arguments of a host. `variables`: instead of torchrun's, but for those that are `unset`.
    """
    places: list[dict[str, Any]] = []
    world_size = sum(hosts.values())
    for number, (host, here) in enumerate(hosts.items()):
        for local in range(here):
            place = {"RANK": len(places), "LOCAL_RANK": local, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": here}
            place |= {"GROUP_RANK": number, "GROUP_WORLD_SIZE": len(hosts), "TORCHELASTIC_RUN_ID": "forked"}
            place |= {"MASTER_ADDR": next(iter(hosts)), "MASTER_PORT": 29400, **(variables or {})}
            is_alone = world_size == 1 and not variables
            told = {} if is_alone else {name: value for name, value in place.items() if name not in unset}
            more = list((on or {}).get(host, ()))
            places.append({"first": rig.first[host], "variables": told, "arguments": more, "seconds": 240})
    return forked.run(list(own), places=places)


def start(rig: Rig, typed: str, *hosts: str, log: Path) -> list[subprocess.Popen[bytes]]:
    """Type a command on the first of the hosts, or torchrun's on each; log.HOST is what it prints."""
    typing = hosts if typed.startswith("torchrun") else hosts[:1]
    return [rig.start(host, ["bash", "-c", typed], log.with_name(f"{log.name}.{host}")) for host in typing]


def told(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))
