"""Counts, without a GPU, what decides a GPU's speed: bytes and kernels of the loss and of the compiled layers.

    python scripts/bench/kernel_counts.py [--json rows.json]

The loss by loss_traffic.py: one default micro-batch at 151,936 words, forward and backward, beside matrix products,
with its own kernel and as torch's operators. The layers by layer_traffic.py: what the kernels move that inductor plans
for a default micro-batch, on a GPU and on this machine's CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import layer_traffic
import loss_traffic
from turns import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        traffic("loss, its kernel", has_kernel=True),
        traffic("loss, torch's operators", has_kernel=False),
        layer_bytes("layers, planned for a GPU", "cuda"),
        layer_bytes("layers, planned for a CPU", "cpu"),
    ]
    report("counted without a GPU", rows, options.json)


def traffic(name: str, *, has_kernel: bool) -> dict[str, Any]:
    found = loss_traffic.counted(has_kernel=has_kernel)
    return {
        "what": name,
        "GB": found.num_bytes / 1e9,
        "ms at 3 TB/s": 1e3 * found.num_bytes / loss_traffic.BYTES_PER_SECOND,
        "kernels": found.kernels,
        "of them products": found.products,
    }


def layer_bytes(name: str, plan: layer_traffic.Plan) -> dict[str, Any]:
    kernels = layer_traffic.planned(plan)
    num_bytes = sum(kernel.num_bytes for kernel in kernels)
    return {
        "what": name,
        "GB": num_bytes / 1e9,
        "ms at 3 TB/s": 1e3 * num_bytes / loss_traffic.BYTES_PER_SECOND,
        "kernels": len(kernels) * layer_traffic.LAYERS,
    }


if __name__ == "__main__":
    main()
