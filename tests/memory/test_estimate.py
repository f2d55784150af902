"""The moments of a step, one after the other, against a trace of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from jobs import job_of, small_sizes

from ds_encdec.config.data_sections import EvalSet
from ds_encdec.memory.estimate import engine_memory, step_parts
from ds_encdec.memory.job import Job
from ds_encdec.memory.trace import watched_pass
from ds_encdec.model import precision

SIZES = small_sizes(256, 768, layers=3, vocab=128, head_dim=32)


def wide_job(device: str, numbers: str, mode: str, ratio: float) -> Job:
    """Wide micro-batches of full documents, beside which the weights are small."""
    lengths = {"max_encoder_length": 512, "max_decoder_length": int(512 / ratio), "max_examples_per_micro_batch": 4}
    training = {"per_device_train_batch_size": 4, "bf16": numbers != "float32", "activation_checkpointing": mode}
    return job_of(
        "fsdp",
        sizes=SIZES,
        world_size=1,
        accumulation=32,
        device="cpu",
        sections={"model": {"loss_chunk_tokens": 16}, "data": lengths, "training": training},
        make={"device": device, "ratio": ratio, "emulates_bf16": numbers == "emulated"},
    )


@pytest.mark.parametrize(
    ("device", "numbers", "mode", "ratio"),
    [
        ("cpu", "float32", "none", 1.0),
        ("cpu", "bfloat16", "selective", 2.0),
        ("cpu", "emulated", "full", 4.0),
        ("cuda", "bfloat16", "none", 1.0),
        ("cuda", "bfloat16", "every_n", 4.0),
    ],
)
def test_activations_at_their_worst(
    device: str, numbers: str, mode: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the encoder or in the decoder, as the tokens are shared out, or behind the head."""
    emulated = frozenset({torch.bfloat16}) if numbers == "emulated" else frozenset()
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    job = wide_job(device, numbers, mode, ratio)
    held, _ = watched_pass(job).peak(("activations", "logits"))
    found = sum(held.values())
    moments = step_parts(job, engine_memory(job))
    expected = max(held.activations + held.logits for name, held in moments if name != "evaluation")
    assert 0.995 * found < expected < 1.015 * found


def test_generating_in_evaluations_takes_a_second_model_and_a_cache() -> None:
    job = wide_job("cuda", "bfloat16", "full", 1.0)
    training = job.config.training.model_copy(update={"eval_generate_samples": 8})
    generating = replace(job, config=job.config.model_copy(update={"training": training}))
    parts = [dict(step_parts(one, engine_memory(one))) for one in (job, generating)]
    added = parts[1].pop("generation").total - engine_memory(job).resting.total
    row = job.config.data.max_encoder_length + training.generation_max_new_tokens
    tokens = max(row, min(8 * row, 16_384))
    cache = 2 * SIZES.num_hidden_layers * SIZES.num_key_value_heads * SIZES.head_dim * tokens * 2
    assert (parts[0], added) == (parts[1], 2 * job.parameters + cache)
    sets = {"law": EvalSet(eval_files=["law.jsonl"]), "code": EvalSet(eval_files=["code.jsonl"])}  # have losses alone
    data = job.config.data.model_copy(update={"eval_sets": sets})
    more = replace(generating, config=generating.config.model_copy(update={"data": data}))
    assert dict(step_parts(more, engine_memory(more)))["generation"].total == engine_memory(job).resting.total + added
