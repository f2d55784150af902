"""Weights from every source, and the errors of sources that have none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES, qwen3_folder, resolve, tiny_config, tiny_model, vocabulary

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import ArchitectureConfig, ModelConfig
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.source import resolve_model
from ds_encdec.model.weights import SafetensorsFolder, random_weights


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    config = tiny_config(initializer_range=0.02, hidden_size=256)
    weights, again, other = random_weights(config, 1), random_weights(config, 1), random_weights(config, 2)
    drawn = weights("encoder.layers.1.mlp.up_proj.weight")
    assert torch.equal(drawn, again("encoder.layers.1.mlp.up_proj.weight"))
    assert not torch.equal(drawn, other("encoder.layers.1.mlp.up_proj.weight"))
    assert not torch.equal(drawn, weights("decoder.layers.1.mlp.up_proj.weight"))
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(weights("decoder.norm.weight"), torch.ones(256))


@pytest.mark.parametrize("sharded", [False, True])
def test_both_sides_copy_a_qwen3_and_only_sentinel_rows_are_new(tmp_path: Path, sharded: bool) -> None:
    qwen3 = qwen3_folder(tmp_path, max_shard_size="20KB" if sharded else "5GB").state_dict()
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    source = resolve(tmp_path)
    for name in parameter_shapes(source.config):
        tensor = source.weights(name)
        assert tensor.dtype == torch.bfloat16
        if name != "shared.weight":
            assert torch.equal(tensor, qwen3["model." + name.partition(".")[2]]), name
    embedding, original = source.weights("shared.weight"), qwen3["model.embed_tokens.weight"]
    kept = [row for row in range(97) if row not in range(90, 94)]
    assert torch.equal(embedding[kept], original[kept])
    assert not (embedding[90:94] == original[90:94]).all(dim=1).any()
    assert source.config.sentinel_token_ids == [90, 91, 92, 93]
    assert (source.config.eos_token_id, source.config.decoder_start_token_id) == (1, 0)


def test_an_untied_head_is_carried_with_sentinel_rows_of_its_own(tmp_path: Path) -> None:
    qwen3 = qwen3_folder(tmp_path, tie_word_embeddings=False).state_dict()
    source = resolve(tmp_path)
    head = source.weights("lm_head.weight")
    assert not source.config.tie_word_embeddings
    assert torch.equal(head[:90], qwen3["lm_head.weight"][:90])
    assert not torch.equal(head[90:94], source.weights("shared.weight")[90:94])


def test_sentinel_rows_follow_the_distribution_of_the_trained_rows(tmp_path: Path) -> None:
    """Dimension by dimension: 2,000 rows drawn from 400 with mean i/10 and deviation 1 + i/20 in dimension i."""
    model = qwen3_folder(tmp_path, vocab_size=400)
    dimension = torch.arange(32.0)
    rows = torch.randn(400, 32, generator=torch.Generator().manual_seed(0)) * (1 + dimension / 20) + dimension / 10
    model.model.embed_tokens.weight.data = rows.bfloat16()
    model.save_pretrained(tmp_path)
    source = resolve(tmp_path, vocabulary(sentinels=range(400, 2400), size=2400))
    drawn = source.weights("shared.weight")[400:2400].float()
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), rtol=0, atol=0.25)
    torch.testing.assert_close(drawn.std(0), rows.std(0), rtol=0.1, atol=0)
    again = resolve(tmp_path, vocabulary(sentinels=range(400, 2400), size=2400)).weights("shared.weight")
    assert torch.equal(drawn, again[400:2400].float())


def test_a_folder_of_our_own_gives_its_weights_unchanged(tmp_path: Path) -> None:
    model = tiny_model(sentinel_token_ids=[90, 91, 92, 93])
    model.save_pretrained(tmp_path)
    source = resolve(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(source.weights(name), parameter)
    assert source.config.initializer_range == model.config.initializer_range


@pytest.mark.parametrize("sentinels", [range(90, 94), range(97, 130)], ids=["in unused rows", "in rows of their own"])
def test_rows_of_a_parameter_are_those_of_the_whole(tmp_path: Path, sentinels: range) -> None:
    qwen3_folder(tmp_path)
    folder = resolve(tmp_path, vocabulary(sentinels=sentinels, size=max(97, sentinels.stop)))
    assert folder.config.vocab_size == (97 if sentinels.stop <= 97 else 256)  # a multiple of 128
    for weights in (folder.weights, random_weights(folder.config, 3)):
        for name, shape in parameter_shapes(folder.config).items():
            whole = weights(name)
            for rows in (slice(0, 5), slice(88, 93), slice(95, 120), slice(93, shape[0]), slice(200, 300), slice(3, 3)):
                assert torch.equal(weights(name, rows), whole[rows]), (name, rows)


def test_more_sentinels_than_our_own_folder_has_are_added_but_not_beside_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_model(sentinel_token_ids=[90, 91, 92, 93])
    model.save_pretrained(tmp_path)
    embedding = resolve(tmp_path, vocabulary(sentinels=range(90, 96))).weights("shared.weight")
    (said,) = caplog.messages
    assert "has 4 sentinels and 0 mode tokens: rows of the embedding for 2 further ones are drawn" in said
    assert torch.equal(embedding[:94], model.shared.weight[:94])
    assert not (embedding[94:96] == model.shared.weight[94:96]).all(dim=1).any()
    section = ModelConfig.model_validate({"model_name_or_path": str(tmp_path), "lora": {}})
    resolve_model(section, vocabulary(), 0)
    with pytest.raises(
        ConfigError, match=r"num_sentinel_tokens is 6, but .* has 4 .*: set model.num_sentinel_tokens=4$"
    ):
        resolve_model(section, vocabulary(sentinels=range(90, 96)), 0)


ARCHITECTURE = ArchitectureConfig(**SIZES, rope_theta=5e4)


def test_an_architecture_gives_random_weights() -> None:
    section = ModelConfig(model_name_or_path=None, architecture=ARCHITECTURE, loss_chunk_tokens=33)
    source = resolve_model(section, vocabulary(), seed=3)
    assert source.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e4}
    assert source.config.loss_chunk_tokens == 33
    assert source.config.vocab_size == 97
    expected = random_weights(source.config, 3)("shared.weight")
    assert torch.equal(source.weights("shared.weight"), expected)


def test_impossible_architectures_are_configuration_errors() -> None:
    section = ModelConfig(model_name_or_path=None, architecture=ARCHITECTURE)
    with pytest.raises(ConfigError, match="set it to at least 98"):
        resolve_model(section, vocabulary(size=98), seed=0)
    uneven = ARCHITECTURE.model_copy(update={"num_key_value_heads": 3})
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) is not a multiple"):
        resolve_model(section.model_copy(update={"architecture": uneven}), vocabulary(), seed=0)


@pytest.mark.parametrize("content", ["[1]", "1", "[" * 100_000, '{"model_type": ["qwen3"]}'])
def test_a_configuration_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_stored_model(tmp_path / "config.json")


def test_unusable_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(tmp_path)
    qwen3_folder(tmp_path, max_shard_size="20KB")
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(CheckpointError, match=r"model_type is 'llama'; needed is 'qwen3' .* or 'qwen3_seq2seq'"):
        resolve(tmp_path)
    edit_config(tmp_path, model_type="qwen3", num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="not a multiple"):
        resolve(tmp_path)
    edit_config(tmp_path, num_key_value_heads=2, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"-of-.*_proj.weight has shape \(48, 32\), .* describes \(64, 32\)"):
        resolve(tmp_path)
    edit_config(tmp_path, intermediate_size=48)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        resolve(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard.name}, which is missing"):
        resolve(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_tensor_too_few_or_of_another_shape_is_noticed_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard_size: str
) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    resolve(tmp_path)
    monkeypatch.setattr(SafetensorsFolder, "tensor", None)  # no data is needed
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 11 of the model's \d+ tensors, such as decoder\.layers\.2\."):
        resolve(tmp_path)
    edit_config(tmp_path, num_hidden_layers=2, vocab_size=112)
    with pytest.raises(CheckpointError, match=r"safetensors: shared.weight has shape \(97, 32\), .* \(112, 32\)"):
        resolve(tmp_path)


def test_an_index_that_names_the_wrong_shard_is_noticed(tmp_path: Path) -> None:
    qwen3_folder(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    shards = sorted(set(stored["weight_map"].values()))
    stored["weight_map"]["model.norm.weight"] = shards[0]
    index.write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=f"{shards[0]} has no model.norm.weight"):
        resolve(tmp_path)


def test_a_hub_id_without_cache_or_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-0.6B is not a local folder, .* give the folder's path"):
        resolve_model(ModelConfig(), vocabulary(), seed=0)
