"""Whatever of a run on two hosts is killed or cut off: all of it ends in bounded time, says so, and can go on. Several
runs die at a time, each on two hosts of its own, for most of each is waiting."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from rig import ENDLESS, ForkedRuns, Rig, arguments, run, saved, start, told, until
from tables import DEATHS, ELASTIC, small

AT_A_TIME = 2
Pairs = SimpleQueue[tuple[str, str]]


@dataclass(frozen=True)
class End:
    """What was seen: the launchers' codes, the seconds until all had gone, what had not, and where the run was."""

    codes: tuple[int, ...]
    seconds: float
    left: dict[str, list[str]]
    status: dict[str, Any]
    folder: Path
    logs: str


def die(rig: Rig, name: str, pairs: Pairs) -> End:
    first, second = pairs.get()
    death, folder = DEATHS[name], rig.folder / "deaths" / name.replace(" ", "-")
    folder.parent.mkdir(exist_ok=True)
    log = folder.with_suffix(".log")
    own = [*arguments(folder, **ENDLESS), "--resume", "auto"]
    started = start(rig, small(death.launcher, rig.hostfile(first, second), own), first, second, log=log)
    until(lambda: saved(folder) or any(process.poll() is not None for process in started), 300)
    began = time.monotonic()
    if saved(folder):
        death.happens(rig, first, second, folder)
    there = [host for host in (first, second) if host in rig.first]
    left: dict[str, list[str]] = {}
    while time.monotonic() < began + death.seconds:
        left = {host: [*rig.processes(host)] for host in there}
        if not any(left.values()) and all(process.poll() is not None for process in started):
            break
        time.sleep(0.5)
    seconds = time.monotonic() - began
    for process in started:
        process.kill()
    for host in there:
        rig.mend(host)
        for kind in left[host]:
            rig.kill(host, kind)
    codes = tuple(process.wait() for process in started)
    if len(there) == 2:
        pairs.put((first, second))
    logs = "\n".join(path.read_text() for path in sorted(folder.parent.glob(f"{log.name}.*")))
    return End(codes, seconds, left, told(folder), folder, logs)


def lose_a_host(rig: Rig, pairs: Pairs) -> dict[str, Any]:
    """Let torchrun go on without a host that it has lost, until the run is asked to stop; returns its `run.json`."""
    first, second = pairs.get()
    folder = rig.folder / "elastic"
    own = [*arguments(folder, **ENDLESS), "--resume", "auto"]
    command = small(ELASTIC, rig.hostfile(first, second), own)
    started = start(rig, command, first, second, log=folder.with_suffix(".log"))
    until(lambda: saved(folder), 300)
    assert told(folder)["world_size"] == 2
    rig.switch_off(second)
    until(lambda: told(folder)["world_size"] == 1, 180)
    before = saved(folder)[-1]
    until(lambda: saved(folder)[-1] > before, 120)
    assert started[0].poll() is None
    rig.run(first, "ds-encdec", "stop", str(folder))
    started[0].wait(timeout=180)  # the agent starts a rank as often as it may, which leaves at once
    return told(folder)


@pytest.fixture(scope="module")
def pairs(rig: Rig) -> Pairs:
    free: Pairs = SimpleQueue()
    for pair in zip(rig.hosts[2:-1:2], rig.hosts[3:-1:2], strict=True):
        free.put(pair)
    return free


@pytest.fixture(scope="module")
def ends(rig: Rig, pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    items = request.session.items
    names = [item.name.rpartition("[")[2].rstrip("]") for item in items if item.path == request.path]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {name: pool.submit(die, rig, name, pairs) for name in DEATHS if name in names}
        if any("lost_host" in name for name in names):
            futures["elastic"] = pool.submit(lose_a_host, rig, pairs)
        yield futures


@pytest.mark.parametrize("name", DEATHS)
def test_a_run_ends_and_goes_on(name: str, rig: Rig, forked: ForkedRuns, ends: dict[str, Future[End]]) -> None:
    death, end = DEATHS[name], ends[name].result()
    print(f"{name}: {end}")
    assert not any(end.left.values()), end.logs
    assert (end.status["state"], end.status["exit_code"]) == (death.state, death.code), end.logs
    assert end.codes == death.codes, end.logs
    newest, last = saved(end.folder)[-1], json.loads((end.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest >= last["step"] if death.code == 75 else newest % ENDLESS["training__save_steps"] == 0
    further = [*arguments(end.folder, **ENDLESS), f"training.num_train_steps={newest + 5}", "--resume", "auto"]
    gone_on = run(rig, forked, dict.fromkeys(rig.hosts[: len(end.left)], 1), further)
    assert set(gone_on.codes) == {0}, gone_on.output
    assert saved(end.folder)[-1] == newest + 5


def test_torchrun_goes_on_without_a_lost_host(rig: Rig, ends: dict[str, Future[Any]]) -> None:
    status = ends["elastic"].result()
    assert (status["state"], status["exit_code"], status["world_size"]) == ("preempted", 75, 1)
