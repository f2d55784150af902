"""The model and tokenizer of a run: from its configuration, or on resume from its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.config.schema import FullConfig
from ds_encdec.data.builtin_corpus import builtin_documents
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.source import resolve_model
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary
from ds_encdec.types import CheckpointError, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model to train, before it is built. `weights` is None where a checkpoint will bring them."""

    config: Qwen3Seq2SeqConfig
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    weights: WeightSource | None


def new_model(config: FullConfig) -> RunModel:
    """The model that `config` names. Raises ConfigError and CheckpointError: see `resolve_model`, `load_tokenizer`."""
    tokenizer, vocabulary = run_tokenizer(config)
    source = resolve_model(config.model, vocabulary, seed=config.training.seed)
    return RunModel(source.config, tokenizer, vocabulary, source.weights)


def saved_model(config: FullConfig, checkpoint: Path) -> RunModel:
    """The model in the folder `checkpoint`, whose source may be gone or have changed; the kernels are `config`'s.

    Raises CheckpointError where `config` wants special tokens that the saved model does not know.
    """
    folder = checkpoint / "model"
    tokenizer, vocabulary = run_tokenizer(config, folder)
    model_config = Qwen3Seq2SeqConfig.from_pretrained(folder)
    known = (tuple(model_config.sentinel_token_ids), tuple(model_config.mode_token_ids))
    if (vocabulary.sentinel_ids, vocabulary.mode_token_ids) != known or vocabulary.vocab_size > model_config.vocab_size:
        raise CheckpointError(
            f"{folder}: its model does not have the special tokens of this run, which are "
            f"{config.model.num_sentinel_tokens} sentinels{' and mode tokens' if config.data.use_mode_tokens else ''}. "
            "Give the model.num_sentinel_tokens and data.use_mode_tokens that it was made with."
        )
    model_config.loss_chunk_tokens = config.model.loss_chunk_tokens
    model_config.use_flash_attention = config.model.use_flash_attention
    return RunModel(model_config, tokenizer, vocabulary, weights=None)


def run_tokenizer(config: FullConfig, folder: Path | None = None) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    """The configuration's tokenizer, or the one saved in `folder`."""
    section = config.model
    if folder is not None:
        section = section.model_copy(update={"tokenizer_name_or_path": str(folder)})
    return load_tokenizer(
        section,
        builtin_texts=lambda: (document.text for document in builtin_documents()),
        mode_tokens=config.data.use_mode_tokens,
    )
