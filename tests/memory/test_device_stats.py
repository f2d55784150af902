"""Reported memory, against memory that was really taken."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from ds_encdec.memory.library import _control_groups, clear_memory, get_memory_stats, log_memory_stats
from ds_encdec.types import ConfigError

BALLAST_FLOATS = 2**25


def test_the_process_holds_what_it_has_taken() -> None:
    before = get_memory_stats("cpu")
    ballast = torch.ones(BALLAST_FLOATS)
    held = get_memory_stats(torch.device("cpu"))
    del ballast
    after = get_memory_stats("cpu")
    assert set(held) == {"allocated_gb", "reserved_gb", "max_allocated_gb", "free_gb", "total_gb"}
    taken_gb = BALLAST_FLOATS * 4 / 1e9
    assert held["allocated_gb"] - before["allocated_gb"] == pytest.approx(taken_gb, rel=0.1)
    assert after["allocated_gb"] - before["allocated_gb"] < 0.1 * taken_gb
    # The kernel brings its peak up to date a little later.
    assert after["max_allocated_gb"] >= 0.9 * held["allocated_gb"]
    assert 0 < held["free_gb"] < held["total_gb"] <= psutil.virtual_memory().total / 1e9


def test_memory_is_logged_behind_a_prefix(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_memory_stats("after the first step", "cpu")
    words, *figures = caplog.messages[0].replace(": ", ", ").split(", ")
    assert words == "after the first step"
    assert [figure.rsplit(" ", 2)[0] for figure in figures] == [
        "allocated",
        "reserved",
        "max allocated",
        "free",
        "total",
    ]


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match=f"device={device}: "):
        get_memory_stats(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_what_it_was_given() -> None:
    clear_memory()
    before = get_memory_stats()
    ballast = torch.ones(BALLAST_FLOATS, device="cuda")
    held = get_memory_stats(0)
    del ballast
    freed = get_memory_stats("cuda")
    clear_memory()
    cleared = get_memory_stats()
    taken_gb = BALLAST_FLOATS * 4 / 1e9
    assert held["allocated_gb"] - before["allocated_gb"] == pytest.approx(taken_gb)
    assert freed["allocated_gb"] == before["allocated_gb"]
    assert freed["reserved_gb"] >= taken_gb
    assert freed["max_allocated_gb"] == held["max_allocated_gb"] > cleared["max_allocated_gb"]
    assert cleared["reserved_gb"] < freed["reserved_gb"]
    assert held["allocated_gb"] <= held["reserved_gb"] <= held["total_gb"] - held["free_gb"]


def test_clearing_lets_go_of_what_only_a_cycle_holds() -> None:
    class Node:
        """Refers to itself."""

        def __init__(self) -> None:
            self.itself = self

    node = Node()
    gone = weakref.ref(node)
    del node
    clear_memory()
    assert gone() is None


def test_limits_of_all_control_groups_around_the_process_are_read(tmp_path: Path) -> None:
    membership, mounted = tmp_path / "membership", tmp_path / "mounted"
    membership.write_text("4:cpu,cpuacct:/elsewhere\n3:memory:/job\n0::/batch/job\n")
    version_1, outer = mounted / "memory" / "job", mounted / "batch"
    inner = outer / "job"
    for folder in (version_1, inner):
        folder.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("400\n")
    (inner / "memory.stat").write_text("anon 300\ninactive_file 90\n")
    (outer / "memory.max").write_text("1000\n")
    (outer / "memory.current").write_text("500\n")
    (outer / "memory.stat").write_text("anon 400\ninactive_file 80\n")
    (version_1 / "memory.limit_in_bytes").write_text("2000\n")
    (version_1 / "memory.usage_in_bytes").write_text("600\n")
    (version_1 / "memory.stat").write_text("total_inactive_file 50\n")
    assert list(_control_groups(membership, mounted)) == [(2000, 550), (1000, 420)]
    assert list(_control_groups(tmp_path / "no Linux", mounted)) == []
