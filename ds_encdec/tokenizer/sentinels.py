"""The special token ids that denoising needs; they are added to a tokenizer as real tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.stored_model import MODE_TOKENS as MODE_TOKENS
from ds_encdec.config.stored_model import sentinel as sentinel
from ds_encdec.registry.denoisers import DENOISERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The special token ids of a tokenizer, all looked up, never computed from the tokenizer's size."""

    sentinel_ids: tuple[int, ...]  # item i is `<extra_id_i>`
    eos_id: int  # ends a target
    pad_id: int  # it may be `eos_id`, since padding is known by length
    mode_token_ids: tuple[int, ...]  # in the order of `DENOISERS`, or empty
    vocab_size: int  # one past the largest id, added tokens included; an embedding may have more rows
    bos_id: int | None = None  # begins every text of a tokenizer that adds it by itself; None: this one does not

    @property
    def start_id(self) -> int:
        """Return the id that starts the decoder: the padding's, as in T5, but for a tokenizer with `bos_id`."""
        return self.pad_id if self.bos_id is None else self.bos_id

    def beginning(self, denoiser: str | None = None) -> list[int]:
        """Return the ids before an encoder's text: `bos_id`, and the mode token of `denoiser`, if there are any."""
        mode = [] if denoiser is None else self.mode_token_ids[list(DENOISERS).index(denoiser) :][:1]
        return [*([] if self.bos_id is None else [self.bos_id]), *mode]


def added_bos(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the token that `tokenizer` puts before each text by itself, as Llama's do, else None."""
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


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
    ids, folder, added = tokenizer.get_vocab(), tokenizer.name_or_path, tokenizer.added_tokens_decoder
    for token in wanted:
        is_word = getattr(added.get(ids[token]), "single_word", False)
        if is_word or tokenizer.encode(token, add_special_tokens=False) != [ids[token]]:
            raise CheckpointError(f"{folder} splits {token} within a text: remove that from its tokenizer")
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"{folder} names no eos_token in tokenizer_config.json, so that no target could end")
    return Vocabulary(
        sentinel_ids=tuple(ids[sentinel(index)] for index in range(num_sentinels)),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        mode_token_ids=tuple(ids[token] for token in MODE_TOKENS) if mode_tokens else (),
        vocab_size=max(ids.values()) + 1,
        bos_id=added_bos(tokenizer),
    )
