"""The export at the end of a run, made again where it is not that of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from saved_checkpoints import config, random_state, save_checkpoint

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.exports.final_export import export_at_end
from ds_encdec.launch.run_folder import RunFolder


@pytest.mark.parametrize("name", ["final", "best"])
def test_an_export_of_an_earlier_end_is_made_again(tmp_path: Path, name: str) -> None:
    run, link = RunFolder(str(tmp_path)), tmp_path / "checkpoints" / name
    training = TrainingConfig(load_best_model_at_end=name == "best")
    card = run.exports / name / "README.md"
    for step in (100, 200):  # the second end is killed before its export, and continued
        save_checkpoint(run.checkpoints, step, random_state(config(), seed=step), config())
        link.unlink(missing_ok=True)
        link.symlink_to(f"step-{step:08d}")
        export_at_end(run, training, anew=step == 100)
        assert f"checkpoint `step-{step:08d}`" in card.read_text()
    written = card.stat().st_ctime_ns
    export_at_end(run, training, anew=False)
    assert card.stat().st_ctime_ns == written


def test_a_run_that_was_stopped_where_it_now_ends_has_no_final_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    for step in (100, 200):
        save_checkpoint(run.checkpoints, step, random_state(config(), seed=step), config())
    export_at_end(run, TrainingConfig(), anew=False)
    assert "checkpoint `step-00000200`" in (run.exports / "final" / "README.md").read_text()
