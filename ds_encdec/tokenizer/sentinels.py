"""The special token ids that denoising needs, and adding them to a tokenizer as real tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.stored_tokenizer import MODE_TOKENS as MODE_TOKENS
from ds_encdec.config.stored_tokenizer import sentinel as sentinel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The special token ids of a tokenizer, each looked up, none computed from the tokenizer's size.

    `sentinel_ids[i]` is `<extra_id_i>`; `mode_token_ids` follow `DENOISERS`, or are empty. `eos_id` ends a target;
    `pad_id` fills and is also what the decoder starts from, as in T5 (they may be equal: padding is known by length).
    `vocab_size` is one past the largest id, added tokens included; a model's embedding may have more rows.
    """

    sentinel_ids: tuple[int, ...]
    eos_id: int
    pad_id: int
    mode_token_ids: tuple[int, ...]
    vocab_size: int


def add_sentinels(tokenizer: PreTrainedTokenizerFast, num_sentinels: int, *, mode_tokens: bool) -> Vocabulary:
    """Add the sentinels, and the mode tokens if asked for, that `tokenizer` lacks, and look all ids up.

    New tokens get the ids that follow the largest one in use; for Qwen3's tokenizer these are 151669, 151670, …, the
    rows that its embedding of 151936 has to spare. Raises CheckpointError for a tokenizer without an end-of-sequence
    token, or one where a token does not come out as a single id.
    """
    # Imported here: the module is also read for its names alone.
    from transformers import AddedToken

    wanted = [sentinel(index) for index in range(num_sentinels)] + (list(MODE_TOKENS) if mode_tokens else [])
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in wanted if token not in known],
        special_tokens=True,
    )
    ids = tokenizer.get_vocab()
    for token in wanted:
        if tokenizer.encode(token, add_special_tokens=False) != [ids[token]]:
            raise CheckpointError(f"The tokenizer does not keep {token} together: it cannot carry sentinels")
    if tokenizer.eos_token_id is None:
        raise CheckpointError("The tokenizer names no eos_token in its tokenizer_config.json: targets could not end")
    return Vocabulary(
        sentinel_ids=tuple(ids[sentinel(index)] for index in range(num_sentinels)),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        mode_token_ids=tuple(ids[token] for token in MODE_TOKENS) if mode_tokens else (),
        vocab_size=max(ids.values()) + 1,
    )
