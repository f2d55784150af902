"""The examples of a split with their texts, from which generated texts are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.schema import DataConfig, FullConfig
from ds_encdec.data.build import example_maker, held_out_shares, open_sources, own_split
from ds_encdec.data.eval_set import keyed_examples
from ds_encdec.data.fingerprint import source_facts, unknown_sources
from ds_encdec.data.sources.sources import OpenSource, Split
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.registry.objectives import OBJECTIVES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ds_encdec.tokenizer.sentinels import Vocabulary


@dataclass(frozen=True, slots=True)
class TextExample:
    """An example, and the text of its input ids."""

    key: str  # of its document, with `#NUMBER` if it is not that document's first example
    input_text: str
    encoder_ids: np.ndarray  # int32
    decoder_ids: np.ndarray  # int32, with EOS at the end


@dataclass(frozen=True, slots=True)
class TrainedData:
    """The data that a model was trained on: its configuration, and the `TrainingData.saved()` of its checkpoints."""

    data: DataConfig
    saved: Mapping[str, Any]


def split_examples(
    config: FullConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
    split: Split,
    max_samples: int | None = None,
    commits: Mapping[str, str] | None = None,
    trained: TrainedData | None = None,
) -> list[TextExample]:
    """Return the first `max_samples` (None: all) examples of a split, in the fixed order of an evaluation.

    `commits`: see `build_data`. `trained`: a model's training data, which must have held them out. Raises DataError for
    an empty split or too many bad rows, and ConfigError if the training had another split.
    """
    data, seed = config.data, config.training.seed
    commits = resolve_commits(data) if commits is None else commits
    maker = example_maker(data, seed, tokenizer, vocabulary).of_evaluation()
    own = own_split(data, split, seed, maker, commits)
    sources = own or open_sources(data, seed, maker, 1, commits)
    if trained is not None and split != "train" and not own:
        _require_held_out(split, data, sources, trained)
    examples = keyed_examples(sources, split, maker, data.bad_row_limit)
    result = [
        TextExample(
            key,
            tokenizer.decode(example.encoder_ids.tolist(), clean_up_tokenization_spaces=False),
            example.encoder_ids,
            example.decoder_ids,
        )
        for key, example in islice(examples, max_samples)
    ]
    if not result:
        fields = ", ".join(f"data.{name}" for name in OBJECTIVES[data.objective].split_fields)
        named = {"validation": ", data.eval_files, data.eval_split", "test": ", data.test_files, data.test_split"}
        for_validation, for_test = OBJECTIVES[data.objective].held_out(data)
        has_other = split == "test" and for_validation and not for_test
        instead = "; its texts for evaluation are --split validation (--max-new-tokens 0: their loss alone)"
        raise DataError(
            f"the split {split} is empty{instead if has_other else ''}: see {fields}{named.get(split, '')}, or add "
            "documents"
        )
    return result


def _require_held_out(split: Split, data: DataConfig, sources: Sequence[OpenSource], trained: TrainedData) -> None:
    """Raise ConfigError if the training held out other sources or shares: keys are numbers of rows."""
    then, now = (list(held_out_shares(section).items()) for section in (trained.data, data))
    sizes = slice(1 if split == "validation" else 2)  # the test split begins where the other one ends
    differing = [
        f"{share:g} of the rows were for {name}, {ours:g} are now"
        for (name, share), (_, ours) in zip(then[sizes], now[sizes], strict=True)
        if share != ours
    ]
    others = unknown_sources(trained.saved["fingerprint"], source_facts(sources))
    differing += [f"{name} is not what it was trained on" for name in others]
    if differing:
        files = "data.eval_files" if split == "validation" else "data.test_files"
        raise ConfigError(
            f"the split {split} is not that of the run that trained the model, and may have rows that it was trained "
            f"on: {'; '.join(differing)}. Restore the run's settings and files, or name a split of its own ({files})"
        )
