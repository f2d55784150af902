"""How a run comes by its micro-batch size, and how ranks agree on what their probes have found."""

import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ds_encdec.base.types import ConfigError, DsEncDecError, Preempted
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manifest import Manifest
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import token_budgets, with_micro_batch_size
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import World
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.registry.denoisers import expected_ratio
from ds_encdec.training.auto_batch.probe import Outcome, ProbeProcess, ProbeTask, full_batch
from ds_encdec.training.auto_batch.resolve import agreed_outcome, largest_that_fits, resolve_batch_size


def world(rank: int, size: int) -> World:
    return World(rank, rank, size, size, 0, 1, "127.0.0.1", 1, "python")


def settled(saved: Path | None, ranks: int, **training: Any) -> tuple[int | str, int, int | None]:
    context = RunContext(world(0, ranks), torch.device("cpu"), "fsdp", HostCollectives())
    stop, model = StopRequest(world(0, ranks)), Qwen3Seq2SeqConfig.from_dict(dict(MODEL))
    found = Checkpoint(saved, Manifest(1, 2, "fsdp", (), True, "", None)) if saved else None
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
    for outcome in agreed(other, RUNS_OUT):
        assert isinstance(outcome, Outcome)
        assert not outcome.fits
        assert outcome.message.startswith("rank 1: the kernel killed it")


@pytest.mark.parametrize(
    ("one", "other", "limits", "words"),
    [
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


MODEL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}


def make_config(**training: object) -> FullConfig:
    return FullConfig.model_validate(
        {
            "model": {"tokenizer_name_or_path": "builtin", "architecture": MODEL},
            "data": {"max_encoder_length": 100, "max_decoder_length": 60},
            "training": training,
            "infra": {"device": "cpu", "distributed_type": "fsdp", "offload_optimizer": "none", "num_gpus": 1},
        }
    )


@pytest.fixture
def port() -> Iterator[int]:
    """Where a run's ranks have met."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def make_task(config: FullConfig, port: int) -> ProbeTask:
    return ProbeTask(
        config=with_micro_batch_size(config, 2, 1),
        model=MODEL,
        engine="fsdp",
        world=World(0, 0, 1, 1, 0, 1, "127.0.0.1", port, "python"),
        number=1,
        device="cpu",
        free_bytes=10**10,
    )


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("most_examples", [512, 4])
def test_a_batch_is_as_full_as_its_examples_can_make_it(size: int, most_examples: int) -> None:
    config = make_config()
    data = config.data.model_copy(update={"max_examples_per_micro_batch": most_examples})
    config = config.model_copy(update={"data": data})
    budgets = token_budgets(data, size, expected_ratio(data.ul2_task_weights))
    batch = full_batch(config, size, 512)
    count, tokens = len(batch.encoder_lengths), (budgets.encoder_tokens, budgets.decoder_tokens)
    assert count <= most_examples
    assert (max(batch.encoder_lengths), max(batch.decoder_lengths)) <= (100, 60)
    most = tokens if most_examples == 512 else (min(tokens[0], 100 * count), min(tokens[1], 60 * count))
    assert (batch.encoder_tokens, batch.target_tokens) == most
    assert int(batch.encoder_ids.max()) < 512


def test_a_full_batch_of_pairs_has_whole_pairs() -> None:
    config = make_config()
    data = config.data.model_copy(update={"objective": "dpo"})
    config = config.model_copy(update={"data": data})
    batch = full_batch(config, 3, 512)
    assert set(batch.group_sizes) == {2}
    assert batch.num_losses == len(batch.group_sizes) == len(batch.encoder_lengths) / 2
    budgets = token_budgets(data, 3, data.max_encoder_length / data.max_decoder_length)
    assert (batch.encoder_tokens, batch.target_tokens) == (budgets.encoder_tokens, budgets.decoder_tokens)


def ended(process: ProbeProcess) -> Outcome:
    deadline = time.monotonic() + 600
    while (outcome := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return outcome


def test_a_probe_that_fails_for_another_reason_says_which(port: int) -> None:
    config = make_config()
    infra = config.infra.model_copy(update={"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2})
    with ProbeProcess(make_task(config.model_copy(update={"infra": infra}), port)) as process:
        outcome = ended(process)
    assert outcome.failed
    assert "ended with exit code 1" in outcome.message
    assert "ConfigError" in outcome.message


@pytest.mark.parametrize(
    ("free_bytes", "eval_samples", "says"),
    [(100 * 10**6, 0, ""), (10**9, 8, "in an evaluation (training.per_device_eval_batch_size): ")],
)
def test_memory_runs_out_by_the_limit(port: int, free_bytes: int, eval_samples: int, says: str) -> None:
    config = make_config(eval_samples=eval_samples, per_device_eval_batch_size=10**5)
    task = dataclasses.replace(make_task(config, port), free_bytes=free_bytes)
    with ProbeProcess(task) as process:
        outcome = ended(process)
    assert (outcome.fits, outcome.failed) == (False, False), outcome.message
    assert outcome.message.startswith(says)
    assert outcome.smaller_may_fit == (not says)
    assert not outcome.of_device


INSTEAD = (sys.executable, "-S", "-c")
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
NO_THREADS = "sys.exit('libgomp: Thread creation failed: Resource temporarily unavailable')"


@pytest.mark.parametrize(
    ("device", "code", "failed", "message"),
    [
        ("cuda:0", KILLED, False, "the kernel killed it"),
        ("cpu", "print('what():  std::bad_alloc', file=sys.stderr); os.abort()", False, "std::bad_alloc"),
        ("cpu", NO_THREADS, False, "Thread creation failed"),
        ("cpu", "os.abort()", True, "It was killed by SIGABRT"),
        ("cpu", "sys.exit('x' * 10_000 + ' the last')", True, "x the last"),
    ],
)
def test_what_an_end_without_a_report_means(device: str, code: str, failed: bool, message: str) -> None:
    task = dataclasses.replace(make_task(make_config(), 1), device=device)
    with ProbeProcess(task, (*INSTEAD, f"import os, signal, sys; {code}")) as process:
        outcome = ended(process)
    assert (outcome.fits, outcome.failed, outcome.of_device) == (False, failed, False)
    assert message in outcome.message
    assert len(outcome.message) < 5000
    assert outcome.smaller_may_fit == (device == "cpu")


def test_a_probe_is_ended_by_its_rank_alone_and_with_all_that_it_has_started() -> None:
    start_another = "print(subprocess.Popen(['sleep', '3600']).pid, file=sys.stderr, flush=True)"
    code = f"import signal, subprocess, sys; {start_another}; signal.pause()"
    with ProbeProcess(make_task(make_config(), 1), (*INSTEAD, code)) as process:
        (child,) = (child for child in psutil.Process().children() if "signal.pause()" in " ".join(child.cmdline()))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            child.send_signal(number)
        deadline = time.monotonic() + 60
        while not (said := process.last_words()).endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        grandchild = psutil.Process(int(said))
        assert process.poll() is None
    assert psutil.wait_procs([child, grandchild], timeout=300)[1] == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


NEEDS = {size: 10 * size for size in (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)}
"""As estimated, of the divisors of 48."""
FEW = {1: 900, 2: 1001, 3: 1002, 4: 1003}


@pytest.mark.parametrize(
    ("needs", "limit", "capacity", "bytes_each", "tried", "found"),
    [
        (NEEDS, 125, 125, 10, [12], 12),  # as estimated: 16 would take 160
        (NEEDS, 9, 9, 9, [1], 1),  # the estimate has no room even for this one
        (NEEDS, 125, 125, 11, [12, 6], 6),  # of at most half the size, and then no larger one
        (NEEDS, 125, 125, 100, [12, 6, 3, 1], 1),
        (NEEDS, 125, 125, 6, [12, 16], 16),  # where there is room for 16 (72 + 40), but not then for 24 (96 + 80)
        (NEEDS, 125, 30, 2, [12, 16], 12),  # a larger one that does not fit leaves what did
        (FEW, 1000, 1000, 1, [1, 2, 3], 3),  # two larger ones at most
        (NEEDS, 125, 0, 10, [12, 6, 3, 1], None),
        (NEEDS, 125, 0, 0, [12], None),  # all sizes take it
    ],
)
def test_the_largest_that_fits(
    needs: dict[int, int], limit: int, capacity: int, bytes_each: int, tried: list[int], found: int | None
) -> None:
    no_memory, sizes = Outcome(fits=False, message="no memory", smaller_may_fit=bytes_each > 0), list[int]()

    def run(size: int) -> Outcome:
        sizes.append(size)
        peak_bytes = size * bytes_each
        return Outcome(fits=True, peak_bytes=peak_bytes) if 0 < peak_bytes <= capacity else no_memory

    expected = (tried[-1], no_memory) if found is None else (found, Outcome(fits=True, peak_bytes=found * bytes_each))
    assert largest_that_fits(needs, limit, run) == expected
    assert sizes == tried
