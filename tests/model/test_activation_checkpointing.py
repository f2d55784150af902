"""Recomputing and offloading change when things are computed and kept, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import pack, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.encoder import Qwen3MLP
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

MODES = [
    {"mode": "none", "offload": True},
    {"mode": "full"},
    {"mode": "full", "offload": True},
    {"mode": "every_n", "every_n": 2},
    {"mode": "every_n", "every_n": 2, "offload": True},
    {"mode": "selective"},
    {"mode": "selective", "offload": True},
]


def step(model: Qwen3ForSeq2SeqLM, dropout: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.residual_dropout = dropout
    model.attention_dropout = dropout
    torch.manual_seed(0)
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_loss_and_gradients_are_bit_identical(options: dict[str, Any], dropout: float) -> None:
    expected_loss, expected = step(tiny_model(num_hidden_layers=3), dropout)
    model = tiny_model(num_hidden_layers=3)
    names = [name for name, _ in model.named_modules()]
    apply_activation_checkpointing(model, **options, random=bool(dropout))
    assert [name for name, _ in model.named_modules()] == names
    loss, gradients = step(model, dropout)
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(
    ("options", "recomputed"), [({"mode": "none"}, 0), ({"mode": "full"}, 6), ({"mode": "every_n", "every_n": 2}, 4)]
)
def test_the_layers_asked_for_recompute(options: dict[str, Any], recomputed: int) -> None:
    model = tiny_model(num_hidden_layers=3)
    calls = []
    for module in model.modules():
        if isinstance(module, Qwen3MLP):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    apply_activation_checkpointing(model, **options)
    step(model)
    assert len(calls) == 6 + recomputed


class Executed(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        self.attentions += "attention" in func.__name__ and "backward" not in func.__name__
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_repeats_half_of_the_products_and_no_attention() -> None:
    counts = {}
    for mode in ("none", "full", "selective"):
        model = tiny_model(num_hidden_layers=3)
        apply_activation_checkpointing(model, mode)
        with Executed() as counted:
            step(model)
        counts[mode] = counted
    # Of 7 products in an encoder layer and 9 in a decoder layer: every second one, beginning with the second.
    assert counts["selective"].products - counts["none"].products == 3 * (3 + 4)
    assert counts["full"].products - counts["none"].products > 3 * (3 + 4) * 1.5
    assert counts["selective"].attentions == counts["none"].attentions < counts["full"].attentions


def test_evaluation_needs_no_graph() -> None:
    model = tiny_model()
    batch = pack((5, 0, 7), (4, 6, 3), 16, 17)
    expected = model(**batch.inputs).loss
    apply_activation_checkpointing(model, "full", offload=True)
    with torch.no_grad():
        assert torch.equal(model(**batch.inputs).loss, expected)
