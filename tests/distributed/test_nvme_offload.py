"""Optimizer states on a disk: to the bit what they are in host memory, also when saved, resumed and converted.

DeepSpeed's async_io takes minutes to compile, so this runs only where it has been: after any run with
`infra.offload_optimizer=nvme` on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import assert_identical
from gloo_ranks import run_ranks

from ds_encdec.base.types import ConfigError
from ds_encdec.engine.deepspeed import private
from ds_encdec.launch.disk import build_folder

COMPILED = (build_folder(os.environ) / "async_io" / "async_io.so").exists()
needs_async_io = pytest.mark.skipif(not COMPILED, reason="DeepSpeed's async_io has not been compiled on this machine")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks("nvme_cases.py:run", 2, {"folder": str(folder)}, timeout_seconds=900)


@needs_async_io
def test_states_on_a_disk_train_as_in_memory_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        in_memory, on_disk = rank["cpu"], rank["nvme"]
        assert on_disk["begun"] == in_memory["begun"]
        assert [found["applied"] for found in on_disk["begun"]] == [True, False, False, True]
        assert on_disk["straight"][0] == in_memory["straight"][0]
        for key in ("untrained", "saved"):
            assert_identical(on_disk[key], in_memory[key])
        assert_identical(on_disk["straight"][1], in_memory["straight"][1])


@needs_async_io
def test_nothing_of_them_stays_in_memory(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        swapped, everything = dict(rank["nvme"]["swapped"]), rank["cpu"]["swapped"]["in memory"]
        in_memory = swapped.pop("in memory")
        assert 0 < in_memory < 2**20 / 4  # sub-groups of less than 1 MiB: the last matrices, and the norms
        states = [size for name, size in swapped.items() if "gradient" not in name]
        assert len(states) >= 6  # of two sub-groups at least
        assert sum(states) == pytest.approx(3 * 4 * (everything - in_memory), rel=0.01)
        assert rank["nvme"]["left"] == 0


@needs_async_io
@pytest.mark.parametrize("again", ["repeated", "resumed"])
def test_a_run_goes_on_to_the_bit(ranks: list[dict[str, Any]], again: str) -> None:
    """The running engine goes back to a copy that was written while it trained on; a new one to what was saved."""
    for rank in ranks:
        found = rank["nvme"]
        assert found[again][0] == found["straight"][0]
        assert_identical(found[again][1], found["straight"][1])
        assert set(found["adam steps"]) == {2.0}


@needs_async_io
def test_the_checkpoint_is_one_that_others_read(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    assert [rank["nvme"]["files"] for rank in ranks] == [rank["cpu"]["files"] for rank in ranks]
    checkpoint = folder / "nvme"
    command = [sys.executable, str(checkpoint / "zero_to_fp32.py"), str(checkpoint), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=600)
    (file,) = tmp_path.glob("pytorch_model*.bin")
    converted = torch.load(file, weights_only=True)
    saved = ranks[0]["nvme"]["saved"]
    assert_identical({name: converted[name] for name in saved}, saved)


def test_a_disk_that_cannot_hold_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.AsyncIOBuilder, "load", lambda self: None)
    private.prepare_folder(tmp_path / "run", 1000)
    assert (tmp_path / "run").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        private.prepare_folder(tmp_path / "file", 1000)
    monkeypatch.setattr(private, "free_bytes", lambda folder: 14_999)
    with pytest.raises(ConfigError, match=r"15.0 KB free, but .* take 16.0 KB .16 bytes for each trained"):
        private.prepare_folder(tmp_path / "run", 1000)
    (tmp_path / "run" / "0_9.tensor.swp").write_bytes(b"x" * 1001)
    private.prepare_folder(tmp_path / "run", 1000)


def test_a_machine_without_libaio_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("Unable to JIT load the async_io op")

    monkeypatch.setattr(private.AsyncIOBuilder, "load", fails)
    with pytest.raises(ConfigError, match="apt-get install libaio-dev"):
        private.prepare_folder(tmp_path / "run", 1000)
