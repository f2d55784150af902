"""Load the model and tokenizer of a run, not built yet: from its configuration, or on resume from its checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import CheckpointError, WeightSource
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.sources.builtin_corpus import builtin_documents
from ds_encdec.exports.adapters import base_record, opened_base, refuse_other_teacher
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import TeacherSource, resolve_teacher
from ds_encdec.model.parameter_count import trained_shapes
from ds_encdec.model.source import base_model, resolve_model
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary

MODEL_NAME = "model.model_name_or_path"


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model to train, before it is built. `weights` is None if a checkpoint has them. `base` and `taught_by`: the
    records of the adapters' base and of the teacher for checkpoints, if they were hashed."""

    config: Qwen3Seq2SeqConfig
    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    weights: WeightSource | None
    base: dict[str, Any] | None = None
    teacher: TeacherSource | None = None
    taught_by: dict[str, Any] | None = None


def new_model(config: FullConfig, *, hashes_base: bool = True) -> RunModel:
    """Return the model that `config` names. `hashes_base`: read all files of the base of adapters. Raises ConfigError
    and CheckpointError: see `resolve_model`, `load_tokenizer`."""
    tokenizer, vocabulary = run_tokenizer(config)
    seed = config.training.seed
    source = resolve_model(config.model, vocabulary, seed, OBJECTIVES[config.data.objective])
    trained_shapes(config, source.config)  # raises for patterns that match nothing
    has_base = config.model.lora is not None and hashes_base
    place = config.model.model_name_or_path
    base = base_record(place, base_model(config.model, source.config, seed)) if has_base else None
    taught = _teacher(config, tokenizer, vocabulary, hashed=hashes_base)
    return RunModel(source.config, tokenizer, vocabulary, source.weights, base, *taught)


def saved_model(config: FullConfig, checkpoint: Path, *, hashes_base: bool = True) -> RunModel:
    """Return the model in the folder `checkpoint`, whose source may be gone or changed; the kernels are `config`'s.
    `hashes_base`: read all files of the base of adapters, and compare them. Raises CheckpointError if `config` wants
    special tokens that the saved model does not know."""
    folder = checkpoint / "model"
    tokenizer, vocabulary = run_tokenizer(config, folder)
    model_config = Qwen3Seq2SeqConfig.from_pretrained(folder)
    known = (tuple(model_config.sentinel_token_ids), tuple(model_config.mode_token_ids))
    if (vocabulary.sentinel_ids, vocabulary.mode_token_ids) != known or vocabulary.vocab_size > model_config.vocab_size:
        raise CheckpointError(
            f"{folder}: the model lacks special tokens of this run, {config.model.num_sentinel_tokens} sentinels"
            f"{' and mode tokens' if config.data.use_mode_tokens else ''}. Give the model.num_sentinel_tokens and "
            "data.use_mode_tokens that it was made with."
        )
    model_config.loss_chunk_tokens = config.model.loss_chunk_tokens
    model_config.use_flash_attention = config.model.use_flash_attention
    taught = _teacher(config, tokenizer, vocabulary, hashed=hashes_base)
    if taught[1] is not None:
        refuse_other_teacher(checkpoint, taught[1])
    if config.model.lora is None:
        return RunModel(model_config, tokenizer, vocabulary, None, None, *taught)
    base = opened_base(checkpoint, config.model, MODEL_NAME, hashed=hashes_base)
    record = base_record(config.model.model_name_or_path, base) if hashes_base else None
    return RunModel(model_config, tokenizer, vocabulary, base.weights, record, *taught)


def _teacher(
    config: FullConfig, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary, *, hashed: bool
) -> tuple[TeacherSource | None, dict[str, Any] | None]:
    source = resolve_teacher(config, tokenizer, vocabulary)
    return source, base_record(source.name, source.base) if source is not None and hashed else None


def run_tokenizer(config: FullConfig, folder: Path | None = None) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    """Return the configuration's tokenizer, or the one saved in `folder`, and its vocabulary."""
    saved = {} if folder is None else {"tokenizer_name_or_path": str(folder)}
    return load_tokenizer(
        config.model.model_copy(update=saved),
        builtin_texts=lambda: (document.text for document in builtin_documents()),
        mode_tokens=config.data.use_mode_tokens,
    )
