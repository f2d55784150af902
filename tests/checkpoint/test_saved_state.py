"""One way to read any checkpoint: dispatch, verification before anything is unpickled, rows of weights, refusals."""

import json
import pickle
import re
from enum import Enum
from pathlib import Path
from typing import Any

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
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.engine.protocol import ENGINE_RECORD
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


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    write_tensors(tmp_path, random_state(config(), seed=1))
    record = json.loads((tmp_path / ENGINE_RECORD).read_text())
    (tmp_path / ENGINE_RECORD).write_text(json.dumps(record | {"format": "papyrus"}))
    with pytest.raises(CheckpointError, match="'papyrus'"):
        open_saved_state(tmp_path, verified=True)


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
    name_of_no_encoding = whole.replace(b"data/0", b"dat\xff/0")
    later_format = re.sub(rb"(?s)(PK\x01\x02..).", b"\\1\xff", whole)
    for damaged in (name_of_no_encoding, later_format):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{file.name}: a tensor in it is not readable"):
            DcpState(tmp_path).read("weight", "shared.weight")
