"""Compares the facts that the ranks of a run must have in common before any of them builds anything. Ranks that differ
in a setting would silently train on different terms. rendezvous.py exchanges the facts."""

import hashlib
import json
import platform
import shlex
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from ds_encdec.base.quantities import listed
from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.settings import leaves
from ds_encdec.launch.disk import installed_versions
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.run_folder import masked
from ds_encdec.registry.engines import ENGINES

# Settings that may differ between ranks, by the last part of their names → why.
OWN_TO_A_HOST = {
    "data_files": "copies may lie elsewhere: their contents are compared, in the data's fingerprint",
    "eval_files": "the same",
    "test_files": "the same",
    "prepared_dir": "the same",
    "preprocessing_num_workers": "hosts have different numbers of cores, and the order of the data is not theirs",
    "wandb_project": "rank 0's alone is used, and WANDB_PROJECT, which sets it, need not reach every host",
    "wandb_entity": "rank 0's alone is used",
    "wandb_run_name": "rank 0's alone is used",
}

_LONGEST_VALUE = 120
_MOST_LINES = 12

Ranks = Mapping[int, Any]  # a value for each rank


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Return every value as JSON under its dotted name."""
    return {name: json.dumps(value, sort_keys=True) for name, value in leaves(values)}


def shared_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, flat."""
    return {name: value for name, value in flat(settings).items() if name.rpartition(".")[2] not in OWN_TO_A_HOST}


def digest(facts: Any) -> str:
    """Return a short digest, equal for equal facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:15]


def versions(engines: Iterable[str], *, nccl: bool) -> dict[str, str]:
    """Return the versions on this host that ranks compare: of packages that all need, and of those of `engines`."""
    packages = filter(None, (ENGINES[engine].package for engine in engines))
    return {
        "python": platform.python_version(),
        **installed_versions("torch", "transformers", "tokenizers", "numpy", *packages),
        **({"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if nccl else {}),
    }


def differences(everyones: Ranks, hosts: Ranks) -> list[str]:
    """Return a line for each name whose values differ between ranks, which have a mapping each."""
    lines = []
    for name in dict.fromkeys(name for values in everyones.values() for name in values):
        if len({json.dumps(values.get(name)) for values in everyones.values()}) > 1:
            owners: dict[str, list[int]] = {}
            for rank, values in everyones.items():
                owners.setdefault(_shown(name, values[name]) if name in values else "nothing", []).append(rank)
            in_words = (f"{value} for {ranks_in_words(ranks, hosts)}" for value, ranks in owners.items())
            lines.append(f"{name}: {', '.join(in_words)}")
    return lines


def merge_rank_facts(places: Mapping[int, Mapping[str, Any]], hosts: Ranks) -> dict[str, Any]:
    """Return all that ranks need to know of each other, in JSON's types: `sharing`; `reached`: of at most two machines
    the name, and an address that others reach; `warnings`. `places`: rank → `machine`, `address`, `cores`, GPU's
    `uuid`; facts that must be `equal`, and facts `noted` if they differ. Raises ConfigError for ranks on one GPU, and
    for ranks that would not train one model."""
    on_gpu: dict[Any, list[int]] = {}
    reached: dict[str, str | None] = {}
    for rank, place in places.items():
        on_gpu.setdefault((place["machine"], place["uuid"] or rank), []).append(rank)
        if place["machine"] in reached or len(reached) < 2:
            reached[place["machine"]] = reached.get(place["machine"]) or place["address"]
    for (_, uuid), crowded in on_gpu.items():
        if len(crowded) > 1:
            raise ConfigError(
                f"Ranks {spans(sorted(crowded))} were started on the same GPU ({hosts[crowded[0]]}, {uuid}). Start one "
                "rank for each GPU, or have the launcher give each rank its own (Slurm: --gpus-per-task=1)."
            )
    if errors := differences({rank: place["equal"] for rank, place in places.items()}, hosts):
        raise ConfigError(
            f"the ranks do not agree, so they would not train one model:{listed(errors, _MOST_LINES)}\nStart all of "
            "them with the same command, files, code and versions. (These settings may differ between hosts: "
            f"{', '.join(OWN_TO_A_HOST)}.)"
        )
    return {
        "warnings": differences({rank: place["noted"] for rank, place in places.items()}, hosts),
        "sharing": sharing([(place["machine"], place["cores"]) for _, place in sorted(places.items())]),
        "reached": list(reached.items()),
    }


def sharing(places: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return for each rank how many, itself included, may run on its cores. `places`: machine and cores of each."""
    users = Counter((machine, tuple(cores)) for machine, cores in places)
    return [
        sum(count for (other, theirs), count in users.items() if other == machine and not set(cores).isdisjoint(theirs))
        for machine, cores in places
    ]


def require_same_data(fingerprint: Mapping[str, Any], collectives: HostCollectives) -> None:
    """Raise DataError on all ranks unless all have the same `fingerprint` (data/fingerprint.py). A collective."""
    mine = flat(fingerprint)
    own = int(digest(mine), 16)
    least, most = collectives.lowest(own, -own)
    if least == -most:
        return
    digests = collectives.gather(own)
    # Of the ranks with the same data, the first sends its description.
    of_ranks = collectives.gather((socket.gethostname(), mine if digests.index(own) == collectives.rank else None))
    lines = differences(
        {rank: of_ranks[digests.index(found)][1] for rank, found in enumerate(digests)},
        {rank: host for rank, (host, _) in enumerate(of_ranks)},
    )
    raise DataError(
        "the ranks do not read the same data, so no other run could repeat this one:"
        f"{listed(lines, _MOST_LINES)}\nGive every host the same files, under any path."
    )


def _shown(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = shlex.split(masked(["", f"{name}={text}"]))[1].removeprefix(f"{name}=")
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({digest(text)})"


def ranks_in_words(ranks: Iterable[int], hosts: Ranks) -> str:
    """Return `rank 3 (node1)` or `ranks 0-7 (node0), 9 (node1)`; ranks of unknown hosts have none in brackets."""
    ranks = sorted(ranks)
    places: dict[str | None, list[int]] = {}
    for rank in ranks:
        places.setdefault(hosts.get(rank), []).append(rank)
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(
        spans(of_host) + (f" ({host})" if host else "") for host, of_host in places.items()
    )


def spans(ranks: Sequence[int]) -> str:
    """Return sorted ranks as `0-7, 12`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda place: place[1] - place[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
