"""Traces one micro-batch's pass through the model: what it holds at every moment, without the memory for it.

The model runs forward and backward under torch's FakeTensorMode, where tensors have shapes and no data, and
scripts/bench/tracked.py logs every storage. Fake tensors are on the CPU, because torch has no fake GPU without CUDA:
the model sees the job's device, and stand-ins for a GPU's kernels compute nothing, but allocate, keep and free as they
do. Memory inside operators is not seen, except in flash attention's backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from ds_encdec.base.types import Batch
from ds_encdec.engine.sharded_engine import compute_dtype, draws_masks, regularize
from ds_encdec.memory.job import Job
from ds_encdec.model import attention_kernels, loss, loss_kernel, modeling, precision
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import form_of
from ds_encdec.model.lora import choose_trained
from ds_encdec.objectives.contrastive import pooled
from ds_encdec.objectives.protocol import run_packed
from ds_encdec.objectives.tokens import split_by_task
from ds_encdec.registry.objectives import OBJECTIVES, TASKS

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from tracked import StorageLog, storages_of


def watched_pass(job: Job, *, backward: bool = True) -> StorageLog:
    """Log a pass through an unsharded model, forward and `backward`, with the purpose "activations" beside others."""
    training = job.config.training
    with FakeTensorMode(), as_on_device(job), no_init_weights(), torch.set_grad_enabled(backward):
        before, dtype = torch.get_default_dtype(), compute_dtype(training)
        sizes = Qwen3Seq2SeqConfig(
            **dataclasses.asdict(job.sizes),
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            encoder_positions=form_of(job.sizes).positions,  # others take less than 1 % more or less
            loss_chunk_tokens=job.config.model.loss_chunk_tokens,
            use_flash_attention=job.config.model.use_flash_attention,
        )
        model = modeling.Qwen3ForSeq2SeqLM._from_config(sizes, dtype=dtype)
        torch.set_default_dtype(dtype)
        try:
            choose_trained(model, job.config)
        finally:
            torch.set_default_dtype(before)
        every_n, random = training.activation_checkpointing_every_n, draws_masks(job.config)
        apply_activation_checkpointing(model, training.recomputation, every_n=every_n, random=random)
        regularize(model, training)
        watch, batch = _StorageWatch(model), _batch(job)
        watch.log.claim(storages_of(model.parameters()), "weights")
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.register_post_accumulate_grad_hook(
                lambda weight: watch.log.claim(storages_of([weight.grad]), "gradients")
            )
        watch.log.note(storages_of(getattr(batch, field.name) for field in dataclasses.fields(batch)), "activations")
        with watch:
            watch.now_in(part="forward pass")
            output = run_packed(model.train(backward), batch)
            if output.states is not None:
                total = pooled(output.states, batch, "mean").sum()
            else:
                total = split_by_task(output, batch).total
            del output
            if backward:
                watch.now_in(part="backward pass")
                total.backward()
    return watch.log


def _batch(job: Job) -> Batch:
    """Return a full micro-batch of fake tensors with the fewest, so the longest, documents; nothing reads its ids."""
    data, counts = job.config.data, (job.encoder_tokens, job.decoder_tokens)
    documents = max(-(-counts[0] // data.max_encoder_length), -(-counts[1] // data.max_decoder_length))
    ends = [[tokens * index // documents for index in range(documents + 1)] for tokens in counts]
    lengths = [tuple(end - start for start, end in itertools.pairwise(each)) for each in ends]
    edges = [torch.zeros(data.max_examples_per_micro_batch + 1, dtype=torch.int32) for _ in range(2)]
    encoder, decoder = (partial(torch.zeros, tokens, dtype=torch.int64) for tokens in counts)
    tasks = [TASKS[name] for name in OBJECTIVES[data.objective].tasks]
    labelled = encoder if any(task.on_encoder for task in tasks) else decoder
    return Batch(encoder(), decoder(), labelled(), encoder(), decoder(), *edges, labelled(), *lengths)


class _StorageWatch(TorchDispatchMode):
    """Logs the storages that operators make, with the running part of the pass and the layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.log = StorageLog()
        self._part = self._module = ""

        def enter(name: str, *_: Any) -> None:
            self.now_in(module=name)

        def leave(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(enter, name))

        for name, module in model.named_modules():
            if name in ("lm_head", "shared") or name.rpartition(".")[0] in ("encoder.layers", "decoder.layers"):
                module.register_forward_pre_hook(partial(enter, name))
                module.register_forward_hook(partial(leave, name))

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.log.note(storages_of(tree_leaves(result)), "activations")
        return result

    def now_in(self, *, part: str = "", module: str = "") -> None:
        """Set the part of the pass and the layer that run from now on; "" keeps one."""
        self._part, self._module = part or self._part, module or self._module
        self.log.moment = ", ".join(filter(None, (self._part, self._module)))


@contextmanager
def as_on_device(job: Job) -> Iterator[None]:
    """Inside, run on the CPU the code that the model would run on the device of `job`."""
    emulated = frozenset({compute_dtype(job.config.training)}) if job.emulates_bf16 else frozenset()
    substitutes: list[tuple[Any, str, object]] = [(precision, "_EMULATED_ON_CPU", emulated)]
    if job.device == "cuda":
        substitutes += [
            (modeling, "choose_kernel", choose_kernel),
            (nn.functional, "rms_norm", lambda x, _shape, weight, _epsilon: _FusedRmsNorm.apply(x, weight)),
            (nn.functional, "dropout", _dropout),
            (loss, "_gives_float32", lambda *_, **__: True),
            (loss_kernel, "runs_on", lambda *_: True),
            (loss_kernel, "_launch", lambda *_: None),
            (loss, "_add_product", lambda *_: None),  # it allocates nothing, and has no shapes on torch 2.11
        ]
    if job.config.model.lora is not None:
        # peft moves its adapters to their present device, which fake tensors do not allow.
        substitutes.append((nn.Module, "to", lambda module, *_, **__: module))
    with ExitStack() as substituted:
        for substitute in substitutes:
            substituted.enter_context(patch.object(*substitute))
        yield


def choose_kernel(*_: Any, **__: Any) -> tuple[attention_kernels.AttentionKernel, str]:
    """Stand in for `attention_kernels.choose_kernel`: flash attention, also in float32 (see memory/estimate.py)."""
    return attention_kernels.AttentionKernel("as on a GPU", lambda _: "", _varlen_attention), ""


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: attention_kernels.Segments, causal: bool, _dropout: float
) -> Tensor:
    """Call torch's operator, which knows its shapes without a GPU, and allocate what its backward pass does.

    Flash attention 2's `mha_varlen_bwd` (csrc/flash_attn/flash_api.cpp) makes the gradients of q, k and v; that of q in
    float32, with 128 rows more for each segment; and if heads share keys, those of keys and values of each head.
    """
    query, key, rows = q.shape, k.shape, len(q) + 128 * (len(segments.query_cu_seqlens) - 1)

    def allocate_and_free(grad: Tensor) -> None:
        held = [grad.new_empty(shape) for shape in (query, key, key)]
        held += [grad.new_empty(shape, dtype=torch.float32) for shape in ((rows, *query[1:]), (rows, query[1]))]
        held += [grad.new_empty((key[0], *query[1:])) for _ in range(2)] if query[1] != key[1] else []

    out = attention_kernels.attend_in_torch(q, k, v, segments, causal)
    if out.requires_grad:
        out.register_hook(allocate_and_free)
    return out


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Stand in for `dropout`, one operator on a GPU; a CPU computes it in single ones."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _FusedRmsNorm(torch.autograd.Function):
    """A GPU's operator (aten::_fused_rms_norm): it keeps its input, and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
