"""The mean of a run's last checkpoints, exact and of any engines mixed, and the export at the end of a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from saved_checkpoints import State, config, flip_byte, random_state, save_checkpoint

from ds_encdec import cli
from ds_encdec.base.types import CheckpointError
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.exports.hugging_face import average_checkpoints, average_last_checkpoints, clear_exports, export_at_end
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

ENGINES = {400: "deepspeed", 100: "dcp", 1200: "dcp", 900: "deepspeed"}


def save_run(run: Path) -> dict[int, State]:
    states = {step: random_state(config(), seed=step) for step in ENGINES}
    for step, engine in ENGINES.items():
        save_checkpoint(run / "checkpoints", step, states[step], config(), engine=engine)
    (run / "checkpoints" / "latest").symlink_to("step-00001200")
    (run / "checkpoints" / "step-00001300.tmp").mkdir()
    return states


def average(run: Path, out: Path, last: int = 5, dtype: torch.dtype = torch.float32) -> list[int]:
    return average_checkpoints(RunFolder(str(run)), out, last=last, dtype=dtype)


@pytest.mark.parametrize("last", [3, 9])
def test_the_mean_of_the_newest_is_exact_and_rounded_once(tmp_path: Path, last: int) -> None:
    states = save_run(tmp_path)
    steps = average(tmp_path, tmp_path / "out", last)
    average(tmp_path, tmp_path / "rounded", last, torch.bfloat16)
    assert steps == {3: [400, 900, 1200], 9: [100, 400, 900, 1200]}[last]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == states[100]["weight"].keys()
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    for name, found in tensors.items():
        total = states[steps[0]]["weight"][name].numpy().copy()
        for step in steps[1:]:
            total += states[step]["weight"][name].numpy()
        assert np.array_equal(found.numpy(), total / np.float32(len(steps)))
        assert torch.equal(rounded[name], found.bfloat16())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"mean of the checkpoints at steps {', '.join(map(str, steps))}" in card
    assert Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out").config.num_encoder_layers == 3


def test_fewer_than_two_have_no_mean(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 0 in a row for --last 5\. training\.save_total_limit"):
        average(tmp_path, tmp_path / "out")
    save_checkpoint(tmp_path / "checkpoints", 100, random_state(config(), 0), config())
    save_checkpoint(tmp_path / "checkpoints", 200, random_state(config(), 0), config())
    with pytest.raises(CheckpointError, match="has 1 in a row for --last 1"):
        average(tmp_path, tmp_path / "out", last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_an_old_best_is_no_part_of_the_mean(tmp_path: Path) -> None:
    for step in (1000, 96_000, 97_000, 99_000):  # save_steps is 1000
        save_checkpoint(tmp_path / "checkpoints", step, random_state(config(), 0), config())
    assert average(tmp_path, tmp_path / "out") == [96_000, 97_000, 99_000]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00097000")
    with pytest.raises(CheckpointError, match="has 1 in a row"):
        average(tmp_path, tmp_path / "other")
    run = RunFolder(str(tmp_path))
    average_last_checkpoints(run, last=5)
    assert not run.averaged.parent.exists()


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    for leftover in ("averaged.tmp", ".replaced-averaged", "other.tmp"):
        (run.exports / leftover).mkdir(parents=True)
    clear_exports(run)
    assert {path.name for path in run.exports.iterdir()} == {"averaged", "other.tmp"}  # which another writes


def test_different_models_are_both_named(tmp_path: Path) -> None:
    other = config(cross_attention="renormed")
    save_checkpoint(tmp_path / "checkpoints", 100, random_state(config(), 0), config())
    save_checkpoint(tmp_path / "checkpoints", 200, random_state(other, 0), other)
    with pytest.raises(CheckpointError, match="step-00000100, step-00000200 are different models"):
        average(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named_and_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-00000400" / "zero" / "mp_rank_00_model_states.pt"
    flip_byte(damaged)
    assert cli.main(["average", str(tmp_path), "--last", "3"]) == 5
    assert str(damaged) in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
    assert cli.main(["average", str(tmp_path), "--last", "2", "--dtype", "bfloat16"]) == 0
    assert "steps 900, 1200" in capsys.readouterr().out
    assert load_file(tmp_path / "export" / "averaged" / "model.safetensors")["shared.weight"].dtype == torch.bfloat16


def test_only_the_end_of_a_run_replaces_its_earlier_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path)
    run = RunFolder(str(tmp_path))
    assert cli.main(["average", str(tmp_path), "--last", "9"]) == 0
    assert "(there are no more in a row; --last is 9)" in capsys.readouterr().out
    for out in ([], [str(run.averaged)]):
        assert cli.main(["average", str(tmp_path), *out, "--last", "2"]) == 5
        assert f"{run.averaged} exists and is not empty" in capsys.readouterr().err
    average_last_checkpoints(run, last=2)
    assert "at steps 900, 1200" in (run.averaged / "README.md").read_text()


@pytest.mark.parametrize("name", ["final", "best"])
def test_an_export_of_an_earlier_end_is_made_again(tmp_path: Path, name: str) -> None:
    run, link = RunFolder(str(tmp_path)), tmp_path / "checkpoints" / name
    training = TrainingConfig(load_best_model_at_end=name == "best")
    card = run.exports / name / "README.md"
    for step in (100, 200):  # the second end is killed before its export, and continued
        save_checkpoint(run.checkpoints, step, random_state(config(), seed=step), config())
        link.unlink(missing_ok=True)
        link.symlink_to(f"step-{step:08d}")
        export_at_end(run, training, has_trained=step == 100)
        assert f"checkpoint `step-{step:08d}`" in card.read_text()
    written = card.stat().st_ctime_ns
    export_at_end(run, training, has_trained=False)
    assert card.stat().st_ctime_ns == written


def test_a_run_that_was_stopped_where_it_now_ends_has_no_final_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    for step in (100, 200):
        save_checkpoint(run.checkpoints, step, random_state(config(), seed=step), config())
    export_at_end(run, TrainingConfig(), has_trained=False)
    assert "checkpoint `step-00000200`" in (run.exports / "final" / "README.md").read_text()
