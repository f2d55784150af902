"""Sizes without torch are those of a run."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path

import pytest
from huggingface_hub import constants

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import PUBLISHED, QWEN3_IDS, Sizes, checkpoint_bytes, make_job, run_sizes
from ds_encdec.model.parameter_count import count_parameters

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
        assert sizes_of(Path("Qwen", f"Qwen3-{name}")) == sizes
        alone = count_parameters(dataclasses.replace(sizes, num_encoder_layers=0)) - sizes.hidden_size  # its last norm
        assert alone == parameters


def test_a_folder_gives_both_sides_its_layers_or_each_its_own(tmp_path: Path) -> None:
    sizes = sizes_of(write_model(tmp_path, SMALL))
    assert (sizes.num_encoder_layers, sizes.num_hidden_layers, sizes.vocab_size) == (3, 3, 1024)
    assert sizes.tie_word_embeddings
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


def test_an_unknown_model_is_named_with_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean Qwen/Qwen3-0\.6B\?.*model\.architecture"):
        sizes_of(Path("Qwen/Qwen3-0.5B"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no config\.json"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[]", "no { ... } block"),
        (json.dumps(SMALL | {"model_type": "llama"}), "model_type is 'llama'"),
        (json.dumps({key: value for key, value in SMALL.items() if key != "hidden_size"}), "lacks hidden_size"),
        (json.dumps(SMALL | {"intermediate_size": "96"}), "lacks intermediate_size"),
        (json.dumps(SMALL | {"attention_bias": True}), "attention_bias"),
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
    assert job.trainable_parameters == 8 * 56 * (attention + mlp) == 10_092_544
    assert job.parameters == 1_036_517_376 + 10_092_544
    # Of adapters alone: a checkpoint names their base.
    assert checkpoint_bytes(job) == 12 * 10_092_544


def test_matrices_that_muon_steps_have_one_moment() -> None:
    """28 + 28 layers of the default model: all but the embedding of 151,936 rows and the norms."""
    given = ["infra.distributed_type=fsdp", "infra.offload_optimizer=none", "training.optimizer=muon"]
    adamw, muon = (
        make_job(config, run_sizes(config), "fsdp", world_size=8, ranks_per_node=8)
        for config in (load_config(None, given[:2]), load_config(None, given))
    )
    matrices = 56 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert sum(prod(shape) for _, shape in muon.stepped_matrices) == matrices
    assert checkpoint_bytes(adamw) - checkpoint_bytes(muon) == 4 * matrices
    assert fsdp_memory(adamw).resting.optimizer - fsdp_memory(muon).resting.optimizer == 4 * matrices / 8
