"""Recomputing and offloading change when things are computed and kept, and no number."""

from typing import Any

import pytest
import torch
from tiny_models import pack, tiny_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.model import activation_checkpointing
from ds_encdec.model.activation_checkpointing import (
    _pack,
    _Saved,
    _tensors,
    _unpack,
    apply_activation_checkpointing,
)
from ds_encdec.model.cross_attention import FORMS
from ds_encdec.model.encoder import Qwen3MLP
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

MODES = [
    {"mode": "none", "offload": True},
    {"mode": "full"},
    {"mode": "every_n", "every_n": 2, "offload": True},
    {"mode": "selective"},
    {"mode": "selective", "offload": True},
]
FORMED = {form: {"cross_attention": form, "encoder_positions": row.positions} for form, row in FORMS.items()}


def step(model: Qwen3ForSeq2SeqLM, dropout: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.residual_dropout = dropout
    model.attention_dropout = dropout
    torch.manual_seed(0)
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_loss_and_gradients_are_bit_identical(options: dict[str, Any], dropout: float, form: str) -> None:
    expected_loss, expected = step(tiny_model(num_hidden_layers=3, **FORMED[form]), dropout)
    model = tiny_model(num_hidden_layers=3, **FORMED[form])
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


@pytest.mark.parametrize("form", FORMS)
def test_modules_are_called_in_the_same_order_for_any_documents(form: str) -> None:
    """Also where there are none, or no inputs: ZeRO-3 gathers by module, and ranks wait for each other."""
    orders = []
    for lengths in (((5, 0, 7), (4, 6, 3)), ((), ()), ((0, 0), (3, 4))):
        model, calls = tiny_model(num_hidden_layers=3, **FORMED[form]).train(), list[str]()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name, calls=calls: calls.append(name))
        apply_activation_checkpointing(model, "full")
        model(**pack(*lengths, 16, 17).inputs).loss.backward()
        orders.append(calls)
    assert orders[0] == orders[1] == orders[2]
    assert orders[0].count("decoder.layers.1.self_attn.k_proj") == 4  # of both sides, and again


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


Packed = list[tuple[dict[Any, Any], Tensor | _Saved]]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Packed:
    """Of each saved tensor what its layer has seen, and what is kept of it."""
    kept: Packed = []

    def noted(seen: dict[Any, Any], *others: Any) -> Tensor | _Saved:
        kept.append((seen, _pack(seen, *others)))
        return kept[-1][1]

    monkeypatch.setattr(activation_checkpointing, "_pack", noted)
    return kept


def loss_of(layers: int) -> tuple[Tensor, dict[str, Any], nn.Module]:
    model = tiny_model(num_hidden_layers=layers).train()
    apply_activation_checkpointing(model, "none", offload=True)
    inputs = pack((5, 0, 7), (4, 6, 3), 16, 17).inputs
    return model(**inputs).loss, inputs, model


def test_the_device_keeps_nothing_of_a_layer_but_what_all_layers_share(packed: Packed) -> None:
    _loss, inputs, model = loss_of(1)
    assert not any(seen for seen, _ in packed)
    saved = {id(one): one for _, one in packed if isinstance(one, _Saved)}.values()
    assert all(one.tensor is None for one in saved)
    assert max(one.uses for one in saved) >= 3  # the input of the projections
    layout = inputs["packing"]
    fields = (*vars(layout).values(), *vars(layout.encoder).values(), *vars(layout.merged).values())
    shared = {one.untyped_storage().data_ptr() for one in (*fields, *model.parameters()) if isinstance(one, Tensor)}
    found = (*_tensors(inputs), *model.parameters())
    assert shared <= {one.untyped_storage().data_ptr() for one in found}  # boundaries, too, which kernels of GPUs save
    staying = {one.untyped_storage().data_ptr() for _, one in packed if isinstance(one, Tensor) and one.numel()}
    assert staying & {one.untyped_storage().data_ptr() for one in model.parameters()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_the_encoders_states_leave_the_device_if_each_layer_reads_its_own(mode: Any, form: str) -> None:
    model = tiny_model(num_hidden_layers=3, **FORMED[form]).train()
    apply_activation_checkpointing(model, mode, offload=True)
    read: list[StorageWeakRef] = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, given: read.append(StorageWeakRef(given[1].untyped_storage())))
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss  # whose graph lives
    assert [one.expired() for one in read] == [form == "aligned"] * 3
    loss.backward()


@pytest.mark.parametrize("form", FORMS)
def test_states_that_two_layers_read_are_copied_once(form: str, packed: Packed) -> None:
    model = tiny_model(num_hidden_layers=3, **FORMED[form]).train()
    apply_activation_checkpointing(model, "full", offload=True)
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
    copies = {id(one): len(one.host) for _, one in packed if isinstance(one, _Saved)}
    assert sorted(copies.values()) == [16] * 3 + [17] * 3  # tokens: an input of each layer, the last height instead
    loss.backward()


def test_a_copy_stays_on_the_device_until_its_last_use() -> None:
    seen: dict[Any, Any] = {}
    table = torch.randn(4, 6)
    saved, again = (_pack(seen, set(), nn.Identity(), table) for _ in range(2))
    assert saved is again
    assert isinstance(saved, _Saved)
    assert torch.equal(_unpack(saved), table)
    assert saved.tensor is not None
    for _ in range(2):  # the last use, and that of a second backward pass
        assert torch.equal(_unpack(saved), table)
        assert saved.tensor is None


def test_what_a_copy_would_lay_out_anew_stays() -> None:
    table = torch.randn(4, 6)
    for one in (table, table.T, table[1:]):
        assert isinstance(_pack({}, set(), nn.Identity(), one), _Saved)
    for one in (table[:, ::2], table[:1].expand(4, 6)):
        assert _pack({}, set(), nn.Identity(), one) is one
