"""FSDP2, in every form and on 1, 2 and 4 ranks, trains like plain torch in one process.

Float32, four micro-batches per rank with unequal target tokens and one of them empty, clipping active in every step
(without it Adam would hide a gradient that is wrong by a factor).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fsdp_plan import BF16, COMMUNICATION, HELD, PARITY, result
from small_run import MODEL, lane_batches, run_config, weights
from test_engine_parity import assert_merged, oracle_trajectory

from ds_encdec.engine.sharded_engine import packed_forward
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes

pytestmark = pytest.mark.distributed

CASES = [(world_size, name) for world_size, cases in PARITY.items() for name in cases]


def both(world_size: int, case: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return result(world_size, f"parity {case}"), oracle_trajectory(world_size, PARITY[world_size][case])


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_trains_like_the_oracle(world_size: int, case: str) -> None:
    ranks, oracle = both(world_size, case)
    max_grad_norm = run_config().training.max_grad_norm
    for found in ranks:
        assert len(found["steps"]) == PARITY[world_size][case]["steps"]
        for mine, (loss, grad_norm, learning_rate) in zip(found["steps"], oracle["steps"], strict=True):
            assert mine["applied"]
            assert mine["loss"] == pytest.approx(loss, abs=1e-5)
            # Compiled code scales what dropout leaves in another order.
            assert mine["grad_norm"] == pytest.approx(grad_norm, rel=1e-4 if case == "zero2-compile-full" else 1e-5)
            assert mine["grad_norm"] > 10 * max_grad_norm  # or clipping would not be tested
            assert mine["grad_norm_dtype"] == "torch.float32"
            assert mine["learning_rate"] == learning_rate
        assert found["eval"] == pytest.approx(oracle["eval"], rel=1e-5)
        torch.testing.assert_close(found["by_denoiser"], oracle["after"].by_denoiser, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["tokens_by_denoiser"], oracle["after"].tokens_by_denoiser)


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_reaches_the_weights_of_the_oracle(world_size: int, case: str) -> None:
    ranks, oracle = both(world_size, case)
    for found in ranks:
        assert found["weights"].keys() == oracle["weights"].keys()
        for name, expected in oracle["weights"].items():
            # Adam divides by tiny second moments: 1e-7 in a gradient is more in a weight.
            torch.testing.assert_close(found["weights"][name], expected, rtol=0, atol=1e-4, msg=name)
        assert_merged(found["merged"], found["weights"])


def test_recomputation_changes_nothing_to_the_bit() -> None:
    plain, *_ = result(2, "parity zero3-short")
    for case in ("zero3-full", "zero3-every-2", "zero3-selective", "zero3-activation-offload"):
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
    """The first step is plain torch's in bf16; the losses of eight, near 5 nats, are within 0.05 of float32's."""
    oracle = oracle_trajectory(2, {"steps": run_config().training.num_train_steps})
    loss, grad_norm = plain_bf16_step()
    for found in result(2, f"bf16 {case}"):
        assert found["loss_dtype"] == "torch.float32"
        assert found["steps"][0]["loss"] == pytest.approx(loss, abs=1e-5)
        assert found["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
        for mine, (oracle_loss, *_) in zip(found["steps"], oracle["steps"], strict=True):
            assert mine["loss"] == pytest.approx(oracle_loss, abs=0.05)


def test_compiled_layers_serve_all_batches() -> None:
    """Batches with other documents compile nothing anew."""
    for graphs in result(2, "compiled"):
        assert graphs["then"] == graphs["first"]
        assert 0 < graphs["first"] <= 12


LAYERS = 4
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
    "zero3-reduce-always": {"allgather_base": 2 * (2 * LAYERS + 1), "reduce_scatter_base": 2 * (LAYERS + 1)},
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
        assert counted == STEP[case]


@pytest.mark.parametrize("case", HELD)
def test_a_rank_reads_and_holds_its_shards_alone(case: str) -> None:
    shards = {"zero0": 1, "zero3_hybrid": 2}.get(case, 4)
    for found in result(4, f"held {case}"):
        assert found["tied"]
        assert found["dtypes"] == {"torch.float32"}
        for name, shape in parameter_shapes(MODEL).items():
            share = torch.Size(shape).numel() // shards  # all first dimensions divide by 4
            assert found["asked"][name] == found["held"][name] == share, name
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert found["state"][f"{kind}.{name}"] == share, name


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_only_matrices_decay(stage: str) -> None:
    training = run_config().training
    for rank in result(2, f"decay {stage}"):
        assert rank["grad_norm"] == 0.0
        kept = 1 - rank["learning_rate"] * training.weight_decay
        for name, moved in rank["weights"].items():
            if name.endswith("norm.weight"):
                assert torch.equal(moved, weights(name)), name
            else:
                torch.testing.assert_close(moved, weights(name) * kept, rtol=1e-6, atol=0)
                assert not torch.equal(moved, weights(name)), name


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
