"""Counts what the loss of one micro-batch moves on a GPU, without a GPU: bytes, kernels and products.

    python scripts/bench/loss_traffic.py [--operators] [--json]

The loss runs forward and backward on meta tensors. Each operator counts as one kernel that reads every tensor it is
given once and writes its results once; views and allocations count as none. The loss's own kernel, which does not run
there, counts by its loads and stores: of every logit two reads in float32 and a gradient. Matrix products count
apart: what they read and write is hidden behind their arithmetic. --operators counts the loss as it is without its
kernel.

The tokens are the decoder's of a default micro-batch at UL2's mix (docs/memory.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_encdec.model import loss as loss_module
from ds_encdec.model import loss_kernel
from ds_encdec.model.loss_kernel import Extras, Rows

TOKENS, HIDDEN, VOCAB, CHUNK_TOKENS = 13_107, 1024, 151_936, 1024
BYTES_PER_SECOND = 3.0e12
"""The rate of an H100's memory, about."""
_PRODUCTS = {"mm", "addmm", "addmm_"}
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "detach_"}
_WRITES_ONLY = {"zeros", "zeros_like", "new_full", "full", "full_like", "ones_like", "zero_", "fill_", "scalar_tensor"}


@dataclasses.dataclass
class Traffic:
    """The counts: bytes beside products, kernels of all kinds, and of the products bytes and number."""

    num_bytes: int = 0
    kernels: int = 0
    product_bytes: int = 0
    products: int = 0


class TrafficCounter(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _FREE and name != "slice":
            read = [] if name in _WRITES_ONLY else tree_leaves((args, kwargs))
            self.add(_bytes(read) + _bytes([result]), is_product=name in _PRODUCTS)
        return result

    def add(self, num_bytes: int, *, is_product: bool = False) -> None:
        """Count a kernel that moves that much."""
        self.traffic.kernels += 1
        if is_product:
            self.traffic.products += 1
            self.traffic.product_bytes += num_bytes
        else:
            self.traffic.num_bytes += num_bytes

    def add_own(self, rows: Rows, gradients: Tensor | None, *_: Any) -> None:
        """Count the loss's kernel in place of starting it."""
        of_gradients = 0 if gradients is None else gradients.nbytes + rows.logits.nbytes
        self.add(_bytes(rows) + of_gradients)


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
    dtype: torch.dtype = torch.bfloat16,
    **extras: float,
) -> Traffic:
    """Count forward and backward of a loss of `tokens`, `chunk_tokens` at a time, on a GPU."""
    counter = TrafficCounter()
    states, weight = (
        torch.empty(rows, hidden, dtype=dtype, device="meta").requires_grad_() for rows in (tokens, vocab)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with (
        patch.object(loss_module, "_gives_float32", lambda *_, **__: True),
        patch.object(loss_kernel, "runs_on", lambda *_: has_kernel),
        patch.object(loss_kernel, "_launch", counter.add_own),
        counter,
    ):
        # Without the public function's autocast, which meta tensors do not have.
        loss_module._LinearCrossEntropy.apply(states, weight, labels, chunk_tokens, Extras(**extras), True)[
            0
        ].backward()
    return counter.traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--operators", action="store_true", help="without the kernel")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = (options.tokens, options.hidden, options.vocab, options.chunk_tokens)
    found = counted(*sizes, has_kernel=not options.operators)
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    milliseconds, rate = 1e3 * found.num_bytes / BYTES_PER_SECOND, BYTES_PER_SECOND / 1e12
    print(f"{options.tokens} tokens, hidden {options.hidden}, {options.vocab} words, chunks of {options.chunk_tokens}")
    print(f"{found.num_bytes / 1e9:.1f} GB beside products, {milliseconds:.1f} ms at {rate:.1f} TB/s")
    print(f"{found.kernels} kernels, {found.products} of them products, which move {found.product_bytes / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
