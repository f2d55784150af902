"""Exports the last or the best checkpoint of a complete run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from ds_encdec.checkpoint.folder import clear_leftovers, committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST, read_manifest
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.exports.hugging_face import export_checkpoint
from ds_encdec.launch.run_folder import RunFolder

logger = logging.getLogger(__name__)


def hand_over(run: RunFolder, folder: Path) -> None:
    """Copy the exported model of a complete run into `folder`, all that its platform keeps; errors are only logged."""
    out = next((run.exports / name for name in ("best", "final") if (run.exports / name).is_dir()), None)
    if out is None:
        logger.warning("no model was exported, so %s has none", folder)
        return
    try:
        shutil.copytree(out, folder, dirs_exist_ok=True)
    except OSError as error:
        logger.error("%s could not be copied to %s: %s", out, folder, error)
        return
    logger.info("the model is in %s", folder)


def export_at_end(run: RunFolder, training: TrainingConfig, *, anew: bool) -> None:
    """Write a complete run's float32 weights to `export/final`, or with `load_best_model_at_end` to `export/best`.

    An earlier export stays if the run has not trained now (`anew`) and it is no older. Errors are only logged.
    """
    name = "best" if training.load_best_model_at_end else "final"
    if name == "best" and not (run.checkpoints / name).exists():
        logger.warning("load_best_model_at_end: no checkpoint of this run was evaluated, so the last one is exported.")
        name = "final"
    out, checkpoint = run.exports / name, run.checkpoints / name
    if not checkpoint.exists() and (saved := committed_steps(run.checkpoints)):
        checkpoint = saved[max(saved)]  # stopped at its present end: no step was the last
    if not training.export_at_end or (not anew and _is_newer(out, checkpoint)):
        return
    try:
        manifest = read_manifest(checkpoint.resolve())
        logger.info(
            "Exporting the %s checkpoint, of step %d: rank 0 reads %s MB. The run is complete; this may be "
            "interrupted.",
            name,
            manifest.step,
            f"{manifest.num_bytes / 1e6:,.0f}",
        )
        export_checkpoint(checkpoint, out, replace=True)
    except Exception as error:
        logger.error("The %s checkpoint could not be exported: %s. `ds-encdec export` tries again.", name, error)
        return
    logger.info("the %s model (step %d) is in %s", name, manifest.step, out)


def _is_newer(out: Path, checkpoint: Path) -> bool:
    model, saved = out / "config.json", checkpoint / MANIFEST
    return model.exists() and (not saved.exists() or model.stat().st_mtime_ns >= saved.stat().st_mtime_ns)


def clear_exports(run: RunFolder) -> None:
    """Remove leftovers of a killed export in `export/`, and restore the folder that it was replacing."""
    for name in (run.averaged.name, "final", "best"):
        clear_leftovers(run.exports, name)
