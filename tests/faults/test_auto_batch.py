"""`per_device_train_batch_size: auto` on two real ranks whose memory really runs out, and what may happen meanwhile."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_runs import ForkedRuns, arguments, status
from tiny_run import losses, wait_until

from ds_encdec.config.schema import FullConfig

pytestmark = [pytest.mark.distributed]

# What each process may have beyond what a rank of the same run holds that makes micro-batches of 1: logits take about
# 100 MB for one sequence and 700 MB for seven. The estimate does not know of the limit, and the probes run into it.
ROOM_BYTES = 300_000_000
AUTO: dict[str, Any] = {
    "data__num_lanes": "null",
    "data__max_encoder_length": 512,
    "data__max_decoder_length": 4096,
    "data__max_seq_length": 2048,
    "data__max_examples_per_micro_batch": 64,
    "model__architecture__vocab_size": 8192,
    "model__loss_chunk_tokens": 100_000,
    "training__per_device_train_batch_size": "auto",
    "training__activation_checkpointing": "none",
    "training__num_train_steps": 1,
    "training__lr_scheduler_type": "constant",
    "training__warmup_steps": 0,
    "training__logging_steps": 1,
}


def probes() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    found = [child for child in below if "ds_encdec.training.auto_batch.probe" in child.cmdline()]
    return sorted(found, key=lambda process: process.environ()["RANK"])


def two_probes() -> list[psutil.Process]:
    wait_until(lambda: len(probes()) == 2, 600)
    return probes()


def test_a_size_that_fits_is_found_and_kept(runs: ForkedRuns, tmp_path: Path) -> None:
    """Of 7 and 1, the divisors of a rank's share, 7 is estimated to fit and does not. FSDP2's: tests/auto_batch."""
    numbers = {"training__per_device_train_batch_size": 1, "training__gradient_accumulation_steps": 7}
    by_number = runs.run(arguments(tmp_path / "numbers", "deepspeed", **AUTO | numbers), ranks=2).ended_with(0)
    auto = arguments(tmp_path / "auto", "deepspeed", **AUTO, training__global_batch_size=14)
    result = runs.run(auto, ranks=2, limits={"RLIMIT_DATA": by_number.data_bytes + ROOM_BYTES}).ended_with(0)
    assert "micro-batches of 7 do not fit (rank " in result.output
    assert "micro-batch 1: estimated " in result.output
    assert "accumulation 7 keeps the global batch of 14" in result.output
    assert probes() == []

    found = FullConfig.from_yaml(tmp_path / "auto" / "config.yaml").training
    assert (found.micro_batch_size, found.gradient_accumulation_steps, found.global_batch_size) == (1, 7, 14)
    assert losses(tmp_path / "auto") == losses(tmp_path / "numbers")

    resumed = runs.run([*auto, "training.num_train_steps=2", "--resume", "auto"], ranks=1).ended_with(0)
    assert "micro-batches of" not in resumed.output  # nothing is tried
    kept = FullConfig.from_yaml(tmp_path / "auto" / "config.yaml").training
    assert (kept.micro_batch_size, kept.gradient_accumulation_steps) == (1, 14)


@pytest.mark.parametrize("code", [6, 75])
def test_a_run_whose_probes_get_a_signal_ends(runs: ForkedRuns, tmp_path: Path, code: int) -> None:
    """The kernel kills one of two probes, and nobody waits for it; or a scheduler stops every process, probes first."""
    with ThreadPoolExecutor() as pool:
        run = pool.submit(runs.run, arguments(tmp_path, "fsdp", **AUTO, training__global_batch_size=2), ranks=2)
        found = two_probes()
        if code == 6:
            found[1].send_signal(signal.SIGKILL)
        else:
            for probe in found:
                probe.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # longer than it takes to see that a probe has ended
            found[1].parent().send_signal(signal.SIGTERM)
        result = run.result(timeout=180).ended_with(code)
    assert status(tmp_path)["exit_code"] == code
    if code == 6:
        assert "not even a micro-batch of 1 fits into the" in result.output
        assert "rank 1: the kernel killed it" in result.output
    assert probes() == []


def test_a_run_that_is_killed_while_it_probes_leaves_nothing_behind(runs: ForkedRuns, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        run = pool.submit(runs.run, arguments(tmp_path, "fsdp", **AUTO, training__global_batch_size=2), ranks=2)
        waiting, stopped = two_probes()
        stopped.suspend()
        wait_until(lambda: waiting.num_threads() > 1)  # it watches its rank, and so has read its task
        for rank in (waiting.parent(), stopped.parent()):
            rank.kill()
        run.result(timeout=180)
        stopped.resume()
        _, alive = psutil.wait_procs([waiting, stopped], timeout=600)
    assert alive == []
