"""How a run comes by its micro-batch size, and how ranks agree on what their probes have found."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import MODEL, make_config

from ds_encdec.base.types import ConfigError, DsEncDecError, Preempted
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manifest import Manifest
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import World
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.training.auto_batch.probe import Outcome, ProbeProcess, ProbeTask
from ds_encdec.training.auto_batch.resolve import agreed_outcome, resolve_batch_size


def world(rank: int, size: int) -> World:
    return World(rank, rank, size, size, 0, 1, "127.0.0.1", 1, "python")


def settled(saved: Path | None, ranks: int, **training: Any) -> tuple[int | str, int, int | None]:
    context = RunContext(world(0, ranks), torch.device("cpu"), "fsdp", HostCollectives())
    stop, model = StopRequest(world(0, ranks)), Qwen3Seq2SeqConfig.from_dict(dict(MODEL))
    found = Checkpoint(saved, Manifest(1, 2, "fsdp", ())) if saved else None
    chosen = resolve_batch_size(make_config(**training), context, stop, model, found).training
    return chosen.per_device_train_batch_size, chosen.gradient_accumulation_steps, chosen.global_batch_size


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a run with micro-batches of 3, of which a step has 8."""
    begun = make_config(per_device_train_batch_size=3, gradient_accumulation_steps=4, global_batch_size=24)
    (tmp_path / "config.yaml").write_text(begun.dump_yaml())
    (tmp_path / "trainer.json").write_text(json.dumps({"num_lanes": 8}))
    return tmp_path


def test_the_accumulation_follows_from_a_global_batch() -> None:
    numbers = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    assert settled(None, 2, **numbers) == (3, 2, None)  # left alone
    assert settled(None, 2, per_device_train_batch_size=3, global_batch_size=24) == (3, 4, 24)


@pytest.mark.parametrize(("given", "ranks"), [({}, 1), ({}, 4), ({"global_batch_size": 24}, 2)])
def test_auto_goes_on_with_the_size_that_the_run_began_with(saved: Path, given: dict[str, int], ranks: int) -> None:
    assert settled(saved, ranks, per_device_train_batch_size="auto", **given) == (3, 8 // ranks, 24)


@pytest.mark.parametrize("size", ["auto", 3])
def test_a_run_does_not_go_on_with_another_global_batch(saved: Path, size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"training.global_batch_size=48, but the steps of .* hold 24 sequences"):
        settled(saved, 2, per_device_train_batch_size=size, global_batch_size=48)


class RankThread(HostCollectives):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, records: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(records)
        self._records, self._barrier = records, barrier

    def gather(self, record: Any) -> list[Any]:
        self._records[self.rank] = record
        self._barrier.wait(timeout=300)
        everyone = list(self._records)
        self._barrier.wait(timeout=300)
        return everyone


FITS, FITS_WITH_MORE = (f'print(\'{{"fits": true, "peak_bytes": {size}}}\')' for size in (5, 7))
RUNS_OUT = "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"
FAILS = "import sys; sys.exit('closed by a peer')"
HANGS = "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(3600)"


def agreed(
    *programs: str,
    timeout_seconds: float = 300,
    grace_seconds: float = 300,
    stop: Callable[[StopRequest], None] | None = None,
) -> list[Outcome | Exception]:
    """What each rank gets whose probe is one of these `programs`; the last one's run is asked to stop by `stop`."""
    barrier, records = threading.Barrier(len(programs)), [None] * len(programs)

    def be_rank(rank: int) -> Outcome | Exception:
        place = world(rank, len(programs))
        config = make_config(per_device_train_batch_size=1)
        task = ProbeTask(config, MODEL, "fsdp", place, 1, "cpu", 1)
        request = StopRequest(place)
        if stop is not None and rank == len(programs) - 1:
            stop(request)
        with ProbeProcess(task, (sys.executable, "-S", "-c", programs[rank]), timeout_seconds) as process:
            try:
                return agreed_outcome(process, RankThread(rank, records, barrier), request, grace_seconds)
            except DsEncDecError as error:
                return error

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(be_rank, range(len(programs))))


def test_what_fits_on_all_ranks_takes_what_it_takes_on_the_fullest() -> None:
    assert agreed(FITS, FITS_WITH_MORE) == [Outcome(fits=True, peak_bytes=7)] * 2


@pytest.mark.parametrize("other", [FITS, FAILS, HANGS])
def test_memory_that_runs_out_on_one_rank_runs_out(other: str) -> None:
    """Also where the other rank hears first that the connection is closed, and fails."""
    for outcome in agreed(other, RUNS_OUT):
        assert isinstance(outcome, Outcome)
        assert not outcome.fits
        assert outcome.message.startswith("rank 1: the kernel killed it")


@pytest.mark.parametrize(
    ("one", "other", "limits", "words"),
    [
        (FITS, FAILS, {"grace_seconds": 0.5}, ("failed, and not for want of memory", "closed by a peer")),
        (HANGS, FAILS, {"grace_seconds": 0.5}, ("failed, and not for want of memory", "closed by a peer")),
        (
            FITS,
            HANGS,
            {"timeout_seconds": 1.5},
            ("rank 1 failed", "not ended after 0.025 min", "waiting"),
        ),
    ],
)
def test_another_reason_is_an_error_on_all_ranks(
    one: str, other: str, limits: dict[str, float], words: tuple[str, ...]
) -> None:
    for error in agreed(one, other, **limits):  # type: ignore[arg-type]
        assert isinstance(error, DsEncDecError)
        assert [word for word in words if word not in str(error)] == []


def test_one_rank_that_is_asked_to_stop_stops_all() -> None:
    errors = agreed(HANGS, HANGS, stop=lambda request: request._on_signal(signal.SIGTERM, None))
    assert all(isinstance(error, Preempted) for error in errors)
    assert [str(error).split()[2] for error in errors] == ["another", "SIGTERM"]


def test_a_stop_file_stops_the_search(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    errors = agreed(HANGS, timeout_seconds=20, stop=lambda one: one.folder_is_known(tmp_path / "stop", lambda _: None))
    assert [str(error) for error in errors] == [
        "stopped by ds-encdec stop before the first step: nothing to save",
    ]
