"""A check that generation with the cache equals generation without, under the installed libraries. transformers fills
and passes the cache by names and rules that its versions change: with 5.24 models that dropped an unknown name
generated garbage, and nothing failed."""

from typing import Any

import torch
import transformers

from ds_encdec.base.foreign_places import range_of
from ds_encdec.base.types import ConfigError
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import random_weights

TOKENS = 8
INPUTS = 8  # several: tokens of a single one may be the same by chance


def check_cache(config: Qwen3Seq2SeqConfig) -> None:
    """Raise ConfigError if greedy tokens of a tiny random model differ with and without the cache."""
    fields = {name: value for name, value in config.to_dict().items() if name != "model_type"} | {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_encoder_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": max(1, 4 * config.num_key_value_heads // config.num_attention_heads),
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "sentinel_token_ids": [],
        "mode_token_ids": [],
        "initializer_range": 0.2,  # attention far from uniform, and likeliest tokens far from the next
        "use_cache": True,
    }
    tiny = Qwen3Seq2SeqConfig(**fields)
    ids = torch.arange(2, 2 + 6 * INPUTS).view(INPUTS, 6)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "num_beams": 1,
        "return_dict_in_generate": False,  # a configuration with output_hidden_states sets it
    }
    under = (
        f"under transformers {transformers.__version__} with torch {torch.__version__}; tested were transformers "
        f"{range_of('transformers')} and torch {range_of('torch')}, install one of those"
    )
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # training's random numbers stay the same
            model = Qwen3ForSeq2SeqLM(tiny).float().eval()
            weights = random_weights(tiny, seed=0)
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name))
        with_cache, without = (model.generate(ids, use_cache=use, **options)[:, 1:].tolist() for use in (True, False))
    except Exception as error:  # whatever another version of transformers raises
        raise ConfigError(f"generate() fails, {under}: {type(error).__name__}: {error}") from error
    for cached, plain in zip(with_cache, without, strict=True):
        if cached != plain:
            raise ConfigError(
                f"generate() writes other tokens with its cache ({cached}) than without ({plain}), {under}."
            )
