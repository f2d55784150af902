"""Hosts that are namespaces of this machine: one rig for all tests, and one server that forks ranks on its hosts."""

from collections.abc import Iterator

import pytest
from rig import ForkedRuns, Rig, lacking

HOSTS = 15  # more than are ever busy: a host that has been switched off does not come back


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rig" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if reason := lacking():
        pytest.skip(reason)
    with Rig(tmp_path_factory.mktemp("hosts") / "shared", HOSTS) as up:
        yield up


@pytest.fixture(scope="session")
def slurm(rig: Rig) -> Rig:
    rig.start_slurm("node0", "node1")
    return rig


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedRuns]:
    with ForkedRuns() as started:
        yield started
