"""Speed of greedy generation with fewer decoder layers: OMP_NUM_THREADS=1 python scripts/bench/depth.py [--size JSON]
[--decoder-layers 28 14 7] [--input-tokens 128] [--new-tokens 32] [--dtype bfloat16] [--rounds 5] [--json rows.json]

Models of random weights in the aligned form, all of them in memory at once. `--size {}` takes Qwen3-0.6B's. The encoder
has all layers that the decoder's last one reads. CPU time of one thread for one input, medians of rounds; `times the
first` is the median over rounds of tokens a second over those of the first depth.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import in_turns, median, report

from ds_encdec.config.schema import ModelConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import form_fields
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import count_parameters

SIZE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SPECIAL = {"vocab_size": 32768, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=json.loads, default=SIZE | SPECIAL, help="fields of config.json")
    parser.add_argument("--decoder-layers", type=int, nargs="+", default=[28, 14, 7])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_default_dtype(getattr(torch, options.dtype))
    models = {str(layers): made(layers, options.size) for layers in options.decoder_layers}
    ids = torch.randint(0, 1000, (1, options.input_tokens), generator=torch.Generator().manual_seed(0))
    takes = {name: partial(seconds, model, ids, options.new_tokens) for name, model in models.items()}
    in_turns(takes, 1)  # warm-up
    found = in_turns(takes, options.rounds)
    rates = {name: [1 / token for _, token in turns] for name, turns in found.items()}
    rows = [
        {
            "encoder + decoder layers": f"{model.config.num_encoder_layers} + {name}",
            "M parameters": count_parameters(model.config) / 1e6,
            "s to the first token": median(first for first, _ in found[name]),
            "tokens a second": median(rates[name]),
            "times the first": median(
                one / all_ for one, all_ in zip(rates[name], rates[next(iter(models))], strict=True)
            ),
        }
        for name, model in models.items()
    ]
    report("depth of the decoder", rows, options.json, input_tokens=options.input_tokens, dtype=options.dtype)


def made(decoder_layers: int, size: dict[str, Any]) -> Qwen3ForSeq2SeqLM:
    whole = Qwen3Seq2SeqConfig(**size).num_hidden_layers
    section = ModelConfig.model_validate({"decoder_layers": decoder_layers, "cross_attention": "aligned"})
    torch.manual_seed(0)
    return Qwen3ForSeq2SeqLM(Qwen3Seq2SeqConfig(**size | form_fields(section, whole))).eval()


@torch.no_grad()
def seconds(model: Qwen3ForSeq2SeqLM, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """CPU seconds to the first token of an output, and for each one behind it."""
    spent = []
    for length in (1, new_tokens):
        began = time.process_time()
        model.generate(ids, max_new_tokens=length, min_new_tokens=length)
        spent.append(time.process_time() - began)
    return spent[0], (spent[1] - spent[0]) / (new_tokens - 1)


if __name__ == "__main__":
    main()
