"""Which attention kernel is taken and what it is handed; kernels of GPUs and of older torch are stand-ins here."""

import re
from dataclasses import replace
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import pack
from torch import Tensor

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import check_attention_dropout
from ds_encdec.model import attention_kernels
from ds_encdec.model.attention_kernels import AttentionKernel, KernelQuery, Segments, attend_by_document


def by_document(cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    lengths = [tuple(cu.diff().tolist()) for cu in (cu_q, cu_k)]
    return attend_by_document(q, k, v, Segments(cu_q, cu_k, *lengths), causal)


def varlen_2_11(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Torch 2.11's signature: heads that share their keys need not be told, and are not repeated."""
    assert q.shape[1] > k.shape[1] == v.shape[1]
    return by_document(cu_q, cu_k, q, k, v, window_size == (-1, 0))


def varlen_2_13(*tensors: Any, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
    """Torch 2.13's, as far as it is used."""
    q, k, v, cu_q, cu_k, *_ = tensors
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return by_document(cu_q, cu_k, q, k, v, window_size == (-1, 0))


_trial_error = attention_kernels._trial_error


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, varlen: Any, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention_kernels, "torch_varlen", SimpleNamespace(varlen_attn=varlen))
    monkeypatch.setattr(attention_kernels, "flash_attn", None)
    monkeypatch.setattr(attention_kernels, "_failure", cache(attention_kernels._failure.__wrapped__))
    monkeypatch.setattr(
        attention_kernels,
        "_trial_error",
        lambda kernel, wanted: _trial_error(kernel, replace(wanted, device=torch.device("cpu"))),
    )


def chosen(dropout: float = 0.0) -> AttentionKernel:
    return attention_kernels.choose_kernel(KernelQuery(torch.device("cuda"), torch.bfloat16, 128, dropout))[0]


@pytest.mark.parametrize("varlen", [varlen_2_11, varlen_2_13])
def test_grouped_queries_run_in_the_kernel_of_every_torch(monkeypatch: pytest.MonkeyPatch, varlen: Any) -> None:
    on_a_gpu(monkeypatch, varlen)
    kernel = chosen()
    assert kernel.name == "torch.nn.attention.varlen"
    layout = pack((5, 0, 7), (4, 6, 3), 16, 17).inputs["packing"]
    torch.manual_seed(0)
    results = []
    for attend in (kernel.attend, attend_by_document):
        torch.manual_seed(0)
        q = torch.randn(17, 4, 8, requires_grad=True)
        k, v = (torch.randn(33, 2, 8, requires_grad=True) for _ in range(2))
        out = attend(q, k, v, layout.merged, True, 0.0)[:13]
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_attention_dropout_is_refused_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, varlen_2_13)
    config = FullConfig.model_validate({"training": {"attention_dropout": 0.1}})
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(attention_kernels, "_trial_error", None)  # no trial before the ranks have met
    with pytest.raises(ConfigError, match=r"attention_dropout=0.1: .* torch.nn.attention.varlen, which has no dropout"):
        check_attention_dropout(config, gpu)
    check_attention_dropout(config, torch.device("cpu"))
    model = config.model.model_copy(update={"use_flash_attention": False})
    check_attention_dropout(config.model_copy(update={"model": model}), gpu)
    given: list[float] = []

    def varlen(*tensors: Any, dropout_p: float, causal: bool) -> Tensor:
        given.append(dropout_p)
        return by_document(*tensors[3:5], *tensors[:3], causal)

    on_a_gpu(monkeypatch, varlen_2_13)
    monkeypatch.setattr(attention_kernels, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    check_attention_dropout(config, gpu)
    kernel = chosen(dropout=0.1)
    q, k = torch.zeros(17, 4, 8), torch.zeros(33, 2, 8)
    kernel.attend(q, k, k, pack((5,), (4,), 16, 17).inputs["packing"].merged, True, 0.1)
    assert given[-1] == 0.1


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "reason"),
    [
        ("cpu", torch.bfloat16, (9, 0), "no flash kernel for cpu devices"),
        ("cuda", torch.float16, (7, 5), r"compute capability 8\.0 .* this GPU has 7\.5"),
        ("cuda", torch.float16, (8, 0), None),
        ("cuda with heads of 36", torch.bfloat16, (9, 0), "multiple of 8 up to 256, not of 36"),
    ],
)
def test_what_no_flash_kernel_runs_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    on_a_gpu(monkeypatch, varlen_2_13, capability)
    name, _, width = device.partition(" with heads of ")
    kernel, found = attention_kernels.choose_kernel(KernelQuery(torch.device(name), dtype, int(width or 128)))
    assert kernel.is_flash == (reason is None)
    assert re.search(reason or "", found)


@wraps(varlen_2_13)
def is_not_there(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


@wraps(varlen_2_13)
def doubled_gradients(*tensors: Any, **options: Any) -> Tensor:
    q, k, v, cu_q, cu_k, *lengths = tensors
    return varlen_2_13(q, 2 * k - k.detach(), v, cu_q, cu_k, *lengths, **options)


@wraps(varlen_2_13)
def not_a_number(*tensors: Any, **options: Any) -> Tensor:
    return varlen_2_13(*tensors, **options) * torch.nan


@pytest.mark.parametrize(
    ("varlen", "reason"),
    [
        (is_not_there, "RuntimeError: no kernel image is available"),
        (doubled_gradients, "its results are off by "),
        (not_a_number, "its results are off by nan"),
    ],
    ids=["absent", "gradients", "nan"],
)
def test_a_kernel_that_fails_its_trial_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, varlen: Any, reason: str
) -> None:
    on_a_gpu(monkeypatch, varlen)
    for _ in range(2):  # it is tried once
        with torch.inference_mode():
            assert chosen().name == "one call per document"
    (line,) = caplog.messages
    assert line.startswith(f"Attention on cuda: torch.nn.attention.varlen fails on a few documents: {reason}")


@pytest.mark.parametrize("fails", [False, True])
def test_flash_attention_3_is_active_where_it_is_right(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    active: list[str | None] = ["FA4"]

    @wraps(varlen_2_13)
    def varlen(*tensors: Any, **options: Any) -> Tensor:
        if fails and active[-1] == "FA3":
            raise RuntimeError("no kernel")
        return varlen_2_13(*tensors, **options)

    on_a_gpu(monkeypatch, varlen)
    registry = SimpleNamespace(
        current_flash_attention_impl=lambda: active[-1],
        activate_flash_attention_impl=active.append,
        restore_flash_attention_impl=lambda: active.append(None),
    )
    monkeypatch.setattr(attention_kernels.nn, "attention", registry)
    monkeypatch.setattr(attention_kernels, "_HAS_FLASH_ATTENTION_3", True)
    for _ in range(2):  # it is tried once
        assert chosen().name == ("torch.nn.attention.varlen" if fails else "FlashAttention 3")
    assert active == (["FA4", "FA3", None, "FA4"] if fails else ["FA4", "FA3"])


LENGTHS = ((5, 5), (0, 3), (7, 20), (1, 1), (40, 90), (30, 30), (2, 2), (0, 0), (9, 64))
"""Queries and keys of documents; some have no queries, and some nothing at all."""


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out, row, column = torch.zeros_like(q), 0, 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    for queries, keys in LENGTHS:
        spans = slice(row, row + queries), slice(column, column + keys)
        scores = torch.einsum("qhd,khd->hqk", q[spans[0]], k[spans[1]]) * q.shape[-1] ** -0.5
        if causal:
            scores = scores + torch.full((queries, keys), -torch.inf).triu(keys - queries + 1).to(scores)
        out[spans[0]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[spans[1]])
        row, column = row + queries, column + keys
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tail", [0, 3])
def test_neighbours_that_share_a_call_do_not_see_each_other(
    causal: bool, tail: int, dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    query_lengths, key_lengths = (tuple(side) for side in zip(*LENGTHS, strict=True))
    q, k, v = (
        torch.randn(sum(lengths) + tail, heads, 16, generator=draw).to(dtype).requires_grad_()
        for lengths, heads in ((query_lengths, 4), (key_lengths, 2), (key_lengths, 2))
    )
    weights = torch.randn(q.shape, generator=draw)
    edges = torch.zeros(1, dtype=torch.int32)
    segments = Segments(edges, edges, query_lengths, key_lengths, tail, tail)
    found = attend_by_document(q, k, v, segments, causal)
    assert found.dtype == dtype
    gradients = torch.autograd.grad((found.float() * weights).sum(), (q, k, v))
    expected = alone(*(x.double() for x in (q, k, v)), causal)
    theirs = torch.autograd.grad((expected * weights.double()).sum(), (q, k, v))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    for mine, reference in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(mine.float(), reference.float(), rtol=tolerance, atol=tolerance)
