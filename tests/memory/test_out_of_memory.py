"""The message when memory runs out, for jobs on GPUs and on CPUs."""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_encdec.base.types import OutOfMemoryError
from ds_encdec.config.schema import load_config
from ds_encdec.memory.expected import (
    LOADED_BYTES,
    ExpectedMemory,
    estimate_run,
    explanation,
    gib,
    out_of_memory_explained,
    settings_that_fit,
)
from ds_encdec.memory.job import make_job, run_sizes
from ds_encdec.memory.library import device_capacity
from ds_encdec.memory.variants import BATCH_FIELDS, as_overrides
from ds_encdec.registry.engines import EngineName

GIB = 2**30
QUICKSTART = Path(__file__).parents[2] / "ds_configs" / "quickstart.yaml"


def expected_on(
    device: Any, *overrides: str, engine: EngineName = "deepspeed", config_file: Path | None = None
) -> ExpectedMemory:
    config = load_config(config_file, overrides)
    job = make_job(config, run_sizes(config), engine, world_size=8, ranks_per_node=8, device=device)
    expected = estimate_run(job)
    assert expected is not None
    return expected


def test_settings_fit_the_device_and_are_settings() -> None:
    expected = expected_on("cuda", "infra.offload_optimizer=none", "training.activation_checkpointing=none")
    device_bytes = expected.estimate.peak.total / 1.5
    settings = settings_that_fit(expected, device_bytes, 10**12, of_device=True)
    assert len({as_overrides(setting.overrides) for setting in settings}) == 3
    for setting in settings:
        assert setting.estimate.peak.total < device_bytes
        config = load_config(None, ["infra.offload_optimizer=none", *as_overrides(setting.overrides).split()])
        assert all(attrgetter(name)(config) == value for name, value in setting.overrides.items())


def test_what_should_have_fitted_must_become_smaller() -> None:
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
        assert setting.node_bytes < 0.95 * expected.node_bytes
        assert setting.estimate.peak.total < 80 * GIB


@pytest.mark.parametrize(("engine", "copies"), [("deepspeed", "training.async_save"), ("fsdp", "infra.pin_memory")])
def test_where_the_host_of_gpus_runs_out_its_copies_go_first(engine: EngineName, copies: str) -> None:
    larger = "model.model_name_or_path=Qwen/Qwen3-8B"
    expected = expected_on("cuda", larger, engine=engine)
    first, *_ = settings_that_fit(expected, 10**12, 0.95 * expected.node_bytes, of_device=False)
    assert first.overrides == {copies: False}
    without = expected_on("cuda", larger, f"{copies}=false", engine=engine)
    for setting in settings_that_fit(without, 10**12, 0.95 * without.node_bytes, of_device=False):
        assert copies not in setting.overrides


def test_page_locked_memory_is_the_hosts() -> None:
    expected = expected_on("cuda")
    with pytest.raises(OutOfMemoryError) as raised, out_of_memory_explained(expected, torch.device("cpu"), 0):
        raise torch.AcceleratorError("CUDA error: out of memory\nmore")
    asked, hint, estimated, measured, *_ = str(raised.value).splitlines()
    assert asked == "rank 0 ran out of memory: CUDA error: out of memory."
    assert "infra.pin_memory=false" in hint
    assert estimated.startswith("Estimated for each rank")
    assert "the host has" in measured


def test_a_run_that_has_a_checkpoint_goes_on_with_its_batches(tmp_path: Path) -> None:
    settings = ("training.activation_checkpointing=none", "data.num_lanes=64", f"infra.output_dir={tmp_path}")
    expected = expected_on("cpu", *settings, config_file=QUICKSTART)
    _, fresh = _proposed(expected)
    assert BATCH_FIELDS & fresh[0].keys()
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    lines, begun = _proposed(expected)
    in_order = [bool(BATCH_FIELDS & overrides.keys()) for overrides in begun]
    assert in_order == sorted(in_order)
    assert set(in_order) == {False, True}
    assert [". in a new run only: " in line for line in lines] == in_order


def _proposed(expected: ExpectedMemory) -> tuple[list[str], list[dict[str, Any]]]:
    """The last lines of the message, and the overrides that they are about."""
    device = torch.device("cpu")
    lines = explanation(expected, device, 0, of_device=False).splitlines()[3:]
    capacity = device_capacity(device).total_bytes
    settings = settings_that_fit(expected, capacity, capacity, of_device=False)
    return lines, [setting.overrides for setting in settings]


def test_other_errors_and_runs_without_an_estimate_are_left_alone() -> None:
    with pytest.raises(ValueError, match="no"), out_of_memory_explained(None, torch.device("cpu"), 0):
        raise ValueError("no")
    with pytest.raises(MemoryError), out_of_memory_explained(None, torch.device("cpu"), 0):
        raise MemoryError


def test_an_estimate_that_fails_is_no_reason_not_to_train(caplog: pytest.LogCaptureFixture) -> None:
    job = expected_on("cpu").job
    assert estimate_run(dataclasses.replace(job, sizes=None)) is None  # type: ignore[arg-type]
    assert "could not be estimated" in caplog.text


def test_the_measured_peak_is_compared_with_what_it_measures() -> None:
    on_gpu, on_cpu = expected_on("cuda"), expected_on("cpu")
    assert on_gpu.peak_bytes == on_gpu.estimate.peak.total - on_gpu.estimate.peak.framework
    host = on_cpu.estimate.host
    assert host.states > 0
    tensors = on_cpu.estimate.peak.total - on_cpu.estimate.peak.framework
    of_process = on_cpu.resident_bytes + LOADED_BYTES + tensors + host.total - host.process
    assert on_cpu.peak_bytes == pytest.approx(of_process)
    assert on_cpu.resident_bytes > 10**8  # this process has imported torch
    assert on_cpu.node_bytes == 8 * (on_cpu.estimate.peak.total + host.total)
    assert str(on_cpu).startswith(f"estimated peak per rank {gib(of_process)} (")
    assert str(on_gpu).startswith(f"estimated peak per GPU {gib(on_gpu.estimate.peak.total)} (")
