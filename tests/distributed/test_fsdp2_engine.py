"""FSDP2 in every form and on 1, 2 and 4 ranks: it trains like plain torch, and what must be exact is so to the bit.

Like plain torch: float32, three micro-batches per rank with unequal target tokens and one of them empty, clipping
active in every step (without it Adam would hide a gradient that is wrong by a factor).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import (
    assert_evaluated_like,
    assert_identical,
    assert_only_matrices_decay,
    assert_skips_leave_no_trace,
    assert_trained_like,
    assert_weights_of,
    oracle_trajectory,
)
from fsdp_plan import (
    BF16,
    COMMUNICATION,
    PARITY,
    RELOADS,
    SAVES,
    SKIPS,
    WAITING,
    checkpoints,
    reloaded,
    result,
)
from small_run import (
    MODEL,
    OWN_OPTIMIZER,
    SHORT_MODEL,
    SHORT_STEPS,
    generating_weights,
    lane_batches,
    run_config,
    weights,
)

from ds_encdec.base.types import is_hidden_matrix
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import read_record
from ds_encdec.engine.sharded_engine import packed_forward
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes, trained_shapes

pytestmark = pytest.mark.distributed

COMPILED = "zero3-compile-full"
CASES = [(world_size, name) for world_size, cases in PARITY.items() for name in cases]


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_trains_and_evaluates_like_the_oracle(world_size: int, case: str) -> None:
    oracle = oracle_trajectory(world_size, PARITY[world_size][case])
    for found in result(world_size, f"parity {case}"):
        # Compiled code scales what dropout leaves in another order.
        assert_trained_like(found, oracle, norm=1e-4 if case == COMPILED else 1e-5)
        assert_evaluated_like(found, oracle)
        assert_weights_of(found, oracle)


def test_recomputation_changes_nothing_to_the_bit() -> None:
    plain, *_ = result(2, "parity zero3")
    for case in ("zero3-selective", "zero3-activation-offload"):
        found, *_ = result(2, f"parity {case}")
        assert found["steps"] == plain["steps"]


@functools.cache
def plain_bf16_step() -> tuple[float, float]:
    """Loss and gradient norm of the first step of two ranks: a model in bf16, gradients added up in float32."""
    model = Qwen3ForSeq2SeqLM(MODEL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name))
    model.bfloat16()
    lanes = lane_batches(0, 2)
    target_tokens = sum(batch.target_tokens for batch in lanes)
    losses = 0.0
    gradients = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for batch in lanes:
        loss = packed_forward(model, batch).total
        losses += float(loss.detach())
        (loss / target_tokens).backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            gradient += parameter.grad
            parameter.grad = None
    return losses / target_tokens, float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("case", BF16)
def test_bf16_is_torchs_bf16_and_stays_near_the_oracle(case: str) -> None:
    """The first step is plain torch's in bf16; the losses of three, near 5 nats, are within 0.05 of float32's."""
    oracle = oracle_trajectory(2, {"steps": SHORT_STEPS})
    loss, grad_norm = plain_bf16_step()
    for found in result(2, f"bf16 {case}"):
        assert found["loss_dtype"] == "torch.float32"
        assert found["steps"][0]["loss"] == pytest.approx(loss, abs=1e-5)
        assert found["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
        for mine, (oracle_loss, *_) in zip(found["steps"], oracle["steps"], strict=True):
            assert mine["loss"] == pytest.approx(oracle_loss, abs=0.05)


def test_compiled_layers_serve_all_batches() -> None:
    """Batches with other documents compile nothing anew."""
    for found in result(2, f"parity {COMPILED}"):
        first, *later = found["graphs"]
        assert 0 < first <= 6  # two kinds of layers, in training and evaluation, and when compiling is tried
        assert set(later) == {first}


LAYERS = 2
"""Units of the small model that are gathered by themselves; the root is one more."""
STEP = {
    "zero0": {"allreduce": LAYERS + 1},
    "zero2": {"allgather_base": LAYERS + 1, "reduce_scatter_base": LAYERS + 1},
    "zero3": {"allgather_base": 2 * (2 * LAYERS + 1), "reduce_scatter_base": LAYERS + 1},
    "zero3_hybrid": {
        "allgather_base": 2 * (2 * LAYERS + 1),
        "reduce_scatter_base": LAYERS + 1,
        "allreduce": LAYERS + 1,
    },
    "zero2_hybrid-reduce-always": {
        "allgather_base": LAYERS + 1,
        "reduce_scatter_base": 2 * (LAYERS + 1),
        "allreduce": LAYERS + 1,
    },
}
"""Collectives of a step of two micro-batches: accumulation adds none, unless it is told to."""


@pytest.mark.parametrize("case", COMMUNICATION)
def test_accumulation_communicates_once_per_step(case: str) -> None:
    for counted in result(4, f"communication {case}"):
        assert counted["calls"] == STEP[case]


@pytest.mark.parametrize("case", COMMUNICATION)
def test_a_rank_reads_and_holds_its_shards_alone(case: str) -> None:
    shards = 1 if case == "zero0" else 2 if "hybrid" in case else 4
    for found in result(4, f"communication {case}"):
        assert found["tied"]
        assert found["dtypes"] == {"torch.float32"}
        for name, shape in parameter_shapes(SHORT_MODEL).items():
            share = torch.Size(shape).numel() // shards  # all first dimensions divide by 4
            assert found["asked"][name] == found["held"][name] == share, name
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert found["state"][f"{kind}.{name}"] == share, name


def test_only_matrices_decay() -> None:
    assert_only_matrices_decay(result(2, "decay"))


@pytest.mark.parametrize("world_size", PARITY)
def test_deepspeed_is_never_imported(world_size: int) -> None:
    assert result(world_size, "imported deepspeed") == [False] * world_size


@pytest.mark.parametrize(
    ("problem", "wanted"), [("shape", "rows 8 to 16 have shape [3, 5]"), ("error", "k_proj.weight is damaged")]
)
def test_a_source_that_one_rank_cannot_read_fails_on_all_ranks(problem: str, wanted: str) -> None:
    for message in result(2, f"unreadable {problem}"):
        assert wanted in message


def test_hybrids_must_divide_the_ranks() -> None:
    for message in result(2, "indivisible"):
        assert "3 shards (infra.hybrid_shard_size) do not divide 2 ranks" in message


@pytest.mark.parametrize("case", SKIPS)
def test_skipped_steps_leave_no_trace(case: str) -> None:
    for rank, clean in zip(result(2, f"skip {case}"), result(2, f"save {case}"), strict=True):
        steps, state = clean["straight"]
        assert_skips_leave_no_trace(rank["steps"], [*clean["begun"], *steps])
        assert_identical(rank["state"], state)


@pytest.mark.parametrize("engine", ["resumed", "again"])
@pytest.mark.parametrize("case", SAVES)
def test_a_loaded_run_goes_on_to_the_bit(case: str, engine: str) -> None:
    """In a fresh engine and in the one that went on; saved while it did, where `copy` allows that."""
    for rank in result(2, f"save {case}"):
        steps, state = rank["straight"]
        assert rank[engine][0] == steps
        assert_identical(rank[engine][1], state)
        trained = trained_shapes(case_config(case), SHORT_MODEL)
        changed = {key for key, tensor in state.items() if not torch.equal(tensor, rank["saved"][key])}
        assert {key.removeprefix("weight.") for key in changed if key.startswith("weight.")} == trained.keys()


def case_config(case: str) -> FullConfig:
    chosen = {name: value for name, value in SAVES[case].items() if name in ("lora", "freeze")}
    return run_config(distributed_type="ddp", sharding_stage="zero0", **chosen)


def saved_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """What the files of a case hold: without adapters everything."""
    lora = "lora" in SAVES[case]
    return trained_shapes(case_config(case), SHORT_MODEL) if lora else dict(parameter_shapes(SHORT_MODEL))


@pytest.mark.parametrize("case", SAVES)
def test_a_copy_to_generate_with_has_the_weights(case: str) -> None:
    for rank in result(2, f"save {case}"):
        saved = {key.removeprefix("weight."): weight for key, weight in rank["saved"].items() if "exp_avg" not in key}
        other = {"copy", "fsdp_reduce_every_micro_batch", *OWN_OPTIMIZER, "lr_scheduler_type"}
        overrides = {name: value for name, value in SAVES[case].items() if name not in other}
        assert_identical(rank["copied"], generating_weights(saved, **overrides))


@pytest.mark.parametrize("case", RELOADS)
def test_four_ranks_load_what_two_have_saved(case: str) -> None:
    saved = result(2, f"save {reloaded(case)}")[0]["saved"]
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
    trained = trained_shapes(case_config(case), SHORT_MODEL)  # frozen ones are bf16, without moments
    sizes = {name: torch.Size(shape).numel() for name, shape in saved_shapes(case).items()}
    optimizer = SAVES[case].get("optimizer", "adamw")
    all_one = {*trained} if optimizer == OWN_OPTIMIZER["optimizer"] else set()
    one_moment = all_one | {name for name in sizes if optimizer == "muon" and is_hidden_matrix(name)}
    total = sum((8 if name in one_moment else 12 if name in trained else 2) * numel for name, numel in sizes.items())
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
    assert sorted(name for group in record.groups for name in group) == sorted(
        trained_shapes(case_config(case), SHORT_MODEL)
    )
    for index, group in enumerate(record.groups):
        assert {name.endswith("norm.weight") for name in group} == {index == 1}
    if given.get("optimizer") == "muon":
        assert {is_hidden_matrix(name) for name in record.groups[2]} == {True}
        assert len(record.groups[2]) == 7 * LAYERS


def test_a_state_that_has_not_trained_can_be_saved() -> None:
    for state in result(2, "untrained"):
        for name in parameter_shapes(SHORT_MODEL):
            assert torch.equal(state[f"weight.{name}"], weights(name))
            assert not state[f"exp_avg.{name}"].any()
            assert not state[f"exp_avg_sq.{name}"].any()


def test_states_of_other_models_are_refused_on_every_rank() -> None:
    for messages in result(2, "refused"):
        assert "decoder.norm.weight has no counterpart there and shape [32]" in messages["lacking"]
        assert "decoder.norm.weight has shape [33] there and shape [32] in this run's model" in messages["other shape"]
        assert "lora.weight has shape [3] there and no counterpart in this run's model" in messages["more"]
        assert re.fullmatch(r"rank 1 \(.+\): weight of shared\.weight is damaged", messages["unreadable"])
        assert messages["whole"] == "loaded"


@pytest.mark.parametrize("case", WAITING)
def test_a_step_waits_for_its_device_once(case: str) -> None:
    """It reads whether the norm is finite, and nothing else."""
    for counted in result(2, f"waits {case}"):
        assert counted == {"_local_scalar_dense": 1}


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
