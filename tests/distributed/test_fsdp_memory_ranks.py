"""The estimate of FSDP2's memory against engines that train on one and on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from fsdp_memory_run import CASES, config_of, model_of
from gloo_ranks import run_ranks

from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, make_job

pytestmark = pytest.mark.distributed

Measured = Callable[[int, str], dict[str, int]]
ALONE = ("zero0", "zero3")
"""Cases that one rank runs too."""


@pytest.fixture(scope="module")
def measured() -> Measured:
    """`measured(world_size, case)` → the highest figures of the ranks."""

    @cache
    def run(world_size: int) -> list[dict[str, Any]]:
        cases = [(case, "measured", {"case": case}) for case in (CASES if world_size > 1 else ALONE)]
        return run_ranks("fsdp_memory_cases.py:run_cases", world_size, {"cases": cases}, timeout_seconds=300)

    def highest(world_size: int, case: str) -> dict[str, int]:
        ranks = [rank[case] for rank in run(world_size)]
        assert all(isinstance(figures, dict) for figures in ranks), ranks
        return {moment: max(figures[moment] for figures in ranks) for moment in ranks[0]}

    return highest


def job_of(case: str, world_size: int) -> Job:
    return make_job(
        config_of(case), model_of(case), "fsdp", world_size=world_size, ranks_per_node=world_size, device="cpu", ratio=1
    )


def backward_moments(job: Job) -> Iterator[float]:
    """Bytes above those at rest in the backward pass, with the gradient that the head leaves."""
    memory, compute = fsdp_memory(job), job.compute_bytes
    head = job.embedding_parameters
    yield memory.forward.total + (4 + compute if compute < 4 else 4) * head
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    waiting, done = (compute * head, 0) if job.sizes.tie_word_embeddings else (0, head)
    for _ in range(job.encoder_layers + job.decoder_layers):
        yield memory.backward(done, job.layer_parameters).total + waiting
        done += job.layer_parameters
    yield memory.backward(done, head).total + waiting
    yield memory.step.total


@pytest.mark.parametrize(("world_size", "case"), [(2, case) for case in CASES] + [(1, case) for case in ALONE])
def test_the_estimate_is_what_engines_hold(measured: Measured, world_size: int, case: str) -> None:
    found, job = measured(world_size, case), job_of(case, world_size)
    memory = fsdp_memory(job)
    resting = memory.resting.total
    assert resting == pytest.approx(found["resting"], rel=0.01)
    # The last layer's buffer is gone by then, and the head has left its float32 gradient.
    forward = resting + memory.forward.weights + memory.forward.gradients + 4 * job.embedding_parameters
    assert 0.98 < forward / found["forward"] < 1.02
    assert 0.97 < (resting + max(backward_moments(job))) / found["backward"] < 1.05
    assert (resting + memory.step.total) / found["step"] > 0.97


@pytest.mark.parametrize("case", ["zero0", "zero3", "zero3_hybrid"])
def test_the_estimate_of_background_saves(measured: Measured, case: str) -> None:
    assert measured(2, case)["saved"] == pytest.approx(fsdp_memory(job_of(case, 2)).host.save, rel=0.02)
