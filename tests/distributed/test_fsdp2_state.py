"""Skipped steps, saves and loads of the FSDP2 engine: properties that are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_plan import RELOADS, SAVES, SKIPS, checkpoints, result
from small_run import MODEL, generating_weights, run_config, weights

from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import read_record
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.trained import trained_shapes
from ds_encdec.optim import learning_rate

pytestmark = pytest.mark.distributed


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("case", SKIPS)
def test_skipped_steps_leave_no_trace(case: str) -> None:
    for rank in result(2, f"skip {case}"):
        skipped, clean = rank["skipped"], rank["clean"]
        first, second, vetoed, third, not_finite, fourth = skipped["steps"]
        assert [first, second, third, fourth] == clean["steps"]  # losses, norms, rates: equal to the bit
        assert_identical(skipped["state"], clean["state"])
        for refused, following in ((vetoed, third), (not_finite, fourth)):
            assert not refused["applied"]
            assert refused["learning_rate"] == following["learning_rate"]  # the schedule did not move
        assert 0 < vetoed["grad_norm"] < 100
        assert not_finite["grad_norm"] == float("inf")


@pytest.mark.parametrize("engine", ["resumed", "again"])
@pytest.mark.parametrize("case", SAVES)
def test_a_loaded_run_goes_on_to_the_bit(case: str, engine: str) -> None:
    """In a fresh engine and in the one that went on; saved while it did, where `copy` allows that."""
    for rank in result(2, f"save {case}"):
        steps, state = rank["straight"]
        assert rank[engine][0] == steps
        assert_identical(rank[engine][1], state)
        trained = trained_shapes(case_config(case), MODEL)
        changed = {key for key, tensor in state.items() if not torch.equal(tensor, rank["saved"][key])}
        assert {key.removeprefix("weight.") for key in changed if key.startswith("weight.")} == trained.keys()


def case_config(case: str) -> FullConfig:
    chosen = {name: value for name, value in SAVES[case].items() if name in ("lora", "freeze")}
    return run_config(distributed_type="ddp", sharding_stage="zero0", **chosen)


def saved_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """What the files of a case hold: without adapters everything."""
    lora = "lora" in SAVES[case]
    return trained_shapes(case_config(case), MODEL) if lora else dict(parameter_shapes(MODEL))


@pytest.mark.parametrize("case", SAVES)
def test_a_copy_to_generate_with_has_the_weights(case: str) -> None:
    for rank in result(2, f"save {case}"):
        saved = {key.removeprefix("weight."): weight for key, weight in rank["saved"].items() if "exp_avg" not in key}
        overrides = {name: value for name, value in SAVES[case].items() if name != "copy"}
        assert_identical(rank["copied"], generating_weights(saved, **overrides))


@pytest.mark.parametrize("case", RELOADS)
def test_four_ranks_load_what_two_have_saved(case: str) -> None:
    saved = result(2, "save zero3-warmup-decay")[0]["saved"]
    training = run_config(lr_scheduler_type="WarmupDecayLR").training
    for rank in result(4, f"reload {case}"):
        assert_identical(rank["state"], saved)
        assert rank["learning_rate"] == learning_rate(2, training)


@pytest.mark.parametrize("case", SAVES)
def test_every_file_is_returned_by_one_rank(case: str) -> None:
    ranks: list[dict[str, Any]] = result(2, f"save {case}")
    folder = checkpoints() / case
    returned = [name for rank in ranks for name in rank["files"]]
    assert sorted(returned) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert {"engine.json", "dcp/.metadata"} <= set(ranks[0]["files"])
    trained = trained_shapes(case_config(case), MODEL)  # frozen ones are bf16, without moments
    sizes = {name: torch.Size(shape).numel() for name, shape in saved_shapes(case).items()}
    total = sum((12 if name in trained else 2) * numel for name, numel in sizes.items())
    assert sum(rank["num_bytes"] for rank in ranks) == total
    assert max(rank["num_bytes"] for rank in ranks) < 0.6 * total  # replicas share the work
    assert len([name for name in returned if name.endswith(".distcp")]) == 2


@pytest.mark.parametrize("case", SAVES)
def test_the_files_name_the_parameters_in_the_models_order(case: str) -> None:
    result(2, f"save {case}")
    assert list(DcpState(checkpoints() / case).shapes.items()) == list(saved_shapes(case).items())


@pytest.mark.parametrize("case", SAVES)
def test_the_record_describes_the_files(case: str) -> None:
    result(2, f"save {case}")
    record = read_record(checkpoints() / case)
    given = SAVES[case]
    assert (record.format, record.world_size, record.applied_steps, record.loss_scaler) == ("dcp", 2, 2, None)
    assert record.sharding_stage == given.get("sharding_stage", "zero3")
    decaying, others = record.groups if len(record.groups) == 2 else (*record.groups, ())
    assert sorted([*decaying, *others]) == sorted(trained_shapes(case_config(case), MODEL))
    assert all(name.endswith("norm.weight") for name in others)
    assert not any(name.endswith("norm.weight") for name in decaying)


def test_a_state_that_has_not_trained_can_be_saved() -> None:
    for state in result(2, "untrained"):
        for name in parameter_shapes(MODEL):
            assert torch.equal(state[f"weight.{name}"], weights(name))
            assert not state[f"exp_avg.{name}"].any()
            assert not state[f"exp_avg_sq.{name}"].any()


def test_states_of_other_models_are_refused_on_every_rank() -> None:
    for messages in result(2, "refused"):
        assert "decoder.norm.weight has no counterpart there and shape [32]" in messages["lacking"]
        assert "decoder.norm.weight has shape [33] there and shape [32] in this run's model" in messages["other shape"]
        assert "lora.weight has shape [3] there and no counterpart in this run's model" in messages["more"]
        assert messages["unreadable"] == "weight of shared.weight is damaged"
        assert messages["whole"] == "loaded"


def test_copies_in_host_memory() -> None:
    """Kept from save to save, the last one included; written without a GPU; and missing on all ranks or on none."""
    for found in result(2, "host copies"):
        assert found["at first"] == "live"
        assert found["in the background"] == found["at once, afterwards"] == "kept"
        assert found["written"] == "without a GPU"
        assert found["no memory on rank 1"].startswith("OutOfMemoryError: rank 1 ran out of memory: ")
        assert "no more" in found["no memory on rank 1"]


def test_a_loss_scale_is_handed_on() -> None:
    for messages in result(2, "refused"):
        assert messages["handed on"] == "{'scale': 1024.0}"


def test_a_full_disk_is_an_oserror_on_every_rank() -> None:
    for message in result(2, "full disk"):
        assert message.startswith("OSError")
        assert "File too large" in message
        assert str(Path(checkpoints() / "full" / "dcp")) in message
