"""The estimate of DeepSpeed's memory against engines that train on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from zero_memory_run import ACCUMULATION, CASES, MODEL, memory_config

from ds_encdec.memory.breakdown import Breakdown, Count, EngineMemory
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.zero import zero_memory

pytestmark = pytest.mark.distributed

HEAD_BYTES = 4 * MODEL.vocab_size * MODEL.hidden_size
"""The head's weight gradient in float32, which waits in the graph from the forward pass on."""


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """The cases' highest figures of two ranks."""
    cases = [(name, "measured", {"sharding_stage": name.split()[0], **arguments}) for name, arguments in CASES.items()]
    ranks = run_ranks("zero_memory_cases.py:run_cases", 2, {"cases": cases})
    return {name: _highest([rank[name] for rank in ranks]) for name in CASES}


def _highest(ranks: list[Any]) -> dict[str, int]:
    assert all(isinstance(figures, dict) for figures in ranks), ranks
    return {moment: max(figures[moment] for figures in ranks) for moment in ranks[0]}


def job_of(name: str, world_size: int) -> Job:
    config = memory_config(sharding_stage=name.split()[0], **CASES[name])
    return make_job(
        config,
        MODEL,
        "deepspeed",
        world_size=world_size,
        ranks_per_node=world_size,
        device="cpu",
        gradient_accumulation_steps=ACCUMULATION,
        ratio=1.0,
    )


def estimated(job: Job) -> dict[str, float]:
    """Bytes at the moments that `measured` has, device and host together, with the head's gradient."""
    memory = zero_memory(job)
    resting = memory.resting.total + memory.host.states + memory.host.parameters
    return {
        "resting": resting,
        "forward": resting + memory.forward.total + HEAD_BYTES,
        "backward": resting + max(_highest_backward(job, memory).total + HEAD_BYTES, memory.last_reduction.total),
        "step": resting + memory.step.total,
    }


def _highest_backward(job: Job, memory: EngineMemory) -> Breakdown:
    done, moments = Count(0, 0), []
    for unit in (*reversed(job.model.layers.values()), job.model.of("shared.")):
        moments.append(memory.backward(done, unit))
        done += unit
    return max(moments, key=lambda moment: moment.total)


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_engines_hold(measured: dict[str, dict[str, int]], name: str) -> None:
    found, wanted = measured[name], estimated(job_of(name, world_size=2))
    assert wanted["resting"] == pytest.approx(found["resting"], rel=0.01)
    assert 0.98 < wanted["forward"] / found["forward"] < 1.03
    backward, step = max(wanted["backward"], wanted["step"]), max(found["backward"], found["step"])
    assert backward / found["backward"] > 0.97
    assert wanted["step"] / found["step"] > 0.97
    assert 0.98 < backward / step < 1.05


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_estimate_of_background_saves(measured: dict[str, dict[str, int]], name: str) -> None:
    """The first rank saves the most."""
    job = job_of(name, world_size=2)
    saved = zero_memory(job).host.save
    weights = 2 * job.parameters
    assert measured[name]["saved"] == pytest.approx(saved + (0 if name == "zero3" else weights / 2), rel=0.01)
