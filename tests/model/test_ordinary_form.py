"""The Hugging Face form: masks, mean loss, generation, saving and loading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import filled, qwen3_with_norms, resolve, tiny_model, vocabulary
from torch import Tensor
from torch.nn import functional as F
from transformers import CompileConfig, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ds_encdec.model.attention import PaddedLayout
from ds_encdec.model.configuration import Qwen3EncoderConfig
from ds_encdec.model.encoder import Qwen3EncoderModel
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM


@pytest.fixture
def model() -> Qwen3ForSeq2SeqLM:
    return tiny_model()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, 95, (3, 9), generator=torch.Generator().manual_seed(3))


def test_padding_changes_nothing_on_either_side_of_either_sequence(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    encoder_ids, decoder_ids = ids[:1, :5], ids[1:2, :4]
    expected = model(input_ids=encoder_ids, decoder_input_ids=decoder_ids).logits
    left, right = (3, 0), (0, 3)
    for encoder_pad in (left, right):
        for decoder_pad in (left, right):
            logits = model(
                input_ids=F.pad(encoder_ids, encoder_pad, value=7),
                attention_mask=F.pad(torch.ones_like(encoder_ids), encoder_pad),
                decoder_input_ids=F.pad(decoder_ids, decoder_pad, value=7),
                decoder_attention_mask=F.pad(torch.ones_like(decoder_ids), decoder_pad),
            ).logits
            real = logits[:, 3:] if decoder_pad == left else logits[:, :-3]
            torch.testing.assert_close(real, expected, rtol=1e-4, atol=1e-4)
            assert torch.isfinite(logits).all()


def test_a_wholly_masked_encoder_is_an_empty_encoder(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    masked = model(input_ids=ids[:1], attention_mask=torch.zeros_like(ids[:1]), decoder_input_ids=ids[1:2])
    empty = model(input_ids=ids[:1, :0], decoder_input_ids=ids[1:2])
    torch.testing.assert_close(masked.logits, empty.logits, rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_over_real_labels_without_a_second_shift(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    labels = ids[1:3].clone()
    labels[0, 6:] = -100
    output = model(input_ids=ids[:2], labels=labels)
    expected = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)
    shifted = torch.cat([torch.zeros(2, 1, dtype=torch.int64), labels[:, :-1]], dim=1).clamp_min(0)
    given = model(input_ids=ids[:2], decoder_input_ids=shifted).logits
    torch.testing.assert_close(output.logits, given)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}], ids=str)
def test_generate_with_cache_equals_without(model: Qwen3ForSeq2SeqLM, ids: Tensor, options: dict[str, Any]) -> None:
    generated = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        generated.append(model.generate(ids, max_new_tokens=8, min_new_tokens=8, use_cache=use_cache, **options))
    assert torch.equal(*generated)
    assert generated[0].shape == (3, 9)
    assert (generated[0][:, 0] == model.config.decoder_start_token_id).all()


def test_a_static_cache_generates_the_same(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    inputs: dict[str, Any] = {
        "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [0] * 2 + [1] * 7]),
        "decoder_input_ids": torch.tensor([[0, 5], [0, 0], [0, 7]]),
        "decoder_attention_mask": torch.tensor([[1, 1], [0, 1], [1, 1]]),
        "num_beams": 3,
    }
    for length in (8, 5):
        inputs |= {"max_new_tokens": length, "min_new_tokens": length}
        expected = model.generate(ids, **inputs)
        static = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True)}
        static["compile_config"]._compile_all_devices = True  # and still nothing is compiled
        assert torch.equal(model.generate(ids, **inputs, **static), expected)


def test_hidden_states_of_both_sides(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    output = model(input_ids=ids, labels=ids, output_hidden_states=True)
    encoder, decoder = output.encoder_hidden_states, output.decoder_hidden_states
    assert (len(encoder), len(decoder)) == (3, 3)
    assert torch.equal(encoder[0], model.shared(ids))
    assert torch.equal(encoder[-1], output.encoder_last_hidden_state)
    assert torch.equal(model.lm_head(decoder[-1]), output.logits)
    plain = model(input_ids=ids, labels=ids)
    assert plain.encoder_hidden_states is plain.decoder_hidden_states is None
    given = model(encoder_outputs=(encoder[-1],), labels=ids, return_dict=False)
    assert (len(given), given[0]) == (4, plain.loss)


def test_embeddings_stand_for_ids_on_either_side(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    expected = model(input_ids=ids, decoder_input_ids=ids).logits
    embeds = model.shared(ids)
    assert torch.equal(model(inputs_embeds=embeds, decoder_inputs_embeds=embeds).logits, expected)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(decoder_input_ids=ids)


def test_masks_of_other_shapes_are_refused(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    past = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
    one = torch.ones(len(ids), 1)
    with pytest.raises(ValueError, match=r"decoder_attention_mask has shape \[\d, 1\]. Give \[batch, "):
        model(input_ids=ids, decoder_input_ids=ids[:, :1], decoder_attention_mask=one, past_key_values=past)
    with pytest.raises(ValueError, match=r"^attention_mask has shape \[\d, 1\]. Give \[batch, "):
        model(input_ids=ids, decoder_input_ids=ids, attention_mask=one)


def test_an_argument_that_is_not_known_is_refused(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    for one in (model, Qwen3EncoderModel(Qwen3EncoderConfig.of(model.config)), model.get_encoder()):
        with pytest.raises(TypeError, match="next_name_of_the_cache"):
            one(input_ids=ids, next_name_of_the_cache=ids)
    with pytest.raises(TypeError, match="know logits, position_ids"):
        model(input_ids=ids, labels=ids, logits=ids, position_ids=ids, cache_position=ids[0], head_mask=None)
    mean = model(input_ids=ids, labels=ids, cache_position=ids[0], head_mask=None).loss
    torch.testing.assert_close(model(input_ids=ids, labels=ids, num_items_in_batch=54).loss, mean / 2)


def test_a_cache_is_used_in_training_mode_or_refused(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    model.train()
    model.gradient_checkpointing_enable()
    generated = [model.generate(ids, max_new_tokens=6, min_new_tokens=6, use_cache=use) for use in (True, False)]
    assert torch.equal(*generated)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(NotImplementedError, match="write to the cache twice"):
        model(input_ids=ids, labels=ids, past_key_values=cache)


def test_greedy_generation_follows_the_logits(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    generated = model.generate(ids[:1], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    logits = model(input_ids=ids[:1], decoder_input_ids=generated[:, :-1]).logits
    logits[..., model.config.eos_token_id] = -torch.inf  # forbidden by min_new_tokens
    assert torch.equal(logits.argmax(-1), generated[:, 1:])


def test_generation_of_a_padded_batch_equals_one_by_one(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [0] * 2 + [1] * 7])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6)
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row].bool()], max_new_tokens=6, min_new_tokens=6)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_round_trip(tmp_path: Path, tied: bool, ids: Tensor) -> None:
    model = tiny_model(tie_word_embeddings=tied, sentinel_token_ids=[95, 96])
    model.save_pretrained(tmp_path)
    loaded, report = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.sentinel_token_ids == [95, 96]
    assert (loaded.lm_head.weight is loaded.shared.weight) == tied
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters[name], parameter)
    inputs = {"input_ids": ids[:1], "decoder_input_ids": ids[1:2]}
    assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)


def test_gradient_checkpointing_of_transformers_changes_nothing(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> None:
    model.train()
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


Pair = tuple[Qwen3ForCausalLM, Qwen3ForSeq2SeqLM]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def qwen3_and_ours(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    qwen3 = qwen3_with_norms(tmp_path, num_hidden_layers=3, tie_word_embeddings=request.param)
    ours = filled(resolve(tmp_path, vocabulary((95, 96)), cross_attention="final"))
    assert (ours.lm_head.weight is ours.shared.weight) == request.param
    return qwen3, ours


@torch.no_grad()
def test_with_an_empty_encoder_the_decoder_is_qwen3_for_causal_lm(qwen3_and_ours: Pair, ids: Tensor) -> None:
    qwen3, ours = qwen3_and_ours
    expected = qwen3(ids).logits
    # Sentinel rows were drawn anew: their logits alone differ where the head is tied to the embedding.
    logits = ours(input_ids=ids[:, :0], decoder_input_ids=ids).logits
    torch.testing.assert_close(logits[..., :95], expected[..., :95], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_with_a_causal_mask_the_encoder_is_qwen3_model(qwen3_and_ours: Pair, ids: Tensor) -> None:
    qwen3, ours = qwen3_and_ours
    expected = qwen3.model(ids).last_hidden_state
    layout = PaddedLayout.build(encoder_length=9, device=ids.device)
    layout = replace(layout, encoder_mask=torch.ones(9, 9, dtype=torch.bool).tril()[None, None])
    states = ours.encoder(ours.shared(ids), layout=layout)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
