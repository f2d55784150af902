"""`ds-encdec evaluate`: generate for the examples of a split, and compare the texts with their references. Batches are
planned from the examples' lengths alone, so an evaluation that was killed goes on with the same batches."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import Progress

from ds_encdec.base import terminal
from ds_encdec.base.types import CheckpointError, ConfigError, OutOfMemoryError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.schema import FullConfig, load_saved
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.data.inspection import TextExample, TrainedData, split_examples
from ds_encdec.data.sources.sources import Split
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.evaluate.generation import generate_batch, plan_batches, special_ids, text_of
from ds_encdec.evaluate.metrics import rouge_scorer, same_words, score_texts
from ds_encdec.evaluate.models import default_outs, is_ours, open_model, open_tokenizer
from ds_encdec.evaluate.predictions import Predictions, claim, is_free, model_digest
from ds_encdec.evaluate.scoring import score_targets
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.memory_errors import in_one_line, is_out_of_memory
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary, add_sentinels

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_TIMEOUT = timedelta(days=2)
"""The time that a rank waits for the slowest one at the end."""


def evaluate(
    model: Path,
    config: FullConfig,
    split: Split,
    *,
    out: Path | None,
    settings: GenerationSettings,
    metrics: Sequence[str],
    max_samples: int | None = None,
    bertscore_model: Path | None = None,
    device: Literal["cuda", "cpu", "auto"] = "auto",
    dtype: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Generate for the examples of `split`, all or the first `max_samples`; returns the folder `out` and the figures.

    `check_metrics` has accepted `metrics`. An unfinished evaluation of the same model, data and settings in `out` is
    continued; `metrics` and `batch_tokens` may differ. `out` None: the first folder beside the model that has no other
    evaluation. Called by one process, or by every rank. Raises ConfigError, DataError, CheckpointError and
    OutOfMemoryError.
    """
    if out is not None and out.resolve().is_relative_to(model.resolve()):
        raise ConfigError(f"--out: {out} is inside the model's folder, which is left as it is; choose another")
    tokenizer, vocabulary = _tokenizer(model, config)
    world = discover(os.environ)
    place = choose_device(device, world, named="--device cuda")
    if world.world_size > 1:
        init_process_group(world, place, _TIMEOUT, "fsdp", meeting="evaluation")
    collectives = HostCollectives(_TIMEOUT)
    # Rank 0 alone queries the hub, so that all read the same commit of a data set: the one that was trained on.
    trained = collectives.on_rank_zero(lambda: trained_data(model))
    saved_commits = trained.saved["dataset_commits"] if trained else None
    commits = collectives.on_rank_zero(lambda: resolve_commits(config.data, saved_commits))
    examples = collectives.rank_zero_first(
        lambda: split_examples(config, tokenizer, vocabulary, split, max_samples, commits, trained)
    )
    how = {name: value for name, value in asdict(settings).items() if name != "batch_tokens"}
    how |= {"dtype": dtype or "default", "device": place.type}
    facts = collectives.on_rank_zero(
        lambda: {"model": model_digest(model), "data": _data_digest(split, examples), **how}
    )
    if out is None:
        out = collectives.on_rank_zero(lambda: next(one for one in default_outs(model, split) if is_free(one, facts)))
    with collectives.on_every_rank(lambda: claim(out, facts) if world.is_main else open(os.devnull)):
        predictions = collectives.on_every_rank(lambda: Predictions(out, world.rank))
        if world.is_main and 0 < len(predictions.records) < len(examples):
            _log(f"{len(predictions.records):,} of {len(examples):,} predictions are there; going on")
        batches = plan_batches([example.encoder_ids for example in examples], settings)[world.rank :: world.world_size]
        missing = [batch for batch in batches if not predictions.records.keys() >= set(batch)]
        if missing:
            loaded = open_model(model, place, dtype)
            for batch in _with_progress(split, batches, missing, shown=world.is_main):
                predictions.append(_predict(loaded, tokenizer, examples, batch, settings))
            del loaded
        collectives.gather(None)  # all ranks have written their predictions
        special = special_ids(tokenizer)
        result = collectives.on_rank_zero(
            lambda: _finish(out, examples, metrics, bertscore_model, settings, facts, special)
        )
    shutdown()
    return out, result


def trained_data(model: Path) -> TrainedData | None:
    """Return the data that a model in a run's `export` folder was trained on, or None. Raises CheckpointError."""
    export = model.resolve().parent
    candidates = [export.parent / "checkpoints" / name for name in ("final", "best", "latest")]
    checkpoint = next((one for one in candidates if (one / "trainer.json").is_file()), None)
    if export.name != "export" or checkpoint is None:
        return None
    try:
        saved = read_json(checkpoint / "trainer.json", None)["data"]
        return TrainedData(load_saved(checkpoint / "config.yaml").data, saved)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read, which says what was trained on: {error!r}") from error


def _tokenizer(model: Path, config: FullConfig) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    """Return the model's own tokenizer, with the special tokens of its training. Raises CheckpointError, and
    ConfigError for another kind of model if the examples have sentinels."""
    if not is_ours(model):
        if not OBJECTIVES[config.data.objective].takes_records:
            raise ConfigError(
                f"--model: {model} is no model of ds_encdec, and data.objective={config.data.objective} is for those "
                "only: set data.objective=sft and its templates"
            )
        tokenizer = open_tokenizer(model)
        return tokenizer, add_sentinels(tokenizer, 0, mode_tokens=False)
    known = Qwen3Seq2SeqConfig.from_pretrained(model)
    its = {"tokenizer_name_or_path": str(model), "num_sentinel_tokens": len(known.sentinel_token_ids)}
    return load_tokenizer(
        config.model.model_copy(update=its), builtin_texts=tuple, mode_tokens=bool(known.mode_token_ids)
    )


def _data_digest(split: Split, examples: Sequence[TextExample]) -> str:
    digest = hashlib.sha256(split.encode())
    for example in examples:
        digest.update(f"\n{example.key} {example.encoder_ids.tolist()} {example.decoder_ids.tolist()}".encode())
    return f"{len(examples)} examples of {split}, SHA-256 {digest.hexdigest()}"


def _predict(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[TextExample],
    batch: Sequence[int],
    settings: GenerationSettings,
) -> list[dict[str, Any]]:
    inputs, special = [example.encoder_ids for example in examples], special_ids(tokenizer)
    targets = [examples[number].decoder_ids for number in batch]
    try:
        generated = generate_batch(model, inputs, batch, settings)
        scores = score_targets(model, [inputs[number] for number in batch], targets, settings.batch_tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"a batch of {len(batch)} examples does not fit into memory ({in_one_line(error)}). Lower --batch-tokens "
            f"({settings.batch_tokens} now); what is done is kept"
        ) from error
    return [
        {
            "number": number,
            "key": examples[number].key,
            "input": examples[number].input_text,
            "reference": text_of(tokenizer, target),  # with sentinels, as predictions are
            "prediction": text_of(tokenizer, ids),
            "generated_tokens": len(ids),
            "target_tokens": len(target),
            "right_tokens": sum(hit and token not in special for hit, token in zip(score.hits, target, strict=True)),
            "loss": -score.log_probability / len(target),
        }
        for number, ids, target, score in zip(batch, generated, targets, scores, strict=True)
    ]


def _finish(
    out: Path,
    examples: Sequence[TextExample],
    metrics: Sequence[str],
    bertscore_model: Path | None,
    settings: GenerationSettings,
    facts: Mapping[str, Any],
    special: set[int],
) -> dict[str, Any]:
    """Compute and return the figures over the predictions of all ranks; write them, and the predictions in order."""
    predictions = Predictions(out)
    records = [predictions.records[number] for number in range(len(examples))]
    scorer = rouge_scorer() if "rouge" in metrics else None
    for record in records if settings.max_new_tokens else ():
        record["exact_match"] = 100.0 * same_words(record["prediction"], record["reference"])
        record.pop("rougeL", None)
        if scorer is not None:
            record["rougeL"] = 100.0 * scorer.score(record["reference"], record["prediction"])["rougeL"].fmeasure
    tokens = sum(record["target_tokens"] for record in records)
    loss = sum(float(record["loss"]) * record["target_tokens"] for record in records) / tokens
    texts = [[record[side] for record in records] for side in ("prediction", "reference")]
    left_out: dict[str, str] = {}
    figures = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        **_token_accuracy(examples, records, special),
        **score_texts(metrics, *texts, bertscore_model=bertscore_model, left_out=left_out),
    }
    longest = sum(record["generated_tokens"] >= (settings.max_new_tokens or math.inf) for record in records)
    result = {"figures": figures, "examples": len(records), "cut_at_max_new_tokens": longest, "evaluation": dict(facts)}
    if left_out:
        result["metrics_left_out"] = left_out
    predictions.finish(records, result)
    return result


def _token_accuracy(
    examples: Sequence[TextExample], records: Sequence[Mapping[str, Any]], special: set[int]
) -> dict[str, float]:
    """Return the percentage of the targets' text tokens that the model rated likeliest; empty if there are none."""
    tokens = sum(token not in special for example in examples for token in example.decoder_ids.tolist())
    right = sum(record["right_tokens"] for record in records)
    return {"token_accuracy": 100 * right / tokens} if tokens else {}


def _with_progress(
    split: Split, batches: Sequence[Sequence[int]], missing: Sequence[Sequence[int]], *, shown: bool
) -> Iterator[Sequence[int]]:
    """Yield the `missing` batches under a bar on a terminal, else with a line for each tenth of this rank's share."""
    console = terminal.console(stderr=True)
    total = sum(map(len, batches))
    done = total - sum(map(len, missing))
    with Progress(console=console, disable=not (shown and console.is_terminal) or terminal.is_quiet()) as progress:
        task = progress.add_task(split, total=total, completed=done)
        for batch in missing:
            yield batch
            tenths, done = 10 * done // total, done + len(batch)
            progress.advance(task, len(batch))
            if shown and not console.is_terminal and not terminal.is_quiet() and 10 * done // total > tenths:
                _log(f"{split}: {100 * done // total} % of the predictions are made")


def _log(line: str) -> None:
    print(terminal.stamped(line), file=sys.stderr, flush=True)
