"""The estimate of FSDP2's memory against engines that train on two ranks. Of one and of many: test_trace.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp_memory_run import CASES, config_of, model_of
from gloo_ranks import run_ranks

from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, make_job

pytestmark = pytest.mark.distributed

Measured = dict[str, dict[str, int]]
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def measured() -> Measured:
    """The cases' figures of the ranks, see `_of_ranks`."""
    cases = [(case, "measured", {"case": case}) for case in CASES]
    ranks = run_ranks("fsdp_memory_cases.py:run_cases", WORLD_SIZE, {"cases": cases})
    return {case: _of_ranks([rank[case] for rank in ranks]) for case in CASES}


def _of_ranks(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Each figure of the rank with the most."""
    assert all(isinstance(figures, dict) for figures in ranks), ranks
    return {moment: max(figures[moment] for figures in ranks) for moment in ranks[0]}


def job_of(case: str) -> Job:
    return make_job(
        config_of(case), model_of(case), "fsdp", world_size=WORLD_SIZE, ranks_per_node=WORLD_SIZE, device="cpu", ratio=1
    )


def backward_moments(job: Job) -> Iterator[float]:
    """Bytes above those at rest in the backward pass, with the gradient that the head leaves."""
    memory, compute = fsdp_memory(job), job.compute_bytes
    head = job.embedding_parameters
    yield memory.forward.total + (4 + compute if compute < 4 else 4) * head
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    waiting, done = compute * head * job.sizes.tie_word_embeddings, job.model.of("lm_head.")
    for unit in (*reversed(job.model.layers.values()), job.model.of("shared.")):
        yield memory.backward(done, unit).total + waiting
        done += unit
    yield memory.step.total


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_engines_hold(measured: Measured, case: str) -> None:
    found, job = measured[case], job_of(case)
    memory = fsdp_memory(job)
    resting = memory.resting.total
    assert resting == pytest.approx(found["resting"], rel=0.01)
    # The last layer's buffer is gone by then, and the head has left its float32 gradient.
    forward = resting + memory.forward.weights + memory.forward.gradients + 4 * job.embedding_parameters
    assert 0.98 < forward / found["forward"] < 1.02
    assert 0.97 < (resting + max(backward_moments(job))) / found["backward"] < 1.05
    assert (resting + memory.step.total) / found["step"] > 0.97


@pytest.mark.parametrize("case", ["zero0", "zero3", "zero3_hybrid", "zero3 muon"])
def test_the_estimate_of_background_saves(measured: Measured, case: str) -> None:
    assert measured[case]["saved"] == pytest.approx(fsdp_memory(job_of(case)).host.save, rel=0.02)
