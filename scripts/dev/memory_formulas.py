"""Writes ds_encdec/memory/activations.json, the formulas of activations, from traces; --check only compares.

A model of three decoder layers, and the encoder layers that these read, is traced once (pass_trace.py) for each form of
cross-attention, kind of numbers and mode of activation checkpointing, without adapters and with. So are three layers of
an encoder alone, without a head and with one. Its sizes have no
common factors, so the bytes of every storage are the product of one set of sizes only: `2*D*Q` is a tensor of decoder
tokens times the width of the queries in 16 bits. What is held at a moment is a sum of such products, and what one layer
more adds is the difference between its end and that of the layer before it.

Of each part of the pass the file has all moments that may be its worst: those that are so for one of many sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from pass_trace import watched_pass

from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.estimate import ENCODER_FORMS, TABLE
from ds_encdec.memory.job import Job, Sizes, make_job
from ds_encdec.model.cross_attention import FORMS
from ds_encdec.registry.families import FAMILIES, LAYER

KINDS = ("cuda bf16", "cuda fp16", "cuda fp32", "cpu bf16", "cpu fp32", "cpu bf16 emulated")
"""Devices and numbers; `emulated`: bfloat16 multiplied in float32 (model/precision.py)."""
ADAPTERS = ("", " lora", " lora dropout")
"""Suffixes of a kind: the whole model is trained, or adapters of all projections, without or with dropout."""
MODES = ("none", "full", "selective")  # of activation checkpointing; `every_n` mixes layers of `full` and `none`
_KINDS_OF_NORMS = {(row["qk_norm"], row["norm_position"]) for row in (LAYER | {**f.layer} for f in FAMILIES.values())}
OTHER_NORMS = sorted(_KINDS_OF_NORMS - {(LAYER["qk_norm"], LAYER["norm_position"])})
"""Norms of queries and keys and of the layer in families unlike Qwen3. Traced is only what such a layer keeps: in its
backward pass, too, it holds as much less."""
LAYERS, MIDDLE = 3, 1
"""Decoder layers, and the layer of either stack whose bytes are any layer's: it neither begins nor ends the pass.

Only the last decoder layer differs: no gradient of the encoder's states waits beside it yet."""
HEADS, KEY_HEADS, HEAD_DIM = 31 * 37, 31, 2 * 41
TOKENS = {"E": 10_007, "D": 9 * 509, "C": 509, "": 1}
"""Symbols as in memory/estimate.py; a chunk of the loss divides the decoder's tokens.

Each chunk is traced; a byte for each token is not NEGLIGIBLE, and what a chunk has for each of its tokens is.
"""
WIDTHS = {
    "": 1,
    "H": 211,
    "I": 223,
    "r": 227,
    "V": 50_021,
    "h": HEADS,
    "k": KEY_HEADS,
    "d": HEAD_DIM,
    "Q": HEADS * HEAD_DIM,
    "K": KEY_HEADS * HEAD_DIM,
}
COEFFICIENTS = (1, 2, 4, 8)
FLASH_ROWS, SEGMENTS = 128, 2
"""Rows by which each segment is padded in flash attention's backward pass; segments of a layout of one document."""
NEGLIGIBLE = 4096
"""Bytes below which a storage is left out: one number for each document, or for each number of a norm's weight."""

Formula = Counter[str]
"""Bytes by product of symbols."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is not what traces give")
    check = parser.parse_args().check
    # float16 is DeepSpeed's, and selective checkpointing FSDP2's.
    table: dict[str, Any] = {form: {} for form in (*FORMS, *ENCODER_FORMS)}
    for form, (kind, adapters) in itertools.product(table, itertools.product(KINDS, ADAPTERS)):
        name, modes = f"{kind}{adapters}", [mode for mode in MODES if (kind, mode) != ("cuda fp16", "selective")]
        table[form][name] = {mode: own_parts(table, form, name, mode) for mode in modes}
    # A line for each part.
    text = re.sub(r"\n(?: {5}(?=\S)| {4}(?=[]}]))", "", json.dumps(table, indent=1)) + "\n"
    if check:
        return int(TABLE.read_text() != text)
    TABLE.write_text(text)
    return 0


def own_parts(table: dict[str, Any], form: str, kind: str, mode: str) -> dict[str, Any]:
    """The parts of `formulas` in which a form differs from the first one, whose parts are in `table`."""
    first = table[next(iter(FORMS))].get(kind, {}).get(mode, {})
    return {part: found for part, found in formulas(form, kind, mode).items() if found != first.get(part)}


def formulas(form: str, kind: str, mode: str) -> dict[str, Any]:
    """The bytes held in the parts of a pass, in terms of the symbols."""
    job = _job(form, kind, mode)
    parts: dict[str, list[Formula]] = {}
    for part, held in _walk(job, backward=True):
        parts.setdefault(part, []).append(held)
    passed = [part for part in parts if part.startswith("forward pass, ")]
    kept = _kept({part: moments[-1] for part, moments in parts.items()})

    def worst(part: str) -> list[str]:
        """The worst moments of `part`, without what layers before it keep: one of the backward pass has freed more."""
        name = part.replace("backward", "forward")
        before = passed[: passed.index(name)] if name in passed else []
        below = _plus(*(kept[side] for each in before for side in kept if f"{side}.layers" in each))
        return _worst([_minus(held, below) for held in parts.get(part, [])])

    return {
        "kept": _texts(kept),
        **(dict(_kept_by_others(job)) if mode == MODES[0] else {}),
        "loss": worst("forward pass, lm_head"),
        "head": worst("backward pass, lm_head"),
        "encoder": worst(f"backward pass, encoder.layers.{MIDDLE}"),
        "last decoder": worst(f"backward pass, decoder.layers.{LAYERS - 1}"),
        "decoder": worst(f"backward pass, decoder.layers.{MIDDLE}"),
        # Beside adapters the embedding is frozen, and has no backward pass.
        "embedding": worst("backward pass, shared"),
        # Without a backward pass no mode recomputes anything.
        **({"evaluation": _worst([held for _, held in _walk(job, backward=False)])} if mode == MODES[0] else {}),
    }


def _job(form: str, name: str, mode: str) -> Job:
    alone = form in ENCODER_FORMS
    kind, _, adapters = name.partition(" lora")
    device, numbers = kind.split(" ", 1)
    lora = {"r": WIDTHS["r"], "lora_dropout": 0.1 if adapters else 0.0} if "lora" in name else None
    config = FullConfig.model_validate(
        {
            "model": {"loss_chunk_tokens": TOKENS["C"], "lora": lora},
            "data": {"max_encoder_length": TOKENS["E"], "max_examples_per_micro_batch": 1}
            | (
                {"objective": "contrastive" if form == ENCODER_FORMS[0] else "mntp"}
                if alone
                else {"max_decoder_length": TOKENS["D"], "max_seq_length": 2 * TOKENS["D"]}
            ),
            "training": {
                "bf16": numbers.startswith("bf16"),
                "activation_checkpointing": mode,
                "per_device_train_batch_size": 1,
            },
            "infra": {"distributed_type": "fsdp", "offload_optimizer": "none"},
        }
    )
    training = config.training.model_copy(update={"fp16": numbers == "fp16"})  # which FSDP2 refuses
    config = config.model_copy(update={"training": training})
    sizes = Sizes(
        vocab_size=WIDTHS["V"],
        hidden_size=WIDTHS["H"],
        num_hidden_layers=0 if alone else LAYERS,
        num_encoder_layers=LAYERS - (not alone and FORMS[form].is_aligned),
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=WIDTHS["I"],
        tie_word_embeddings=True,
        cross_attention="final" if alone else form,
        encoder_heights=list(range(LAYERS)) if not alone and FORMS[form].is_aligned else None,
    )
    job = make_job(config, sizes, "fsdp", world_size=1, ranks_per_node=1, emulates_bf16=numbers.endswith("emulated"))
    # The chunks of the head's loss divide the tokens that it reads: an encoder alone with a head has the decoder's.
    tokens = (TOKENS["D" if form == ENCODER_FORMS[1] else "E"], 0) if alone else (TOKENS["E"], TOKENS["D"])
    return dataclasses.replace(job, device=device, encoder_tokens=tokens[0], decoder_tokens=tokens[1])


def _walk(job: Job, *, backward: bool) -> Iterator[tuple[str, Formula]]:
    """The bytes held of activations after each change, with the part of the pass in work."""
    held: Formula = Counter()
    for part, purpose, change in watched_pass(job, backward=backward).changes():
        if purpose == "activations" and abs(change) >= NEGLIGIBLE:
            for product, coefficient in _products(abs(change)).items():
                held[product] += coefficient if change > 0 else -coefficient
        names = {"D": "E"} if job.sizes.num_hidden_layers == 0 else {}
        yield part, Counter({_renamed(product, names): times for product, times in held.items() if times})


def _renamed(product: str, names: dict[str, str]) -> str:
    return _joined(*(names.get(name, name) for name in product.split("*")))


def _products(num_bytes: int) -> Formula:
    """The one way to write `num_bytes` as a product of the sizes."""
    found = {
        tuple(sorted(formula.items()))
        for size, formula in _KNOWN
        for times in COEFFICIENTS
        if size * times == num_bytes
        for formula in [_times(times, formula)]
    }
    if len(found) != 1:
        raise ValueError(f"a storage of {num_bytes} bytes is {len(found)} different products of the sizes")
    return Counter(dict(found.pop()))


def _known() -> Iterator[tuple[int, Formula]]:
    rows = {name: {name: 1} for name in TOKENS} | {"E + D": {"E": 1, "D": 1}}
    rows |= {f"{side} + s": {side: 1, "s": FLASH_ROWS} for side in ("E", "D")}
    sizes = {**TOKENS, "s": SEGMENTS}
    for row, (column, width) in itertools.product(rows.values(), WIDTHS.items()):
        size = sum(sizes[name] * times for name, times in row.items())
        yield size * width, Counter({_joined(name, column): times for name, times in row.items()})
    # A mask has the decoder's queries and all keys of a document, which here is the whole micro-batch.
    yield TOKENS["D"] * (TOKENS["E"] + TOKENS["D"]), Counter({"D*m": 1})
    for product in ("H*V", "H*I", "H*Q", "H*K", "H*r", "I*r", "Q*r", "K*r"):
        first, second = product.split("*")
        yield WIDTHS[first] * WIDTHS[second], Counter({product: 1})


def _joined(*names: str) -> str:
    return "*".join(filter(None, names))


_KNOWN = list(_known())


def _kept(ends: dict[str, Formula]) -> dict[str, Formula]:
    """The bytes that the middle layer of each stack adds, of those held at the end of each part of a pass."""
    parts, kept = list(ends), {}
    for side in ("encoder", "decoder"):
        if f"forward pass, {side}.layers.{MIDDLE}" not in parts:
            continue
        at = parts.index(f"forward pass, {side}.layers.{MIDDLE}")
        kept[side] = _minus(ends[parts[at]], ends[parts[at - 1]])
    return kept


def _worst(moments: list[Formula]) -> list[str]:
    """The moments that are the worst for some of the sizes, in the order in which they come."""
    if not moments:
        return []
    distinct = [Counter(dict(items)) for items in dict.fromkeys(tuple(sorted(moment.items())) for moment in moments)]
    products = sorted(set().union(*distinct))
    values = np.array([[_value(product, sizes) for product in products] for sizes in _SAMPLES])
    totals = values @ np.array([[moment[product] for product in products] for moment in distinct]).T
    return [_text(distinct[index]) for index in sorted(set(totals.argmax(axis=1)))]


def _samples() -> Iterator[dict[str, float]]:
    """Sizes of models and micro-batches."""
    for heads, key_heads, head_dim, hidden, inner in _SHAPES:
        for ratio, tokens, chunk, rows in itertools.product(*_PASSES):
            decoder = tokens / (1 + ratio)
            widths = {"H": 1024 * hidden, "I": 1024 * inner, "V": 150_000 * min(hidden, 1), "h": heads, "k": key_heads}
            widths |= {"d": head_dim, "Q": heads * head_dim, "K": key_heads * head_dim, "r": 32}
            counts = {"E": tokens - decoder, "D": decoder, "C": min(chunk, decoder), "s": rows * tokens / 128}
            yield widths | counts | {"m": min(6144, tokens)}


_SHAPES = (
    *((16, 8, 128, 1, 3), (16, 8, 128, 2, 6), (32, 8, 128, 2.5, 9.5), (32, 8, 128, 4, 12), (40, 8, 128, 5, 17)),
    *((64, 8, 128, 5, 25), (4, 2, 32, 0.125, 0.375), (8, 4, 32, 0.25, 0.75), (4, 2, 64, 0.5, 1), (12, 12, 64, 0.75, 2)),
)
"""Query and key/value heads, their width, and hidden and intermediate size in units of 1024: Qwen3's and small ones."""
_PASSES = ((0.5, 0.8, 1, 2, 4), (128, 6144, 65_536), (64, 1024), (0.01, 0.2))
"""Encoder per decoder tokens, tokens, those of a chunk of the loss, and rows added by flash attention per token."""
_SAMPLES = list(_samples())


def _value(product: str, sizes: dict[str, float]) -> float:
    return math.prod(sizes[name] for name in product.split("*"))


def _plus(*formulas: Formula) -> Formula:
    total: Formula = Counter()
    for formula in formulas:
        total.update(formula)
    return total


def _minus(formula: Formula, other: Formula) -> Formula:
    result = Counter(formula)
    result.subtract(other)
    return Counter({product: times for product, times in result.items() if times})


def _times(number: int, formula: Formula) -> Formula:
    return Counter({product: number * times for product, times in formula.items()})


def _kept_by_others(job: Job) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what layers with each of `OTHER_NORMS` keep, by side, under its key in the table."""
    for norms in OTHER_NORMS:
        sizes = dataclasses.replace(job.sizes, **dict(zip(("qk_norm", "norm_position"), norms, strict=True)))
        ends = dict(_walk(dataclasses.replace(job, sizes=sizes), backward=True))
        yield f"kept {' '.join(norms)}", _texts(_kept(ends))


def _texts(formulas: dict[str, Formula]) -> dict[str, str]:
    return {name: _text(formula) for name, formula in formulas.items()}


def _text(formula: Formula) -> str:
    return " + ".join(_joined(str(times), product) for product, times in sorted(formula.items()))


if __name__ == "__main__":
    sys.exit(main())
