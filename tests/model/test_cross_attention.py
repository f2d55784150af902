"""The forms of cross-attention: the aligned one is its source on [input ; target], and every form is one model in both
call forms, whatever the padding."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny_models import (
    SIZES,
    filled,
    pack,
    qwen3_with_norms,
    resolve,
    tiny_config,
    tiny_model,
    token_losses_alone,
    vocabulary,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import ModelConfig
from ds_encdec.model.attention import PackedLayout, PaddedLayout
from ds_encdec.model.cross_attention import FORMS, POSITIONS
from ds_encdec.model.depth import depth_of
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.source import resolve_model

LENGTHS = ((5, 0, 7, 2), (4, 6, 3, 5), 17, 21)  # encoder and decoder documents, sizes of the two buffers


@pytest.fixture(params=[(form, positions) for form in FORMS for positions in POSITIONS], ids=str)
def model(request: pytest.FixtureRequest) -> Qwen3ForSeq2SeqLM:
    form, positions = request.param
    return tiny_model(num_hidden_layers=3, cross_attention=form, encoder_positions=positions)


def source_and_ours(folder: Path, dtype: torch.dtype, **section: Any) -> tuple[Qwen3ForCausalLM, Qwen3ForSeq2SeqLM]:
    """A Qwen3 of 4 layers, whose norms differ, and what is made of it, with the sentinels' rows given back."""
    qwen3 = qwen3_with_norms(folder, num_hidden_layers=4)
    ours = filled(resolve(folder, vocabulary((95, 96)), **section))
    with torch.no_grad():
        ours.shared.weight.copy_(qwen3.model.embed_tokens.weight)
    return qwen3.to(dtype), ours.to(dtype)


class CausalEncoder(PackedLayout):
    """A layout in which the encoder looks back alone, as the source does."""

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel.attend(q, k, v, self.encoder, True, self.dropout)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_aligned_with_a_causal_encoder_is_the_source_on_input_and_target(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    # Rotary tables and the packed loss are float32, so that float64 ends there, too.
    qwen3, ours = source_and_ours(tmp_path, dtype)
    assert (ours.config.cross_attention, ours.config.encoder_positions) == ("aligned", "prefix")
    batch = pack(*LENGTHS)
    batch.inputs["packing"] = CausalEncoder(**vars(batch.inputs["packing"]))
    packed = ours(**batch.inputs).token_losses.split([len(labels) for _, _, labels in batch.documents] + [3])
    for (inputs, targets, labels), losses in zip(batch.documents, packed, strict=False):
        expected = qwen3(torch.cat([inputs, targets])[None]).logits[0, len(inputs) :]
        torch.testing.assert_close(
            losses, F.cross_entropy(expected, labels, reduction="none").float(), rtol=1e-5, atol=1e-5
        )
        layout = PaddedLayout.build(encoder_length=len(inputs), decoder_length=len(targets), device=inputs.device)
        causal = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril()[None, None]
        states = ours.encoder.states(ours.shared(inputs[None]), layout=replace(layout, encoder_mask=causal))
        logits = ours.lm_head(ours.decoder(ours.shared(targets[None]), states, layout=layout))[0]
        assert (logits - expected).abs().max() < tolerance * expected.abs().max()


@torch.no_grad()
def test_a_lost_norm_another_height_or_position_is_not_the_source(tmp_path: Path) -> None:
    qwen3, ours = source_and_ours(tmp_path, torch.float32)
    inputs, targets = torch.randint(2, 95, (2, 1, 9), generator=torch.Generator().manual_seed(5))
    expected = qwen3(torch.cat([inputs, targets], dim=1)).logits[:, 9:]
    layout = PaddedLayout.build(encoder_length=9, decoder_length=9, device=inputs.device)
    layout = replace(layout, encoder_mask=torch.ones(9, 9, dtype=torch.bool).tril()[None, None])

    def error() -> float:
        states = ours.encoder.states(ours.shared(inputs), layout=layout)
        logits = ours.lm_head(ours.decoder(ours.shared(targets), states, layout=layout))
        return float((logits - expected).abs().max() / expected.abs().max())

    assert error() < 1e-5
    for wrong in ({"encoder_heights": [0, 1, 1, 3]}, {"encoder_positions": "unrotated"}):
        before = {name: getattr(ours.config, name) for name in wrong}
        vars(ours.config).update(wrong)
        assert error() > 1e-3, wrong
        vars(ours.config).update(before)
    ours.decoder.layers[2].norms_encoder = False
    assert error() > 1e-3


def test_losses_and_gradients_packed_equal_those_alone(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack(*LENGTHS)
    alone = token_losses_alone(model, batch)
    alone.sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    packed = model(**batch.inputs)
    torch.testing.assert_close(packed.token_losses[: len(alone)], alone, rtol=1e-5, atol=1e-5)
    packed.loss.backward()
    assert set(expected) == set(parameter_shapes(model.config))
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=lambda text, n=name: n + text
        )


@pytest.mark.parametrize("lengths", [((), (), 9, 8), ((0, 0), (3, 4), 9, 8)], ids=["no documents", "no inputs"])
def test_every_parameter_has_a_gradient_without_an_input(model: Qwen3ForSeq2SeqLM, lengths: Sequence[Any]) -> None:
    model(**pack(*lengths).inputs).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model: Qwen3ForSeq2SeqLM) -> None:
    ids = torch.randint(2, 95, (2, 9), generator=torch.Generator().manual_seed(3))
    encoder_ids, decoder_ids = ids[:1, :5], ids[1:, :4]
    expected = model(input_ids=encoder_ids, decoder_input_ids=decoder_ids).logits
    for encoder_pad in ((3, 0), (0, 3)):
        for decoder_pad in ((3, 0), (0, 3)):
            logits = model(
                input_ids=F.pad(encoder_ids, encoder_pad, value=7),
                attention_mask=F.pad(torch.ones_like(encoder_ids), encoder_pad),
                decoder_input_ids=F.pad(decoder_ids, decoder_pad, value=7),
                decoder_attention_mask=F.pad(torch.ones_like(decoder_ids), decoder_pad),
            ).logits
            real = logits[:, 3:] if decoder_pad == (3, 0) else logits[:, :-3]
            torch.testing.assert_close(real, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generation_is_the_same_with_any_cache_beams_and_given_encoder_outputs(model: Qwen3ForSeq2SeqLM) -> None:
    ids = torch.randint(2, 95, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [0] * 2 + [1] * 7])
    for beams in (1, 3):
        asked = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams}
        cached = model.generate(ids, **asked)
        assert torch.equal(model.generate(ids, use_cache=False, **asked), cached)
        assert torch.equal(model.generate(ids, cache_implementation="static", **asked), cached)
        encoded = model.get_encoder()(ids, attention_mask=mask)
        assert torch.equal(model.generate(encoder_outputs=encoded, **asked), cached)
    alone = [
        model.generate(ids[row : row + 1, mask[row].bool()], max_new_tokens=6, min_new_tokens=6)[0] for row in range(3)
    ]
    asked["num_beams"] = 1
    assert torch.equal(model.generate(ids, **asked), torch.stack(alone))


@torch.no_grad()
def test_generation_keeps_no_states_of_the_encoder_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(num_hidden_layers=3, cross_attention="aligned", encoder_positions="prefix")
    kept, forward = [], model.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        kept.append(options["encoder_outputs"].hidden_states is not None)
        return forward(*arguments, **options)

    monkeypatch.setattr(model, "forward", watched)
    ids = torch.randint(2, 95, (2, 9), generator=torch.Generator().manual_seed(3))
    for use_cache, expected in ((True, [True, False, False]), (False, [True, True, True])):
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, use_cache=use_cache)
        assert kept == expected
        kept.clear()
    with pytest.raises(ValueError, match="encoder_outputs lacks the hidden_states"):
        model(encoder_outputs=BaseModelOutput(model.shared(ids)), decoder_input_ids=ids)
    encoded = model.get_encoder()(ids)
    with pytest.raises(ValueError, match="encoder_outputs lacks the hidden_states"):  # of the same texts
        model(encoder_outputs=BaseModelOutput(encoded[0][:1], encoded.hidden_states), decoder_input_ids=ids[:1])


def choice(**section: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name_or_path": "source"} | section)


@pytest.mark.parametrize(
    ("encoder", "decoder", "taken", "heights"),
    [
        (None, None, (tuple(range(7)), tuple(range(8))), list(range(8))),
        (None, 3, (tuple(range(7)), (0, 4, 7)), [0, 4, 7]),
        (3, None, ((0, 3, 6), tuple(range(8))), [0, 1, 1, 1, 2, 2, 2, 3]),
        (None, "top 2", (tuple(range(7)), (6, 7)), [6, 7]),
        (None, [1, 3, 4], (tuple(range(4)), (1, 3, 4)), [1, 3, 4]),
        ([0, 2], [3, 5], ((0, 2), (3, 5)), [2, 2]),
        (1, 1, ((6,), (7,)), [1]),
    ],
)
def test_layers_are_copied_and_read_at_their_height_in_the_source(
    encoder: Any, decoder: Any, taken: tuple[Any, Any], heights: list[int]
) -> None:
    depth = depth_of(choice(encoder_layers=encoder, decoder_layers=decoder), 8, FORMS["aligned"])
    assert ((depth.encoder, depth.decoder), depth.heights) == (taken, heights)
    whole = depth_of(choice(decoder_layers=decoder), 8, FORMS["final"])
    assert (whole.encoder, whole.decoder) == (tuple(range(8)), taken[1])


@pytest.mark.parametrize(
    ("section", "form", "message"),
    [
        ({"decoder_layers": (0,), "encoder_layers": 1}, "aligned", "read only the 0 below it: leave it out"),
        ({"decoder_layers": 9}, "final", "model.decoder_layers is 9, but the source has 8 layers: take at most 8"),
        ({"decoder_layers": [2, 8]}, "aligned", r"model.decoder_layers is \[2, 8\], but .*: name layers from 0 to 7"),
        ({"encoder_layers": 8}, "aligned", "model.encoder_layers is 8, but aligned decoder layers, .* at most 7"),
        (
            {"encoder_layers": [5], "decoder_layers": [1, 5]},
            "aligned",
            "up to layer 5 of the source, read only the 5 b",
        ),
    ],
)
def test_layers_that_a_source_does_not_have_or_nobody_reads_are_refused(
    section: dict[str, Any], form: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        depth_of(choice(**section), 8, FORMS[form])


@pytest.mark.parametrize("wrong", [[3, 1], [1, 1], [], 0, "top 0", "middle 3", [-1, 2], "2,1"])
def test_a_choice_of_layers_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="decoder_layers"):
        choice(decoder_layers=wrong)
    assert choice(decoder_layers="0, 2, 5").decoder_layers == (0, 2, 5)


@torch.no_grad()
def test_a_shallow_decoder_copies_the_layers_it_names(tmp_path: Path) -> None:
    qwen3, ours = source_and_ours(tmp_path, torch.float32, decoder_layers=2, encoder_layers=[0, 2])
    layers = qwen3.model.layers
    pairs = zip([*ours.encoder.layers, *ours.decoder.layers], (layers[0], layers[2], layers[0], layers[3]), strict=True)
    for mine, theirs in pairs:
        state = mine.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())
    assert (ours.config.encoder_heights, ours.config.num_encoder_layers) == ([0, 2], 2)
    ids = torch.randint(2, 95, (2, 9), generator=torch.Generator().manual_seed(3))
    ours.save_pretrained(tmp_path / "ours")
    loaded = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(loaded(input_ids=ids, labels=ids).logits, ours(input_ids=ids, labels=ids).logits)
    again = resolve(tmp_path / "ours", vocabulary((95, 96)))
    assert (again.config.encoder_heights, again.config.num_encoder_layers) == ([0, 2], 2)


@pytest.mark.parametrize(
    "wrong", [{"cross_attention": "final"}, {"encoder_positions": "unrotated"}, {"decoder_layers": 2}]
)
def test_a_stored_encoder_decoder_keeps_its_own_form(tmp_path: Path, wrong: dict[str, Any]) -> None:
    tiny_model(num_hidden_layers=3, cross_attention="aligned", encoder_positions="prefix").save_pretrained(tmp_path)
    section = {"model_name_or_path": str(tmp_path)}
    same = {"cross_attention": "aligned", "encoder_positions": "prefix", "decoder_layers": 3, "encoder_layers": 2}
    for known in ({}, same):
        config = resolve_model(ModelConfig.model_validate(section | known), vocabulary(), 0).config
        assert (config.cross_attention, config.encoder_heights) == ("aligned", [0, 1, 2])
    with pytest.raises(
        ConfigError, match=rf"model.{next(iter(wrong))} is .*, but .* which it keeps: leave the setting"
    ):
        resolve_model(ModelConfig.model_validate(section | wrong), vocabulary(), 0)


def test_a_folder_without_a_form_is_final_and_unknown_forms_are_refused() -> None:
    config = tiny_config()
    assert (config.cross_attention, config.encoder_positions, config.encoder_heights) == ("final", "unrotated", None)
    assert config.num_encoder_layers == 2
    for wrong in ({"cross_attention": "merged"}, {"encoder_positions": "own"}):
        with pytest.raises(ValueError, match="which this code does not know: "):
            tiny_config(**wrong)
    for heights in ([0], [1, 0], [0, 2], [0, 1, 1], [-1, 1]):
        with pytest.raises(ValueError, match="encoder_heights is "):
            tiny_config(cross_attention="aligned", encoder_heights=heights)


def test_the_configuration_names_the_rows() -> None:
    for field, rows in (("cross_attention", FORMS), ("encoder_positions", POSITIONS)):
        assert get_args(get_args(ModelConfig.model_fields[field].annotation)[0]) == tuple(rows)
    assert SIZES["num_hidden_layers"] == 2
