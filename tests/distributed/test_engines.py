"""Both engines in every form: they train like plain torch in one process, and what must be exact is so to the bit.

Like plain torch: float32, three micro-batches per rank with unequal target tokens and one of them empty, clipping
active in every step (without it Adam would hide a gradient that is wrong by a factor). What only one engine has is at
the end, DeepSpeed's first.
"""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_plan as plan
import pytest
import torch
from engine_plan import folder_of, result
from packaging.version import Version
from small_run import (
    MODEL,
    OWN_OPTIMIZER,
    SHORT_ACCUMULATION,
    SHORT_MODEL,
    SHORT_STEPS,
    generating_weights,
    lane_batches,
    run_config,
    train_on,
    weights,
)
from torch_oracle import (
    TorchOracle,
    assert_evaluated_like,
    assert_identical,
    assert_skips_leave_no_trace,
    assert_trained_like,
    assert_weights_of,
    oracle_trajectory,
)

from ds_encdec.base.types import MOMENTS, SavedState, StepResult, is_hidden_matrix
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.engine.protocol import DCP_FOLDER, read_record
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import is_adapter, parameter_shapes, trained_shapes
from ds_encdec.objectives.tokens import packed_forward
from ds_encdec.registry.engines import EngineName

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
COMPILED = "zero3-compile-full"


def every(table: Mapping[EngineName, Any]) -> pytest.MarkDecorator:
    """A test of each engine's cases in the table."""
    return pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine in table for case in table[engine]])


def weights_of(state: State) -> State:
    return {key.removeprefix("weight."): tensor for key, tensor in state.items() if key.startswith("weight.")}


def trained_of(engine: EngineName, case: str) -> dict[str, tuple[int, ...]]:
    return trained_shapes(run_config(**plan.SAVES[engine][case]), SHORT_MODEL)


@pytest.mark.parametrize(
    ("engine", "world_size", "case"), [(*start, case) for start, cases in plan.PARITY.items() for case in cases]
)
def test_trains_and_evaluates_like_the_oracle(engine: EngineName, world_size: int, case: str) -> None:
    oracle = oracle_trajectory(world_size, {"steps": SHORT_STEPS, **plan.PARITY[engine, world_size][case]})
    for found in result(engine, world_size, f"parity {case}"):
        # Compiled code scales what dropout leaves in another order.
        assert_trained_like(found, oracle, norm=1e-4 if case == COMPILED else 1e-5)
        assert_evaluated_like(found, oracle)
        assert_weights_of(found, oracle)


@pytest.mark.parametrize(
    ("engine", "case"),
    [("deepspeed", "zero3-activation-offload"), ("fsdp", "zero3-activation-offload"), ("fsdp", "zero3-selective")],
)
def test_recomputation_changes_nothing_to_the_bit(engine: EngineName, case: str) -> None:
    plain, found = result(engine, 2, "parity zero3")[0], result(engine, 2, f"parity {case}")[0]
    assert found["steps"] == plain["steps"]


@every({engine: cases.split() for engine, cases in plan.SKIPS.items()})
def test_skipped_steps_leave_no_trace(engine: EngineName, case: str) -> None:
    for rank, clean in zip(result(engine, 2, f"skip {case}"), result(engine, 2, f"save {case}"), strict=True):
        steps, state = clean["straight"]
        assert_skips_leave_no_trace(rank["steps"], [*clean["begun"], *steps])
        assert_identical(rank["state"], state)
        assert rank["kept"] == 0 or "offload" not in case  # gradients that the parameters still know


@pytest.mark.parametrize("loader", ["again", "resumed"])
@every(plan.SAVES)
def test_a_loaded_run_goes_on_to_the_bit(engine: EngineName, case: str, loader: str) -> None:
    """In the engine that has trained on since the save, and in a new one."""
    trained = trained_of(engine, case).keys()
    for rank in result(engine, 2, f"save {case}"):
        steps, state = rank["straight"]
        loaded, repeated_steps, repeated_state = rank[loader]
        assert_identical(loaded, rank["saved"])
        assert repeated_steps == steps
        assert_identical(repeated_state, state)
        before, after = weights_of(rank["saved"]), weights_of(state)
        assert {name for name in after if not torch.equal(after[name], before[name])} == trained


@every(plan.SAVES)
def test_a_copy_to_generate_with_has_the_weights(engine: EngineName, case: str) -> None:
    for rank in result(engine, 2, f"save {case}"):
        assert_identical(rank["copied"], generating_weights(weights_of(rank["saved"]), **plan.SAVES[engine][case]))


@every(plan.SAVES)
def test_every_file_is_returned_by_one_rank(engine: EngineName, case: str) -> None:
    returned = [name for rank in result(engine, 2, f"save {case}") for name in rank["files"]]
    folder = folder_of(engine, case)
    assert sorted(returned) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    shards = [name for name in returned if name.endswith((".distcp", "optim_states.pt"))]
    assert len(shards) == (0 if engine == "deepspeed" and case.startswith("zero0") else 2)


# Every run of several ranks that leaves digests: engine, ranks, name, settings.
REPLICATED = [
    *((*start, f"parity {case}", given) for start, cases in plan.PARITY.items() for case, given in cases.items()),
    *(
        (engine, 2, f"skip {case}", plan.SAVES[engine][case])
        for engine in plan.SKIPS
        for case in plan.SKIPS[engine].split()
    ),
    *((engine, 2, f"save {case}", given) for engine, cases in plan.SAVES.items() for case, given in cases.items()),
    *((*start, f"arrival {case}", given[2]) for start, cases in plan.ARRIVALS.items() for case, given in cases.items()),
]


@pytest.mark.parametrize(("engine", "world_size", "case", "given"), [one for one in REPLICATED if one[1] > 1])
def test_what_ranks_hold_alike_is_equal(engine: EngineName, world_size: int, case: str, given: dict[str, Any]) -> None:
    stage = given["sharding_stage"]
    shards = given.get("hybrid_shard_size", 1 if stage < ("zero1" if engine == "fsdp" else "zero3") else world_size)
    for moment in zip(*(rank["digests"] for rank in result(engine, world_size, case)), strict=True):
        if shards == world_size or (engine, stage[:5]) == ("deepspeed", "zero3"):
            assert set(moment) == {None}
        else:
            assert [digest.group for digest in moment] == [rank % shards for rank in range(world_size)]
            assert len(set(moment)) == moment[0].groups == shards


@every(plan.CHANGED)
def test_a_resumed_run_follows_its_own_settings(engine: EngineName, case: str) -> None:
    """Against the oracle, whose settings are exchanged in mid-run: rates, decay, betas, epsilon, clipping, schedule."""
    given = plan.CHANGED[engine][case]
    before = {key: value for key, value in given.items() if key == "lr_scheduler_type"}
    oracle = TorchOracle(run_config(**before), SHORT_MODEL, weights)
    steps = [oracle_step(oracle, step) for step in (0, 1)]
    oracle.use(run_config(**before | given["then"]).training)
    steps = [oracle_step(oracle, step) for step in (2, 3)]
    for rank in result(engine, 2, f"changed {case}"):
        for mine, expected in zip(rank["steps"], steps, strict=True):
            assert mine["learning_rate"] == pytest.approx(expected.learning_rate, rel=1e-9)
            assert mine["grad_norm"] == pytest.approx(float(expected.grad_norm), rel=1e-5)
        for name, parameter in oracle.model.named_parameters():
            # A thirtieth of what a step moves a weight by.
            torch.testing.assert_close(rank["weights"][name], parameter.detach(), rtol=0, atol=1e-4, msg=name)


def oracle_step(oracle: TorchOracle, step: int) -> StepResult:
    lanes = lane_batches(step, 2, SHORT_ACCUMULATION)
    return train_on(oracle, lanes, sum(batch.target_tokens for batch in lanes))[1]


@every(plan.PLAIN)
def test_a_source_that_one_rank_cannot_read_fails_on_all_ranks(engine: EngineName, case: str) -> None:
    for message in result(engine, 2, f"unreadable {case}"):
        assert message.startswith("refused: ")
        assert "k_proj.weight is damaged" in message


@every(plan.PLAIN)
def test_only_matrices_decay(engine: EngineName, case: str) -> None:
    for rank in result(engine, 2, f"decay {case}"):
        assert rank["grad_norm"] == 0.0
        kept = 1 - rank["learning_rate"] * run_config().training.weight_decay
        for name, moved in rank["weights"].items():
            expected = weights(name) * (1 if name.endswith("norm.weight") else kept)
            torch.testing.assert_close(moved, expected, rtol=1e-6, atol=0, msg=name)


@every(plan.REFUSED)
def test_states_that_do_not_fit_are_refused_on_every_rank(engine: EngineName, case: str) -> None:
    for found in result(engine, 2, f"refused {case}"):
        assert "decoder.norm.weight does not exist in it and has shape [32] in this run's model" in found["lacking"]
        assert "decoder.norm.weight has shape [33] in it and has shape [32] in this run's model" in found["other shape"]
        assert "lora.weight has shape [3] in it and does not exist in this run's model" in found["more"]
        assert re.fullmatch(r"refused: rank 1 \(.+\): .+ is damaged", found["unreadable"])
        assert found["whole"] == "loaded"


@every(plan.WAITING)
def test_a_step_waits_for_its_device_once(engine: EngineName, case: str) -> None:
    """It reads the norm, and nothing else, whatever the number of micro-batches; no evaluation reads anything."""
    for counted in result(engine, 2, f"waits {case}"):
        assert counted == {"_local_scalar_dense": 1}


def state_in(folder: Path) -> SavedState:
    return DcpState(folder) if (folder / DCP_FOLDER).exists() else ZeroState(folder)


@pytest.mark.parametrize(
    ("engine", "world_size", "case"), [(*start, case) for start, cases in plan.ARRIVALS.items() for case in cases]
)
def test_a_state_arrives_to_the_bit_and_training_goes_on(engine: EngineName, world_size: int, case: str) -> None:
    """Between engines, stages and numbers of ranks; each rank reads what it holds."""
    ranks, (source, saved_case, given) = (
        result(engine, world_size, f"arrival {case}"),
        plan.ARRIVALS[engine, world_size][case],
    )
    left, arrived = state_in(folder_of(source, saved_case)), state_in(folder_of(engine, f"{world_size} {case}"))
    assert (arrived.shapes, arrived.applied_steps, left.applied_steps) == (left.shapes, 2, 2)
    for name in left.shapes:
        has_one = "optimizer" in given and is_hidden_matrix(name)
        for kind in ("weight", *MOMENTS[: 1 if has_one else 2]):
            assert left.read(kind, name).any()
            assert torch.equal(arrived.read(kind, name), left.read(kind, name)), (kind, name)

    sizes = [math.prod(shape) for shape in left.shapes.values()]
    stage = given["sharding_stage"]
    copies = world_size if stage == "zero0" else 2 if stage == "zero3_hybrid" and engine == "fsdp" else 1
    assert sum(rank["weights read"] for rank in ranks) == copies * sum(sizes)
    straight, state = result(source, 2, f"save {saved_case}")[0]["straight"]
    for rank in ranks:
        assert rank["longest read"] <= max(sizes)
        assert {*rank["counters"]} == {2.0}
        assert rank["weight decays"][:2] == [0.1, 0.0]
        for mine, expected in zip(rank["steps"], straight, strict=True):
            assert mine["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-9)
            if not given.get("bf16"):
                assert mine["loss"] == pytest.approx(expected["loss"], abs=1e-5)
                assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for name, weight in weights_of(state).items() if not given.get("bf16") else ():
            # A thirtieth of what a step moves a weight by; decay of the norms would cost a tenth of it per step.
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


# DeepSpeed


@pytest.mark.parametrize(
    ("world_size", "case"), [(size, case) for size, cases in plan.STREAMS.items() for case in cases]
)
def test_streams_wait_for_each_other_and_no_memory_in_use_is_reused(world_size: int, case: str) -> None:
    """Where DeepSpeed has the host wait, the device's own stream does. Memory that is reused under a stream at work is
    the next tensor's: wrong numbers without an error."""
    for found in result("deepspeed", world_size, f"streams {case}"):
        assert not [one for one in found["waits"] if one.startswith("host")]
        assert "default waits for side" in found["waits"]
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert found["overwritten"] == []


def test_zero3_compiles_layers_between_its_hooks() -> None:
    """One graph for each kind of layer (torch 2.11: two), which keeps no gathered weights for the backward pass."""
    graphs = 4 if Version(torch.__version__) < Version("2.12") else 2
    plain_ranks, compiled_ranks = result("deepspeed", 2, "compiled False"), result("deepspeed", 2, "compiled True")
    for plain, found in zip(plain_ranks, compiled_ranks, strict=True):
        assert (plain["graphs"], found["graphs"], found["breaks"], found["kept"]) == (0, graphs, {}, 0)
        # Compiled code rounds otherwise, each CPU's its own way, and Adam divides by tiny second moments.
        for mine, expected, tolerance in zip(found["steps"], plain["steps"], (1e-6, 5e-5), strict=True):
            assert mine["loss"] == pytest.approx(expected["loss"], rel=tolerance)
            assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
        torch.testing.assert_close(found["weights"], plain["weights"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", plan.UNTRAINED)
def test_training_starts_from_the_source_to_the_bit(case: str) -> None:
    names = list(parameter_shapes(SHORT_MODEL))
    for number, rank in enumerate(result("deepspeed", 2, f"untrained {case}")):
        assert_identical(rank["weights"], {name: weights(name) for name in names})
        assert rank["asked"] == ([] if number else names)  # rank 0 reads each once, nobody else any


CONVERTED = ("zero1-bf16", "zero2", "zero3-sub-groups", "zero3-lora-offload-all-bf16", "zero3-freeze-bf16")
# Runs the script of each checkpoint. One process for all: importing deepspeed takes longer than they do.
CONVERT = """
import runpy, sys
for checkpoint, output in zip(sys.argv[1::2], sys.argv[2::2]):
    script = f"{checkpoint}/zero_to_fp32.py"
    sys.argv = [script, checkpoint, output]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the output of every checkpoint's own zero_to_fp32.py."""
    folder = tmp_path_factory.mktemp("converted")
    for case in CONVERTED:
        result("deepspeed", 2, f"save {case}")  # must be there
    arguments = [str(path) for case in CONVERTED for path in (folder_of("deepspeed", case), folder / case)]
    subprocess.run([sys.executable, "-c", CONVERT, *arguments], check=True, capture_output=True, timeout=600)
    return folder


@pytest.mark.parametrize("case", CONVERTED)
def test_zero_to_fp32_yields_the_weights(converted: Path, case: str) -> None:
    expected = weights_of(result("deepspeed", 2, f"save {case}")[0]["saved"])
    found = torch.load(converted / case / "pytorch_model.bin", weights_only=True)
    if "lora" in plan.SAVES["deepspeed"][case]:
        expected = {name: weight for name, weight in expected.items() if is_adapter(name)}
    else:
        assert torch.equal(found.pop("lm_head.weight"), found["shared.weight"])
    found = {name: tensor.float() for name, tensor in found.items()}
    assert_identical(found, expected)
    saved = ZeroState(folder_of("deepspeed", case))
    assert_identical(found, {name: saved.read("weight", name).view(shape) for name, shape in saved.shapes.items()})


@pytest.mark.parametrize("case", plan.SUMMED)
def test_a_sum_over_ranks_is_as_exact_as_one_over_micro_batches(case: str) -> None:
    """Both are float32 sums of the same bfloat16 gradients; a sum in bfloat16 would be 2e-3 off."""
    alone, of_two = (result("deepspeed", world_size, f"summed {case}")[0] for world_size in (1, 2))
    for name, expected in alone.items():
        assert (of_two[name] - expected).norm() <= 1e-6 * expected.norm(), name


def test_no_rank_holds_the_whole_model() -> None:
    for held in result("deepspeed", 2, "shards"):
        assert held["tied"]
        assert set(held["resident"].values()) == {0}
        for name, shard in held["shards"].items():
            assert shard == -(-held["full"][name] // 2), name
        assert held["full"]["shared.weight"] == weights("shared.weight").numel()


# FSDP2


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


@pytest.mark.parametrize("case", plan.TORCHS_BF16)
def test_bf16_is_torchs_bf16_and_stays_near_the_oracle(case: str) -> None:
    """The first step is plain torch's in bf16; the losses of three, near 5 nats, are within 0.05 of float32's."""
    oracle = oracle_trajectory(2, {"steps": SHORT_STEPS})
    loss, grad_norm = plain_bf16_step()
    for found in result("fsdp", 2, f"bf16 {case}"):
        assert found["loss_dtype"] == "torch.float32"
        assert found["steps"][0]["loss"] == pytest.approx(loss, abs=1e-5)
        assert found["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
        for mine, (oracle_loss, *_) in zip(found["steps"], oracle["steps"], strict=True):
            assert mine["loss"] == pytest.approx(oracle_loss, abs=0.05)


def test_compiled_layers_serve_all_batches() -> None:
    for found in result("fsdp", 2, f"parity {COMPILED}"):
        first, *later = found["graphs"]
        assert 0 < first <= 6  # two kinds of layers, in training and evaluation, and when compiling is tried
        assert set(later) == {first}


LAYERS = 2  # units of the small model that are gathered by themselves; the root is one more
# Collectives of a step of two micro-batches: accumulation adds none, unless it is told to.
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


@pytest.mark.parametrize("case", plan.COMMUNICATION)
def test_a_rank_communicates_once_per_step_and_holds_its_shards_alone(case: str) -> None:
    shards = 1 if case == "zero0" else 2 if "hybrid" in case else 4
    for found in result("fsdp", 4, f"communication {case}"):
        assert found["calls"] == STEP[case]
        assert found["tied"]
        assert found["dtypes"] == {"torch.float32"}
        for name, shape in parameter_shapes(SHORT_MODEL).items():
            share = torch.Size(shape).numel() // shards  # all first dimensions divide by 4
            assert found["asked"][name] == found["held"][name] == share, name
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert found["state"][f"{kind}.{name}"] == share, name


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_deepspeed_is_never_imported(world_size: int) -> None:
    assert result("fsdp", world_size, "imported deepspeed") == [False] * world_size


@pytest.mark.parametrize("case", plan.SAVES["fsdp"])
def test_files_hold_what_is_trained_and_describe_it(case: str) -> None:
    ranks, folder, given = result("fsdp", 2, f"save {case}"), folder_of("fsdp", case), plan.SAVES["fsdp"][case]
    assert {"engine.json", "dcp/.metadata"} <= set(ranks[0]["files"])
    trained = trained_of("fsdp", case)  # frozen ones are bf16, without moments
    shapes = trained if "lora" in given else dict(parameter_shapes(SHORT_MODEL))
    assert list(DcpState(folder).shapes.items()) == list(shapes.items())  # in the model's order

    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    optimizer = given.get("optimizer", "adamw")
    all_one = {*trained} if optimizer == OWN_OPTIMIZER["optimizer"] else set()
    one_moment = all_one | {name for name in sizes if optimizer == "muon" and is_hidden_matrix(name)}
    total = sum((8 if name in one_moment else 12 if name in trained else 2) * numel for name, numel in sizes.items())
    assert sum(rank["num_bytes"] for rank in ranks) == total
    assert max(rank["num_bytes"] for rank in ranks) < 0.6 * total  # replicas share the work

    record = read_record(folder)
    assert (record.format, record.world_size, record.applied_steps, record.loss_scaler) == ("dcp", 2, 2, None)
    assert record.sharding_stage == given["sharding_stage"]
    assert sorted(name for group in record.groups for name in group) == sorted(trained)


def test_a_save_that_one_rank_has_no_memory_for_fails_on_all_ranks() -> None:
    for found in result("fsdp", 2, "lacking memory"):
        assert [re.sub(r"memory: .*no more", "memory: no more", one) for one in found] == [
            "OutOfMemoryError: rank 1 ran out of memory: no more."
        ] * 2
