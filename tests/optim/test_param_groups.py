"""Decay groups by module and name, and the steps of Newton and Schulz against torch's own."""

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from ds_encdec.engine.muon import orthogonalized
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


@pytest.mark.parametrize("are_empty", [False, True])  # as zero.Init leaves them
def test_groups_by_module_and_name(are_empty: bool) -> None:
    model = Tiny()
    for parameter in model.parameters() if are_empty else ():
        parameter.data = torch.empty(0)
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert names(model, decay["params"]) == {"embedding.weight", "linear.weight"}
    assert names(model, no_decay["params"]) == {"norm.weight", "layer_norm.weight", "layer_norm.bias", "linear.bias"}
    assert len(decay["params"]) == 2  # the tied head is not counted again


def test_muon_has_the_matrices_of_layers() -> None:
    layer = nn.ModuleDict({"q_proj": nn.Linear(4, 4, bias=False), "norm": TinyRMSNorm()})
    outside = {"shared": nn.Embedding(7, 4), "in_proj": nn.Linear(4, 4, bias=False)}
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([layer]), **outside})})
    decay, no_decay, hidden = parameter_groups(model, 0.1, matrices_apart=True)
    assert names(model, hidden["params"]) == {"encoder.layers.0.q_proj.weight"}
    assert (hidden["weight_decay"], hidden["is_matrix"]) == (0.1, True)
    assert names(model, decay["params"]) == {"encoder.shared.weight", "encoder.in_proj.weight"}
    assert names(model, no_decay["params"]) == {"encoder.layers.0.norm.weight"}


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_newton_schulz_is_torchs_to_the_bit_and_orthogonalizes(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = _zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalized(matrix.bfloat16()), expected)
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = u.T @ orthogonalized(matrix.double()) @ v.T
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-12)
    assert 0.6 < values.diagonal().min() < values.diagonal().max() < 1.3
