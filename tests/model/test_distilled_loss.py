"""The loss beside a teacher, against torch's divergence on whole logits of both."""

from typing import Any

import pytest
import torch
from tiny_models import loss_inputs, relative_error
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from ds_encdec.model.loss import Teacher, distilled_cross_entropy, linear_cross_entropy

TAUGHT = 20
"""Tokens with a teacher: two chunks and a half."""
Case = tuple[torch.dtype, float, float, dict[str, float], int]
"""Dtype, share and temperature of the teacher, extras, and the ids that it knows."""


def inputs(dtype: torch.dtype, rows: int = 190) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Student's states and weight, labels, teacher's states and weight, which are wider and have fewer rows."""
    hidden, weight, labels = loss_inputs(dtype)
    labels[:TAUGHT].clamp_(min=0)
    generator = torch.Generator().manual_seed(9)
    states, head = (torch.randn(count, 40, generator=generator).to(dtype) for count in (TAUGHT, rows))
    return hidden, weight, labels, states, head


def found(
    dtype: torch.dtype, share: float, temperature: float, extras: dict[str, float], words: int, **sizes: Any
) -> list[Tensor]:
    hidden, weight, labels, states, head = inputs(dtype, **sizes)
    teacher = Teacher(states, head, words, share, temperature)
    loss, token_losses, divergences = distilled_cross_entropy(hidden, weight, labels, 8, teacher, **extras)
    (0.37 * loss).backward()
    return [loss.detach(), token_losses, divergences, hidden.grad, weight.grad]


def expected(
    dtype: torch.dtype, share: float, temperature: float, extras: dict[str, float], words: int, **sizes: Any
) -> list[Tensor]:
    """In float64, by torch's own functions: kl_div of softmaxes of the whole vocabulary."""
    tensors = inputs(dtype, **sizes)
    labels = tensors[2]
    hidden, weight, states, head = (one.detach().double() for one in (*tensors[:2], *tensors[3:]))
    hidden.requires_grad_(), weight.requires_grad_()
    logits, has_loss = hidden @ weight.T, labels != -100
    smoothing, z_loss = extras.get("label_smoothing", 0.0), extras.get("z_loss", 0.0)
    own = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    own = own + z_loss * logits.logsumexp(-1).square() * has_loss
    said = torch.full((TAUGHT, len(weight)), -torch.inf, dtype=torch.float64)
    said[:, :words] = (states @ head.T)[:, :words]
    towards = F.log_softmax(said / temperature, -1)
    student = F.log_softmax(logits[:TAUGHT] / temperature, -1)
    divergences = F.kl_div(student, towards.exp(), reduction="none").sum(-1)
    optimised = own * torch.where(torch.arange(len(own)) < TAUGHT, 1 - share, 1.0)
    loss = optimised.sum() + share * temperature**2 * divergences.sum()
    (0.37 * loss).backward()
    plain = F.cross_entropy(logits, labels, reduction="none")
    return [loss.detach(), plain.detach(), divergences.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("extras", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_float32_equals_the_definition(share: float, extras: dict[str, float], temperature: float) -> None:
    case: Case = (torch.float32, share, temperature, extras, 180)
    for value, exact in zip(found(*case), expected(*case), strict=True):
        assert relative_error(value, exact) < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 1e-3)])
def test_16_bits_round_as_much_as_their_gradients_do(dtype: torch.dtype, tolerance: float) -> None:
    case: Case = (dtype, 0.5, 4.0, {"z_loss": 1e-3}, 190)
    values = found(*case)
    assert [value.dtype for value in values] == [torch.float32] * 3 + [dtype] * 2
    for value, exact in zip(values, expected(*case), strict=True):
        assert relative_error(value, exact) < tolerance


def test_ids_that_the_student_lacks_have_no_part_in_it() -> None:
    case: Case = (torch.float32, 0.5, 1.0, {}, 230)  # of 240 that the teacher's head has; the student has 211
    short: Case = (*case[:4], 211)
    for value, exact in zip(found(*case, rows=240), expected(*short, rows=240), strict=True):
        assert relative_error(value, exact) < 1e-6


def test_a_teacher_with_the_student_s_own_weights_diverges_nowhere() -> None:
    hidden, weight, labels, *_ = inputs(torch.float32)
    teacher = Teacher(hidden.detach()[:TAUGHT], weight.detach(), len(weight), 1.0, 2.0)
    loss, token_losses, divergences = distilled_cross_entropy(hidden, weight, labels, 8, teacher)
    loss.backward()
    assert divergences.abs().max() < 1e-5
    assert hidden.grad[:TAUGHT].abs().max() < 1e-5
    torch.testing.assert_close(loss.detach(), token_losses[TAUGHT:].sum())


def test_tokens_without_a_teacher_have_the_plain_loss() -> None:
    hidden, weight, labels, states, head = inputs(torch.float32)
    nobody = Teacher(states[:0], head, 180, 0.5, 2.0)
    loss, token_losses, divergences = distilled_cross_entropy(hidden, weight, labels, 8, nobody)
    plain, plain_tokens = linear_cross_entropy(hidden, weight, labels, 8)
    assert len(divergences) == 0
    assert torch.equal(loss, plain)
    assert torch.equal(token_losses, plain_tokens)


@pytest.mark.parametrize("trains", [True, False])
def test_logits_of_either_exist_for_one_chunk_at_a_time(trains: bool) -> None:
    tokens, width, chunk_tokens, vocab = 96, 4, 32, 2048
    one_chunk = chunk_tokens * vocab * 4
    hidden, weight = torch.randn(tokens, width, requires_grad=trains), torch.randn(vocab, width, requires_grad=trains)
    states, head = torch.randn(tokens, width), torch.randn(vocab, width)
    labels = torch.arange(tokens)
    tracker = MemTracker()
    tracker.track_external(hidden, weight, labels, states, head)
    with tracker:
        distilled_cross_entropy(hidden, weight, labels, chunk_tokens, Teacher(states, head, vocab, 0.5, 2.0))
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert 2 * one_chunk < peak < 4.2 * one_chunk + 3 * weight.nbytes
