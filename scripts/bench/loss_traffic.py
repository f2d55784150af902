"""Counts what the loss of one micro-batch moves on a GPU, without a GPU: bytes, kernels and products.

    python scripts/bench/loss_traffic.py [--chunk-tokens 1024] [--json rows.json]

The loss runs forward and backward on meta tensors. Each operator counts as one kernel that reads every tensor it is
given once and writes its results once; views and allocations count as none. The loss's own kernel, which does not run
there, counts by its loads and stores: of every logit two reads in float32 and a gradient. Matrix products count
apart: what they read and write is hidden behind their arithmetic.

The tokens are the decoder's of a default micro-batch at UL2's mix (docs/memory.md).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from turns import report

from ds_encdec.model import loss as loss_module
from ds_encdec.model import loss_kernel
from ds_encdec.model.loss import Teacher
from ds_encdec.model.loss_kernel import Extras, Rows

TOKENS, HIDDEN, VOCAB, CHUNK_TOKENS = 13_107, 1024, 151_936, 1024
_PRODUCTS = {"mm", "addmm", "addmm_"}
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "detach_", "slice"}
_WRITES_ONLY = {"zeros", "zeros_like", "new_full", "full", "full_like", "ones_like", "zero_", "fill_", "scalar_tensor"}


class TrafficCounter(TorchDispatchMode):
    """Counts the operators that run inside: bytes beside products, kernels of all kinds, and of products both."""

    num_bytes = kernels = product_bytes = products = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _FREE:
            moved = _bytes([result]) + (0 if name in _WRITES_ONLY else _bytes(tree_leaves((args, kwargs))))
            self.kernels += 1
            if name in _PRODUCTS:
                self.products += 1
                self.product_bytes += moved
            else:
                self.num_bytes += moved
        return result

    def add_own(self, rows: Rows, gradients: Tensor | None, *_: Any) -> None:
        """Count the loss's kernel in place of starting it."""
        self.kernels += 1
        read_again = 0 if gradients is None else gradients.nbytes + rows.logits.nbytes
        self.num_bytes += _bytes(rows) + read_again
        if rows.taught is not None:
            self.num_bytes += _bytes(rows.taught) + bool(read_again) * rows.taught.logits.nbytes


def _bytes(leaves: Iterable[object]) -> int:
    """Bytes of the tensors' distinct elements: what is expanded is read once."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors)


def counted(
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    has_kernel: bool = True,
    has_teacher: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **extras: float,
) -> TrafficCounter:
    """Count forward and backward of a loss of `tokens`, `chunk_tokens` at a time, on a GPU. `has_teacher`: all of them
    have one, of the student's sizes."""
    states, weight = (
        torch.empty(rows, hidden, dtype=dtype, device="meta").requires_grad_() for rows in (tokens, vocab)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    teacher = Teacher(states.detach(), weight.detach(), vocab, 0.5, 2.0) if has_teacher else None
    with (
        TrafficCounter() as counter,
        patch.object(loss_module, "_gives_float32", lambda *_, **__: True),
        patch.object(loss_kernel, "runs_on", lambda *_: has_kernel),
        patch.object(loss_kernel, "_launch", counter.add_own),
    ):
        # Without the public function's autocast, which meta tensors do not have.
        arguments = (states, weight, labels, chunk_tokens, True, Extras(**extras), None, teacher)
        loss_module._LinearCrossEntropy.apply(*arguments)[0].backward()
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    kinds = itertools.product(
        (("", False), (", with a teacher", True)), (("its kernel", True), ("torch's operators", False))
    )
    for (beside, has_teacher), (by, has_kernel) in kinds:
        name = by + beside
        found = counted(chunk_tokens=options.chunk_tokens, has_kernel=has_kernel, has_teacher=has_teacher)
        gigabytes = {"GB": found.num_bytes / 1e9, "ms at 3 TB/s": found.num_bytes / 3e9}
        products = {"of them products": found.products, "GB of these": found.product_bytes / 1e9}
        rows.append({"what": name} | gigabytes | {"kernels": found.kernels} | products)
    report("counted without a GPU", rows, options.json)


if __name__ == "__main__":
    main()
