"""What a probe is given, what it runs, and how its process ends."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist
from tiny_job import MODEL, make_config

from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import with_micro_batch_size
from ds_encdec.data.budgets import token_budgets
from ds_encdec.launch.world import World
from ds_encdec.registry.denoisers import expected_ratio
from ds_encdec.training.auto_batch.probe import TASK, Outcome, ProbeProcess, ProbeTask, full_batch


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


def test_a_task_comes_through_its_line() -> None:
    line = TASK.dump_json(task := make_task(make_config(), 1))
    assert (line.count(b"\n"), TASK.validate_json(line)) == (0, task)


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


def ended(process: ProbeProcess) -> Outcome:
    deadline = time.monotonic() + 600
    while (outcome := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return outcome


def test_a_probe_that_fails_for_another_reason_says_which(port: int) -> None:
    """Two full ranks of parameters are more than one: the sharding is refused before anything is built."""
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
        ("cpu", KILLED, False, "the kernel killed it"),
        ("cuda:0", KILLED, False, "the kernel killed it"),
        ("cpu", "print('what():  std::bad_alloc', file=sys.stderr); os.abort()", False, "std::bad_alloc"),
        ("cpu", NO_THREADS, False, "Thread creation failed"),
        ("cpu", "os.abort()", True, "It was killed by SIGABRT"),
        ("cpu", "sys.exit('x' * 10_000 + ' the last')", True, "x the last"),
    ],
)
def test_what_an_end_without_a_report_means(device: str, code: str, failed: bool, message: str) -> None:
    """Host memory beside a GPU is not helped by smaller micro-batches."""
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
