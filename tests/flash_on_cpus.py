"""Torch's flash attention as if there were one for CPUs: it goes by document, and stands inside graphs as on a GPU."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ds_encdec.model import modeling
from ds_encdec.model.attention_kernels import (
    AttentionKernel,
    Segments,
    attend_by_document,
    attend_in_torch,
)

IN_TORCH = AttentionKernel("torch's", lambda _: "", attend_in_torch)


@contextmanager
def attention_of_gpus() -> Iterator[list[tuple[int, int]]]:
    with patch.object(modeling, "choose_kernel", lambda wanted, flash: (IN_TORCH, "")), flash_on_cpus() as longest:
        yield longest


def _segments(cu_q: Tensor, cu_k: Tensor) -> Segments:
    (*queries, query_tail), (*keys, key_tail) = (x.diff().tolist() for x in (cu_q, cu_k))
    return Segments(cu_q, cu_k, tuple(queries), tuple(keys), query_tail, key_tail)


def _with_autograd(compute: Callable[[], Any]) -> Any:
    """Run `compute` in a thread of its own: autograd is off inside operators."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute).result()


@contextmanager
def flash_on_cpus() -> Iterator[list[tuple[int, int]]]:
    """Inside, the operators run on CPUs. Yields the largest lengths of queries and keys that they are given."""
    longest: list[tuple[int, int]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, **_: Any) -> tuple[Any, ...]:
        max_q, max_k, _dropout, causal, _debug = rest
        assert (int(cu_q.diff().max()), int(cu_k.diff().max())) <= (max_q, max_k)
        longest.append((max_q, max_k))
        out = attend_by_document(q, k, v, _segments(cu_q, cu_k), causal).contiguous()
        return out, q.new_empty(q.shape[1], len(q), dtype=torch.float32), *(torch.empty(0) for _ in range(3))

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> Any:
        _out, _statistics, cu_q, cu_k, _max_q, _max_k, _dropout, causal, *_ = rest
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]

        def gradients() -> Any:
            out = attend_by_document(*inputs, _segments(cu_q, cu_k), causal)
            return tuple(x.contiguous() for x in torch.autograd.grad(out, inputs, grad))

        return _with_autograd(gradients)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield longest
    finally:
        library._destroy()
