"""The steps of Newton and Schulz against torch's own, and against what they are for."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from ds_encdec.engine.muon import orthogonalized

SHAPES = [(48, 16), (16, 48), (32, 32)]


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_torchs_muon_to_the_bit(shape: tuple[int, int]) -> None:
    expected = _zeropower_via_newtonschulz(matrix(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalized(matrix(shape).bfloat16()), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_values_come_near_1(shape: tuple[int, int]) -> None:
    found = orthogonalized(matrix(shape).double())
    u, _, v = torch.linalg.svd(matrix(shape).double(), full_matrices=False)
    values = u.T @ found @ v.T
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-12)
    assert 0.6 < values.diagonal().min() < values.diagonal().max() < 1.3


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(4, 6)).any()
