"""Optimizer states on a disk: to the bit what they are in host memory, also when saved, resumed and converted.

DeepSpeed's async_io takes minutes to compile, so this runs only where it has been: after any run with
`infra.offload_optimizer=nvme` on this machine.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_cases
import pytest
import small_run
import torch
import torch.distributed as dist
from engine_cases import saving, short_engine, short_step, skipping
from gloo_ranks import run_ranks
from torch_oracle import assert_identical, assert_skips_leave_no_trace

from ds_encdec.base.types import ConfigError
from ds_encdec.engine.deepspeed import private
from ds_encdec.launch.disk import build_folder
from ds_encdec.model.parameter_count import parameter_shapes

COMPILED = (build_folder(os.environ) / "async_io" / "async_io.so").exists()
needs_async_io = pytest.mark.skipif(not COMPILED, reason="DeepSpeed's async_io has not been compiled on this machine")
pytestmark = pytest.mark.distributed

# Each of two ranks has 1 MiB of the embedding, the least that is swapped, and of the layers more than that.
MODEL = small_run.small_model(vocab_size=4096, hidden_size=128, intermediate_size=384, head_dim=32)
SUB_GROUPS = {"zero_optimization": {"sub_group_size": 263_000, "stage3_param_persistence_threshold": 0}}


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = parameter_shapes(MODEL).items()
    return {name: torch.randn(shape, generator=draw) * 0.05 + (len(shape) == 1) for name, shape in shapes}


def run(folder: str) -> dict[str, Any]:
    """The same runs with their optimizer's states in host memory and on a disk, and the bytes that are swapped."""
    disk = {"nvme_path": folder, "output_dir": f"{folder}/run"}
    found: dict[str, Any] = {}
    drawn = weights()
    with patch.object(engine_cases, "SHORT_MODEL", MODEL), patch.object(small_run, "_weights", lambda: drawn):
        for place, more in (("cpu", {}), ("nvme", disk)):
            given = {"bf16": True, "deepspeed_extra": SUB_GROUPS, "offload_optimizer": place, **more}
            found[f"skip {place}"] = skipping(**given)
            found[f"save {place}"] = saving(f"{folder}/{place}", copy=True, **given)
            engine = short_engine(**given)
            short_step(engine, 0)
            mine = [file for file in Path(folder).rglob("*.swp") if "gradient" not in file.name]
            found[f"swapped {place}"] = sum(file.stat().st_size for file in mine)
            dist.barrier()
            engine.close()
            dist.barrier()  # each rank deletes its own
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks("test_nvme_offload.py:run", 2, {"folder": str(folder)}, timeout_seconds=900)


@needs_async_io
def test_states_on_a_disk_train_and_go_on_as_in_memory_to_the_bit(ranks: list[dict[str, Any]], folder: Path) -> None:
    """The running engine goes back to a copy that was written while it trained on; a new one loads the same."""
    numbers = sum(tensor.numel() for tensor in weights().values())
    for rank in ranks:
        in_memory, on_disk = rank["save cpu"], rank["save nvme"]
        steps, state = in_memory["straight"]
        assert_identical(on_disk["saved"], in_memory["saved"])
        for found in ("again", "resumed"):
            loaded, repeated_steps, repeated_state = on_disk[found]
            assert_identical(loaded, in_memory["saved"])
            assert repeated_steps == on_disk["straight"][0] == steps
            assert_identical(repeated_state, state)
        assert_skips_leave_no_trace(rank["skip nvme"]["steps"], [*in_memory["begun"], *steps])
        assert_identical(rank["skip nvme"]["state"], state)
        assert (rank["swapped cpu"], on_disk["files"]) == (0, in_memory["files"])
        assert 0.7 < rank["swapped nvme"] / (3 * 4 * numbers) <= 1.01  # sub-groups below 1 MiB stay in memory
    assert not list(folder.rglob("*.swp"))


@needs_async_io
def test_the_checkpoint_is_one_that_others_read(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "nvme"
    command = [sys.executable, str(checkpoint / "zero_to_fp32.py"), str(checkpoint), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=600)
    (file,) = tmp_path.glob("pytorch_model*.bin")
    converted = torch.load(file, weights_only=True)
    saved = ranks[0]["save nvme"]["saved"]
    names = [key.removeprefix("weight.") for key in saved]
    assert_identical({f"weight.{name}": converted[name] for name in names}, saved)


def test_a_disk_that_cannot_hold_them_and_a_machine_without_libaio_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("Unable to JIT load the async_io op")

    monkeypatch.setattr(private.AsyncIOBuilder, "load", fails)
    with pytest.raises(ConfigError, match="apt-get install libaio-dev"):
        private.prepare_folder(tmp_path / "run", 1000)
    monkeypatch.setattr(private.AsyncIOBuilder, "load", lambda self: None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        private.prepare_folder(tmp_path / "file", 1000)
    monkeypatch.setattr(private, "free_bytes", lambda folder: 14_999)
    with pytest.raises(ConfigError, match=r"15.0 KB free, but .* take 16.0 KB .16 bytes for each trained"):
        private.prepare_folder(tmp_path / "run", 1000)
    (tmp_path / "run" / "0_9.tensor.swp").write_bytes(b"x" * 1001)
    private.prepare_folder(tmp_path / "run", 1000)
