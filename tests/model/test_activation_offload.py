"""Activations on the host: which are, how long they stay on the device, and when they go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_models import pack, tiny_model
from torch import Tensor, nn

from ds_encdec.model import activation_checkpointing
from ds_encdec.model.activation_checkpointing import (
    _pack,
    _Saved,
    _tensors,
    _unpack,
    apply_activation_checkpointing,
)

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


def test_what_was_saved_goes_with_its_graph_without_a_collector(packed: Packed) -> None:
    gc.disable()
    try:
        loss, _, _model = loss_of(2)
        hosts = [weakref.ref(one.host) for _, one in packed if isinstance(one, _Saved)]
        packed.clear()
        assert all(host() is not None for host in hosts)
        loss.backward()
        del loss
        assert all(host() is None for host in hosts)
    finally:
        gc.enable()


def test_what_a_copy_would_lay_out_anew_stays() -> None:
    """Compiled layers have noted the strides of what they save, which torch would change."""
    table = torch.randn(4, 6)
    for one in (table, table.T, table[1:]):
        assert isinstance(_pack({}, set(), nn.Identity(), one), _Saved)
    for one in (table[:, ::2], table[:1].expand(4, 6)):
        assert _pack({}, set(), nn.Identity(), one) is one
