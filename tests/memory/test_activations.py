"""The formulas of activations against traces of the model, and the tracking of real steps against the allocator."""

import json
from dataclasses import replace
from itertools import accumulate

import memory_formulas
import pytest
import torch
from jobs import job_of, small_sizes
from pass_trace import watched_pass
from torch import nn
from tracked import Tracked, tracking

from ds_encdec.memory.estimate import ENCODER_FORMS, TABLE, MicroBatch, engine_memory, formulas_of, step_parts
from ds_encdec.memory.job import Job, Sizes
from ds_encdec.memory.variants import changed
from ds_encdec.model import precision
from ds_encdec.model.cross_attention import FORMS

OFTEN = ("cuda bf16", "cpu fp32")


@pytest.mark.parametrize("form", [*FORMS, *ENCODER_FORMS])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] * (kind not in OFTEN)) for kind in memory_formulas.KINDS],
)
def test_the_table_is_what_traces_give(form: str, kind: str) -> None:
    modes = json.loads(TABLE.read_text())[form][kind]
    traced = [(kind, mode) for mode in modes]
    if kind in OFTEN:  # of the others by `scripts/dev/memory_formulas.py --check`
        traced.append((f"{kind} lora dropout", "full"))
    for each, mode in traced:
        found = memory_formulas.formulas(form, each, mode)
        assert {part: formulas_of(form, each, mode)[part] for part in found} == found


def formed(form: str, decoders: int = 3, heights: list[int] | None = None) -> Sizes:
    """Sizes of a model with `decoders` layers in the decoder, which read the encoder at `heights`, by default all."""
    sizes, encoders = small_sizes(256, 768, layers=decoders, vocab=128, head_dim=32), decoders - FORMS[form].is_aligned
    if FORMS[form].is_aligned:
        heights = heights or list(range(decoders))
        encoders = heights[-1]
    return replace(sizes, cross_attention=form, encoder_heights=heights, num_encoder_layers=encoders)


FLAT = formed("final")


def full_job(
    device: str, numbers: str, mode: str, ratio: float, sizes: Sizes = FLAT, freeze: tuple[str, ...] = ()
) -> Job:
    """Wide micro-batches of full documents, beside which the weights are small."""
    lengths = {"max_encoder_length": 512, "max_decoder_length": int(512 / ratio), "max_examples_per_micro_batch": 4}
    training = {"per_device_train_batch_size": 4, "bf16": numbers != "float32", "activation_checkpointing": mode}
    training["freeze"] = list(freeze)
    return job_of(
        "fsdp",
        sizes=sizes,
        world_size=1,
        accumulation=32,
        device="cpu",
        sections={"model": {"loss_chunk_tokens": 16}, "data": lengths, "training": training},
        make={"device": device, "ratio": ratio, "emulates_bf16": numbers == "emulated"},
    )


def kept(job: Job, layer: str) -> float:
    return next(each.kept for each in MicroBatch(job).layers() if each.name == layer)


def test_every_nth_layer_recomputes() -> None:
    for index, mode in enumerate(("full", "none", "full")):
        layer = f"decoder layer {index}"
        like, found = (kept(full_job("cpu", "bfloat16", each, 1.0), layer) for each in (mode, "every_n"))
        assert like == found


def test_attention_without_a_flash_kernel_keeps_scores_and_dropout_its_masks() -> None:
    job, layer = full_job("cuda", "bfloat16", "none", 1.0), "encoder layer 0"
    without = changed(job, {"model.use_flash_attention": False})
    scores = 4 * 512 * FLAT.num_attention_heads * (512 + 2 * FLAT.head_dim) * 2
    assert kept(without, layer) - kept(job, layer) == scores
    dropped = changed(job, {"training.residual_dropout": 0.1})
    assert kept(dropped, layer) - kept(job, layer) == 2 * job.encoder_tokens * FLAT.hidden_size


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
    emulated = frozenset({torch.bfloat16}) if numbers == "emulated" else frozenset()
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    for form in FORMS:
        job = full_job(device, numbers, mode, ratio, formed(form))
        assert 0.995 < estimated_peak(job) / traced_peak(job) < 1.015, form


@pytest.mark.parametrize("norms", memory_formulas.OTHER_NORMS)
def test_activations_of_other_families(norms: tuple[str, str]) -> None:
    # Without norms of queries and keys a pass on a CPU holds up to a sixth less than Qwen3's.
    for form, device, mode in (("aligned", "cpu", "none"), ("renormed", "cuda", "full")):
        sizes = replace(formed(form), head_dim=64, qk_norm=norms[0], norm_position=norms[1])
        job = full_job(device, "bfloat16", mode, 1.0, sizes)
        assert 0.98 < estimated_peak(job) / traced_peak(job) < 1.035, form


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_of_unequal_stacks(mode: str) -> None:
    for form, decoders, heights in (
        ("aligned", 12, [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]),
        ("aligned", 4, [0, 4, 7, 11]),
        ("aligned", 4, [8, 9, 10, 11]),
        ("renormed", 4, None),
    ):
        job = full_job("cuda", "bfloat16", mode, 4.0, formed(form, decoders, heights))
        assert estimated_peak(job) == pytest.approx(traced_peak(job), rel=1e-3)


@pytest.mark.parametrize(("form", "most"), [("aligned", 1.06), ("renormed", 1.01), ("final", 1.01)])
def test_activations_beside_a_frozen_encoder(form: str, most: float) -> None:
    # Norms of decoder layers keep its states; where inputs are long, its forward pass is the worst moment.
    for mode, ratio in (("none", 1.0), ("full", 1.0), ("full", 4.0)):
        job = full_job("cuda", "bfloat16", mode, ratio, formed(form, 12), ("encoder.*", "shared.*"))
        assert 0.999 < estimated_peak(job) / traced_peak(job) < most


@pytest.mark.parametrize("objective", ["contrastive", "mntp"])
def test_activations_of_an_encoder_alone(objective: str) -> None:
    sizes = replace(FLAT, num_hidden_layers=0, num_encoder_layers=4)
    for device, numbers, mode in (("cpu", "float32", "none"), ("cuda", "bfloat16", "full")):
        job = job_of(
            "fsdp",
            sizes=sizes,
            world_size=1,
            accumulation=1,
            device="cpu",
            sections={
                "model": {"loss_chunk_tokens": 16},
                "data": {"objective": objective, "max_encoder_length": 512, "max_examples_per_micro_batch": 4},
                "training": {
                    "per_device_train_batch_size": 4,
                    "bf16": numbers != "float32",
                    "activation_checkpointing": mode,
                },
            },
            make={"device": device},
        )
        assert job.decoder_tokens == 0
        traced, estimated = traced_peak(job), estimated_peak(job)
        assert 0.99 < estimated / traced < 1.02
        assert len(list(MicroBatch(job).layers())) == 4


def test_an_embeddings_step_keeps_all_embeddings_of_all_ranks() -> None:
    sizes, data = replace(FLAT, num_hidden_layers=0), {"objective": "contrastive", "max_encoder_length": 512}

    def peak(world_size: int, accumulation: int) -> float:
        sections = {"data": data, "training": {"per_device_train_batch_size": 4}}
        job = job_of("fsdp", sizes=sizes, world_size=world_size, accumulation=accumulation, sections=sections)
        return dict(step_parts(job, engine_memory(job)))["loss"].activations

    texts = 2 * 4 * 4  # a micro-batch of two segments for each of four sequences, in quarters
    added = 6 * 4 * ((64 - 8) * texts * FLAT.hidden_size + ((64 * texts) ** 2 - (8 * texts) ** 2) / 4)
    assert peak(8, 8) - peak(8, 1) == added == peak(8, 8) - peak(4, 2)


def traced_peak(job: Job) -> int:
    return max(accumulate(change for _, purpose, change in watched_pass(job).changes() if purpose == "activations"))


def estimated_peak(job: Job) -> float:
    moments = step_parts(job, engine_memory(job))
    return max(held.activations + held.logits for name, held in moments if name != "evaluation")


def test_an_aligned_encoders_last_states_leave_the_device_too() -> None:
    batch = MicroBatch(job := full_job("cuda", "bfloat16", "full", 1.0, formed("aligned", 4)))
    kept = sum(layer.kept for layer in batch.layers())
    assert kept == 2 * (4 * job.decoder_tokens + 3 * job.encoder_tokens) * FLAT.hidden_size
    assert batch.kept_on_host() == kept + 2 * job.encoder_tokens * FLAT.hidden_size


def test_generating_in_evaluations_takes_a_second_model_and_a_cache() -> None:
    job = full_job("cuda", "bfloat16", "full", 1.0)
    generating = changed(job, {"training.eval_generate_samples": 8})
    parts = [dict(step_parts(one, engine_memory(one))) for one in (job, generating)]
    added = parts[1].pop("generation").total - engine_memory(job).resting.total
    row = job.config.data.max_encoder_length + job.config.training.generation_max_new_tokens
    tokens = max(row, min(8 * row, 16_384))
    cache = 2 * FLAT.num_hidden_layers * FLAT.num_key_value_heads * FLAT.head_dim * 2
    assert (parts[0], added) == (parts[1], 2 * job.parameters + cache * tokens)
    # The first step of an aligned model has the input's keys and values, and its states at three heights.
    aligned = changed(
        full_job("cuda", "bfloat16", "full", 1.0, formed("aligned")), {"training.eval_generate_samples": 8}
    )
    found = dict(step_parts(aligned, engine_memory(aligned)))["generation"].activations
    assert found == (cache + 2 * 3 * FLAT.hidden_size) * tokens * job.config.data.max_encoder_length / row


CPU = torch.device("cpu")
ROWS, WIDTH = 512, 256
WEIGHT_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = ROWS * WIDTH * 4


def test_agrees_with_the_allocator() -> None:
    def step(tracked: Tracked | None = None) -> None:
        model = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        loss = model(torch.ones(4, 128, 128)).square().sum()
        loss.backward()
        if tracked:
            tracked.end_phase("all")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    expected = max(accumulate(change for _, change in changes))
    with tracking(nn.Module(), None, CPU) as tracked:
        step(tracked)
    assert tracked.peak_bytes - tracked.resting_bytes == pytest.approx(expected, rel=0.02)
