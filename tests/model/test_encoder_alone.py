"""A model without decoder layers, as objectives of an encoder train it: its parameters, weights and states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import EACH, GROUPED, decoder
from tiny_models import VOCAB, filled, pack, resolve, tiny_config, tiny_model, vocabulary
from torch import Tensor

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import ModelConfig, load_config
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.memory.job import require_possible_model, run_sizes
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import Qwen3EncoderModel
from ds_encdec.model.loss_kernel import IGNORE_INDEX
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import forward_flops, parameter_shapes, training_flops
from ds_encdec.model.source import ModelSource, resolve_model
from ds_encdec.model.weights import random_weights
from ds_encdec.registry.objectives import OBJECTIVES

HEADLESS = replace(OBJECTIVES["ul2"], encoder_only=True, tasks=("CONTRASTIVE",))
WITH_HEAD = replace(OBJECTIVES["ul2"], encoder_only=True, tasks=("MNTP",))
LENGTHS = (4, 9, 1)


def encoder_of(folder: Path, **section: Any) -> ModelSource:
    known = vocabulary(range(90, 94))
    return resolve_model(ModelConfig(model_name_or_path=str(folder), **section), known, 0, HEADLESS)


def packed_inputs() -> dict[str, Any]:
    inputs = pack(LENGTHS, (0, 0, 0), 19, 0).inputs
    return {name: inputs[name] for name in ("input_ids", "packing")} | {"decoder_input_ids": None, "labels": None}


def documents(states: Tensor) -> tuple[Tensor, ...]:
    return states[: sum(LENGTHS)].split(LENGTHS)


@torch.no_grad()
@pytest.mark.parametrize(("family", "sizes"), EACH)
def test_a_decoders_layers_look_both_ways(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    theirs = decoder(tmp_path, family, **sizes)
    source = encoder_of(tmp_path)
    assert (source.config.num_hidden_layers, source.config.num_encoder_layers) == (0, theirs.config.num_hidden_layers)
    assert source.config.tie_word_embeddings
    model, inputs = filled(source), packed_inputs()
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == parameter_shapes(source.config)
    model.shared.weight[90:94] = theirs.get_input_embeddings().weight[90:94]
    states = documents(model(**inputs).states)
    for ids, ours in zip(inputs["input_ids"][: sum(LENGTHS)].split(LENGTHS), states, strict=True):
        open_mask = torch.zeros(1, 1, len(ids), len(ids))  # added to the scores: every position sees all others
        expected = theirs.model(ids[None], attention_mask=open_mask).last_hidden_state[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("norm_position", ["before", "after"])
@pytest.mark.parametrize("form", ["aligned", "renormed", "final"])
def test_an_encoder_decoders_encoder_is_the_one_that_its_export_has(
    tmp_path: Path, form: str, norm_position: str
) -> None:
    whole = tiny_model(cross_attention=form, norm_position=norm_position, sentinel_token_ids=range(90, 94))
    whole.save_pretrained(tmp_path / "whole")
    source = encoder_of(tmp_path / "whole")
    model, inputs = filled(source), packed_inputs()
    config = Qwen3EncoderConfig.of(source.config)
    export_hf(source.weights, config, None, tmp_path / "encoder", dtype=torch.float32, card="")
    alone = Qwen3EncoderModel.from_pretrained(tmp_path / "encoder").eval()
    read = whole.decoder.layers[-1].input_layernorm if whole.decoder.layers[-1].norms_encoder else torch.nn.Identity()
    states = documents(model(**inputs).states)
    for ids, ours in zip(inputs["input_ids"][: sum(LENGTHS)].split(LENGTHS), states, strict=True):
        torch.testing.assert_close(ours, read(whole.get_encoder()(ids[None]).last_hidden_state[0]))
        torch.testing.assert_close(ours, alone(ids[None]).last_hidden_state[0])
    again = encoder_of(tmp_path / "encoder")
    assert again.config.to_dict() == source.config.to_dict()
    assert all(torch.equal(again.weights(name), source.weights(name)) for name in parameter_shapes(source.config))
    assert Qwen3Seq2SeqConfig(**source.config.to_dict()).num_hidden_layers == 0


def test_an_encoder_cannot_become_an_encoder_decoder_and_keeps_its_depth(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=0, num_encoder_layers=2)
    export_hf(
        random_weights(config, 0), Qwen3EncoderConfig.of(config), None, tmp_path / "out", dtype=torch.float32, card=""
    )
    tmp_path = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"^model\.model_name_or_path is .*, an encoder alone: set data\.objective"):
        resolve(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.encoder_layers is 1, but .* 2, which it keeps"):
        encoder_of(tmp_path, encoder_layers=1)


def test_an_encoder_takes_the_layers_that_are_asked_for(tmp_path: Path) -> None:
    theirs = decoder(tmp_path, "qwen3", **{**GROUPED, "num_hidden_layers": 5})
    source = encoder_of(tmp_path, encoder_layers="top 2")
    for ours, layer in ((0, 3), (1, 4)):
        stored = theirs.model.layers[layer].mlp.up_proj.weight
        assert torch.equal(source.weights(f"encoder.layers.{ours}.mlp.up_proj.weight"), stored)


def test_an_untied_head_stays_only_where_tokens_are_predicted(tmp_path: Path) -> None:
    decoder(tmp_path, "llama", **GROUPED)
    section = ModelConfig(model_name_or_path=str(tmp_path))
    for objective, names in ((HEADLESS, set()), (WITH_HEAD, {"lm_head.weight"})):
        shapes = parameter_shapes(resolve_model(section, vocabulary(range(90, 94)), 0, objective).config)
        assert {name for name in shapes if name.startswith("lm_head")} == names


def test_embeddings_are_cut_no_larger_than_the_states(tmp_path: Path) -> None:
    decoder(tmp_path, "qwen3", **GROUPED)
    settings = [f"model.model_name_or_path={tmp_path}", "data.objective=contrastive"]
    require_possible_model(load_config(None, [*settings, "training.contrastive.matryoshka_dims=[8,32]"]))
    with pytest.raises(ConfigError, match=r"^training\.contrastive\.matryoshka_dims has 33, but .* the model's 32"):
        require_possible_model(load_config(None, [*settings, "training.contrastive.matryoshka_dims=[8,33]"]))


@pytest.mark.parametrize(("objective", "head"), [("contrastive", False), ("mntp", True)])
def test_estimates_know_the_encoder_that_a_run_trains(tmp_path: Path, objective: str, head: bool) -> None:
    decoder(tmp_path / "decoder", "llama", **GROUPED)  # whose head is its own
    whole = tiny_model(sentinel_token_ids=range(90, 94), tie_word_embeddings=False)
    whole.save_pretrained(tmp_path / "whole")
    for name in ("decoder", "whole"):
        config = load_config(None, [f"model.model_name_or_path={tmp_path / name}", f"data.objective={objective}"])
        known, row = vocabulary(range(90, 94)), OBJECTIVES[objective]
        made = resolve_model(config.model, known, 0, row).config
        shapes = parameter_shapes(run_sizes(config))
        assert shapes == parameter_shapes(made)
        assert ("lm_head.weight" in shapes) is head
        assert not any(part.startswith("decoder.") for part in shapes)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_the_heads_loss_on_the_encoders_states(mode: Any) -> None:
    model = tiny_model(num_hidden_layers=0, num_encoder_layers=3).train()
    inputs = packed_inputs()
    labels = torch.where(torch.arange(19) % 3 == 1, inputs["input_ids"], IGNORE_INDEX)
    states = model(**inputs).states
    expected = torch.nn.functional.cross_entropy(model.lm_head(states), labels, reduction="sum")
    expected.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    assert None not in gradients.values()
    model.zero_grad()
    apply_activation_checkpointing(model, mode, offload=True)
    output = model(**inputs | {"labels": labels})
    torch.testing.assert_close(output.loss, expected)
    assert (output.token_losses == 0).tolist() == (labels == IGNORE_INDEX).tolist()
    output.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_operations_are_those_of_the_layers() -> None:
    config = tiny_config(num_hidden_layers=0, num_encoder_layers=3)
    lengths = (5, 8)
    weights = sum(one.numel() for one in Qwen3ForSeq2SeqLM(config).encoder.parameters() if one.dim() > 1)
    pairs = 2 * config.num_attention_heads * config.head_dim * sum(length**2 for length in lengths)
    assert forward_flops(config, lengths, (0, 0)) == 2 * (weights * sum(lengths) + 3 * pairs)
    head = 2 * config.hidden_size * VOCAB * 4
    assert training_flops(config, lengths, (0, 0), encoder_labels=4) == 3 * (
        forward_flops(config, lengths, (0, 0)) + head
    )
