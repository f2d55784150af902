"""What is said when memory runs out, of jobs on GPUs and on CPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ds_encdec.config.load import load_config
from ds_encdec.memory.breakdown import CATEGORIES
from ds_encdec.memory.expected import ExpectedMemory, expect
from ds_encdec.memory.job import make_job
from ds_encdec.memory.model_sizes import run_sizes
from ds_encdec.memory.out_of_memory import as_overrides, out_of_memory_explained, settings_that_fit
from ds_encdec.memory.variants import value_of
from ds_encdec.types import OutOfMemoryError

GIB = 2**30


def expected_on(device: Any, *overrides: str) -> ExpectedMemory:
    config = load_config(None, overrides)
    job = make_job(config, run_sizes(config), "deepspeed", world_size=8, ranks_per_node=8, device=device)
    expected = expect(job)
    assert expected is not None
    return expected


def test_settings_fit_the_device_and_are_settings() -> None:
    """A GPU of which the run would need a half more."""
    expected = expected_on("cuda", "infra.offload_optimizer=none", "training.activation_checkpointing=none")
    device_bytes = expected.estimate.peak.total / 1.5
    settings = settings_that_fit(expected, device_bytes, 10**12, of_device=True)
    assert len({as_overrides(setting.overrides) for setting in settings}) == 3
    for setting in settings:
        assert setting.estimate.peak.total < device_bytes
        config = load_config(None, ["infra.offload_optimizer=none", *as_overrides(setting.overrides).split()])
        assert all(value_of(config, name) == value for name, value in setting.overrides.items())


def test_what_should_have_fitted_must_become_smaller() -> None:
    """Something else takes memory, or the estimate is wrong: as it says nothing of how much, a tenth."""
    expected = expected_on("cuda", "infra.offload_optimizer=none")
    peak = expected.estimate.peak
    settings = settings_that_fit(expected, 10**12, 10**12, of_device=True)
    assert settings
    assert all(setting.estimate.peak.total <= peak.total - 0.1 * (peak.total - peak.framework) for setting in settings)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_where_the_host_runs_out_it_is_the_host_that_needs_less(device: str) -> None:
    expected = expected_on(device, "training.activation_checkpointing=none", "infra.offload_params=cpu")
    settings = settings_that_fit(expected, 80 * GIB, 0.95 * expected.node_bytes, of_device=False)
    assert settings
    for setting in settings:
        assert ExpectedMemory(setting.job, setting.estimate).node_bytes < 0.95 * expected.node_bytes
        assert setting.estimate.peak.total < 80 * GIB


def test_the_message_tells_what_was_asked_expected_measured_and_possible() -> None:
    expected = expected_on("cpu", "training.activation_checkpointing=none", "data.num_lanes=8")
    with pytest.raises(OutOfMemoryError) as raised, out_of_memory_explained(expected, torch.device("cpu"), 5):
        torch.zeros(2**20).expand(2**30, 2**20).clone()
    asked, estimated, measured, *settings = str(raised.value).splitlines()
    assert asked.startswith("rank 5 ran out of memory: ")
    assert f"tried to allocate {2**52} bytes" in asked
    assert expected.estimate.moment in estimated
    for category in CATEGORIES:
        assert (category.replace("_", " ") in estimated) == bool(getattr(expected.estimate.peak, category))
    assert measured.startswith("Rank 5 has held ")
    assert "8 ranks" in measured
    assert settings


def test_other_errors_and_runs_without_an_estimate_are_left_alone() -> None:
    with pytest.raises(ValueError, match="no"), out_of_memory_explained(None, torch.device("cpu"), 0):
        raise ValueError("no")
    with pytest.raises(MemoryError), out_of_memory_explained(None, torch.device("cpu"), 0):
        raise MemoryError


def test_an_estimate_that_fails_is_no_reason_not_to_train(caplog: pytest.LogCaptureFixture) -> None:
    job = expected_on("cpu").job
    assert expect(dataclasses.replace(job, sizes=None)) is None  # type: ignore[arg-type]
    assert "could not be estimated" in caplog.text


def test_the_measured_peak_is_compared_with_what_it_measures() -> None:
    """On a GPU what torch's allocator has given out; on a CPU all that a rank's process holds."""
    on_gpu, on_cpu = expected_on("cuda"), expected_on("cpu")
    assert on_gpu.peak_bytes == on_gpu.estimate.peak.total - on_gpu.estimate.peak.framework
    host = on_cpu.estimate.host
    assert host.states > 0
    assert on_cpu.peak_bytes == on_cpu.estimate.peak.total + host.total - host.process
    assert on_cpu.node_bytes == 8 * (on_cpu.estimate.peak.total + host.total)
