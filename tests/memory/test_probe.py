"""What a probe is given, what it runs, and how its process ends."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from ds_encdec.config.batch_size import with_micro_batch_size
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.packing import token_budgets
from ds_encdec.launch.world import World, free_port
from ds_encdec.memory.job import expected_ratio
from ds_encdec.memory.probe import ProbeTask, full_batch
from ds_encdec.memory.probe_process import ProbeProcess, ProbeState

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


def make_task(config: FullConfig) -> ProbeTask:
    return ProbeTask(
        config=with_micro_batch_size(config, 2, 1),
        model=MODEL,
        engine="fsdp",
        world=World(0, 0, 1, 1, 0, 1, "127.0.0.1", free_port(), "python"),
        device="cpu",
        gradient_accumulation_steps=2,
        available_bytes=10**10,
        limit_bytes=9 * 10**9,
    )


def test_a_task_comes_through_its_line() -> None:
    task = make_task(make_config())
    line = task.dump()
    assert "\n" not in line
    assert ProbeTask.parse(line) == task


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("most_examples", [512, 4])
def test_a_batch_is_as_full_as_its_examples_can_make_it(size: int, most_examples: int) -> None:
    config = make_config()
    data = config.data.model_copy(update={"max_examples_per_micro_batch": most_examples})
    config = config.model_copy(update={"data": data})
    budgets = token_budgets(data, size, expected_ratio(data.ul2_task_weights))
    batch = full_batch(config, size, 512)
    assert len(batch.encoder_lengths) <= most_examples
    assert max(batch.encoder_lengths) <= 100
    assert max(batch.decoder_lengths) <= 60
    assert batch.encoder_tokens == min(budgets.encoder_tokens, 100 * len(batch.encoder_lengths))
    assert batch.target_tokens == min(budgets.decoder_tokens, 60 * len(batch.decoder_lengths))
    if most_examples == 512:
        assert (batch.encoder_tokens, batch.target_tokens) == (budgets.encoder_tokens, budgets.decoder_tokens)
    assert int(batch.encoder_ids.max()) < 512


def ended(process: ProbeProcess) -> ProbeState:
    deadline = time.monotonic() + 120
    while (state := process.poll()) == ProbeState.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return state


def test_a_probe_that_fails_for_another_reason_says_which() -> None:
    """Two full ranks of parameters are more than one: the sharding is refused before anything is built."""
    config = make_config()
    infra = config.infra.model_copy(update={"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2})
    with ProbeProcess(make_task(config.model_copy(update={"infra": infra}))) as process:
        assert ended(process) == ProbeState.FAILED
    assert "ended with exit code 1" in process.message
    assert "ConfigError" in process.message


def test_a_probe_that_the_kernel_kills_has_run_out_of_memory() -> None:
    with ProbeProcess(make_task(make_config())) as process:
        (child,) = (child for child in psutil.Process().children() if "ds_encdec.memory.probe" in child.cmdline())
        child.send_signal(signal.SIGKILL)
        assert ended(process) == ProbeState.OUT_OF_MEMORY
    assert "killed" in process.message
