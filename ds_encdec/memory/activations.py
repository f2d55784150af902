"""What the forward pass keeps for the backward pass, and what both work on: per layer, and in the loss head.

Counted are the tensors that autograd saves in model/modeling.py, operation by operation, for two kinds of device:

- CUDA: fused RMSNorm (keeps its input), variable-length flash attention (keeps queries, keys, values, its output and
  one float32 per head and token), products in the compute dtype.
- CPU: RMSNorm in single operations (keeps float32 copies), one `scaled_dot_product_attention` per document (with a
  mask in the decoder), and, where the CPU has no bfloat16 instructions, products in float32 that keep float32 copies
  of their operands, weights included (model/precision.py).

All figures are bytes of one micro-batch on one rank. docs/memory.md has the formulas in one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ds_encdec.memory.job import Job

Side = Literal["encoder", "decoder"]

_FLOAT32 = 4
_INT64 = 8


_FLASH_ROWS_PER_SEGMENT = 128
"""Rows by which flash-attention's backward pass pads each segment in its float32 workspace (mha_varlen_bwd)."""


_TOKENS_PER_DOCUMENT = 512
"""Of both sides, in the mean of a micro-batch: web-like documents have 945, and 585 in the worst of 300 batches."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer's pass over one micro-batch.

    `input`: its input. `kept`: from its forward pass for its backward pass. `working`: the worst moment of that, with
    what is left of `kept` then, or made again, and gradients of its own; those of weights are the engine's. `forward`:
    what a pass without gradients works on at its worst moment.
    """

    input: float
    kept: float
    working: float
    forward: float


def layer_memory(job: Job, side: Side, *, recomputes: bool = False) -> LayerMemory:
    """The memory of one encoder or decoder layer."""
    hidden, inner, dtype = job.sizes.hidden_size, job.sizes.intermediate_size, job.compute_bytes
    tokens = job.encoder_tokens if side == "encoder" else job.decoder_tokens
    given = tokens * hidden * dtype
    attention, mlp = _attention(job, side), _norm(job, tokens, hidden) + _mlp(job, tokens)
    kept = attention + mlp
    in_flight: float = given  # the gradient of its output
    if job.emulates_bf16:  # and the down projection's in float32, of its output and of its weight
        in_flight += tokens * hidden * _FLOAT32 + hidden * inner * _FLOAT32
    if recomputes:
        kept = given
        if job.device == "cpu" and dtype != _FLOAT32:  # beside the float32 copies that the norm keeps
            in_flight += given
        if job.config.training.activation_checkpointing == "selective":
            kept += _selected(job, side)
            in_flight += tokens * hidden * _product_bytes(job)  # the last product's output, for which none asks again
    # Of both factors of SwiGLU's product; its own stands in for the product, which is gone by then. Where products are
    # emulated, its own in float32, before that: the same number of bytes.
    swiglu_gradients = 2 * tokens * inner * dtype
    return LayerMemory(
        input=given,
        kept=kept,
        working=in_flight + attention + max(mlp + swiglu_gradients, _attention_gradients(job, side)),
        forward=tokens * (3 * inner + 2 * hidden) * dtype,
    )


def layers_memory(job: Job, side: Side) -> list[LayerMemory]:
    """Each layer of a stack, as `training.activation_checkpointing` has it (model/activation_checkpointing.py)."""
    training = job.config.training
    every_n = training.activation_checkpointing_every_n
    interval = {"none": 0, "full": 1, "every_n": every_n, "selective": 1}[training.activation_checkpointing]
    whole, recomputing = layer_memory(job, side), layer_memory(job, side, recomputes=True)
    layers = job.encoder_layers if side == "encoder" else job.decoder_layers
    return [recomputing if interval and index % interval == 0 else whole for index in range(layers)]


def _attention_gradients(job: Job, side: Side) -> float:
    """In flight in the attention kernel: gradients of its operands, and its workspace.

    That of its output stands in for the output projection's input, which is gone by then.
    """
    sizes, dtype = job.sizes, job.compute_bytes
    query_width, key_width = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    tokens = key_tokens = job.encoder_tokens
    if side == "decoder":
        tokens, key_tokens = job.decoder_tokens, job.encoder_tokens + job.decoder_tokens
    if job.device == "cpu":
        return (tokens * query_width + 2 * key_tokens * key_width) * _product_bytes(job)
    if not job.uses_flash:  # scores, softmax and a gradient of one document, in float32
        queries, keys = _longest(job, side)
        operands = (tokens + 2 * key_tokens) * query_width * dtype
        return 3 * sizes.num_attention_heads * queries * keys * _FLOAT32 + operands
    # flash-attention 2, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd: dq_accum, softmax_d; dk_expanded, dv_expanded.
    rows = tokens + _FLASH_ROWS_PER_SEGMENT * _segments(job)
    workspace = rows * (query_width + sizes.num_attention_heads) * _FLOAT32
    if query_width != key_width:
        workspace += 2 * key_tokens * query_width * dtype
    return workspace + (tokens * query_width + 2 * key_tokens * key_width) * dtype


def _segments(job: Job) -> int:
    """Documents of a micro-batch, of `_TOKENS_PER_DOCUMENT` tokens or as long as allowed if shorter; and padding."""
    encoder_length, decoder_length = job.longest_document
    shares = (
        (job.encoder_tokens + job.decoder_tokens) / _TOKENS_PER_DOCUMENT,
        job.encoder_tokens / encoder_length,
        job.decoder_tokens / decoder_length,
    )
    return min(ceil(max(shares)), job.config.data.max_examples_per_micro_batch) + 1


def offloaded_bytes(job: Job, side: Side) -> float:
    """What the layers of a stack leave in host memory under `training.activation_offload`.

    Each tensor is copied as often as it is saved: the input of three products three times. Pinned copies are rounded up
    to powers of two, which is taken to cost half of what they hold.
    """
    layers = layers_memory(job, side)
    total = sum(layer.kept for layer in layers)
    if not job.emulates_bf16:
        whole = layer_memory(job, side)
        total += 3 * whole.input * layers.count(whole)
    return 1.5 * total if job.device == "cuda" else total


def _selected(job: Job, side: Side) -> float:
    """What `selective` keeps (model/activation_checkpointing.py): attention, and every second product's output.

    In the order of the forward pass: queries, keys, values, (of the encoder's output) keys, values, attention's output
    projection, gate, up, down.
    """
    sizes, product = job.sizes, _product_bytes(job)
    query_width, key_width = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    tokens = job.encoder_tokens if side == "encoder" else job.decoder_tokens
    products = [(tokens, query_width), (tokens, key_width), (tokens, key_width)]
    if side == "decoder":
        products += [(job.encoder_tokens, key_width)] * 2
    products += [(tokens, sizes.hidden_size), *[(tokens, sizes.intermediate_size)] * 2, (tokens, sizes.hidden_size)]
    attention = tokens * (query_width * product + sizes.num_attention_heads * _FLOAT32)
    return attention + sum(rows * width * product for rows, width in products[::2])


def _attention(job: Job, side: Side) -> float:
    """Of the attention block: its norm, projections, per-head norms, the kernel and the output projection."""
    sizes = job.sizes
    heads, key_heads, head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    hidden, query_width, key_width = sizes.hidden_size, heads * head_dim, key_heads * head_dim
    tokens = job.encoder_tokens if side == "encoder" else job.decoder_tokens
    key_tokens = tokens
    saved = _norm(job, tokens, hidden)
    saved += _products(job, tokens, hidden, (query_width, key_width, key_width))
    saved += _norm(job, tokens, query_width, heads) + _norm(job, tokens, key_width, key_heads)
    if side == "decoder":  # keys and values of the encoder's output; they share the output itself, see `SharedMemory`
        key_tokens += job.encoder_tokens
        saved += _norm(job, job.encoder_tokens, key_width, key_heads)
        if job.emulates_bf16:
            saved += 2 * _FLOAT32 * (job.encoder_tokens * hidden + hidden * key_width)
    product = _product_bytes(job)
    kernel: float = tokens * (2 * query_width * product + heads * _FLOAT32) + 2 * key_tokens * key_width * product
    if job.device == "cuda" and not job.uses_flash:
        kernel += _scores(job, side)
    elif side == "decoder" and job.device == "cpu":
        kernel += _masks(job, product)
    padding_zeroed = tokens  # a bool for each
    return saved + kernel + padding_zeroed + _products(job, tokens, query_width, (hidden,))


def _masks(job: Job, product: int) -> float:
    """Of the decoder's attention on a CPU: each document's mask, as numbers to be added to the scores."""
    _, keys = _longest(job, "decoder")
    return job.decoder_tokens * keys * product


def _scores(job: Job, side: Side) -> float:
    """Of attention without a flash kernel on a GPU: each document's softmax, and its keys and values at full width.

    torch computes grouped queries under a mask in single operations.
    """
    queries, keys = _longest(job, side)
    documents = (job.encoder_tokens if side == "encoder" else job.decoder_tokens) / queries
    heads, head_dim = job.sizes.num_attention_heads, job.sizes.head_dim
    return documents * keys * heads * (queries + 2 * head_dim) * job.compute_bytes


def _longest(job: Job, side: Side) -> tuple[int, int]:
    """Queries and keys of a document that is as long as allowed."""
    encoder_length, decoder_length = job.longest_document
    return (encoder_length, encoder_length) if side == "encoder" else (decoder_length, encoder_length + decoder_length)


def _mlp(job: Job, tokens: int) -> float:
    """Of the SwiGLU layer: its input, both branches, the activation's output, and their product."""
    hidden, inner = job.sizes.hidden_size, job.sizes.intermediate_size
    branches = 3 * tokens * inner * job.compute_bytes
    return _products(job, tokens, hidden, (inner, inner)) + branches + _products(job, tokens, inner, (hidden,))


def _norm(job: Job, tokens: int, width: int, groups: int = 1) -> float:
    """RMSNorm: one float32 per group, and its input (fused) or two float32 copies (in single operations)."""
    per_token = width * job.compute_bytes if job.device == "cuda" else 2 * width * _FLOAT32
    return tokens * (per_token + groups * _FLOAT32)


def _product_bytes(job: Job) -> int:
    """Of one element of what a product gives, before it is rounded."""
    return _FLOAT32 if job.emulates_bf16 else job.compute_bytes


def _products(job: Job, tokens: int, width: int, outputs: tuple[int, ...]) -> float:
    """Linear layers of one input: the input; where products are emulated, float32 copies of it and of each weight."""
    if not job.emulates_bf16:
        return tokens * width * job.compute_bytes
    return sum(_FLOAT32 * (tokens * width + width * output) for output in outputs)


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes of the output layer and its loss, see model/loss.py.

    `kept`: from the loss to the head's backward pass: gradients of the hidden states and (float32) of the weight.
    `chunk`: beyond that while a chunk of logits is worked on. `evaluation`: all that a pass without gradients needs.
    `rounding`: beyond `kept` in the head's backward pass. `weight_gradient`: what comes of it, in the weight's dtype; a
    tied one waits for the embedding's to the very end.
    """

    kept: float
    chunk: float
    evaluation: float
    rounding: float
    weight_gradient: float


def head_memory(job: Job) -> HeadMemory:
    """The memory of the output layer."""
    hidden, vocab, dtype = job.sizes.hidden_size, job.sizes.vocab_size, job.compute_bytes
    chunk_tokens = min(job.config.model.loss_chunk_tokens, job.decoder_tokens)
    logits, states = chunk_tokens * vocab * _FLOAT32, chunk_tokens * hidden * _FLOAT32
    weight = vocab * hidden * _FLOAT32
    weight_gradient: float = weight if job.trains_embedding else 0.0
    chunk: float
    evaluation: float
    if dtype == _FLOAT32:
        chunk = evaluation = logits + states
    elif job.emulates_bf16:  # float32 copies of the weight and of the states
        chunk = evaluation = weight + logits + 2 * states
    else:  # rounded logits or gradients beside float32 ones; then beside the product that is added
        rounded = chunk_tokens * vocab * dtype
        product = weight_gradient if job.device == "cuda" else weight_gradient * dtype / _FLOAT32
        chunk, evaluation = max(logits + rounded, rounded + product), logits + rounded
    hidden_dtype = _FLOAT32 if job.config.training.fp16 else dtype
    return HeadMemory(
        kept=job.decoder_tokens * hidden * hidden_dtype + weight_gradient,
        chunk=chunk,
        evaluation=evaluation,
        rounding=0.0 if dtype == _FLOAT32 else weight_gradient * dtype / _FLOAT32,
        weight_gradient=weight_gradient * dtype / _FLOAT32,
    )


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes that stay beside the layers. The embeddings are the first layers' inputs, and counted there.

    `batch`: token ids (also joined), positions, labels, denoisers, the merged order of keys, rotary tables: for the
    whole pass. `encoder_output`: until the encoder's backward pass begins. `encoder_norm`, `decoder_norm`: what the
    last norm of a stack keeps, until the stack's backward pass begins. `norm_gradients`: what the decoder's makes in
    its backward pass.
    """

    batch: float
    encoder_output: float
    encoder_norm: float
    decoder_norm: float
    norm_gradients: float


def shared_memory(job: Job) -> SharedMemory:
    """What all layers have in common."""
    hidden, dtype = job.sizes.hidden_size, job.compute_bytes
    rotary = 2 * (job.encoder_tokens + job.decoder_tokens) * job.sizes.head_dim * dtype
    return SharedMemory(
        batch=_INT64 * (4 * job.encoder_tokens + 6 * job.decoder_tokens) + rotary,
        encoder_output=job.encoder_tokens * hidden * dtype,
        encoder_norm=_norm(job, job.encoder_tokens, hidden),
        decoder_norm=_norm(job, job.decoder_tokens, hidden),
        norm_gradients=job.decoder_tokens * hidden * (4 * _FLOAT32 if job.device == "cpu" else dtype),
    )
