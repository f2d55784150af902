"""Runs on two real ranks, of which one really runs out of memory, micro-batches that are chosen by its limit, and what
engines say that they hold."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_runs import QUIET, ForkedRuns, arguments, status
from tiny_run import QUICKSTART, losses, metrics, overrides, wait_until

from ds_encdec.checkpoint.folder import verify_checkpoints
from ds_encdec.config.schema import FullConfig, load_config

pytestmark = [pytest.mark.distributed]

PARAMETERS = 60_736
"""Of the tiny run's model."""
STEPS = QUIET | {
    "data__num_lanes": 4,  # two micro-batches a step on each of two ranks
    "training__num_train_steps": 4,
    "training__save_steps": 2,
    "training__logging_steps": 1,
}


def test_a_rank_without_memory_says_what_would_have_fitted(runs: ForkedRuns, tmp_path: Path) -> None:
    """Its memory is full to the last when it says so, and the other rank ends because it is gone."""
    large = {"training__per_device_train_batch_size": 16, "training__activation_checkpointing": "none"}
    engine = {"infra__distributed_type": "fsdp", "infra__offload_optimizer": "none"}
    settings = overrides(tmp_path, **STEPS | engine | large)
    faults = [{"kind": "full_memory", "at": 4, "on_rank": 1}]
    finished = runs.run(["--config", QUICKSTART, *settings], ranks=2, faults=faults)
    assert finished.codes[1] == 6, finished.output
    assert finished.codes[0] != 0, finished.output

    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"]) == ("failed", 6)
    assert ended["reason"] in finished.output
    asked, estimated, measured, _, *proposed = ended["reason"].splitlines()
    assert re.match(r"rank 1 ran out of memory: .*you tried to allocate 16777216 bytes", asked)
    assert re.match(
        r"Estimated for each rank, at its worst moment \(.*\): [\d.]+ GiB \(framework [\d.]+ GiB, ", estimated
    )
    assert re.match(r"Rank 1 has held [\d.]+ GiB at most; the host has [\d.]+ GiB for 2 ranks\.", measured)
    before = load_config(Path(QUICKSTART), settings)
    for line in proposed:  # each has overrides that change the run
        proposal = re.fullmatch(r"  \d\. (in a new run only: )?(.+?) \(estimated peak per rank .*\)", line)
        assert proposal, line
        after = load_config(Path(QUICKSTART), [*settings, *proposal[2].split()])
        assert after != before
        assert (after.training.micro_batch_size != before.training.micro_batch_size) == bool(proposal[1])
    assert "in a new run only" not in proposed[0]

    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert [saved.manifest.step for saved in verify_checkpoints(tmp_path)] == [2]
    lines = metrics(tmp_path)
    assert len({line["mem/estimated_bytes"] for line in lines}) == 1
    # By 6 % on one machine; libraries of other CPUs keep more.
    assert 0.6 < lines[-1]["mem/estimated_bytes"] / lines[-1]["mem/peak_bytes"] < 1.4


@pytest.mark.parametrize(
    ("engine", "stage", "weights"),  # bytes per parameter; FSDP2 gathers weights, and before a step none are
    [("fsdp", "zero3", 0), ("deepspeed", "zero2", 2), ("deepspeed", "zero3", 2 / 2)],
)
def test_what_accelerators_try_before_their_first_step_changes_nothing(
    runs: ForkedRuns, tmp_path: Path, engine: str, stage: str, weights: float
) -> None:
    """An evaluation and the copies of a save, as large as later ones: the optimizer's states are there by then. The
    second line alone has what the engine's tensors take."""
    changes: dict[str, Any] = {"infra__distributed_type": engine, "infra__sharding_stage": stage}
    changes |= {"infra__offload_optimizer": "none", "training__bf16": True, "training__eval_samples": 8}
    changes |= {"training__eval_steps": 2, "training__save_steps": 2, "training__residual_dropout": 0.1}
    lines = []
    for name, faults in (("plain", []), ("rehearsed", [{"kind": "rehearse"}])):
        words = overrides(tmp_path / name, **STEPS | changes)
        finished = runs.run(["--config", QUICKSTART, *words], ranks=2, faults=faults).ended_with(0)
        kept = ("step", "train/loss", "train/grad_norm", "eval/loss")
        lines.append([{key: line.get(key) for key in kept} for line in metrics(tmp_path / name)])
        names = [f"mem/{category}_bytes" for category in ("weights", "master_weights", "gradients", "optimizer")]
        first, second, *later = [line for line in metrics(tmp_path / name) if "train/loss" in line]
        assert not {*names} & set().union(first, *later)
        # The smallest parameters are not sharded under ZeRO-3, and shards are padded.
        held = (weights, 4 / 2, 4 / 2, 8 / 2)
        assert [second.get(one, 0) / PARAMETERS for one in names] == pytest.approx(held, rel=0.15, abs=0.01)
    assert lines[0] == lines[1]
    for rank in range(2):
        staged = re.findall(rf"rank {rank} stages (\d+) bytes after (\d+) data steps", finished.output)
        assert [int(steps) > 0 for _, steps in staged] == [False, True, True]
        assert len({num_bytes for num_bytes, _ in staged}) == 1, staged


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
