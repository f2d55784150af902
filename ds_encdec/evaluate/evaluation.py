"""`ds-encdec evaluate`: generate for the examples of a split, and compare the texts with their references. Batches are
planned from the examples' lengths alone, so an evaluation that was killed goes on with the same batches. Its files:
docs/evaluate.md; until the end each other rank has its own, `predictions.rank1.jsonl` and so on."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from ds_encdec.base import terminal
from ds_encdec.base.types import CheckpointError, ConfigError, OutOfMemoryError, OutputLockedError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.schema import FullConfig, load_saved
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.data.inspection import TextExample, TrainedData, split_examples
from ds_encdec.data.sources.sources import Split
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.evaluate.generation import generate_batch, plan_batches, score_targets, special_ids, text_of
from ds_encdec.evaluate.metrics import rouge_scorer, same_words, score_texts
from ds_encdec.evaluate.models import is_ours, open_model
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.memory_errors import in_one_line, is_out_of_memory
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.run_folder import lock_file
from ds_encdec.launch.world import World, discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import beyond_positions
from ds_encdec.monitor.metrics_file import strict_json
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary, add_sentinels

FILES_OF_A_MODEL = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*.json")
Batch = TypeVar("Batch", bound=Sized)
_TIMEOUT = timedelta(days=2)  # that a rank waits for the slowest one at the end


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
    continued; `metrics` and `batch_tokens` may differ. `out` None: MODEL-SPLIT beside the model. Called by one process,
    or by every rank. Raises ConfigError, DataError, CheckpointError and OutOfMemoryError.
    """
    out = output_folder(model, out, split)
    tokenizer, vocabulary = _tokenizer(model, config)
    world, place, collectives = meet(device)
    # Rank 0 alone queries the hub, so that all read the same commit of a data set: the one that was trained on.
    trained = collectives.on_rank_zero(lambda: _trained_data(model))
    commits = collectives.on_rank_zero(
        lambda: resolve_commits(config.data, trained.saved["dataset_commits"] if trained else None)
    )
    examples = collectives.rank_zero_first(
        lambda: split_examples(config, tokenizer, vocabulary, split, max_samples, commits, trained)
    )
    how = asdict(settings) | {"dtype": dtype or "default", "device": place.type}
    del how["batch_tokens"]
    facts = collectives.on_rank_zero(lambda: {**_digests(model, split, examples), **how})
    with collectives.on_every_rank(lambda: claim(out, facts) if world.is_main else open(os.devnull)):
        predictions = collectives.on_every_rank(lambda: Predictions(out, world.rank))
        if world.is_main and 0 < len(predictions.records) < len(examples):
            _log(f"{len(predictions.records):,} of {len(examples):,} predictions are there; going on")
        batches = plan_batches([example.encoder_ids for example in examples], settings)[world.rank :: world.world_size]
        if missing := [batch for batch in batches if not predictions.records.keys() >= set(batch)]:
            loaded = open_model(model, place, dtype)
            longest = max(len(example.encoder_ids) for example in examples)
            if world.is_main and (problem := beyond_positions(loaded.config, longest, settings.max_new_tokens)):
                _log(problem)
            for batch in with_progress(split, batches, missing, shown=world.is_main and not terminal.is_quiet()):
                predictions.append(_predict(loaded, tokenizer, examples, batch, settings))
            del loaded
        collectives.gather(None)  # all ranks have written their predictions
        result = collectives.on_rank_zero(
            lambda: _finish(out, examples, metrics, bertscore_model, settings, facts, special_ids(tokenizer))
        )
    shutdown()
    return out, result


def output_folder(model: Path, out: Path | None, judged: str) -> Path:
    """Return `out`, or MODEL-JUDGED beside the model. Raises ConfigError for one inside the model's folder."""
    if out is None:
        return model.resolve().with_name(f"{model.resolve().name}-{judged}")
    if out.resolve().is_relative_to(model.resolve()):
        raise ConfigError(f"--out: {out} is inside the model's folder, which is left as it is; choose another")
    return out


def meet(device: Literal["cuda", "cpu", "auto"]) -> tuple[World, torch.device, HostCollectives]:
    """Return this rank's place, its device, and the collectives of all ranks, if there are several."""
    world = discover(os.environ)
    place = choose_device(device, world, named="--device cuda")
    if world.world_size > 1:
        init_process_group(world, place, _TIMEOUT, "fsdp", meeting="evaluation")
    return world, place, HostCollectives(_TIMEOUT)


def _trained_data(model: Path) -> TrainedData | None:
    export = model.resolve().parent
    candidates = (export.parent / "checkpoints" / name for name in ("final", "best", "latest"))
    checkpoint = next((one for one in candidates if (one / "trainer.json").is_file()), None)
    if export.name != "export" or checkpoint is None:
        return None
    try:
        saved = read_json(checkpoint / "trainer.json", None)["data"]
        return TrainedData(load_saved(checkpoint / "config.yaml").data, saved)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read for the data of the training: {error!r}") from error


def _tokenizer(model: Path, config: FullConfig) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    if not is_ours(model):
        if not OBJECTIVES[config.data.objective].takes_records:
            raise ConfigError(
                f"--model: {model} is no model of ds_encdec, and data.objective={config.data.objective} is for those "
                "only: set data.objective=sft and its templates"
            )
        tokenizer = AutoTokenizer.from_pretrained(model)
        return tokenizer, add_sentinels(tokenizer, 0, mode_tokens=False)
    known = Qwen3Seq2SeqConfig.from_pretrained(model)
    its = {"tokenizer_name_or_path": str(model), "num_sentinel_tokens": len(known.sentinel_token_ids)}
    section = config.model.model_copy(update=its)
    return load_tokenizer(section, builtin_texts=tuple, mode_tokens=bool(known.mode_token_ids))


def digest_of(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the names and contents of the files."""
    found = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


def _digests(model: Path, split: Split, examples: Sequence[TextExample]) -> dict[str, str]:
    of_data = hashlib.sha256(split.encode())
    for example in examples:
        of_data.update(f"\n{example.key} {example.encoder_ids.tolist()} {example.decoder_ids.tolist()}".encode())
    return {
        "model": digest_of(path for pattern in FILES_OF_A_MODEL for path in model.glob(pattern)),
        "data": f"{len(examples)} examples of {split}, SHA-256 {of_data.hexdigest()}",
    }


@contextmanager
def in_memory(examples: int, settings: GenerationSettings, kept: str = "") -> Iterator[None]:
    """Turn the error of a batch that does not fit into memory into one that names the option."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"a batch of {examples} examples does not fit into memory ({in_one_line(error)}). Lower --batch-tokens "
            f"({settings.batch_tokens} now){kept}"
        ) from error


def _predict(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[TextExample],
    batch: Sequence[int],
    settings: GenerationSettings,
) -> list[dict[str, Any]]:
    inputs, special = [example.encoder_ids for example in examples], special_ids(tokenizer)
    targets = [examples[number].decoder_ids for number in batch]
    with in_memory(len(batch), settings, "; finished predictions are kept"):
        generated = generate_batch(model, inputs, batch, settings)
        scores = score_targets(model, [inputs[number] for number in batch], targets, settings.batch_tokens)
    return [
        {
            "number": number,
            "key": examples[number].key,
            "input": examples[number].input_text,
            "reference": text_of(tokenizer, target),  # with sentinels, as predictions are
            "prediction": text_of(tokenizer, ids),
            "generated_tokens": len(ids),
            "target_tokens": len(target),
            "right_tokens": sum(hit and token not in special for hit, token in zip(hits, target, strict=True)),
            "loss": -log_probability / len(target),
        }
        for number, ids, target, (log_probability, hits) in zip(batch, generated, targets, scores, strict=True)
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
    predictions = Predictions(out)
    records = [predictions.records[number] for number in range(len(examples))]
    scorer = rouge_scorer() if "rouge" in metrics else None
    for record in records if settings.max_new_tokens else ():
        record["exact_match"] = 100.0 * same_words(record["prediction"], record["reference"])
        record.pop("rougeL", None)
        if scorer is not None:
            record["rougeL"] = 100.0 * scorer.score(record["reference"], record["prediction"])["rougeL"].fmeasure
    total_loss = sum(float(record["loss"]) * record["target_tokens"] for record in records)
    loss = total_loss / sum(record["target_tokens"] for record in records)
    figures = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if of_text := sum(token not in special for example in examples for token in example.decoder_ids.tolist()):
        figures["token_accuracy"] = 100 * sum(record["right_tokens"] for record in records) / of_text
    texts = [[record[side] for record in records] for side in ("prediction", "reference")]
    of_texts, left_out = score_texts(metrics, *texts, bertscore_model=bertscore_model)
    most = settings.max_new_tokens or math.inf
    cut = sum(record["generated_tokens"] >= most for record in records)
    result = {
        "figures": figures | of_texts,
        "examples": len(records),
        "cut_at_max_new_tokens": cut,
        "evaluation": dict(facts),
    }
    result |= {"metrics_left_out": left_out} if left_out else {}
    predictions.finish(records, result)
    return result


def with_progress(
    judged: str, batches: Sequence[Batch], missing: Sequence[Batch], what: str = "predictions are made", *, shown: bool
) -> Iterator[Batch]:
    """Yield the `missing` ones of all `batches`, and log how many of their items are done."""
    total = sum(map(len, batches))
    done = total - sum(map(len, missing))
    for batch in missing:
        yield batch
        tenths, done = 10 * done // total, done + len(batch)
        if shown and 10 * done // total > tenths:  # a line for each tenth of this rank's share
            _log(f"{judged}: {100 * done // total} % of the {what}")


def _log(line: str) -> None:
    print(terminal.stamped(line), file=sys.stderr, flush=True)


class Predictions:
    """The predictions in `folder`, by the number of their example; each rank appends to its own file, and `finish`
    makes one of them. A line that a kill has cut is dropped, and its example is generated again."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._path = folder / ("predictions.jsonl" if rank == 0 else f"predictions.rank{rank}.jsonl")
        self._writing = Writing(folder, "The evaluation", "Make room, and start it again: it goes on from here.", rank)
        self.records: dict[int, dict[str, Any]] = {}
        for path in folder.glob("predictions*.jsonl"):
            *lines, torn = path.read_bytes().split(b"\n")
            self.records |= {record["number"]: record for record in map(json.loads, lines)}
            if torn and path == self._path:
                os.truncate(path, path.stat().st_size - len(torn))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the records of a batch through to the disk."""
        with self._writing.explain_refusals(), self._path.open("ab") as file:
            file.write("".join(map(_line, records)).encode())
            file.flush()
            os.fsync(file.fileno())
        self.records |= {record["number"]: dict(record) for record in records}

    def finish(self, records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> None:
        """Write all records, in their order, and the figures."""
        with self._writing.explain_refusals():
            write_atomically(self._folder / "predictions.jsonl", "".join(map(_line, records)))
            write_atomically(self._folder / "metrics.json", json.dumps(strict_json(metrics), indent=2) + "\n")
            for path in self._folder.glob("predictions.rank*.jsonl"):
                path.unlink()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(strict_json(record), ensure_ascii=False) + "\n"


def claim(folder: Path, facts: Mapping[str, Any]) -> IO[str]:
    """Begin an evaluation in `folder`, or continue the one in it; it is this process's until the returned file is
    closed. Raises ConfigError that names the differences if its evaluation differs from `facts`, and OutputLockedError
    if another process is writing into it."""
    with (
        Writing(folder, "The evaluation", "Make room, or choose another --out.").explain_refusals(),
        ExitStack() as undo,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        lock = undo.enter_context(open(folder / ".lock", "a"))
        if not lock_file(lock):
            raise OutputLockedError(f"--out: another process is writing its evaluation into {folder}")
        if problem := _difference(folder, facts):
            raise ConfigError(problem)
        write_atomically(folder / "evaluation.json", json.dumps(facts, indent=2) + "\n")
        undo.pop_all()
        return lock


def _difference(folder: Path, facts: Mapping[str, Any]) -> str:
    header = folder / "evaluation.json"
    try:
        earlier = json.loads(header.read_text())
        differing = [name for name in {**facts, **earlier} if facts.get(name) != earlier.get(name)]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError) as error:
        return f"--out: {header} cannot be read ({error}); choose another folder, or delete it"
    changes = ", ".join(f"{name} ({earlier.get(name)} there, {facts.get(name)} now)" for name in differing)
    problem = f"--out: {folder} has the predictions of another evaluation, which differs in {changes}. "
    return f"{problem}Choose another folder, or delete it" if differing else ""
