"""The examples of a split with their texts: what generation is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import open_sources, own_split
from ds_encdec.data.evaluation import split_rows
from ds_encdec.data.examples import read_documents
from ds_encdec.data.sources import Split
from ds_encdec.data.tables import resolve_commits
from ds_encdec.engines import load
from ds_encdec.objectives import OBJECTIVES
from ds_encdec.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ds_encdec.tokenizer.sentinels import Vocabulary


@dataclass(frozen=True, slots=True)
class TextExample:
    """An example, and the text that its input's ids stand for.

    `key`: of its document, and its number in it where that is not 0. The ids are int32; `decoder_ids` end with EOS.
    """

    key: str
    input_text: str
    encoder_ids: np.ndarray
    decoder_ids: np.ndarray


def split_examples(
    config: FullConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
    split: Split,
    max_samples: int | None = None,
    commits: Mapping[str, str] | None = None,
) -> list[TextExample]:
    """The first `max_samples` examples of a split in a fixed order, which is that of an evaluation; None: all of them.

    They are those that a run evaluates on. `commits`: see `build_data`; None: looked up here. Raises DataError for a
    split that is empty, or more rows that cannot be used than the run's limit.
    """
    data, seed = config.data, config.training.seed
    commits = resolve_commits(data) if commits is None else commits
    maker = load(OBJECTIVES[data.objective].maker).from_config(data, seed, tokenizer, vocabulary).of_evaluation()
    sources = own_split(data, split, seed, maker, commits) or open_sources(data, seed, maker, 1, commits)
    rows = split_rows(sources, split)
    examples = (
        (document.key if made.number == 0 else f"{document.key}#{made.number}", made.example)
        for document, ids in read_documents(rows, maker, data.max_bad_rows if data.on_bad_row == "skip" else 0)
        for made in maker.examples(ids, document.key, 0)
        if made.example is not None
    )
    found = [
        TextExample(
            key,
            tokenizer.decode(example.encoder_ids.tolist(), clean_up_tokenization_spaces=False),
            example.encoder_ids,
            example.decoder_ids,
        )
        for key, example in islice(examples, max_samples)
    ]
    if not found:
        fields = ", ".join(f"data.{name}" for name in OBJECTIVES[data.objective].split_fields)
        own = {"validation": ", data.eval_files, data.eval_split", "test": ", data.test_files, data.test_split"}
        raise DataError(f"the split {split} is empty: see {fields}{own.get(split, '')}, or add documents")
    return found
