"""`ds-encdec convert`: to either engine's files, in one process and on ranks, bit for bit; and what it refuses."""

from __future__ import annotations

import filecmp
import os
import runpy
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from fresh_process import without
from saved_checkpoints import KINDS, State, config, flip_byte, random_state, save_checkpoint

from ds_encdec import cli
from ds_encdec.checkpoint.saved_state import open_saved_state
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import read_record

pytestmark = pytest.mark.distributed

STEP = 7
LOSS_SCALER = {"scale": 1024.0, "steps_since_overflow": 7, "hysteresis": 2}


@pytest.fixture(scope="module")
def state() -> State:
    return random_state(config(), seed=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, state: State) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source"), STEP, state, config(), loss_scaler=LOSS_SCALER)


def convert(source: Path, out: Path, to: str, *overrides: str) -> None:
    assert cli.main(["convert", str(source), str(out), "--to", to, *overrides]) == 0


def convert_on_two_ranks(source: Path, out: Path, to: str, *overrides: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "ds_encdec.cli", "convert", str(source), str(out), "--to", to, *overrides]
    run = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"converted to {out} ({to})") == 1


def assert_same(checkpoint: Path, state: State, source: Path) -> None:
    """The manifest holds, every element and counter is there, and so is what is not the engine's."""
    saved = open_saved_state(checkpoint)
    assert (saved.applied_steps, saved.loss_scaler) == (STEP, LOSS_SCALER)
    assert list(saved.shapes) == list(state["weight"])
    for kind in KINDS:
        for name, full in state[kind].items():
            assert torch.equal(saved.read(kind, name).view(full.shape), full), (kind, name)
    copied = ["trainer.json", "data.json", *(f"model/{file.name}" for file in (source / "model").iterdir())]
    assert filecmp.cmpfiles(source, checkpoint, copied, shallow=False) == (copied, [], [])


def test_there_and_back(tmp_path: Path, state: State, source: Path) -> None:
    deepspeed, back = tmp_path / "deepspeed", tmp_path / "back"
    convert_on_two_ranks(source, deepspeed, "deepspeed", "infra.sharding_stage=zero2")
    assert_same(deepspeed, state, source)
    record = read_record(deepspeed)
    assert (record.format, record.sharding_stage, record.world_size) == ("deepspeed", "zero2", 2)
    infra = FullConfig.from_yaml(deepspeed / "config.yaml").infra
    assert (infra.distributed_type, infra.sharding_stage, infra.device) == ("deepspeed", "zero2", "cuda")
    convert(deepspeed, back, "dcp")
    assert_same(back, state, source)
    assert (read_record(back).format, len(list((back / "dcp").glob("*.distcp")))) == ("dcp", 1)
    assert FullConfig.from_yaml(back / "config.yaml").infra.distributed_type == "fsdp"


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_deepspeeds_own_script_reads_what_one_process_wrote(
    tmp_path: Path, state: State, source: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    out, file = tmp_path / "out", tmp_path / "pytorch_model.bin"
    convert(source, out, "deepspeed", f"infra.sharding_stage={stage}", "infra.offload_optimizer=none")
    assert_same(out, state, source)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", str(out), str(tmp_path)])
    runpy.run_path(str(out / "zero_to_fp32.py"), run_name="__main__")
    weights = torch.load(file, weights_only=True)
    assert torch.equal(weights.pop("lm_head.weight"), weights["shared.weight"])
    assert weights.keys() == state["weight"].keys()
    assert all(torch.equal(weights[name], full) for name, full in state["weight"].items())


CONVERT = """
from pathlib import Path
from ds_encdec.checkpoint.export import convert_checkpoint
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), to="dcp", overrides=["infra.sharding_stage=zero1"])
print("done")
"""


def test_deepspeeds_files_are_converted_without_deepspeed(tmp_path: Path, state: State) -> None:
    source = save_checkpoint(tmp_path, STEP, state, config(), engine="deepspeed", loss_scaler=LOSS_SCALER)
    assert without(["deepspeed"], CONVERT, source, tmp_path / "out", cwd=tmp_path) == "done"
    assert_same(tmp_path / "out", state, source)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("infra.sharding_stage=zero2_hybrid", "DeepSpeed has no hybrid of ZeRO-2"),
        ("infra.distributed_type=fsdp", "not the engine that --to asks for"),
        ("infra.sharding_staje=zero2", "did you mean"),
    ],
)
def test_settings_that_do_not_fit(
    tmp_path: Path, source: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "deepspeed", override]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_written_over(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert cli.main(["convert", str(source), str(tmp_path), "--to", "deepspeed"]) == 5
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_what_is_no_checkpoint(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(source.parent), str(tmp_path / "out"), "--to", "dcp"]) == 5
    assert "is not a complete checkpoint" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_before_it_is_read(
    tmp_path: Path, state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = save_checkpoint(tmp_path / "checkpoints", STEP, state, config())
    flip_byte(damaged / "dcp" / ".metadata")
    assert cli.main(["convert", str(damaged), str(tmp_path / "out"), "--to", "dcp"]) == 5
    torch.distributed.destroy_process_group()  # which the end of the program would have ended
    assert "dcp/.metadata: its SHA-256" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
