"""Decay groups are decided by module and name, also when every parameter looks empty."""

from __future__ import annotations

import torch
from torch import nn

from ds_encdec.engine.sharded_engine import parameter_groups


class TinyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = TinyRMSNorm()
        self.layer_norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    return {name for name, found in model.named_parameters() if any(found is one for one in parameters)}


def test_groups_by_module_and_name() -> None:
    model = Tiny()
    decay, no_decay = parameter_groups(model, 0.1)
    assert decay["weight_decay"] == 0.1
    assert no_decay["weight_decay"] == 0.0
    assert names(model, decay["params"]) == {"embedding.weight", "linear.weight"}
    assert names(model, no_decay["params"]) == {"norm.weight", "layer_norm.weight", "layer_norm.bias", "linear.bias"}
    assert len(decay["params"]) == 2  # the tied head is not counted again


def test_shapes_do_not_matter() -> None:
    model = Tiny()
    expected = [names(model, group["params"]) for group in parameter_groups(model, 0.1)]
    for parameter in model.parameters():
        parameter.data = torch.empty(0)  # what zero.Init leaves behind
    assert [names(model, group["params"]) for group in parameter_groups(model, 0.1)] == expected


class Layers(nn.Module):
    """Two kinds of matrices outside of layers, and a layer with one that Muon steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4, bias=False), "norm": TinyRMSNorm()})])
        self.shared = nn.Embedding(7, 4)
        self.in_proj = nn.Linear(4, 4, bias=False)


def test_muon_has_the_matrices_of_layers() -> None:
    model = nn.ModuleDict({"encoder": Layers()})
    decay, no_decay, hidden = parameter_groups(model, 0.1, matrices_apart=True)
    assert names(model, hidden["params"]) == {"encoder.layers.0.q_proj.weight"}
    assert (hidden["weight_decay"], hidden["is_matrix"]) == (0.1, True)
    assert names(model, decay["params"]) == {"encoder.shared.weight", "encoder.in_proj.weight"}
    assert names(model, no_decay["params"]) == {"encoder.layers.0.norm.weight"}
    assert not any("is_matrix" in group for group in parameter_groups(model, 0.1))


def test_empty_groups_are_left_out() -> None:
    (only,) = parameter_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert only["weight_decay"] == 0.1
