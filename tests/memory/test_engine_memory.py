"""The memory of both engines by hand: published figures, and what test_memory_ranks.py does not measure."""

import dataclasses
import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from jobs import EMBEDDING, ENCODER, PARAMETERS, QWEN3_0_6B, job_of, small_sizes

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.memory.breakdown import Breakdown, Count, power_of_two
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import PUBLISHED, QWEN3_IDS, Sizes, checkpoint_bytes, make_job, run_sizes
from ds_encdec.memory.zero import swapped_bytes, zero_memory
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.registry.engines import EngineName

NORMS = 56 * (2 * 1024 + 2 * 128) + 2 * 1024
LARGE = dataclasses.replace(
    QWEN3_0_6B, vocab_size=32_000, hidden_size=4096, num_attention_heads=32, intermediate_size=11_008
)
"""Sizes with the parameters spread over many matrices, none of which is larger than a 64th of all."""
BF16_GRADIENTS = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "bf16"}}}


def states(moment: Breakdown) -> float:
    return moment.weights + moment.master_weights + moment.gradients + moment.optimizer


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("model", "parameters"), [("0.6B", PARAMETERS), ("8B", 15_136_811_008)])
def test_what_rests_between_steps(model: str, parameters: int, stage: str, ranks: int, engine: EngineName) -> None:
    shards = 1 if stage == "zero0" else ranks
    held = engine_memory(job_of(engine, stage, sizes=PUBLISHED[f"Qwen/Qwen3-{model}"], world_size=ranks)).resting
    assert held.master_weights == pytest.approx(4 * parameters / shards, rel=1e-3)
    assert held.optimizer == pytest.approx(8 * parameters / shards, rel=1e-3)
    weights = 0 if engine == "fsdp" else 2 * parameters / (shards if stage == "zero3" else 1)
    assert held.weights == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize(("stage", "published_gb"), [("zero0", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_zero_papers_figures(stage: str, published_gb: float) -> None:
    extra = BF16_GRADIENTS if stage > "zero1" else {}
    job = job_of("deepspeed", stage, world_size=64, sizes=LARGE, accumulation=2, **extra)
    memory = zero_memory(job)
    of_7_5_billion = states(memory.resting + memory.forward) * 7.5 / job.parameters
    # Stage 2 keeps all of a parameter of which a rank's partition has a part: two of 45 M here, of 2 bytes each.
    straddling = 2 * 2 * 4096 * 11_008 * 7.5 / job.parameters if stage == "zero2" else 0.0
    assert published_gb - 0.1 < of_7_5_billion < published_gb + straddling + 0.1


def test_one_rank_of_deepspeed_gathers_nothing() -> None:
    assert zero_memory(job_of(world_size=1)).forward.total == 0
    offloaded = zero_memory(job_of(world_size=1, offload_params="cpu", offload_optimizer="cpu"))
    assert offloaded.forward.total == 2 * (PARAMETERS - NORMS)  # each parameter is copied to the GPU


def test_an_output_layer_waits_for_the_gradient_after_it() -> None:
    sizes = dataclasses.replace(QWEN3_0_6B, tie_word_embeddings=False)
    layer = job_of().model.layers["decoder layer 0"].all
    for stage in ("zero2", "zero3"):
        backward = zero_memory(job_of("deepspeed", stage, sizes=sizes)).backward
        behind = [Count(EMBEDDING + done, EMBEDDING + done) for done in (0, layer)]
        first, second = (backward(done, Count(layer, layer)).total for done in behind)
        assert first - second >= 2 * EMBEDDING


@pytest.mark.parametrize(
    ("device", "bucket", "reduces"),
    [("cpu", 5_000_000, [False, False, True, False]), ("cuda", 50_000_000, [False, True, True, True])],
)
def test_a_bucket_is_reduced_when_a_gradient_fills_it_or_with_overlap_later(
    device: str, bucket: int, reduces: list[bool]
) -> None:
    job = job_of("deepspeed", "zero2", sizes=small_sizes(256, 768), device=device)
    layer = job.model.layers["encoder layer 0"]  # of 0.8 M, of which a matrix of the MLP has 0.2 M
    before = (bucket + more for more in (-900_000, -400_000, -100_000, 100_000))
    moments = [zero_memory(job).backward(Count(done, done), layer).communication for done in before]
    assert [moment > moments[0] for moment in moments] == reduces


def test_offloaded_states_on_the_host() -> None:
    assert [power_of_two(n) for n in (0, 1, 5, 1024, 1025)] == [0, 1, 8, 1024, 2048]
    both = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    pinned, pageable = (zero_memory(job_of(**both, pin_memory=pin)) for pin in (True, False))
    assert pageable.resting.weights == 0
    assert pageable.host.parameters == 2**28  # pinned in any case: 259 MB take 268.4
    # Both forms of gradients, 518 MB each, take 536.9; master weights and moments are not pinned.
    assert pinned.host.states - pageable.host.states == pytest.approx(2 * (2**29 - PARAMETERS / 2), rel=1e-3)
    pinned, pageable = (fsdp_memory(job_of("fsdp", offload_optimizer="cpu", pin_memory=pin)) for pin in (True, False))
    assert pageable.resting.total == 0
    assert pageable.host.states == pytest.approx(16 * PARAMETERS / 8)
    assert pageable.host.states < pinned.host.states < 2 * pageable.host.states


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_frozen_parts_have_weights_alone(engine: EngineName, stage: str) -> None:
    job = job_of(engine, stage, world_size=4, sections={"training": {"freeze": ["encoder.*"]}})
    memory, trained = engine_memory(job), PARAMETERS - ENCODER
    assert job.trainable_parameters == trained
    shards = 1 if stage == "zero0" else 4
    with_weights = ENCODER / shards if engine == "fsdp" else PARAMETERS / (4 if stage == "zero3" else 1)
    assert memory.resting.weights == pytest.approx(2 * with_weights, rel=1e-5)
    assert memory.resting.master_weights == pytest.approx(4 * trained / shards, rel=1e-5)
    assert memory.resting.optimizer == pytest.approx(8 * trained / shards, rel=1e-5)
    assert engine == "deepspeed" or memory.forward.gradients == 4 * trained


@pytest.mark.parametrize(("stage", "bytes_each"), [("zero0", 14), ("zero3", 12)])
def test_background_saves_over_all_ranks(stage: str, bytes_each: int) -> None:
    sections = {"training": {"async_save": True}}
    pinned, pageable = (
        zero_memory(job_of("deepspeed", stage, sections=sections, pin_memory=pin)).host.save for pin in (True, False)
    )
    assert 8 * pageable == pytest.approx(bytes_each * PARAMETERS, rel=1e-4)
    assert pageable < pinned <= 2 * pageable


@pytest.mark.parametrize(("stage", "bytes_each"), [("zero0", 0), ("zero1", 4), ("zero2", 4), ("zero3", 0)])
def test_stages_that_flatten_hold_the_weights_twice_while_they_are_built(stage: str, bytes_each: int) -> None:
    assert zero_memory(job_of("deepspeed", stage)).build.weights == bytes_each * PARAMETERS


def test_states_on_a_disk_take_four_buffers_of_a_sub_group() -> None:
    on_disk = {"offload_optimizer": "nvme", "nvme_path": "/local"}
    swapped = zero_memory(job_of(**on_disk, pin_memory=False))
    sub_group = 25_000_000 + EMBEDDING / 8
    assert swapped.host.states == pytest.approx(4 * PARAMETERS / 8 + (4 + 2) * 4 * sub_group, rel=1e-3)
    assert swapped.resting == zero_memory(job_of(offload_optimizer="cpu", pin_memory=False)).resting
    assert swapped_bytes(job_of(**on_disk)) == pytest.approx(16 * PARAMETERS, rel=1e-4)
    assert swapped_bytes(job_of(offload_optimizer="cpu")) == 0


@pytest.mark.parametrize(
    ("engine", "infra", "named"),
    [
        ("fsdp", {"stage": "zero3_hybrid", "hybrid_shard_size": 3}, r"3 shards .* do not divide 8 ranks"),
        (
            "deepspeed",
            {"stage": "zero2", "deepspeed_extra": {"zero_optimization": {"reduce_bucket_size": "auto"}}},
            "zero_optimization.reduce_bucket_size = 'auto'",
        ),
        ("deepspeed", {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "half"}}}, "grad_accum_dtype = 'half'"),
    ],
)
def test_values_that_an_engine_could_not_use_are_named(engine: EngineName, infra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_memory(job_of(engine, **infra))


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, ds_encdec.memory.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


SMALL = {"model_type": "qwen3", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "rope_theta": 1e6}
SMALL |= {"tie_word_embeddings": True}


def sizes_of(folder: Path, *overrides: str) -> Sizes:
    return run_sizes(load_config(None, [f"model.model_name_or_path={folder}", *overrides]))


def write_model(folder: Path, fields: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_the_decoder_alone_has_the_published_parameters() -> None:
    published = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360}
    published |= {"14B": 14_768_307_200, "32B": 32_762_123_264}
    for name, parameters in published.items():
        sizes = PUBLISHED[f"Qwen/Qwen3-{name}"]
        assert sizes_of(Path("Qwen", f"Qwen3-{name}"), "model.cross_attention=final") == sizes
        alone = count_parameters(dataclasses.replace(sizes, num_encoder_layers=0)) - sizes.hidden_size  # its last norm
        assert alone == parameters


def test_a_folder_gives_both_sides_its_layers_or_each_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    for overrides, expected in (((), (2, 3)), (("model.cross_attention=renormed",), (3, 3))):
        sizes = sizes_of(tmp_path, *overrides)
        assert (sizes.num_encoder_layers, sizes.num_hidden_layers, sizes.vocab_size) == (*expected, 1024)
        assert sizes.tie_word_embeddings
    sizes = sizes_of(tmp_path, "model.encoder_layers=1", "model.decoder_layers=[0, 2]")
    assert (sizes.num_encoder_layers, sizes.num_hidden_layers, sizes.cross_attention) == (1, 2, "aligned")
    sizes = sizes_of(write_model(tmp_path, SMALL | {"model_type": "qwen3_seq2seq", "num_encoder_layers": 1}))
    assert (sizes.num_encoder_layers, sizes.num_hidden_layers) == (1, 3)


def test_qwen3_has_room_for_267_sentinels() -> None:
    for sentinels, rows in ((151_936 - QWEN3_IDS, 151_936), (151_937 - QWEN3_IDS, 152_064)):
        assert run_sizes(load_config(None, [f"model.num_sentinel_tokens={sentinels}"])).vocab_size == rows


def test_the_local_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--someone--some-qwen3"
    for commit, layers in (("old", 2), ("new", 3)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        write_model(snapshot, SMALL | {"num_hidden_layers": layers})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("old")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert sizes_of(Path("someone/some-qwen3")).num_hidden_layers == 2
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="not in the Hugging Face cache"):
        sizes_of(Path("someone/some-qwen3"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no config\.json"),
        ("{", "not readable as JSON"),
        (json.dumps(SMALL | {"model_type": "bloom"}), "model_type is 'bloom'"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        sizes_of(tmp_path)


def test_adapters_by_hand() -> None:
    attention = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024)
    mlp = 3 * (1024 + 3072)
    config = load_config(None, ["model.lora={r: 8}"])
    job = make_job(config, run_sizes(config), "deepspeed", world_size=8, ranks_per_node=8)
    assert job.trainable_parameters == 8 * 55 * (attention + mlp) == 9_912_320
    # Of adapters alone: a checkpoint names their base.
    assert checkpoint_bytes(job) == 12 * 9_912_320


def test_matrices_that_muon_steps_have_one_moment() -> None:
    given = ["infra.distributed_type=fsdp", "infra.offload_optimizer=none", "training.optimizer=muon"]
    adamw, muon = (
        make_job(config, run_sizes(config), "fsdp", world_size=8, ranks_per_node=8)
        for config in (load_config(None, given[:2]), load_config(None, given))
    )
    matrices = 55 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert sum(prod(shape) for _, shape in muon.stepped_matrices) == matrices
    assert checkpoint_bytes(adamw) - checkpoint_bytes(muon) == 4 * matrices
    assert fsdp_memory(adamw).resting.optimizer - fsdp_memory(muon).resting.optimizer == 4 * matrices / 8
