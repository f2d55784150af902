"""Count the ids of a tokenizer by its `tokenizer.json` alone, without torch, and name the special tokens added here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.config.model_folder import is_hub_name
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.registry.denoisers import DENOISERS

if TYPE_CHECKING:
    from ds_encdec.config.sections import Sections

MODE_TOKENS = tuple(f"<denoiser_{name}>" for name in DENOISERS)
"""Optional tokens that name the denoiser of an example, in the order of `DENOISERS`."""


def sentinel(index: int) -> str:
    """Return the text of sentinel number `index`, counted from 0."""
    return f"<extra_id_{index}>"


def too_few_rows(rows: int, ids: int) -> str | None:
    """Return an error message if an embedding of `rows` is too small for a tokenizer of `ids`, else None."""
    return None if ids <= rows else f"the tokenizer's ids reach {ids - 1}: set it to at least {ids}"


def tokenizer_lacks_rows(config: Sections) -> str | None:
    """Return an error if `model.architecture.vocab_size` is too small for a tokenizer on this machine, else None."""
    section = config.model
    name = section.tokenizer_name_or_path
    if section.architecture is None or name is None or (file := _file_of(name)) is None:
        return None
    wanted = [sentinel(index) for index in range(section.num_sentinel_tokens)]
    wanted += MODE_TOKENS if config.data.use_mode_tokens else ()
    ids = _ids_with(file, wanted)
    return None if ids is None else too_few_rows(section.architecture.vocab_size, ids)


def _file_of(name: str) -> Path | None:
    """Return the `tokenizer.json` in a folder, or of a repository in the Hugging Face cache."""
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return folder / "tokenizer.json"
    if not is_hub_name(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # rarely needed

    found = try_to_load_from_cache(name, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None


def _ids_with(file: Path, wanted: list[str]) -> int | None:
    """Return one past the largest id once the `wanted` tokens are added; None if the file cannot be read."""
    try:
        stored = read_json(file)
        own = _vocabulary(stored["model"]["vocab"])
        added = {token["content"]: int(token["id"]) for token in stored.get("added_tokens") or ()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    ids = own | added
    following = max([len(own), *(number + 1 for number in added.values())])  # tokenizers continues the ids in this way
    return max([following + sum(token not in ids for token in wanted), *(number + 1 for number in ids.values())])


def _vocabulary(vocab: Any) -> dict[str, int]:
    """Return the ids of a model's tokens: BPE, WordPiece and WordLevel map them, Unigram lists pairs with scores."""
    if isinstance(vocab, dict):
        return {token: int(number) for token, number in vocab.items()}
    return {token: number for number, (token, _) in enumerate(vocab)}
