"""Rules about contradictions in a configuration. Each names all fields that it reads: reports give their places."""

import math
from collections.abc import Iterator

from ds_encdec.config.data_rules import data_rules
from ds_encdec.config.engine_rules import LACKS, infra_rules
from ds_encdec.config.monitor_sections import LARGEST_LOSS
from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import Conflict, broken
from ds_encdec.config.training_rules import training_rules
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.engines import ENGINES, EngineName, EngineSpec

SMALLEST_VOCABULARY = 258
"""Ids of a byte-level tokenizer before the first merge: 256 bytes, padding, end of sequence."""


def find_conflicts(config: Sections) -> list[Conflict]:
    """Return all contradictions in `config`."""
    found = [*_model(config), *data_rules(config.data), *training_rules(config), *infra_rules(config), *_phases(config)]
    kind = config.infra.distributed_type
    lacks = [engine_conflicts(config, row.name) for row in ENGINES.values() if kind in (*row.distributed_types, "auto")]
    return found + ([conflict for each in lacks for conflict in each] if all(lacks) else [])


def _model(config: Sections) -> Iterator[Conflict]:
    model, shape, lora, data = config.model, config.model.architecture, config.model.lora, config.data
    named, tokenizer = model.model_name_or_path is not None, model.tokenizer_name_or_path
    targets, sources, at = (
        lora.target_modules if lora else ("",),
        "model_name_or_path architecture",
        "model.architecture.",
    )
    yield from broken(
        "model",
        (named and shape, sources, "give one of the two: a checkpoint to start from, or the sizes of a new model"),
        (not named and not shape, sources, "give one of the two: a checkpoint to start from, or an architecture"),
        (
            shape and tokenizer is None,
            "tokenizer_name_or_path",
            "a model from scratch has no tokenizer: name one, or `builtin`",
        ),
        (
            not shape and tokenizer == "builtin",
            "tokenizer_name_or_path model_name_or_path",
            "builtin goes with an architecture: a pretrained model needs the tokenizer it was trained with",
        ),
        (not targets, "model.lora.target_modules", "at least one is needed, or nothing is trained"),
        (len({*targets}) < len(targets), "model.lora.target_modules", "a name stands there twice"),
    )
    if shape is None:
        return
    needed = SMALLEST_VOCABULARY + model.num_sentinel_tokens + len(DENOISERS) * data.use_mode_tokens
    yield from broken(
        "data",
        (
            shape.num_attention_heads % shape.num_key_value_heads,
            f"{at}num_attention_heads {at}num_key_value_heads",
            "every key/value head must serve equally many query heads: one must divide the other",
        ),
        (shape.head_dim % 2, f"{at}head_dim", "must be even: rotary embeddings turn pairs of dimensions"),
        (
            shape.vocab_size < needed,
            f"{at}vocab_size model.num_sentinel_tokens use_mode_tokens",
            f"must be >= {needed}: bytes, special tokens, sentinels and mode tokens each take a row",
        ),
        *(
            (
                getattr(data, name) > shape.max_position_embeddings,
                f"{name} {at}max_position_embeddings",
                "an example may be longer than the model is declared for",
            )
            for name in ("max_encoder_length", "max_decoder_length")
        ),
    )


def _phases(config: Sections) -> Iterator[Conflict]:
    """Yield gates that every run would pass, or none; a run would notice them after days."""
    shape = config.model.architecture
    first_loss, sizes = (math.log(shape.vocab_size), " model.architecture.vocab_size") if shape else (LARGEST_LOSS, "")
    for phase, numbers in config.phases:
        yield from broken(
            f"phases.{phase}",
            (
                (numbers.max_loss_after_warmup or 0) > LARGEST_LOSS,
                "max_loss_after_warmup",
                f"must be <= {LARGEST_LOSS:.0f} nats: every run would pass a higher limit",
            ),
            (
                not 0 <= (numbers.min_loss_decrease or 0) < first_loss,
                f"min_loss_decrease{sizes}",
                f"must be >= 0 and < {first_loss:.1f} nats, the highest first loss: no loss falls below 0",
            ),
        )


def engine_conflicts(config: Sections, engine: EngineName) -> list[Conflict]:
    """Return the requests of `config` that `engine` cannot fulfil."""
    return list(LACKS[engine](config))


def engine_candidates(config: Sections) -> list[EngineSpec]:
    """Return the engines that `infra.distributed_type` allows, the preferred one first; never empty. `auto` allows
    those that can run `config`; the rules refuse a configuration that no engine can run."""
    rows = list(ENGINES.values())
    matching = [row for row in rows if config.infra.distributed_type in row.distributed_types]
    return matching or [row for row in rows if not engine_conflicts(config, row.name)] or rows[-1:]
