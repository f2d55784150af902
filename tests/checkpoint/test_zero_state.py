"""Reading DeepSpeed's files: what is refused, and what stands where in files made by hand."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from saved_checkpoints import Attack, Attribute

from ds_encdec.base.types import CheckpointError
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.engine.protocol import TAG, EngineRecord, write_record

NAMES = ("a.weight", "b.weight")
SHAPES = {"a.weight": (3, 2), "b.weight": (5,)}


def checkpoint(folder: Path, stage: str, files: dict[str, Any], *, world_size: int = 1, applied_steps: int = 2) -> Path:
    (folder / TAG).mkdir()
    for name, content in files.items():
        torch.save(content, folder / TAG / name)
    record = EngineRecord("deepspeed", stage, world_size, applied_steps, groups=(NAMES,))
    write_record(record, folder)
    return folder


def plain_states() -> dict[str, Any]:
    """The content that stage 0 saves: a holds 0 to 5, b holds 10 to 14; their moments are 100 and 200 more."""
    module = {"a.weight": torch.arange(6.0).view(3, 2), "b.weight": torch.arange(10.0, 15.0)}
    state = {
        index: {"step": torch.tensor(2.0), "exp_avg": value + 100, "exp_avg_sq": value + 200}
        for index, value in enumerate(module.values())
    }
    return {"module": module, "optimizer": {"state": state, "param_groups": [{"params": [0, 1]}]}}


def two_parts(zero_stage: int, pad: int) -> dict[str, Any]:
    values = [*range(6), *[0.0] * pad, *range(10, 15)]
    size = -(-len(values) // 4) * 2
    missing = 2 * size - len(values)
    files: dict[str, Any] = {
        "mp_rank_00_model_states.pt": {
            "module": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
            "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        }
    }
    flat = torch.tensor([*values, *[0.0] * missing])
    for rank, part in enumerate(flat.split(size)):
        padding = missing if rank == 1 else 0
        states = {
            "single_partition_of_fp32_groups": [part[: size - padding]],
            "base_optimizer_state": {
                "state": {0: {"exp_avg": part + 100, "exp_avg_sq": part + 200}},
                "param_groups": [{"params": [0]}],
            },
            "group_paddings": [padding],
            "param_alignment_paddings": [[pad, 0]],
            "zero_stage": zero_stage,
        }
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": states}
    return files


STATES = "mp_rank_00_model_states.pt"
SECOND = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_ranges_of_a_parameter(tmp_path: Path) -> None:
    saved = ZeroState(checkpoint(tmp_path, "zero0", {STATES: plain_states()}))
    assert saved.shapes == SHAPES
    assert saved.read("weight", "a.weight", 1, 4).tolist() == [1, 2, 3]
    for _ in range(2):  # what is read is the caller's own
        read = saved.read("exp_avg", "b.weight")
        assert read.tolist() == [110, 111, 112, 113, 114]
        read.zero_()
    with pytest.raises(CheckpointError, match=r"no weight of a parameter 'c\.weight'"):
        saved.read("weight", "c.weight")
    assert saved.read("exp_avg_sq", "a.weight", 5).tolist() == [205]
    assert saved.read("weight", "a.weight", 2, 2).tolist() == []


@pytest.mark.parametrize(("stage", "pad"), [("zero1", 0), ("zero2", 3)])
def test_ranges_over_a_cut(tmp_path: Path, stage: str, pad: int) -> None:
    saved = ZeroState(checkpoint(tmp_path, stage, two_parts(int(stage[-1]), pad), world_size=2))
    assert saved.read("weight", "a.weight").tolist() == [0, 1, 2, 3, 4, 5]
    assert saved.read("weight", "b.weight").tolist() == [10, 11, 12, 13, 14]
    assert saved.read("exp_avg_sq", "b.weight", 1, 4).tolist() == [211, 212, 213]


def test_a_damaged_part_is_named_when_it_is_read(tmp_path: Path) -> None:
    files = two_parts(2, 0)
    files[SECOND]["optimizer_state_dict"]["group_paddings"] = [5]
    saved = ZeroState(checkpoint(tmp_path, "zero2", files, world_size=2))
    with pytest.raises(CheckpointError, match=rf"{SECOND}: not laid out.*parts of \[10\] elements, and of \[6\]"):
        saved.read("weight", "b.weight")


def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    states = {**plain_states(), "lr_scheduler": Attack(trace)}
    folder = checkpoint(tmp_path, "zero0", {STATES: states})
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt: names posix\.system"):
        ZeroState(folder)
    assert not trace.exists()


class Scaler:
    TWO = 2

    def __init__(self) -> None:
        self.cur_scale = 1.0


def test_deepspeeds_own_classes_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ModuleType("deepspeed.not_there")
    absent.Scaler = Scaler  # type: ignore[attr-defined]
    with monkeypatch.context() as present:
        present.setitem(sys.modules, "deepspeed.not_there", absent)
        present.setattr(Scaler, "__module__", "deepspeed.not_there")
        own = {"loss_scaler": Scaler(), "zero_stage": Attribute(Scaler, "TWO")}
        folder = checkpoint(tmp_path, "zero0", {STATES: plain_states() | own})
    assert ZeroState(folder).read("weight", "b.weight", 0, 1).tolist() == [10]


FIRST = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def in_another_layout(path: Path) -> None:
    files = two_parts(2, 0)[FIRST]
    del files["optimizer_state_dict"]["group_paddings"]
    torch.save(files, path)


@pytest.mark.parametrize(
    ("name", "damage", "ranks", "message"),
    [
        (SECOND, Path.unlink, 2, "0 files of optimizer states of rank 1"),
        (SECOND, Path.touch, 1, r"of weight\.b\.weight only 0 of 5 elements are there"),
        (STATES, Path.unlink, 2, rf"{STATES}: cannot be read"),
        (FIRST, cut_off, 2, rf"{FIRST}: cannot be read"),
        (FIRST, in_another_layout, 2, "not laid out as DeepSpeed 0.19 does it"),
    ],
)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None], ranks: int, message: str
) -> None:
    folder = checkpoint(tmp_path, "zero2", two_parts(2, 0), world_size=ranks)
    damage(folder / TAG / name)
    with pytest.raises(CheckpointError, match=message):
        ZeroState(folder)
