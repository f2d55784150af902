"""From a configuration to the data of one rank: the only module that knows all the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_encdec.config.schema import FullConfig
from ds_encdec.data.chunks import Chunker
from ds_encdec.data.evaluation import eval_batches
from ds_encdec.data.fingerprint import fingerprint, require_same
from ds_encdec.data.lane import Pipeline
from ds_encdec.data.loader import LaneLoader
from ds_encdec.data.packing import token_budgets
from ds_encdec.data.sources import open_sources
from ds_encdec.data.survey import require_one_step, survey
from ds_encdec.data.text_tokens import TextTokenizer
from ds_encdec.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ds_encdec.tokenizer.sentinels import Vocabulary


@dataclass(frozen=True)
class TrainingData:
    """The data of one rank.

    `eval_batches` reads and packs the held-out examples at its first call and keeps them. `ratio`: encoder
    tokens per decoder token, by which the micro-batch was divided.
    """

    loader: LaneLoader
    eval_batches: Callable[[], Sequence[Batch]]
    pipeline: Pipeline
    fingerprint: dict[str, Any]
    ratio: float

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps for `build_data(saved=...)`, beside the loader's records. Equal on all ranks."""
        return {"fingerprint": self.fingerprint, "encoder_decoder_ratio": self.ratio}


def build_data(
    config: FullConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
    *,
    rank: int,
    world_size: int,
    num_lanes: int,
    saved: dict[str, Any] | None = None,
    accept_other_data: bool = False,
) -> TrainingData:
    """Open the sources and wire the loader. Starts no process and reads a few hundred documents at most.

    `saved`: what an earlier `TrainingData.saved()` of the run returned. Raises DataError for sources that are
    missing, unreadable or too small, ConfigError for lanes that ranks do not divide, and CheckpointError when the data
    is not that of `saved` (unless `accept_other_data`).
    """
    data, training = config.data, config.training
    tokenize = TextTokenizer.of(tokenizer)
    chunker = Chunker.from_config(data, training.seed, vocabulary)
    sources = open_sources(data, training.seed, vocabulary, num_lanes)
    if saved is None:
        found = survey(sources, tokenize, chunker)
        ratio = found.ratio
        require_one_step(found, num_lanes, token_budgets(data, training.per_device_train_batch_size, ratio))
    else:
        ratio = saved["encoder_decoder_ratio"]
    pipeline = Pipeline(
        sources=sources,
        tokenize=tokenize,
        chunker=chunker,
        budgets=token_budgets(data, training.per_device_train_batch_size, ratio),
        num_lanes=num_lanes,
        seed=training.seed,
        shuffle_buffer_size=data.shuffle_buffer_size,
        pool_examples=data.packing_pool_examples,
        max_wait_batches=data.packing_max_wait_batches,
    )
    facts = fingerprint(config, pipeline)
    if saved is not None and not accept_other_data:
        require_same(saved["fingerprint"], facts)
    loader = LaneLoader(pipeline, rank=rank, world_size=world_size, num_workers=data.preprocessing_num_workers)
    eval_budgets = token_budgets(data, training.per_device_eval_batch_size, ratio)

    @cache
    def held_out() -> Sequence[Batch]:
        return eval_batches(pipeline, eval_budgets, training.eval_samples, rank=rank, world_size=world_size)

    return TrainingData(loader, held_out, pipeline, facts, ratio)
