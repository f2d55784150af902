"""Weights from every source, and the errors of sources that have none."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, qwen3_folder, resolve, tiny_config, tiny_model, vocabulary
from transformers import AutoConfig

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import ArchitectureConfig, ModelConfig, load_config
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.memory.job import run_sizes
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.source import resolve_model
from ds_encdec.model.weights import random_weights, write_safetensors_folder


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
    model = qwen3_folder(tmp_path, vocab_size=400)
    dimension = torch.arange(32.0)
    rows = torch.randn(400, 32, generator=torch.Generator().manual_seed(0)) * (1 + dimension / 20) + dimension / 10
    model.model.embed_tokens.weight.data = rows.bfloat16()
    model.save_pretrained(tmp_path)
    source = resolve(tmp_path, vocabulary(sentinels=range(400, 2400), size=2400))
    drawn = source.weights("shared.weight")[400:2400].float()
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), rtol=0, atol=0.25)
    torch.testing.assert_close(drawn.std(0), rows.std(0), rtol=0.1, atol=0)


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


def test_more_sentinels_than_our_own_folder_has_are_added_but_not_beside_adapters(tmp_path: Path) -> None:
    model = tiny_model(sentinel_token_ids=[90, 91, 92, 93])
    model.save_pretrained(tmp_path)
    embedding = resolve(tmp_path, vocabulary(sentinels=range(90, 96))).weights("shared.weight")
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


def test_unusable_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(tmp_path)
    qwen3_folder(tmp_path, max_shard_size="20KB")
    edit_config(tmp_path, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="not a multiple"):
        resolve(tmp_path)
    edit_config(tmp_path, num_key_value_heads=2, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"-of-.*_proj.weight has shape \(48, 32\), not \(64, 32\)"):
        resolve(tmp_path)
    edit_config(tmp_path, intermediate_size=48, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 11 of the model's \d+ tensors, such as model\.layers\.2\."):
        resolve(tmp_path)
    edit_config(tmp_path, num_hidden_layers=2)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        resolve(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard.name}, which is missing"):
        resolve(tmp_path)


def test_a_hub_id_without_cache_or_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-0.6B is not a local folder, .* give the folder's path"):
        resolve_model(ModelConfig(), vocabulary(), seed=0)


STORED: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 64}
OLD = {"model_type": "qwen3", **STORED, "rope_theta": 1e6, "rope_scaling": None}
"""As transformers 4 writes it, and as the hub has it."""
NEW = {"model_type": "qwen3", **STORED, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
"""As transformers 5 writes it."""
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    "fields",
    [
        OLD,
        NEW,
        NEW | {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        without(OLD, "head_dim"),
        OLD | {"num_key_value_heads": None},
        OLD | SLIDING | {"max_window_layers": 3},
        OLD | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ],
)
def test_a_configuration_is_read_as_transformers_reads_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    read = read_stored_model(written(tmp_path, fields))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert set(theirs.layer_types) == {"full_attention"}
    rope = {name: theirs.rope_parameters[name] for name in ("rope_type", "rope_theta")}
    assert read["rope_parameters"] == rope
    for name in (*STORED, "num_key_value_heads"):
        assert read[name] == getattr(theirs, name), name
    sizes = run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))
    assert (sizes.num_key_value_heads, sizes.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)


LONG = {"rope_type": "longrope", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (NEW | {"rope_scaling": LONG}, r"rope type 'longrope' \(rope_scaling\)"),
        (NEW | {"model_type": "qwen3_seq2seq", "rope_scaling": LONG}, "rope type 'longrope'"),
        (NEW | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "not one block for all layers"),
        (NEW | {"rope_theta": 1e6}, r"rope_theta is 1e\+06 and rope_parameters.rope_theta is 5e\+06: keep the one"),
        (without(OLD, "rope_theta"), "lacks rope_theta: write the base"),
        (OLD | SLIDING | {"max_window_layers": 2}, "not supported: sliding_window = 8"),
        (OLD | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types has 'sliding_"),
        (OLD | {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\).* take the unquantized folder"),
        (OLD | {"head_dim": None}, r"lacks head_dim \(whole numbers above 0\)"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_a_run_and_by_its_estimate(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    written(tmp_path, fields)
    with pytest.raises(CheckpointError, match=message):
        resolve(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))


def test_weights_that_are_stored_as_other_numbers_are_refused_by_name(tmp_path: Path) -> None:
    qwen3_folder(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} is stored as .*Take the unquantized"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters has the rope type 'proportional'"),
        ({"rope_scaling": LONG}, "rope_scaling has the rope type 'longrope', which this model does not compute"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling has the rope type 'dynamic'"),
    ],
)
def test_a_rotation_that_an_export_does_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    Qwen3Seq2SeqConfig(**STORED).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        Qwen3Seq2SeqConfig.from_pretrained(tmp_path)
    assert Qwen3Seq2SeqConfig(rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


def test_tensors_are_written_in_turn(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def weights(_: str, rows: slice = slice(None), /) -> torch.Tensor:
        assert sum(one() is not None for one in made) <= 1  # the one before
        tensor = torch.zeros(8, 4)
        made.append(weakref.ref(tensor))
        return tensor

    shapes = dict.fromkeys("abcdef", (8, 4))
    write_safetensors_folder(tmp_path, shapes, weights, dtype=torch.float32, max_shard_bytes=256)
    assert (len(made), len(list(tmp_path.glob("*.safetensors")))) == (6, 3)
