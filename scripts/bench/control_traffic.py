"""Measures the control traffic of ranks by their number: forked ranks on this machine, gloo over loopback.

    python scripts/bench/control_traffic.py 2 8 32 128

Each kind is measured as the program does it (launch/host_collectives.py) and by the all-gathers that do the same. The
figures are milliseconds of CPU per rank and call: other work on the machine changes them little, and where each rank
has a core of its own a call takes no less. Ranks are forked, so that a hundred fit into memory and start in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import psutil
import torch
import torch.distributed as dist

from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import free_port

RECORD, LANES, STATISTICS = "x" * 50_000, "x" * 1_200, "x" * 220
"""As large as a checkpoint's listing, a rank's records of its lanes, and its statistics of a logging interval."""
CALLS = 10


def kinds(collectives: HostCollectives) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The exchange, as an all-gather and as the program does it."""
    rank, size, sums = collectives.rank, collectives.world_size, torch.zeros(11, dtype=torch.float64)

    def gathered(record: Any) -> Callable[[], object]:
        return lambda: dist.all_gather_object([None] * size, record, group=collectives.group)

    def gathered_integers() -> None:
        mine = torch.ones(10, dtype=torch.int64)
        dist.all_gather([torch.empty_like(mine) for _ in range(size)], mine, group=collectives.group)

    def summed() -> None:
        flags, epoch = collectives.begin_sum(*range(9)), collectives.begin_lowest(0)
        flags.result(), epoch.result()

    return {
        "a step": (gathered_integers, summed),
        "the answer skip_step": (gathered((sums, 1.0)), lambda: collectives.sum_tensor(sums)),
        "nobody has failed": (gathered(None), lambda: collectives.raise_first(None)),
        "rank 0's 50 kB": (gathered(RECORD if rank == 0 else None), lambda: collectives.broadcast(RECORD)),
        "1.2 kB of each for rank 0": (gathered(LANES), lambda: collectives.gather_to_zero(LANES)),
        "220 B of each for all": (gathered(STATISTICS), lambda: collectives.gather(STATISTICS)),
    }


def be_rank(rank: int, size: int, port: int, output: int) -> NoReturn:
    timeout = timedelta(seconds=300)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    collectives = HostCollectives(timeout)
    found: dict[str, list[float]] = {}
    for name, ways in kinds(collectives).items():
        found[name] = []
        for way in ways:
            way()  # connections and buffers are made
            dist.barrier()
            began = time.process_time()
            for _ in range(CALLS):
                way()
            found[name].append((time.process_time() - began) / CALLS * 1e3)
            dist.barrier()
    open_files = psutil.Process().num_fds()
    dist.barrier()
    os.write(output, json.dumps({"rank": rank, "open files": open_files, "found": found}).encode() + b"\n")
    os._exit(0)


def measure(size: int) -> list[dict[str, Any]]:
    """The findings of each of `size` ranks, in their order."""
    port, (readable, output) = free_port(), os.pipe()
    ranks = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            be_rank(rank, size, port, output)
        ranks.append(pid)
    os.close(output)
    with os.fdopen(readable) as lines:
        found = [json.loads(line) for line in lines]
    for pid in ranks:
        os.waitpid(pid, 0)
    assert len(found) == size, f"{len(found)} of {size} ranks have answered"
    return sorted(found, key=lambda one: one["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+")
    sizes = parser.parse_args().ranks
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    columns = {size: measure(size) for size in sizes}
    print("| ms of CPU per rank and call | " + " | ".join(f"{size} ranks" for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))

    def show(title: str, value: Callable[[dict[str, Any]], float], first: int | None = None) -> None:
        cells = (ranks[:first] for ranks in columns.values())
        print(f"| {title} | " + " | ".join(f"{sum(map(value, some)) / len(some):.2f}" for some in cells) + " |")

    for name in columns[sizes[0]][0]["found"]:
        show(f"{name}, by all-gathers", lambda rank, name=name: rank["found"][name][0])
        show(f"{name}, now", lambda rank, name=name: rank["found"][name][1])
        if name.endswith("for rank 0"):
            show(f"{name}, now, on rank 0", lambda rank, name=name: rank["found"][name][1], 1)
    show("open files of a rank", lambda rank: rank["open files"])


if __name__ == "__main__":
    main()
