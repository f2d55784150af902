"""Measures the control traffic of ranks by their number: forked ranks on this machine, gloo over loopback.

    python scripts/bench/control_traffic.py 2 8 32 128

Each kind is measured as the program does it (launch/host_collectives.py) and by the all-gather that does the same. The
figures are milliseconds of CPU per rank and call: other work on the machine changes them little, and where each rank
has a core of its own a call takes no less. Ranks are forked, so that a hundred fit into memory and start in seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import mean
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import psutil
import torch
import torch.distributed as dist
from turns import report

from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import free_port

RECORD, LANES, STATISTICS = "x" * 50_000, "x" * 1_200, "x" * 220
"""As large as a checkpoint's listing, a rank's records of its lanes, and its statistics of a logging interval."""
CALLS = 10


def kinds(collectives: HostCollectives) -> dict[str, tuple[Any, Callable[[], object]]]:
    """Return, by kind, the value for an all-gather, and the exchange as the program makes it."""
    sums = torch.zeros(11, dtype=torch.float64)

    def summed() -> None:
        flags, epoch = collectives.begin_sum(*range(9)), collectives.begin_lowest(0)
        flags.result(), epoch.result()

    return {
        "a step": (torch.ones(10, dtype=torch.int64), summed),
        "the answer skip_step": ((sums, 1.0), lambda: collectives.sum_tensor(sums)),
        "nobody has failed": (None, lambda: collectives.raise_first(None)),
        "rank 0's 50 kB": (RECORD if collectives.rank == 0 else None, lambda: collectives.broadcast(RECORD)),
        "1.2 kB of each for rank 0": (LANES, lambda: collectives.gather_to_zero(LANES)),
        "220 B of each for all": (STATISTICS, lambda: collectives.gather(STATISTICS)),
    }


def be_rank(rank: int, size: int, port: int, answers: SimpleQueue[Any]) -> None:
    timeout = timedelta(seconds=300)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    collectives = HostCollectives(timeout)
    found: dict[str, float] = {}
    for name, (record, ours) in kinds(collectives).items():

        def gather(record: Any = record) -> None:
            if isinstance(record, torch.Tensor):
                dist.all_gather([torch.empty_like(record) for _ in range(size)], record, group=collectives.group)
            else:
                dist.all_gather_object([None] * size, record, group=collectives.group)

        for title, way in ((f"{name}, by an all-gather", gather), (f"{name}, now", ours)):
            way()  # connections and buffers are made
            dist.barrier()
            began = time.process_time()
            for _ in range(CALLS):
                way()
            found[title] = (time.process_time() - began) / CALLS * 1e3
            dist.barrier()
    found["open files of a rank"] = psutil.Process().num_fds()
    dist.barrier()
    answers.put((rank, found))
    os._exit(0)


def measure(size: int) -> dict[str, float]:
    """The means of `size` ranks."""
    forks, port = get_context("fork"), free_port()
    answers = forks.SimpleQueue()
    for rank in range(size):
        forks.Process(target=be_rank, args=(rank, size, port, answers)).start()
    found = dict(answers.get() for _ in range(size))
    means = {title: mean(one[title] for one in found.values()) for title in found[0]}
    for title in [title for title in means if title.endswith("for rank 0, now")]:
        means[f"{title}, on rank 0"] = found[0][title]
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = {size: measure(size) for size in options.ranks}
    rows = [
        {"ms of CPU per rank and call": title, **{f"{size} ranks": found[title] for size, found in columns.items()}}
        for title in columns[options.ranks[0]]
    ]
    report("control traffic", rows, options.json)


if __name__ == "__main__":
    main()
