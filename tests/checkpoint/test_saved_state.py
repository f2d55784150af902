"""One way to read any checkpoint: dispatch, verification before anything is unpickled, rows of weights, refusals."""

import pickle
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_checkpoints import (
    KINDS,
    Attack,
    Attribute,
    config,
    flat,
    flip_byte,
    random_state,
    save_checkpoint,
    write_tensors,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from ds_encdec.base.types import CheckpointError
from ds_encdec.checkpoint import zero_state
from ds_encdec.checkpoint.saved_state import DcpState, saved_weights
from ds_encdec.checkpoint.zero_state import ZeroState, open_saved_state
from ds_encdec.engine.protocol import TAG, EngineRecord, write_record
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.registry.engines import ByEngine


@pytest.mark.parametrize("engine", ["dcp", "deepspeed"])
def test_every_format_gives_names_shapes_counters_and_every_element(tmp_path: Path, engine: str) -> None:
    state = random_state(config(), seed=1)
    saved = open_saved_state(save_checkpoint(tmp_path, 7, state, config(), engine=engine))
    assert list(saved.shapes.items()) == list(parameter_shapes(config()).items())
    assert (saved.applied_steps, saved.loss_scaler) == (7, None)
    for kind in KINDS:
        for name, full in state[kind].items():
            read = saved.read(kind, name)
            assert torch.equal(read.view(full.shape), full)
            read.zero_()  # the caller's own
            assert torch.equal(saved.read(kind, name, 5, 9), full.flatten()[5:9])


def test_weights_by_rows(tmp_path: Path) -> None:
    state = random_state(config(), seed=1)
    weights = saved_weights(open_saved_state(save_checkpoint(tmp_path, 7, state, config())))
    for name, full in state["weight"].items():
        assert torch.equal(weights(name), full)
        for rows in (slice(1, 3), slice(2, None), slice(3, 3), slice(0, 10**6)):
            assert torch.equal(weights(name, rows), full[rows])
    with pytest.raises(CheckpointError, match=r"no parameter 'lm_head\.weight'"):
        weights("lm_head.weight")


def test_damage_is_found_before_anything_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, 7, random_state(config(), seed=1), config())
    flip_byte(path / "dcp" / ".metadata")

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(zero_state, "_READERS", ByEngine(opened, opened))
    with pytest.raises(CheckpointError, match=r"dcp/\.metadata: its SHA-256"):
        open_saved_state(path)
    with pytest.raises(AssertionError, match="unpickled"):
        open_saved_state(path, verified=True)


def test_dcp_files_that_no_engine_of_ours_wrote_are_refused(tmp_path: Path) -> None:
    state = random_state(config(), seed=1)
    write_tensors(tmp_path, state)
    with pytest.raises(CheckpointError, match="no exp_avg of a parameter 'nothing'"):
        DcpState(tmp_path).read("exp_avg", "nothing")
    rounded = {name: tensor.bfloat16() for name, tensor in flat(state).items()}
    dcp.save(rounded, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"exp_avg\.shared\.weight is torch\.bfloat16"):
        DcpState(tmp_path)
    for damage in (lambda file: file.write_bytes(b"no pickle"), Path.unlink):
        damage(tmp_path / "dcp" / ".metadata")
        with pytest.raises(CheckpointError, match=r"dcp/\.metadata is not readable"):
            DcpState(tmp_path)


def test_dcp_metadata_runs_nothing_and_stays_in_its_folder(tmp_path: Path) -> None:
    write_tensors(tmp_path, random_state(config(), seed=1))
    file, trace = tmp_path / "dcp" / ".metadata", tmp_path / "trace"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Attack(trace)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"dcp/\.metadata is not readable.*names posix\.system"):
        DcpState(tmp_path)
    assert not trace.exists()
    metadata.planner_data = None
    for name in ("../secret", "/etc/passwd"):
        next(iter(metadata.storage_data.values())).relative_path = name
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=f"names a file outside its folder: '{name}'"):
            DcpState(tmp_path)
    file.write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(CheckpointError, match="holds a Size, not the metadata"):
        DcpState(tmp_path)


WEIGHT = "weight.shared.weight"


def place_of_a_weight(metadata: Any) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == WEIGHT)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda metadata: metadata.storage_data.clear(),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        lambda metadata: setattr(metadata, "planner_data", {"weight.nothing": 1}),
        lambda metadata: setattr(metadata.state_dict_metadata["weight.shared.weight"], "chunks", None),
        lambda metadata: setattr(
            metadata.state_dict_metadata["weight.shared.weight"], "size", torch.Size([1 << 62, 8])
        ),
        lambda metadata: setattr(place_of_a_weight(metadata), "length", "x"),
        lambda metadata: setattr(place_of_a_weight(metadata), "offset", -(1 << 62)),
    ],
    ids=["no places", "no table", "unknown name", "no chunks", "huge", "length of no number", "in front of the file"],
)
def test_dcp_metadata_of_other_things_is_an_error_that_names_the_file(
    tmp_path: Path, spoil: Callable[[Any], object]
) -> None:
    write_tensors(tmp_path, random_state(config(), seed=1))
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    spoil(metadata)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"dcp\S*: |metadata is not readable"):
        DcpState(tmp_path).read("weight", "shared.weight")


def test_an_archive_that_unpacks_or_leads_elsewhere_is_not_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "plain")
    for name, method in (("data.pkl", ZIP_DEFLATED), ("../../elsewhere", ZIP_STORED), ("/elsewhere", ZIP_STORED)):
        with ZipFile(tmp_path / "plain") as plain, ZipFile(tmp_path / "evil", "w") as evil:
            for entry in plain.infolist():
                is_that = entry.filename.endswith(name)
                evil.writestr(entry.filename, plain.read(entry), method if is_that else ZIP_STORED)
            if name != "data.pkl":
                evil.writestr(name, b"x")
        with pytest.raises(CheckpointError, match="evil: cannot be read"):
            zero_state._load(tmp_path / "evil")
    assert not (tmp_path.parents[1] / "elsewhere").exists()


@pytest.mark.parametrize("chunks", [0, 2])
def test_chunks_must_cover_a_tensor_once(tmp_path: Path, chunks: int) -> None:
    write_tensors(tmp_path, random_state(config(), seed=1))
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["exp_avg.shared.weight"].chunks *= chunks
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"of exp_avg\.shared\.weight only {768 * (chunks > 0)} of 768 elements"):
        DcpState(tmp_path)


class MembersByName(pickle.Pickler):
    """Pickles the members of enumerations as Python 3.11.2 does, whichever version runs."""

    def reducer_override(self, obj: Any) -> Any:
        return Attribute(type(obj), obj.name).__reduce__() if isinstance(obj, Enum) else NotImplemented


def test_dcp_metadata_may_hold_members_by_name_and_no_other_attributes(tmp_path: Path) -> None:
    state = random_state(config(), seed=1)
    write_tensors(tmp_path, state)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())

    def write() -> None:
        with open(file, "wb") as opened:
            MembersByName(opened).dump(metadata)

    write()
    assert b"getattr" in file.read_bytes()
    name, full = next(iter(state["weight"].items()))
    assert torch.equal(DcpState(tmp_path).read("weight", name).view(full.shape), full)
    for owner, attribute in ((type(metadata), "__init__"), (_MEM_FORMAT_ENCODING, "mro")):
        metadata.planner_data = Attribute(owner, attribute)
        write()
        with pytest.raises(CheckpointError, match=rf"dcp/\.metadata is not readable.*names {attribute} of <"):
            DcpState(tmp_path)


def test_a_file_of_tensors_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path, random_state(config(), seed=1))
    saved = DcpState(tmp_path)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    saved.read("weight", "shared.weight", 0, 1)
    whole = file.read_bytes()
    file.write_bytes(whole[:2000])
    for kind in KINDS:
        with pytest.raises(CheckpointError, match=rf"{file.name}: a tensor in it is not readable"):
            saved.read(kind, "shared.weight")
    file.write_bytes(whole.replace(b"data/0", b"dat\xff/0"))  # a name of no encoding
    with pytest.raises(CheckpointError, match=rf"{file.name}: a tensor in it is not readable"):
        DcpState(tmp_path).read("weight", "shared.weight")


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
