"""Each family of decoders: read, converted, and computed as transformers' own class does, on random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, pack, resolve, tiny_config, vocabulary
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.memory.job import run_sizes
from ds_encdec.model import precision
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.configuration import _DEFAULTS, Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import rotary_tables
from ds_encdec.model.lora import choose_trained
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import canonical_name, model_shapes, parameter_shapes
from ds_encdec.model.weights import random_weights
from ds_encdec.registry.families import FAMILIES, LAYER

OF_LENGTH = {"max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
GROUPED: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "head_dim"} | OF_LENGTH
FULL = GROUPED | {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": True}
BIASED = GROUPED | {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3": (GROUPED | {"head_dim": 12}, GROUPED | {"head_dim": 8, "attention_bias": True}),
    "qwen2": (GROUPED, FULL),
    "llama": (GROUPED, FULL, BIASED, GROUPED | {"head_dim": 12}),
    "mistral": (GROUPED | {"sliding_window": None}, GROUPED | {"sliding_window": 64, "head_dim": 12}),
    "smollm3": (FULL | {"num_hidden_layers": 5}, BIASED | {"no_rope_layers": [0, 1], "tie_word_embeddings": False}),
    "olmo2": (GROUPED, FULL | {"attention_bias": True}),
    "phi3": (GROUPED, FULL | {"intermediate_size": 40}),
}
EACH = [pytest.param(name, sizes, id=f"{name}-{i}") for name, cases in CASES.items() for i, sizes in enumerate(cases)]


def decoder(folder: Path, family: str, **sizes: Any) -> PreTrainedModel:
    """Write the folder of a decoder as transformers does, with no norm of ones and no bias of zeros; returns it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model


def converted(folder: Path, theirs: PreTrainedModel) -> Qwen3ForSeq2SeqLM:
    """What is made of the folder of `theirs`, with the sentinels' rows given back."""
    source = resolve(folder, vocabulary((95, 96)))
    model = Qwen3ForSeq2SeqLM(source.config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.weights(name))
        model.shared.weight.copy_(theirs.get_input_embeddings().weight)
        model.lm_head.weight.copy_(theirs.get_output_embeddings().weight)
    return model


class CausalEncoder(PackedLayout):
    """A layout in which the encoder looks back alone, as the source does."""

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel.attend(q, k, v, self.encoder, True, self.dropout)


@torch.no_grad()
def assert_same(theirs: PreTrainedModel, ours: Qwen3ForSeq2SeqLM, longest: int = 9) -> None:
    """Behind an empty input the decoder is the source; behind an encoder that looks back alone the whole model is."""
    batch = pack((longest // 2, 0, 3), (4, longest, longest - longest // 2), 3 * longest, 3 * longest)
    batch.inputs["packing"] = CausalEncoder(**vars(batch.inputs["packing"]))
    lengths = [len(labels) for _, _, labels in batch.documents]
    losses = ours(**batch.inputs).token_losses[: sum(lengths)].split(lengths)
    for (inputs, targets, labels), packed in zip(batch.documents, losses, strict=True):
        expected = theirs(torch.cat([inputs, targets])[None]).logits[0, len(inputs) :]
        torch.testing.assert_close(packed, F.cross_entropy(expected, labels, reduction="none"), rtol=1e-4, atol=1e-4)
        if not len(inputs):
            logits = ours(input_ids=inputs[None], decoder_input_ids=targets[None]).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "sizes"), EACH)
def test_a_converted_decoder_is_transformers_own(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    theirs = decoder(tmp_path, family, **sizes)
    ours = converted(tmp_path, theirs)
    assert_same(theirs, ours)
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(ours.config).items())
    sizes_of_run = run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))
    assert parameter_shapes(sizes_of_run) == shapes
    ours.save_pretrained(tmp_path / "ours")
    again = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert_same(theirs, again)


@pytest.mark.parametrize(("family", "sizes"), EACH)
def test_every_tensor_of_a_decoder_has_a_place_and_is_read_by_rows(
    tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    theirs = decoder(tmp_path, family, **sizes).state_dict()
    source, row = resolve(tmp_path, vocabulary(())), FAMILIES[family]
    shapes = parameter_shapes(source.config)
    read = dict.fromkeys((name for name in theirs if name not in ("lm_head.weight",) or name in shapes), 0)
    for name, shape in shapes.items():
        whole, (stored, first) = source.weights(name), row.place(name, shapes)
        assert torch.equal(whole, theirs[stored][first : first + shape[0]]), name
        assert torch.equal(source.weights(name, slice(2, 5)), whole[2:5]), name
        read[stored] += 0 if name.startswith("encoder.") else shape[0]
    assert read == {name: theirs[name].shape[0] for name in read}


ORIGINAL = "original_max_position_embeddings"
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("older", [False, True])
def test_each_kind_of_rotary_embedding_is_transformers_own(tmp_path: Path, rope: dict[str, Any], older: bool) -> None:
    sizes = GROUPED | {"hidden_size": 64, "rope_parameters": {**rope, "rope_theta": 5e3}}
    theirs = decoder(tmp_path, "llama", **sizes)
    file = tmp_path / "config.json"
    if older:  # as transformers 4 writes it
        fields = {name: value for name, value in json.loads(file.read_text()).items() if name != "rope_parameters"}
        scaling = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
        beside = {ORIGINAL: scaling.pop(ORIGINAL)} if ORIGINAL in scaling else {}
        file.write_text(json.dumps(fields | beside | {"rope_theta": 5e3, "rope_scaling": scaling}))
    ours = converted(tmp_path, theirs)
    assert_same(theirs, ours, 64)
    cos, sin = rotary_tables(torch.arange(64), ours.config, torch.float32)
    expected = theirs.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
    for table, theirs_table in zip((cos, sin), expected, strict=True):
        torch.testing.assert_close(table[:, 0], theirs_table[0, :, :8], rtol=1e-5, atol=1e-5)
    on_meta = rotary_tables(torch.arange(64, device="meta"), ours.config, torch.bfloat16)
    assert (on_meta[0].shape, on_meta[0].dtype) == (cos.shape, torch.bfloat16)


LLAMA: dict[str, Any] = {"model_type": "llama", **GROUPED, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "bloom"},
            r"model_type is 'bloom'; needed is .*qwen3 \(Qwen3\), qwen2 .*phi3 .*, or qwen3_seq2seq",
        ),
        ({"model_type": "gemma3_text"}, "'gemma3_text'; needed is a dense decoder, qwen3"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral', a mixture of experts, .*; needed is"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "'qwen3_moe', a mixture of experts, .*; needed is"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5', which is an encoder-decoder already; needed is"),
        (
            {"model_type": "mistral", "sliding_window": 32},
            "sliding_window = 32, .* If no text is longer, set it to null",
        ),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window = 4096, over which"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "_window = 8",
        ),
        ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        (
            {"rope_scaling": {"type": "longrope"}},
            r"rope type 'longrope' \(rope_scaling\); known are default, dynamic, linear",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is None: needed is a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0: needed"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}}, "rope_scaling.beta_fast is 'x': needed"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, ORIGINAL: 8}, ORIGINAL: 16},
            f"{ORIGINAL} is 16, but 8 in rope_scaling: keep the right one",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2}},
            "rope type 'yarn' .*; known are default$",
        ),
        ({"is_causal": False}, "is_causal = false: its layers look both ways"),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu'; known are silu, swish"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None: needed is a number above 0"),
        ({"max_position_embeddings": None}, "lacks max_position_embeddings"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers is \[1\]: needed is 0 or 1 for each of 2"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layers is None: needed"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": True}, "lacks 8 of the model's 29 tensors, such as model.layers.0.self_attn.k_proj.bias"),
        ({"num_attention_heads": None}, "lacks num_attention_heads, head_dim"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    decoder(tmp_path, "llama", **GROUPED)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | fields))
    with pytest.raises(CheckpointError, match=message):
        resolve(tmp_path)
    if "tensors" not in message:
        with pytest.raises(ConfigError, match=message):
            run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))


def test_weights_for_which_the_layers_have_no_place_are_refused(tmp_path: Path) -> None:
    decoder(tmp_path, "llama", **BIASED)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlp_bias": False}))
    with pytest.raises(
        CheckpointError, match=r"has model.layers.0.mlp.down_proj.bias, for which the layers .* no place"
    ):
        resolve(tmp_path)


def test_a_head_beside_a_tied_embedding_must_be_equal_to_it(tmp_path: Path) -> None:
    decoder(tmp_path, "llama", **GROUPED | {"tie_word_embeddings": False})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"an lm_head.weight of its own, .* set tie_word_embeddings to false"):
        resolve(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    resolve(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_missing_have_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    needed = {name: GROUPED[name] for name in GROUPED.keys() & set(SIZES)} | {"model_type": family}
    base = {} if FAMILIES[family].rope_theta else {"rope_theta": 1e6}
    window = {"sliding_window": None} if family == "mistral" else {}
    (tmp_path / "config.json").write_text(json.dumps(needed | base | window))
    theirs, read = AutoConfig.from_pretrained(tmp_path), Qwen3Seq2SeqConfig(**read_fields(tmp_path))
    for name in ("max_position_embeddings", "rms_norm_eps", "hidden_act", "initializer_range", "num_key_value_heads"):
        assert getattr(read, name) == getattr(theirs, name), name
    assert read.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert read.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert read.tie_word_embeddings == theirs.tie_word_embeddings
    rotates = getattr(theirs, "no_rope_layers", [])
    assert (read.unrotated_layers or []) == [layer for layer, does in enumerate(rotates) if not does]


def read_fields(folder: Path) -> dict[str, Any]:
    fields = read_stored_model(folder / "config.json")
    return {"tie_word_embeddings": False, **fields, "model_type": None}


def test_an_older_config_of_our_own_is_a_qwen3s() -> None:
    assert {name: _DEFAULTS[name] for name in LAYER} == LAYER
    config = Qwen3Seq2SeqConfig(**{name: value for name, value in tiny_config().to_dict().items() if name not in LAYER})
    assert {name: getattr(config, name) for name in LAYER} == LAYER


@torch.no_grad()
@pytest.mark.parametrize("emulated", [True, False])
def test_a_bias_is_added_once_in_every_product(monkeypatch: pytest.MonkeyPatch, emulated: bool) -> None:
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset([torch.bfloat16] if emulated else []))
    linear = precision.Linear(8, 6, bias=True).bfloat16()
    x, stream = torch.randn(5, 8).bfloat16(), torch.randn(5, 6).bfloat16()
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-2, atol=1e-2)
    compiled = torch.compile(precision.projected, backend="eager")
    for projected in (precision.projected, compiled):
        torch.testing.assert_close(projected(linear, x, stream).double(), stream.double() + exact, rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(projected(linear, x, None), linear(x), rtol=0, atol=0)


def test_adapters_stand_behind_their_matrix_and_its_bias() -> None:
    config = load_config(None, ["model.model_name_or_path=nowhere", "model.lora={}"])
    sizes = tiny_config(qk_norm="none", attention_bias=True, mlp_bias=True)
    model = Qwen3ForSeq2SeqLM(sizes)
    choose_trained(model, config)
    shapes = {canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(shapes.items()) == list(model_shapes(sizes, config.model.lora).items())
    weights = random_weights(sizes, 0)
    assert not weights("encoder.layers.0.mlp.up_proj.bias").any()
