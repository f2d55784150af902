"""A step of AdamW in float32 on a CPU, as a rank with offloaded optimizer does it: python scripts/bench/adam.py

Torch's fused AdamW, torch's own choice (a loop over single operations) and DeepSpeed's compiled CPUAdam take turns on
one flat tensor for each size. Given are medians of the rounds: CPU milliseconds a step, and by how much CPUAdam is
faster. CPUAdam is compiled at its first use on a machine, which takes minutes; `--without-cpu-adam` leaves it out.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from turns import cpu_seconds, in_turns, median, report

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", type=float, default=[1, 10, 100], help="of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-cpu-adam", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        measure(int(1e6 * millions), options.rounds, with_cpu_adam=not options.without_cpu_adam)
        for millions in options.millions
    ]
    report(f"AdamW on one flat tensor, {torch.get_num_threads()} thread(s)", rows, options.json)


def measure(size: int, rounds: int, *, with_cpu_adam: bool) -> dict[str, Any]:
    """One row: CPU milliseconds a step of `size` float32 weights under each."""

    def flat() -> list[torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.full((size,), 0.1))
        parameter.grad = torch.full((size,), 1e-3)
        return [parameter]

    optimizers: dict[str, Any] = {
        "fused": torch.optim.AdamW(flat(), fused=True, **SETTINGS),
        "loop": torch.optim.AdamW(flat(), foreach=False, fused=False, **SETTINGS),
    }
    if with_cpu_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizers["CPUAdam"] = DeepSpeedCPUAdam(flat(), adamw_mode=True, **SETTINGS)
    steps = {name: partial(cpu_seconds, optimizer.step) for name, optimizer in optimizers.items()}
    in_turns(steps, 2)  # the moments are made, the memory is touched
    found = in_turns(steps, rounds)
    row: dict[str, Any] = {"M parameters": size / 1e6}
    row |= {f"{name}, CPU ms": median(1e3 * seconds for seconds in found[name]) for name in optimizers}
    if with_cpu_adam:
        pairs = zip(found["fused"], found["CPUAdam"], strict=True)
        row["fused over CPUAdam"] = median(ours / theirs for ours, theirs in pairs)
    return row


if __name__ == "__main__":
    main()
