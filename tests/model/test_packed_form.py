"""The packed form: documents see only themselves, and the ordinary form gives the same numbers."""

from typing import Any

import pytest
import torch
from tiny_models import pack, tiny_model, token_losses_alone
from torch import Tensor
from torch.nn import functional as F

from ds_encdec.model import precision
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.precision import Linear, product_dtype

LENGTHS = ((5, 0, 7), (4, 6, 3), 16, 17)  # encoder and decoder documents, sizes of the two buffers


@pytest.fixture(params=[{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}], ids=["gqa", "untied", "mha"])
def model(request: pytest.FixtureRequest) -> Qwen3ForSeq2SeqLM:
    return tiny_model(**request.param)


def gradients(model: Qwen3ForSeq2SeqLM) -> dict[str, Tensor]:
    taken = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return taken


def test_losses_and_gradients_packed_equal_those_alone(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack(*LENGTHS)
    alone = token_losses_alone(model, batch)
    alone.sum().backward()
    expected = gradients(model)
    packed = model(**batch.inputs)
    torch.testing.assert_close(packed.token_losses[: len(alone)], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.loss, alone.sum(), rtol=1e-6, atol=1e-5)
    assert packed.loss.dtype == packed.token_losses.dtype == torch.float32
    assert not packed.token_losses.requires_grad
    assert (packed.token_losses[len(alone) :] == 0).all()
    packed.loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_decoder_is_causal_and_encoder_is_not(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack((6,), (5,), 6, 5)
    before = model(**batch.inputs).token_losses
    batch.inputs["decoder_input_ids"][3] = 2
    changed = model(**batch.inputs).token_losses
    assert torch.equal(changed[:3], before[:3])
    assert changed[3] != before[3]
    batch.inputs["input_ids"][5] = 2  # the last encoder token reaches the first target
    assert model(**batch.inputs).token_losses[0] != changed[0]


@pytest.mark.parametrize("lengths", [((), (), 9, 8), ((0, 0), (3, 4), 9, 8), ((4, 5), (3, 5), 9, 8)])
def test_every_parameter_gets_a_gradient(model: Qwen3ForSeq2SeqLM, lengths: tuple[Any, ...]) -> None:
    output = model(**pack(*lengths).inputs)
    output.loss.backward()
    taken = gradients(model)
    assert all(torch.isfinite(gradient).all() for gradient in taken.values())
    if not lengths[0]:
        assert output.loss == 0
        assert all((gradient == 0).all() for gradient in taken.values())


@pytest.mark.parametrize("emulated", [frozenset(), frozenset({torch.bfloat16})])
def test_bf16_product_is_the_rounded_float32_product(
    emulated: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    torch.manual_seed(0)
    layer = Linear(64, 48).bfloat16()
    x = torch.randn(33, 64).bfloat16().requires_grad_()
    assert product_dtype(x) == (torch.float32 if emulated else torch.bfloat16)
    y = layer(x)
    y.float().square().sum().backward()
    exact = F.linear(x.detach().double(), layer.weight.detach().double())
    assert y.dtype == torch.bfloat16
    # One rounding to bf16 (8 bits), and a last bit for the float32 sum on the edge between two of its values.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-3)
    assert layer.weight.grad is not None
    assert (layer.weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)  # type: ignore[union-attr]
