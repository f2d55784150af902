"""The estimate of memory against engines that train on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from gloo_ranks import run_ranks
from memory_runs import DEEPSPEED, FSDP, run_of

from ds_encdec.memory.breakdown import Count
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.zero import zero_memory
from ds_encdec.registry.engines import EngineName

pytestmark = pytest.mark.distributed


@functools.cache
def measured(engine: EngineName) -> dict[str, dict[str, int]]:
    """The figures of the cases, each of the rank with the most."""
    names = DEEPSPEED if engine == "deepspeed" else FSDP
    cases = [(name, "measured", {"engine": engine, "case": name}) for name in names]
    ranks = run_ranks("memory_cases.py:run_cases", 2, {"cases": cases}, engine)
    for rank in ranks:
        assert all(isinstance(figures, dict) for figures in rank.values()), rank
    return {name: {moment: max(rank[name][moment] for rank in ranks) for moment in ranks[0][name]} for name in names}


def job_of(engine: EngineName, case: str) -> Job:
    return make_job(*run_of(engine, case), engine, world_size=2, ranks_per_node=2, device="cpu", ratio=1.0)


@pytest.mark.parametrize("case", DEEPSPEED)
def test_the_estimate_is_what_deepspeed_holds(case: str) -> None:
    """Device and host together, with the head's float32 gradient, which waits from the forward pass on."""
    found, job = measured("deepspeed")[case], job_of("deepspeed", case)
    memory, head = zero_memory(job), 4 * job.embedding_parameters
    done, in_backward = Count(0, 0), []
    for unit in (*reversed(job.model.layers.values()), job.model.of("shared.")):
        in_backward.append(memory.backward(done, unit).total)
        done += unit
    resting = memory.resting.total + memory.host.states + memory.host.parameters
    backward = resting + max(*(held + head for held in in_backward), memory.last_reduction.total)
    step = resting + memory.step.total
    assert resting == pytest.approx(found["resting"], rel=0.01)
    assert 0.98 < (resting + memory.forward.total + head) / found["forward"] < 1.03
    assert max(backward, step) / found["backward"] > 0.97
    assert step / found["step"] > 0.97
    assert 0.98 < max(backward, step) / max(found["backward"], found["step"]) < 1.05


def backward_moments(job: Job) -> Iterator[float]:
    """Bytes above those at rest in FSDP2's backward pass, with the gradient that the head leaves."""
    memory, compute = fsdp_memory(job), job.compute_bytes
    head = job.embedding_parameters
    yield memory.forward.total + (4 + compute if compute < 4 else 4) * head
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    waiting, done = compute * head * job.sizes.tie_word_embeddings, job.model.of("lm_head.")
    for unit in (*reversed(job.model.layers.values()), job.model.of("shared.")):
        yield memory.backward(done, unit).total + waiting
        done += unit
    yield memory.step.total


@pytest.mark.parametrize("case", FSDP)
def test_the_estimate_is_what_fsdp2_holds(case: str) -> None:
    found, job = measured("fsdp")[case], job_of("fsdp", case)
    memory = fsdp_memory(job)
    resting = memory.resting.total
    assert resting == pytest.approx(found["resting"], rel=0.01)
    # The last layer's buffer is gone by then, and the head has left its float32 gradient.
    forward = resting + memory.forward.weights + memory.forward.gradients + 4 * job.embedding_parameters
    assert 0.98 < forward / found["forward"] < 1.02
    assert 0.97 < (resting + max(backward_moments(job))) / found["backward"] < 1.05
    assert (resting + memory.step.total) / found["step"] > 0.97


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
def test_the_estimate_of_deepspeeds_background_saves(case: str) -> None:
    """The first rank saves the most."""
    job = job_of("deepspeed", case)
    weights = 0 if case == "zero3" else 2 * job.parameters
    assert measured("deepspeed")[case]["saved"] == pytest.approx(zero_memory(job).host.save + weights / 2, rel=0.01)


@pytest.mark.parametrize("case", ["zero0", "zero3", "zero3_hybrid", "zero3 muon"])
def test_the_estimate_of_fsdp2s_background_saves(case: str) -> None:
    assert measured("fsdp")[case]["saved"] == pytest.approx(fsdp_memory(job_of("fsdp", case)).host.save, rel=0.02)
