"""The faults are those of real runs: the helpers of tests/launch are found from here, and one server forks them all."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from forked_runs import ForkedRuns


@pytest.fixture(scope="session")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as started:
        yield started
