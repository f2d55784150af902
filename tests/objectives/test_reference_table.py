"""The reference's log-probabilities: the table, the share of each rank, a stop, and what a resume takes over."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.base.types import Batch, CheckpointError, DataError, Example, Preempted
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import TrainingData
from ds_encdec.data.reference import ReferenceTable, pair_digest, write_table
from ds_encdec.data.sources.sources import all_rows
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import Heartbeat
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.objectives.preferences import PreferenceLosses
from ds_encdec.training import reference
from ds_encdec.training.reference import _measured, _share, _take_over, use_reference

sys.path.append(str(Path(__file__).parents[1] / "data"))

from data_parts import make_config, make_data, write_rows

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda numbers: np.array(numbers, np.int32))
pairs = st.builds(lambda a, b, c, name: Example(a, b, "DPO", name, ((a, c),)), ids, ids, ids, st.text(max_size=3))


def contents(example: Example) -> tuple[Any, ...]:
    return tuple(tuple(ids.tolist()) for segment in example.segments for ids in segment)


@given(st.lists(pairs, max_size=8))
def test_pairs_are_known_by_their_ids_alone(made: list[Example]) -> None:
    assert len({pair_digest(one) for one in made}) == len({contents(one) for one in made})


def table_of(folder: Path, examples: Sequence[Example], **facts: Any) -> ReferenceTable:
    write_table(folder, {pair_digest(one): (-float(n), -n / 3) for n, one in enumerate(examples)}, facts)
    table = ReferenceTable.read(folder)
    assert table is not None
    return table


def numbered(count: int) -> list[Example]:
    source = np.arange(3, dtype=np.int32)
    return [Example(source, source[:1] + n, "DPO", f"row {n}", ((source, source[:2] + n),)) for n in range(count)]


def test_a_table_gives_what_was_written_and_names_what_it_lacks(tmp_path: Path) -> None:
    examples = numbered(50)
    table = table_of(tmp_path / "reference", examples[:-1])
    asked = [examples[n] for n in (40, 3, 3, 48)]
    assert table(asked).equal(torch.tensor([[-n, np.float32(-n / 3)] for n in (40.0, 3.0, 3.0, 48.0)]))
    assert table([]).shape == (0, 2)
    with pytest.raises(DataError, match=r"reference: the reference's log-probabilities of row 49 are not there"):
        table([examples[0], examples[49]])
    assert table_of(tmp_path / "again", examples[:-1]).digest == table.digest


def test_a_reference_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="log-probabilities that are not finite, so it is no reference"):
        write_table(tmp_path / "reference", {1: (-1.0, -2.0), 2: (-3.0, float("nan"))}, {})
    assert ReferenceTable.read(tmp_path / "reference") is None


def test_an_unfinished_table_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    table = table_of(tmp_path, numbered(5))
    content = (tmp_path / "table.npy").read_bytes()
    (tmp_path / "table.npy").write_bytes(content[:-1] + b"\x07")
    with pytest.raises(CheckpointError, match=r"the table of the reference is damaged .*restore a copy"):
        ReferenceTable.read(tmp_path)
    (tmp_path / "table.json").unlink()
    assert ReferenceTable.read(tmp_path) is None
    assert table.facts == {}


ROWS = [{"prompt": f"add {i}", "chosen": f"it is {i}", "rejected": "no" * (i % 9 + 1)} for i in range(70)]


def data_of(folder: Path, kind: str = "json") -> tuple[FullConfig, TrainingData]:
    path = write_rows(folder / "rows.jsonl", ROWS)
    if kind == "parquet":  # a stream
        path = str(folder / "rows.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=9)
    fields = {"input_template": "{prompt}", "output_template": "{output}", "eval_fraction": 0.005}
    config = make_config(objective="dpo", dataset_name=kind, data_files=path, **fields)
    return config, make_data(config)


@pytest.mark.parametrize(("world_size", "kind"), [(1, "json"), (2, "json"), (3, "json"), (2, "parquet")])
def test_the_ranks_share_all_pairs(world_size: int, kind: str, tmp_path: Path) -> None:
    _, data = data_of(tmp_path, kind)
    shares = [[one.document for one in _share(data, rank, world_size)] for rank in range(world_size)]
    found = [document for share in shares for document in share]
    assert len(found) == len(set(found))
    assert len(set(found)) == 70 - len(left_out(data))
    assert all(len(share) > 60 / world_size * 0.4 for share in shares)


def left_out(data: TrainingData) -> set[str]:
    """The rows of the test split, and those for validation that `eval_samples` leaves out."""
    evaluated = {one.document for one in data.eval_examples()}
    (opened,) = data.pipeline.sources
    keys = {row.key for row in all_rows(opened.source, "test")}
    assert len(keys) == 70
    return {key for key in keys if opened.holds_out(key)} - evaluated


class StandIn:
    """An engine whose log-probabilities of a pair are the lengths of its answers."""

    def __init__(self, config: FullConfig) -> None:
        self.objective = PreferenceLosses(config, HostCollectives())
        self.calls = 0

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[None]:
        for batch in batches:
            self.calls += 1
            self.objective.measured = -torch.tensor(batch.decoder_lengths, dtype=torch.float32).view(-1, 2)
            yield None


class Stop:
    """A request that comes after some looks."""

    def __init__(self, after: int) -> None:
        self.after, self.reason, self.has_seen, self.heartbeat = after, "SIGTERM", False, Heartbeat()

    @property
    def requested(self) -> bool:
        self.after -= 1
        return self.after < 0


def run_in(folder: Path, config: FullConfig, checkpoint: Any = None) -> Any:
    context = SimpleNamespace(collectives=HostCollectives())
    model = SimpleNamespace(base={"sha256": "abc"})
    return SimpleNamespace(
        config=config, context=context, folder=RunFolder(str(folder)), model=model, checkpoint=checkpoint
    )


def test_a_first_start_writes_the_table_and_the_next_one_takes_it(tmp_path: Path) -> None:
    config, data = data_of(tmp_path)
    run, engine = run_in(tmp_path, config), StandIn(config)
    use_reference(run, data, engine, Stop(10_000))  # type: ignore[arg-type]
    first, calls = data.loader.reference, engine.calls
    assert first is not None
    assert calls > 2
    for batch in next(data.loader):
        assert batch.reference is not None
        assert batch.reference.equal(-torch.tensor(batch.decoder_lengths, dtype=torch.float32).view(-1, 2))
    for batch in data.eval_batches():
        assert batch.reference is not None
    use_reference(run, data, engine, Stop(10_000))  # type: ignore[arg-type]
    assert engine.calls == calls
    assert data.saved()["reference"] == first.digest
    run.model.base["sha256"] = "another reference"
    use_reference(run, data, engine, Stop(10_000))  # type: ignore[arg-type]
    assert engine.calls == 2 * calls


def test_a_stop_leaves_no_table(tmp_path: Path) -> None:
    config, data = data_of(tmp_path)
    run, engine, stop = run_in(tmp_path, config), StandIn(config), Stop(2)
    with pytest.raises(Preempted, match="stopped by SIGTERM before the first step"):
        use_reference(run, data, engine, stop)  # type: ignore[arg-type]
    assert engine.calls == 2
    assert stop.has_seen
    assert stop.heartbeat.beats == 2
    assert not (tmp_path / "reference").exists()


def test_an_error_of_the_data_ends_the_pass(tmp_path: Path) -> None:
    config, data = data_of(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{**row, "rejected": row["chosen"]} for row in ROWS])
    run, engine = run_in(tmp_path, config), StandIn(config)
    with pytest.raises(DataError):
        dict(_measured(run, data, engine, engine.objective, Stop(10_000)))  # type: ignore[arg-type]


def saved_in(folder: Path, digest: str | None) -> Any:
    path = folder / "checkpoints" / "step-00000004"
    path.mkdir(parents=True)
    facts = {"data": {} if digest is None else {"reference": digest}}
    (path / "trainer.json").write_text(json.dumps(facts))
    return SimpleNamespace(path=path, read_json=lambda name: json.loads((path / name).read_text()))


def test_a_resume_takes_the_table_of_its_checkpoint(tmp_path: Path) -> None:
    config, _ = data_of(tmp_path)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ours.mkdir()
    theirs.mkdir()
    table = table_of(theirs / "reference", numbered(5))
    checkpoint = saved_in(theirs, table.digest)
    _take_over(run_in(ours, config, checkpoint), ours / "reference")
    copied = ReferenceTable.read(ours / "reference")
    assert copied is not None
    assert copied.digest == table.digest

    another = table_of(ours / "reference", numbered(3))
    for name in ("table.json", "table.npy"):
        (theirs / "reference" / name).unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"{table.digest} of the reference's log-probabilities, but this is {another.digest}\. Copy the folder",
    ):
        _take_over(run_in(ours, config, checkpoint), ours / "reference")
    with pytest.raises(CheckpointError, match=r"but this does not exist\. Copy the folder `reference`"):
        _take_over(run_in(theirs, config, checkpoint), theirs / "reference")
    other = saved_in(tmp_path / "fine-tuned", None)
    with pytest.raises(CheckpointError, match=r"was not made with data\.objective=dpo\. Start a new run"):
        _take_over(run_in(ours, config, other), ours / "reference")


def test_a_rank_that_does_not_see_the_table_refuses_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches would be their own reference, without a word."""
    collectives, config = HostCollectives(), FullConfig.model_validate({"data": {"objective": "dpo"}})
    monkeypatch.setattr(reference, "_facts", lambda *_: {})
    monkeypatch.setattr(reference, "_has_table", lambda *_: True)  # as rank 0 of another host finds it
    run: Any = SimpleNamespace(
        config=config,
        context=SimpleNamespace(collectives=collectives),
        folder=SimpleNamespace(reference=tmp_path / "reference"),
        checkpoint=None,
    )
    engine: Any = SimpleNamespace(objective=PreferenceLosses(config, collectives))
    with pytest.raises(CheckpointError, match="rank 0 does not find the table"):
        reference.use_reference(run, SimpleNamespace(), engine, SimpleNamespace())  # type: ignore[arg-type]
