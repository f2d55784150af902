"""The mean of a run's last checkpoints, as a Hugging Face folder.

Weights late on a trajectory scatter around a better point than any of them (Izmailov et al., arXiv 1803.05407).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ds_encdec.checkpoint.export import RunFacts, export_hf, model_card
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST, read_manifest
from ds_encdec.checkpoint.saved_state import open_saved_state, saved_weights
from ds_encdec.checkpoint.whole_folder import clear_leftovers, refuse_existing
from ds_encdec.config.load import load_saved
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.source import architecture
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import CheckpointError, WeightSource

logger = logging.getLogger(__name__)

MIN_AVERAGED = 3
"""Checkpoints that a run must have left for their mean to be written at its end."""
MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of that export; `ds-encdec export` has the same default."""
_MAX_GAP = 2
"""`training.save_steps` between neighbours: two, because one save may have failed."""


def average_last_checkpoints(run: RunFolder, *, last: int) -> None:
    """Write the mean of a finished run's newest checkpoints, at most `last`, to `export/averaged`, over an earlier one.

    The run is complete whatever happens here: what goes wrong is logged.
    """
    try:
        found = last_checkpoints(run.checkpoints, max(last, MIN_AVERAGED)) if last else {}
        if len(found) < MIN_AVERAGED:
            if run.averaged.exists():
                logger.warning(
                    "%s is the mean of an earlier end of this run: %d checkpoints in a row are left, too few for "
                    "another. `ds-encdec average` takes 2.",
                    run.averaged,
                    len(found),
                )
            return
        logger.info(
            "Averaging the last checkpoints: rank 0 reads %.1f GB. The run is complete; this may be interrupted.",
            sum(read_manifest(path).num_bytes for path in list(found.values())[-last:]) / 1e9,
        )
        steps = average_checkpoints(run, last=last, dtype=torch.float32, max_shard_bytes=MAX_SHARD_BYTES)
    except Exception as error:
        logger.error(
            "The mean of the last checkpoints could not be written: %s. `ds-encdec average` tries again.", error
        )
        return
    logger.info("the mean of the checkpoints at steps %s is in %s", ", ".join(map(str, steps)), run.averaged)


def clear_averaged(run: RunFolder) -> None:
    """Remove what a mean that was killed midway left beside `export/averaged`; give back what it was replacing."""
    clear_leftovers(run.averaged.parent, run.averaged.name)


def average_checkpoints(
    run: RunFolder, out: Path | None = None, *, last: int, dtype: torch.dtype, max_shard_bytes: int
) -> list[int]:
    """Write the arithmetic mean of the weights of `last_checkpoints` of `run`.

    Any engines may have saved them. Sums and quotients are float32, in the order of the steps, before the result is
    rounded to `dtype`; two full parameters are in memory at a time. `out` is the Hugging Face folder to write, see
    `export_hf`; None is `export/averaged`, where an earlier mean makes way once the new one is complete. Card,
    tokenizer and configuration are those of the newest checkpoint. Returns the averaged steps. Raises CheckpointError
    for fewer than two checkpoints, damaged ones, and ones of different models.
    """
    if out is None:
        clear_averaged(run)
    else:
        refuse_existing(out)  # before minutes of reading
    checkpoints = last_checkpoints(run.checkpoints, last)
    if len(checkpoints) < 2:
        problem = f"{run.root} has {len(checkpoints)} in a row. training.save_total_limit says how many a run keeps."
        if last < 2:
            problem = f"{last} was asked for."
        elif (run.root / MANIFEST).exists():
            problem = f"{run.root} is one: give the folder of its run."
        raise CheckpointError(f"An average takes at least two checkpoints, but {problem}")
    paths, steps = [path.resolve() for path in checkpoints.values()], list(checkpoints)
    newest = paths[-1]
    _refuse_different_models(paths)
    weights = mean_weights([saved_weights(open_saved_state(path)) for path in paths])
    export_hf(
        weights,
        Qwen3Seq2SeqConfig.from_pretrained(newest / "model"),
        pretrained_tokenizer(str(newest / "model"), field="RUN"),
        out or run.averaged,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        replace=out is None,
        card=model_card(RunFacts.of(newest, f"mean of the checkpoints at steps {', '.join(map(str, steps))}")),
    )
    return steps


def last_checkpoints(folder: Path, last: int) -> dict[int, Path]:
    """Step → path of the newest committed checkpoints under `folder` that stand in a row, at most `last`, oldest first.

    The row ends where checkpoints between two have been deleted: what is older was kept for being the best, and may
    be far away from where the run is now.
    """
    row: list[tuple[int, Path]] = []
    for step, path in sorted(committed_steps(folder).items(), reverse=True)[:last]:
        if row and row[-1][0] - step > _MAX_GAP * load_saved(row[-1][1] / "config.yaml").training.save_steps:
            break
        row.append((step, path))
    return dict(reversed(row))


def mean_weights(sources: Sequence[WeightSource]) -> WeightSource:
    """The mean of float32 sources: summed from the first to the last, then divided."""

    def lookup(name: str, rows: slice = slice(None), /) -> Tensor:
        total = sources[0](name, rows)
        for source in sources[1:]:
            total += source(name, rows)
        return total.div_(len(sources))

    return lookup


def _refuse_different_models(checkpoints: Sequence[Path]) -> None:
    first, *others = ((path, architecture(Qwen3Seq2SeqConfig.from_pretrained(path / "model"))) for path in checkpoints)
    for path, found in others:
        for field, expected in first[1].items():
            if found.get(field) != expected:
                raise CheckpointError(
                    f"{first[0].name} and {path.name} are of different models, which have no average: {field} is "
                    f"{expected!r} in the one and {found.get(field)!r} in the other."
                )
