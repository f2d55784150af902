"""What the loss moves on a GPU, as scripts/bench/loss_traffic.py counts it."""

from __future__ import annotations

import pytest
import torch
from loss_traffic import TOKENS, VOCAB, counted
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="torch 2.11 has no shapes for addmm with out_dtype"
)


def test_a_micro_batch_moves_a_fifth_of_what_operators_move() -> None:
    """Two reads of the logits and one write of their gradients: 10 bytes for each of 1.99 billion logits."""
    found, by_operators = counted(), counted(has_kernel=False)
    assert found.num_bytes <= 24e9
    assert found.num_bytes > 10 * TOKENS * VOCAB
    assert by_operators.num_bytes > 5 * found.num_bytes
    assert found.kernels <= 65
    assert by_operators.kernels > 250


@pytest.mark.parametrize("extras", [{"label_smoothing": 0.1}, {"label_smoothing": 0.1, "z_loss": 1e-4}])
def test_smoothing_and_z_loss_move_no_more_logits(extras: dict[str, float]) -> None:
    assert counted(**extras).num_bytes < 1.001 * counted().num_bytes


def test_the_weights_gradient_is_summed_up_in_its_product() -> None:
    """So that larger chunks, which sum up less often, move less in products, and nothing else changes."""
    small, large = counted(chunk_tokens=1024), counted(chunk_tokens=4096)
    assert large.num_bytes == pytest.approx(small.num_bytes, rel=1e-3)
    assert large.product_bytes < 0.6 * small.product_bytes
    assert (small.products, large.products) == (39, 12)


def test_float16_waits_in_float32_for_its_loss_scale() -> None:
    """Of hidden states alone: 10 bytes for each more, no logit more."""
    assert counted(dtype=torch.float16).num_bytes < 1.03 * counted().num_bytes
