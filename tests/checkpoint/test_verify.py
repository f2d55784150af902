"""`ds-encdec verify`: whole checkpoints are described, damage is exit code 5 and names the file."""

from pathlib import Path

import pytest
from saved_checkpoints import config, flip_byte, random_state, save_checkpoint

from ds_encdec import cli

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, engine in ((100, "dcp"), (200, "deepspeed"), (300, "dcp")):
        save_checkpoint(tmp_path / "run" / "checkpoints", step, random_state(config(), 0), config(), engine=engine)
    return tmp_path / "run"


def test_a_checkpoint_a_run_and_its_folder_of_checkpoints(run: Path, capsys: Output) -> None:
    (run / "checkpoints" / "final").symlink_to("step-00000300")
    assert cli.main(["verify", str(run / "checkpoints" / "final")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    checkpoint = run / "checkpoints" / "step-00000300"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json")
    assert line.startswith(f"{checkpoint}: whole; step 300, dcp zero0 on 1 rank, ")
    assert line.endswith(f" {size / 1e9:.3f} GB")
    for path in (run, run / "checkpoints"):
        assert cli.main(["verify", str(path)]) == 0
        found = [line.partition(" on ")[0].rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()]
        assert found == ["step 100, dcp zero0", "step 200, deepspeed zero0", "step 300, dcp zero0"]


def test_every_damaged_one_is_named_and_the_others_are_still_checked(run: Path, capsys: Output) -> None:
    flipped = run / "checkpoints" / "step-00000100" / "dcp" / ".metadata"
    flip_byte(flipped)
    missing = run / "checkpoints" / "step-00000200" / "trainer.json"
    missing.unlink()
    assert cli.main(["verify", str(run)]) == 5
    shown = capsys.readouterr()
    assert [line.split(": whole")[0] for line in shown.out.splitlines()] == [str(run / "checkpoints" / "step-00000300")]
    assert f"{flipped}: its SHA-256" in shown.err
    assert f"{missing}: missing" in shown.err


def test_what_is_no_checkpoint(tmp_path: Path, capsys: Output) -> None:
    assert cli.main(["verify", str(tmp_path)]) == 5
    assert "no manifest.json" in capsys.readouterr().err
