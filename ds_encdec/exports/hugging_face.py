"""Exports a checkpoint as a Hugging Face folder, alone or averaged with its neighbours, also at the end of a run. The
folder has the modelling code, so `AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)` (or
`AutoModel`, for an encoder alone) loads it without ds_encdec and deepspeed. Weights late on a trajectory scatter around
a better point than any of them (Izmailov et al., arXiv 1803.05407), hence the mean of a run's last checkpoints."""

import json
import logging
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ds_encdec.base.types import CheckpointError, WeightSource
from ds_encdec.checkpoint.folder import Checkpoint, clear_leftovers, committed_steps, refuse_existing, written_whole
from ds_encdec.checkpoint.manifest import MANIFEST, read_manifest
from ds_encdec.config.schema import FullConfig, TrainingConfig, load_saved
from ds_encdec.exports.adapters import trained_weights
from ds_encdec.exports.model_card import model_card
from ds_encdec.exports.model_code import write_code
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import encoder_norm
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.source import architecture
from ds_encdec.model.weights import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer, write_tokenizer

logger = logging.getLogger(__name__)

AUTO_MAP = {"AutoConfig": "configuration.Qwen3Seq2SeqConfig", "AutoModelForSeq2SeqLM": "modeling.Qwen3ForSeq2SeqLM"}
ENCODER_AUTO_MAP = {"AutoConfig": "configuration.Qwen3EncoderConfig", "AutoModel": "encoder.Qwen3EncoderModel"}

MIN_AVERAGED = 3  # fewest checkpoints of a run whose mean is written at its end


def export_hf(
    weights: WeightSource,
    config: Qwen3Seq2SeqConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5_000_000_000,
    card: str,
    longest_text: int | None = None,
    run: FullConfig | None = None,
    replace: bool = False,
) -> None:
    """Write the folder `out`: weights (safetensors, tied ones once), configuration, code, tokenizer and model card.
    Under a `Qwen3EncoderConfig` it is a `Qwen3EncoderModel`, also for sentence-transformers, which cuts texts to
    `longest_text` tokens (None: the number of positions) and embeds them as `run` did; otherwise a `Qwen3ForSeq2SeqLM`.
    Weights are read, converted to `dtype` and written one by one, into files of at most `max_shard_bytes`. The folder
    appears complete or not at all; `replace` and errors: see `written_whole`."""
    is_encoder = isinstance(config, Qwen3EncoderConfig)
    shapes = parameter_shapes(config)
    if is_encoder:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(("shared.", "encoder."))}
    with written_whole(out, replace=replace) as (unfinished, writing):
        writing.require_space(dtype.itemsize * sum(map(prod, shapes.values())))
        write_safetensors_folder(unfinished, shapes, weights, dtype=dtype, max_shard_bytes=max_shard_bytes)
        fields = {
            **config.to_dict(),
            "architectures": ["Qwen3EncoderModel" if is_encoder else "Qwen3ForSeq2SeqLM"],
            "auto_map": ENCODER_AUTO_MAP if is_encoder else AUTO_MAP,
            "code_sha256": write_code(unfinished, encoder_only=is_encoder),
            "dtype": str(dtype).removeprefix("torch."),
        }
        _write_json(unfinished / "config.json", fields)
        if is_encoder:
            longest_text = longest_text or config.max_position_embeddings
            _write_sentence_transformers(unfinished, config.hidden_size, longest_text, run or FullConfig())
        else:
            GenerationConfig(
                pad_token_id=config.pad_token_id,
                eos_token_id=config.eos_token_id,
                decoder_start_token_id=config.decoder_start_token_id,
            ).save_pretrained(unfinished)
        if tokenizer is not None:
            write_tokenizer(tokenizer, unfinished)
        (unfinished / "README.md").write_text(card)


def _write_sentence_transformers(folder: Path, hidden_size: int, longest_text: int, run: FullConfig) -> None:
    """Make an encoder's folder one for `SentenceTransformer(folder, trust_remote_code=True)` of version 3 or later. A
    text's embedding is the mean of its tokens' states, or the last one, of length 1."""
    pooling, prompts = (
        run.training.contrastive.pooling,
        {"query": run.data.query_prefix, "document": run.data.document_prefix},
    )
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    (folder / modules["Pooling"]).mkdir()
    contents: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (name, path) in enumerate(modules.items())
        ],
        "config_sentence_transformers.json": {
            "similarity_fn_name": "cosine",
            **({"prompts": prompts, "default_prompt_name": None} if any(prompts.values()) else {}),
        },
        "sentence_bert_config.json": {"max_seq_length": longest_text, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_mean_tokens": pooling == "mean",
            **({"pooling_mode_lasttoken": True} if pooling == "last" else {}),
        },
    }
    for name, content in contents.items():
        _write_json(folder / name, content)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    encoder_only: bool = False,
    replace: bool = False,
    base: str | None = None,
) -> None:
    """Export a committed checkpoint of any engine, with a model card about its run. Raises CheckpointError. `replace`:
    replace an earlier export at `out` once this one is complete. `base`: the adapters' base, if moved."""
    path = Path(checkpoint).expanduser().resolve()
    described, folder = f"checkpoint `{path.name}`", Path(out).expanduser()
    _export_mean([path], described, folder, "CHECKPOINT", base, dtype, encoder_only=encoder_only, replace=replace)


def _export_mean(
    checkpoints: Sequence[Path],
    described: str,
    out: Path,
    field: str,
    base: str | None,
    dtype: torch.dtype,
    *,
    encoder_only: bool = False,
    replace: bool,
) -> None:
    """Export the mean of the weights of `checkpoints`, `described` in words, with the files of the last one, which the
    argument `field` named. Weights are summed from the first to the last, then divided."""
    if not replace:
        refuse_existing(out)  # before minutes of reading
    sources = [trained_weights(checkpoint, base) for checkpoint in checkpoints]

    def mean(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        total = sources[0](name, rows)
        for source in sources[1:]:
            total += source(name, rows)
        return total.div_(len(sources)) if sources[1:] else total

    newest = checkpoints[-1]
    config = Qwen3Seq2SeqConfig.from_pretrained(newest / "model")
    manifest = read_manifest(newest)
    saved = Checkpoint(newest, manifest)
    run = load_saved(newest / "config.yaml")
    forms = (saved.read_json("trainer.json").get("data") or {}).get("input_forms", ())  # of a run's own data
    encoder_only = encoder_only or not config.num_hidden_layers
    made = Qwen3EncoderConfig.of(config) if encoder_only else config
    trained_by = {"code": manifest.code, "commit": manifest.commit}
    export_hf(
        _of_encoder(mean, config) if encoder_only else mean,
        made,
        pretrained_tokenizer(str(newest / "model"), field=field),
        out,
        dtype=dtype,
        card=model_card(run, made, saved.training_state(), described, trained_by, forms=forms),
        longest_text=run.data.max_encoder_length,
        run=run,
        replace=replace,
    )


def _of_encoder(weights: WeightSource, config: Qwen3Seq2SeqConfig) -> WeightSource:
    """Return the weights of the encoder alone."""
    read = encoder_norm(config)
    return lambda name, rows=slice(None), /: weights(read if name == "encoder.norm.weight" else str(name), rows)


def average_last_checkpoints(run: RunFolder, *, last: int) -> None:
    """Write the mean of at most `last` newest checkpoints to `export/averaged`. Errors are only logged."""
    try:
        found = last_checkpoints(run.checkpoints, max(last, MIN_AVERAGED)) if last else {}
        if len(found) < MIN_AVERAGED:
            return
        logger.info(
            "Averaging the last checkpoints: rank 0 reads %s MB. This may be interrupted.",
            f"{sum(read_manifest(path).num_bytes for path in list(found.values())[-last:]) / 1e6:,.0f}",
        )
        steps = average_checkpoints(run, run.averaged, last=last, dtype=torch.float32, replace=True)
        logger.info("the mean of the checkpoints at steps %s is in %s", ", ".join(map(str, steps)), run.averaged)
    except Exception as error:
        logger.error("The mean of the last checkpoints was not written: %s. `ds-encdec average` tries again.", error)


def average_checkpoints(
    run: RunFolder, out: Path, *, last: int, dtype: torch.dtype, replace: bool = False, base: str | None = None
) -> list[int]:
    """Write the arithmetic mean of the weights of `last_checkpoints` of `run`, adapters merged into `base`. Any engines
    may have saved them. Sums and quotients are float32, in the order of the steps, before the result is rounded to
    `dtype`; two full parameters are in memory at a time. `out`: see `export_hf`; `replace`: see `export_checkpoint`.
    Card, tokenizer and configuration are those of the newest checkpoint. Returns the averaged steps. Raises
    CheckpointError for fewer than two checkpoints, damaged ones, and different models."""
    checkpoints = last_checkpoints(run.checkpoints, last)
    if len(checkpoints) < 2:
        raise CheckpointError(
            f"An average takes at least two checkpoints, but {run.root} has {len(checkpoints)} in a row for --last "
            f"{last}. training.save_total_limit says how many a run keeps."
        )
    paths, steps = [path.resolve() for path in checkpoints.values()], list(checkpoints)
    models = [architecture(Qwen3Seq2SeqConfig.from_pretrained(path / "model")) for path in paths]
    if any(model != models[0] for model in models):
        raise CheckpointError(f"{', '.join(path.name for path in paths)} are different models: they have no average.")
    described = f"mean of the checkpoints at steps {', '.join(map(str, steps))}"
    _export_mean(paths, described, out, "RUN", base, dtype, replace=replace)
    return steps


def last_checkpoints(folder: Path, last: int) -> dict[int, Path]:
    """Return step → path of the newest committed checkpoints in a row, at most `last`, oldest first. A gap ends the
    row: an older one was kept for being the best, and may be far from the run's present weights."""
    row: list[tuple[int, Path]] = []
    for step, path in sorted(committed_steps(folder).items(), reverse=True)[:last]:
        # A gap of two, because one save may have failed.
        if row and row[-1][0] - step > 2 * load_saved(row[-1][1] / "config.yaml").training.save_steps:
            break
        row.append((step, path))
    return dict(reversed(row))


def hand_over(run: RunFolder, folder: Path) -> None:
    """Copy the exported model of a complete run into `folder`, all that its platform keeps; errors are only logged."""
    out = next((run.exports / name for name in ("best", "final") if (run.exports / name).is_dir()), None)
    if out is None:
        logger.warning("%s has no model, because none was exported.", folder)
        return
    try:
        shutil.copytree(out, folder, dirs_exist_ok=True)
        logger.info("the model is in %s", folder)
    except OSError as error:
        logger.error("%s could not be copied to %s: %s", out, folder, error)


def export_at_end(run: RunFolder, training: TrainingConfig, *, has_trained: bool) -> None:
    """Write a complete run's float32 weights to `export/final`, or with `load_best_model_at_end` to `export/best`. An
    earlier export that is no older stays, unless the run `has_trained` now. Errors are only logged."""
    name = "best" if training.load_best_model_at_end else "final"
    if name == "best" and not (run.checkpoints / name).exists():
        logger.warning("load_best_model_at_end: no checkpoint of this run was evaluated, so the last one is exported.")
        name = "final"
    out, checkpoint = run.exports / name, run.checkpoints / name
    if not checkpoint.exists() and (saved := committed_steps(run.checkpoints)):
        checkpoint = saved[max(saved)]  # stopped at its present end: no step was the last
    model, saved_at = out / "config.json", checkpoint / MANIFEST
    is_newer = model.exists() and (not saved_at.exists() or model.stat().st_mtime_ns >= saved_at.stat().st_mtime_ns)
    if not training.export_at_end or (is_newer and not has_trained):
        return
    try:
        manifest = read_manifest(checkpoint.resolve())
        megabytes, step = manifest.num_bytes / 1e6, manifest.step
        logger.info("Exporting the %s checkpoint (step %d, %.0f MB). This may be interrupted.", name, step, megabytes)
        export_checkpoint(checkpoint, out, replace=True)
        logger.info("the %s model (step %d) is in %s", name, manifest.step, out)
    except Exception as error:
        logger.error("The %s checkpoint could not be exported: %s. `ds-encdec export` tries again.", name, error)


def clear_exports(run: RunFolder) -> None:
    """Remove leftovers of a killed export in `export/`, and restore the folder that it was replacing."""
    for name in (run.averaged.name, "final", "best"):
        try:
            clear_leftovers(run.exports, name)
        except OSError as error:  # the run trains in any case
            logger.warning("%s: the leftovers of a killed export could not be cleared: %s", run.exports, error)
