"""A look at the data of a configuration: a run's first examples, or those of a split, with their texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ds_encdec.base.quantities import count
from ds_encdec.base.types import ConfigError, DataError, Example
from ds_encdec.config.schema import DataConfig, FullConfig
from ds_encdec.config.shares import micro_batches_per_step, with_assumed_batch_size
from ds_encdec.data.build import Opener, TrainingData, build_data, example_maker, held_out_shares
from ds_encdec.data.eval_set import keyed_examples
from ds_encdec.data.fingerprint import source_facts, unknown_sources
from ds_encdec.data.lane import Lane
from ds_encdec.data.sources.sources import OpenSource, Split
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SIDES = ("encoder", "decoder")


def inspect_run_data(config: FullConfig, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary, **how: Any) -> str:
    """Return `inspect_data` of a run of this configuration."""
    config = with_assumed_batch_size(config, config.infra.num_gpus)
    lanes = micro_batches_per_step(config, config.infra.num_gpus)  # no ranks have to divide them
    data = build_data(config, tokenizer, vocabulary, rank=0, world_size=1, num_lanes=lanes)
    return inspect_data(data, tokenizer, **how)


def inspect_data(
    data: TrainingData, tokenizer: PreTrainedTokenizerFast, *, num_examples: int, as_json: bool, with_ids: bool = False
) -> str:
    """Return the run's first `num_examples` examples, in the order of its lanes, as text or JSON. Raises DataError.
    Statistics are of all micro-batches made for them."""
    pipeline = data.pipeline
    lane = cache(partial(Lane, pipeline))
    made: list[Example] = []
    batches = 0
    while not batches or len(made) < num_examples:
        made += next(lane(batches % pipeline.num_lanes))
        batches += 1
    statistics: dict[str, Any] = {"micro_batches": batches, "examples": len(made)}
    for side, tokens in zip(_SIDES, np.array([*map(pipeline.tokens, made)]).T, strict=True):
        budget = getattr(pipeline.budgets, f"{side}_tokens")
        statistics |= {
            f"{side}_budget_tokens": budget,
            f"{side}_fill": float(tokens.sum() / max(batches * budget, 1)),
            f"{side}_tokens": {
                "min": int(tokens.min()),
                "median": float(np.median(tokens)),
                "mean": float(tokens.mean()),
                "max": int(tokens.max()),
            },
        }
    objective = OBJECTIVES[pipeline.data.objective]
    read = [lane(number).record for number in range(min(batches, pipeline.num_lanes))]
    statistics |= {
        "denoisers": {name: sum(one.denoiser == name for one in made) for name in objective.tasks},
        "long_rows": sum(sum(record["long_rows"]) for record in read),
        "bad_rows": sum(sum(record["bad_rows"]) for record in read),
        "skipped_documents": sum(record["skipped_documents"] for record in read),
    }
    if as_json:
        fields = ("document", "denoiser", "encoder_ids", "decoder_ids")
        rows = [
            {name: getattr(example, name) for name in fields} | ({"others": example.others} if example.others else {})
            for example in made[:num_examples]
        ]
        return json.dumps({"examples": rows, "statistics": statistics}, ensure_ascii=False, default=np.ndarray.tolist)
    lines = []
    for number, example in enumerate(made[:num_examples], start=1):
        lines.append(f"── example {number} · {example.denoiser} · {example.document}")
        for segment in example.segments:
            for side, array in zip(_SIDES, segment, strict=True):
                ids = array.tolist()
                text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                lines += [f"{side}, {len(ids)} tokens: {text}", *([f"{side} ids: {ids}"] if with_ids else [])]
        lines.append("")
    return "\n".join(lines + _in_words(statistics, objective.weights(pipeline.data)))


def _in_words(statistics: Mapping[str, Any], weights: Sequence[float]) -> list[str]:
    counted = {
        "skipped_documents": ("document", "that were read gave no example"),
        "bad_rows": ("bad row", "among those read"),
        "long_rows": ("example", "of those read exceeded the lengths"),
    }
    return [
        f"── {count(statistics['examples'], 'example')} in {count(statistics['micro_batches'], 'micro-batch')}",
        *(
            f"{side}: {statistics[f'{side}_fill']:.1%} of {statistics[f'{side}_budget_tokens']} tokens filled; lengths "
            "{min} to {max}, median {median:.0f}, mean {mean:.0f}".format(**statistics[f"{side}_tokens"])
            for side in _SIDES
        ),
        "             examples   share   by weight",
        *(
            f"{name:<10}{drawn:11,}{drawn / statistics['examples']:8.1%}{weight / sum(weights):12.1%}"
            for (name, drawn), weight in zip(statistics["denoisers"].items(), weights, strict=True)
        ),
        *(f"{count(statistics[name], one)} {rest}" for name, (one, rest) in counted.items() if statistics[name]),
    ]


class TextExample(NamedTuple):
    """An example, and the text of its input ids."""

    key: str  # of its document, with `#NUMBER` if it is not that document's first example
    input_text: str
    encoder_ids: np.ndarray  # int32
    decoder_ids: np.ndarray  # int32, with EOS at the end


class TrainedData(NamedTuple):
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
    """Return the first `max_samples` (None: all) examples of a split, in the fixed order of an evaluation. `commits`:
    see `build_data`. `trained`: a model's training data, which must have held them out. Raises DataError for an empty
    split or too many bad rows, and ConfigError if the training had another split."""
    data, seed = config.data, config.training.seed
    commits = resolve_commits(data) if commits is None else commits
    maker = example_maker(data, seed, tokenizer, vocabulary).of_evaluation()
    opener = Opener(data, seed, maker, commits)
    own = opener.open_split(split)
    sources = own or opener.open_sources(1)
    if trained is not None and split != "train" and not own:
        _require_held_out(split, data, sources, trained)
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    result = [
        TextExample(key, decode(example.encoder_ids.tolist()), example.encoder_ids, example.decoder_ids)
        for key, example in islice(keyed_examples(sources, split, maker, data.bad_row_limit), max_samples)
    ]
    if not result:
        fields = ", ".join(f"data.{name}" for name in OBJECTIVES[data.objective].split_fields)
        named = {"validation": ", data.eval_files, data.eval_split", "test": ", data.test_files, data.test_split"}
        for_validation, for_test = OBJECTIVES[data.objective].held_out(data)
        instead = "; its texts for evaluation are --split validation (--max-new-tokens 0: their loss alone)"
        instead = instead if split == "test" and for_validation and not for_test else ""
        raise DataError(f"the split {split} is empty{instead}: see {fields}{named.get(split, '')}, or add documents")
    return result


def _require_held_out(split: Split, data: DataConfig, sources: Sequence[OpenSource], trained: TrainedData) -> None:
    # Keys are numbers of rows: with other sources or shares they mean other rows.
    then, now = held_out_shares(trained.data), held_out_shares(data)
    sizes: tuple[Split, ...] = ("validation",) if split == "validation" else ("validation", "test")
    differing = [
        f"{then[name]:g} of the rows were for {name}, {now[name]:g} are now"
        for name in sizes  # the test split begins where the other one ends
        if then[name] != now[name]
    ]
    others = unknown_sources(trained.saved["fingerprint"], source_facts(sources))
    differing += [f"{name} was not in the training data" for name in others]
    if differing:
        raise ConfigError(
            f"the split {split} is not that of the run that trained the model, and may have rows that it was trained "
            f"on: {'; '.join(differing)}. Restore the run's settings and files, or name a separate split "
            f"({'data.eval_files' if split == 'validation' else 'data.test_files'})"
        )
