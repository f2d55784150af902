"""The tokenizer of a run: from a folder, from the hub, or trained on the built-in corpus."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import ModelConfig
from ds_encdec.config.stored_model import TOKENIZER_FILES, model_folder
from ds_encdec.launch.disk import cached
from ds_encdec.tokenizer.sentinels import MODE_TOKENS, Vocabulary, add_sentinels

BUILTIN = "builtin"  # value of `model.tokenizer_name_or_path` that selects the built-in tokenizer
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
BYTES = 256  # smallest alphabet of a byte-level tokenizer


def load_tokenizer(
    section: ModelConfig, *, builtin_texts: Callable[[], Iterable[str]], mode_tokens: bool
) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    """Return the tokenizer of `section`, with sentinels (and mode tokens) added, and its special ids.

    Raises ConfigError if no tokenizer is named, CheckpointError if it cannot be loaded or used.
    """
    name_or_path = section.tokenizer_name_or_path or section.model_name_or_path
    if name_or_path == BUILTIN and section.architecture is not None:
        reserved = section.num_sentinel_tokens + len(MODE_TOKENS) * mode_tokens
        tokenizer = builtin_tokenizer(builtin_texts(), section.architecture.vocab_size - reserved)
    elif name_or_path is None:
        raise ConfigError(f"model.tokenizer_name_or_path: name a folder, a hub id, or {BUILTIN} for model.architecture")
    else:
        which = "tokenizer" if section.tokenizer_name_or_path else "model"
        tokenizer = pretrained_tokenizer(name_or_path, field=f"model.{which}_name_or_path")
    return tokenizer, add_sentinels(tokenizer, section.num_sentinel_tokens, mode_tokens=mode_tokens)


def pretrained_tokenizer(name_or_path: str, *, field: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer as its `tokenizer.json` defines it. Raises CheckpointError with the configuration's `field`."""
    folder = model_folder(name_or_path, TOKENIZER_FILES, field=field)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{field}: {folder} has no tokenizer.json; set model.tokenizer_name_or_path")
    try:
        # The generic class, not AutoTokenizer: AutoTokenizer would need the config.json of a model that it knows.
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The tokenizer in {folder} could not be loaded: {error}") from error


def builtin_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a lossless byte-level BPE tokenizer of at most `vocab_size` ids, trained on `texts` once and cached.

    The cache is keyed by the texts, the size, and the version of tokenizers. Raises ConfigError below `BYTES + 2` ids.
    """
    if vocab_size < BYTES + 2:
        raise ConfigError(
            f"model.architecture.vocab_size leaves {vocab_size} ids for the built-in tokenizer beside sentinels and "
            f"mode tokens; it needs at least {BYTES + 2}"
        )
    corpus = list(texts)

    def train() -> str:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD_TOKEN, EOS_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        return tokenizer.to_str()

    made_from = (part.encode() for part in (f"{vocab_size} {tokenizers.__version__}", *corpus))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(cached("tokenizer", made_from, train)),
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
    )


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save `tokenizer` for transformers 4.57 and 5, whose classes and lists of special tokens differ."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    for of_this_machine in ("backend", "is_local", "local_files_only"):
        fields.pop(of_this_machine, None)
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    fields |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # 4.57 would add token types, which no model here has
    }
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
