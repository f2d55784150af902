"""From a configuration to the data of one rank: the only module that knows all the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ds_encdec.base.types import Batch, DataError, Example
from ds_encdec.config.schema import DataConfig, FullConfig, MixtureSource
from ds_encdec.config.shares import token_budgets
from ds_encdec.data.eval_set import evaluation_examples, packed
from ds_encdec.data.examples.protocol import ExampleMaker
from ds_encdec.data.fingerprint import fingerprint, numbered, require_same
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.loader import LaneLoader, known
from ds_encdec.data.sources.local_files import expand_files
from ds_encdec.data.sources.prepared import PreparedSource, made_from, prepare_source, prepared_folder
from ds_encdec.data.sources.sources import AnySource, OpenSource, Split, held_out_below, named_sources, source_entries
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.data.survey import take_survey
from ds_encdec.launch.run_folder import take_folder
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.registry.source_kinds import HUB, local_kind
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Number of lanes for which `prepare` opens a source, whatever a run has: the units of a stream depend on it.
PREPARED_LANES = 8


@dataclass(frozen=True)
class TrainingData:
    """The data of one rank; `eval_batches` and each of `eval_sets` pack their examples once, at the first call."""

    loader: LaneLoader
    eval_batches: Callable[[], Sequence[Batch]]
    eval_examples: Callable[[], Sequence[Example]]
    pipeline: LanePipeline
    fingerprint: dict[str, Any]
    ratio: float  # encoder tokens per decoder token
    commits: Mapping[str, str]  # see `resolve_commits`
    eval_sets: Mapping[str, Callable[[], Sequence[Batch]]]
    evaluated: Sequence[Callable[[], Sequence[Example]]]  # the examples of each set, if there are evaluations
    forms: Sequence[str] = ()  # see `take_survey`

    def saved(self) -> dict[str, Any]:
        """Return the facts that a checkpoint keeps for `build_data(saved=...)`; they are equal on all ranks."""
        return {
            "fingerprint": self.fingerprint,
            "encoder_decoder_ratio": self.ratio,
            "dataset_commits": dict(self.commits),
            "input_forms": [*self.forms],
            **({} if self.loader.reference is None else {"reference": self.loader.reference.digest}),
        }


def build_data(
    config: FullConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
    *,
    rank: int,
    world_size: int,
    num_lanes: int,
    saved: dict[str, Any] | None = None,
    commits: Mapping[str, str] | None = None,
    accept_other_data: bool = False,
    evaluation_cache: Path | None = None,
    pin_memory: bool = False,
) -> TrainingData:
    """Open the sources and make the loader; starts no process, and reads a few hundred documents at most. `saved`: the
    run's earlier `TrainingData.saved()`. `commits`: one rank's `resolve_commits`, for all ranks; None: looked up here.
    `evaluation_cache`: a folder for the evaluation examples, which are then made now; None: every rank makes them at
    the first evaluation. Raises DataError for sources that are missing, unreadable or empty, ConfigError for lanes
    that ranks do not divide, and CheckpointError if the data is not that of `saved` (unless `accept_other_data`)."""
    data, training = config.data, config.training
    commits = resolve_commits(data, saved["dataset_commits"] if saved else None) if commits is None else commits
    maker = example_maker(data, training.seed, tokenizer, vocabulary)
    opener = Opener(data, training.seed, maker, commits)
    own, sources = opener.open_split("validation"), opener.open_sources(num_lanes)
    if saved is None:
        ratio, forms = take_survey(config, sources, maker)
    else:
        ratio, forms = saved["encoder_decoder_ratio"], saved.get("input_forms", ())
        sources = numbered(sources, saved["fingerprint"]["sources"])
    budgets = token_budgets(data, training.micro_batch_size, ratio)
    pipeline = LanePipeline(sources, maker, budgets, num_lanes, training.seed, data)
    facts = fingerprint(config, pipeline, own)
    if saved is not None and not accept_other_data:
        require_same(saved["fingerprint"], facts)
    loader = LaneLoader(
        pipeline, rank=rank, world_size=world_size, num_workers=data.preprocessing_num_workers, pin_memory=pin_memory
    )

    def evaluated(own: Sequence[OpenSource]) -> tuple[Callable[[], Sequence[Batch]], Callable[[], Sequence[Example]]]:
        """Return two cached functions: of this rank's batches, and of the examples of `own` (or the held-out ones)."""
        facts, wanted = fingerprint(config, pipeline, own), training.eval_samples
        find = cache(lambda: known(evaluation_examples(pipeline, wanted, facts, evaluation_cache, own), pipeline))
        if evaluation_cache and wanted:
            find()
        budgets = token_budgets(data, training.per_device_eval_batch_size, ratio)
        return cache(lambda: loader.collated(packed(find(), pipeline, budgets), budgets)), find

    found = {"": evaluated(own)}
    for name in data.eval_sets:
        try:
            of_set = replace(opener, data=data.of_eval_set(name))
            found[name] = evaluated(of_set.open_split("validation", name))
        except DataError as error:
            raise DataError(f"data.eval_sets.{name}: {error}") from error
    (batches, examples), *_ = found.values()
    eval_sets = {name: of_set for name, (of_set, _) in found.items() if name}
    finders = [find for _, find in found.values()] if training.eval_samples else []
    return TrainingData(loader, batches, examples, pipeline, facts, ratio, commits, eval_sets, finders, forms)


def held_out_shares(data: DataConfig) -> dict[Split, float]:
    """Return the shares of the training data that are held out for `validation` and, behind it, for `test`."""
    validation, test = OBJECTIVES[data.objective].held_out(data)
    return {
        "validation": 0.0 if data.own_split("validation") else validation,
        "test": 0.0 if data.own_split("test") else test,
    }


def example_maker(
    data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> ExampleMaker:
    """Return the maker of the examples for `data`, by its objective. Raises ConfigError."""
    maker: ExampleMaker = resolve_name(OBJECTIVES[data.objective].maker)(data, seed, tokenizer, vocabulary)
    return maker


def prepare_data(
    config: FullConfig, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary, num_proc: int
) -> Iterator[str]:
    """Prepare all sources; yield a line about each. Raises ConfigError, OutputLockedError and DataError."""
    data, seed = config.data, config.training.seed
    maker = example_maker(data, seed, tokenizer, vocabulary)
    unprepared = data.model_copy(update={"prepared_dir": None})
    with take_folder(prepared_folder(data), "data.prepared_dir"):
        opener = Opener(unprepared, seed, maker, resolve_commits(unprepared))
        for name, entry in named_sources(data).items():
            source = opener.open(entry, name, PREPARED_LANES)
            facts = made_from(data, entry, maker, seed)
            yield prepare_source(source, facts, maker, prepared_folder(data) / name, data.bad_row_limit, num_proc)


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens the sources of `data`, hub data sets at `commits` (see `resolve_commits`). The methods raise DataError."""

    data: DataConfig
    seed: int
    maker: ExampleMaker
    commits: Mapping[str, str]

    def open_sources(self, num_lanes: int) -> tuple[OpenSource, ...]:
        """Open the sources to train on."""
        opened = []
        validation, test = held_out_shares(self.data).values()
        counts_tokens = self.data.mixture_weights_count == "tokens"
        for number, entry in enumerate(source_entries(self.data)):
            source = self.open(entry, f"source-{number}", num_lanes)
            below = held_out_below(source, validation)
            opened.append(OpenSource(source, entry.weight, below, number, below + test if test else 0.0, counts_tokens))
        return tuple(opened)

    def open_split(self, split: str, eval_set: str | None = None) -> tuple[OpenSource, ...]:
        """Open the separate source of a split, all of it in that split; () if it has none. `eval_set`: the name of the
        set in `data.eval_sets` that this opener's `data` describes."""
        entry = self.data.own_split(split)
        if entry is None:
            return ()
        is_test = split == "test"
        field = "test_files" if is_test else f"eval_sets.{eval_set}.eval_files" if eval_set else "eval_files"
        source = self.open(entry, f"eval-{eval_set}" if eval_set else split, 1, f"data.{field}")
        return (OpenSource(source, 1.0, 0.0 if is_test else 1.0, 0, 1.0),)

    def open(self, named: MixtureSource, name: str, num_lanes: int, files_field: str = "data.data_files") -> AnySource:
        """Open the source `named`; `name` is that of its folder in `data.prepared_dir`."""
        data = self.data
        if data.prepared_dir is not None:
            return PreparedSource(data, name, named, self.maker, self.seed)
        entry = named.model_copy(update={"dataset_revision": self.commits.get(named.hub_name, named.dataset_revision)})
        kind = local_kind(entry.dataset_name) or HUB
        columns = OBJECTIVES[data.objective].columns
        offered = {
            "entry": entry,
            "text_column": entry.text_column if columns is None else None,
            "columns": columns and partial(columns, data),
            "seed": self.seed,
            "vocabulary": self.maker.vocabulary,
            "num_lanes": num_lanes,
            "streaming": data.streaming,
            "limit": data.max_row_bytes,
            "files": expand_files(entry.data_files or (), files_field) if kind.reads_files else (),
        }
        return resolve_name(kind.reader)(**{name: offered[name] for name in kind.needs})
