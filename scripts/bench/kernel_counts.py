"""Counts, without a GPU, what decides a GPU's speed: bytes and kernels of the loss, graphs of the compiled layers.

    python scripts/bench/kernel_counts.py [--batches 6] [--json rows.json]

The loss by loss_traffic.py: one default micro-batch at 151,936 words, forward and backward, beside matrix products,
with its own kernel and as torch's operators. The layers by layer_traffic.py: what the kernels move that inductor plans
for a default micro-batch, on a GPU and on this machine's CPU. Smaller layers are captured as torch.compile would for a
GPU, over micro-batches of other documents each, forward and backward: how many graphs they take, and how often one
ends early.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import layer_traffic
import loss_traffic
import torch
from contenders import Job
from torch._dynamo.utils import counters
from turns import report

from ds_encdec.data.loader import collate
from ds_encdec.engine.sharded_engine import packed_forward
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.types import Batch

JOB = Job(documents="web", hidden=32, layers=2, vocab=1024, encoder_length=64, decoder_length=32, median_tokens=16)
"""Small: a graph is the same at any size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        traffic("loss, its kernel", has_kernel=True),
        traffic("loss, torch's operators", has_kernel=False),
        layer_bytes("layers, planned for a GPU", "cuda"),
        layer_bytes("layers, planned for a CPU", "cpu"),
        graphs("layers", options.batches, "none"),
        graphs("layers, recomputed", options.batches, "full"),
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
        "graphs": None,
        "breaks": None,
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


def graphs(name: str, count: int, mode: Any) -> dict[str, Any]:
    """Graphs of all layers, of which there are two kinds, over `count` micro-batches."""
    torch._dynamo.reset()
    counters.clear()
    model, compile_ = JOB.model(), torch.compile
    torch.compile = partial(_captured, compile_)  # type: ignore[assignment]
    try:
        apply_activation_checkpointing(model, mode, compile_layers=True)
        for batch in islice(batches(), count):
            packed_forward(model, batch).total.backward()
    finally:
        torch.compile = compile_
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {"what": f"{name}, {count} micro-batches", "graphs": found[0], "breaks": found[1]}


def _captured(compile_: Any, forward: Any, **_: Any) -> Any:
    """`torch.compile` that makes graphs and runs them as they are: generating code takes minutes."""
    return compile_(forward, backend="aot_eager")


def batches() -> Iterator[Batch]:
    for examples in JOB.micro_batches():
        yield collate(examples, JOB.budgets, JOB.vocabulary.pad_id)


if __name__ == "__main__":
    main()
