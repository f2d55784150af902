"""Measures what conversion alone costs: the loss of a source decoder on a text, and that of the untrained
encoder-decoder made from it. Both predict the last three quarters of each passage from the first one, as in the
denoiser S. The decoder is transformers' own class, so that whatever ours computes otherwise shows as well."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import stdev

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ds_encdec.base.types import ConfigError
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.evaluate.generation import score_targets
from ds_encdec.evaluate.models import open_model
from ds_encdec.launch.process_group import choose_device
from ds_encdec.launch.world import discover

MOST_PASSAGES, LONGEST, SHORTEST = 32, 512, 64  # the last two in tokens
_READ_CHARACTERS = 2**20  # of the text, over which the passages are spread
_BATCH_TOKENS = 4096


def read_passages(text: Path, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return the token ids of at most `MOST_PASSAGES` passages of the file. Raises ConfigError if it is too short."""
    with text.open(encoding="utf-8", errors="replace") as file:
        ids: list[int] = TextTokenizer(tokenizer.backend_tokenizer).encode(file.read(_READ_CHARACTERS)).tolist()
    passages = [ids[start : start + LONGEST] for start in range(0, len(ids) - SHORTEST + 1, LONGEST)]
    if not passages:
        raise ConfigError(f"--check: {text} has {len(ids)} tokens: give at least {SHORTEST}, better 20,000")
    return passages[:: -(-len(passages) // MOST_PASSAGES)]


@torch.no_grad()
def measure_conversion(source: Path, made: Path, passages: list[list[int]], beginning: Sequence[int]) -> Iterator[str]:
    """Yield a table, line by line, of the mean losses on `passages` of the decoder in `source` and of the
    encoder-decoder in `made`, with its input and without. `beginning`: the tokens that each input begins with. Models
    are loaded in turn, in float32 on a CPU. Raises CheckpointError."""
    device = choose_device("auto", discover(os.environ))
    kept = [[*beginning, *passage[: len(passage) // 4]] for passage in passages]
    targets = [passage[len(passage) // 4 :] for passage in passages]
    tokens = sum(map(len, targets))
    yield f"nats a token over {tokens:,} tokens of {len(passages)} passages, each behind its first quarter:"

    model = open_model(made, device)
    found = {
        "encoder-decoder": [-score for score, _ in score_targets(model, kept, targets, _BATCH_TOKENS)],
        "its input hidden": [-score for score, _ in score_targets(model, [[]] * len(kept), targets, _BATCH_TOKENS)],
    }
    start, dtype = model.config.decoder_start_token_id, model.dtype
    del model
    decoder = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True).to(device).eval()
    losses = []
    for before, target in zip(kept, targets, strict=True):
        ids = torch.tensor([*before, start, *target], device=device)
        logits = decoder(input_ids=ids[None, :-1]).logits[0, len(before) :].float()
        losses.append(F.cross_entropy(logits, ids[len(before) + 1 :], reduction="sum").item())
    yield f"  {'source decoder':18}{sum(losses) / tokens:8.4f}"
    for name, ours in found.items():
        gaps = [(one - other) / len(target) for one, other, target in zip(ours, losses, targets, strict=True)]
        spread = f" ± {stdev(gaps) / len(gaps) ** 0.5:.4f}" if len(gaps) > 1 else ""
        yield f"  {name:18}{sum(ours) / tokens:8.4f}  {sum(ours) / tokens - sum(losses) / tokens:+.4f}{spread}"
