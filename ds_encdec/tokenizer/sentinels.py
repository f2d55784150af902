"""The special token ids that denoising needs; they are added to a tokenizer as real tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.stored_model import MODE_TOKENS as MODE_TOKENS
from ds_encdec.config.stored_model import sentinel as sentinel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The special token ids of a tokenizer, all looked up, never computed from the tokenizer's size."""

    sentinel_ids: tuple[int, ...]  # item i is `<extra_id_i>`
    eos_id: int  # ends a target
    pad_id: int  # also starts the decoder, as in T5; it may be `eos_id`, since padding is known by length
    mode_token_ids: tuple[int, ...]  # in the order of `DENOISERS`, or empty
    vocab_size: int  # one past the largest id, added tokens included; an embedding may have more rows


def add_sentinels(tokenizer: PreTrainedTokenizerFast, num_sentinels: int, *, mode_tokens: bool) -> Vocabulary:
    """Add the sentinels (and mode tokens) that `tokenizer` lacks, and look up all ids.

    New tokens get the ids after the largest one: 151669, … in Qwen3's tokenizer, whose embedding has 151936 rows.
    Raises CheckpointError for a tokenizer without an end-of-sequence token, or that splits one of these.
    """
    # Imported here: other modules need only the names in this one.
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
