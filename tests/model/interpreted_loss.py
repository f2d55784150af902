"""The loss's kernel in Triton's interpreter, in a process of its own: Triton decides when it is imported."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from tiny_models import loss_inputs
from torch import Tensor

from ds_encdec.model import loss_kernel
from ds_encdec.model.loss import Teacher, distilled_cross_entropy, linear_cross_entropy

VOCAB = loss_kernel._BLOCK + 321
"""One block of words, and a part of a second."""
TOKENS, HIDDEN, CHUNK_TOKENS, GRADIENT = 21, 24, 8, 0.37
Case = tuple[torch.dtype, float, float]
"""Dtype of states and weight, label smoothing, z-loss."""
CASES: list[Case] = [
    (dtype, smoothing, z_loss)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-4))
]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return loss_inputs(dtype, TOKENS, HIDDEN, VOCAB)


def results(case: Case) -> list[Tensor]:
    dtype, smoothing, z_loss = case
    hidden, weight, labels = inputs(dtype)
    extras = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, CHUNK_TOKENS, **extras)
    (loss * GRADIENT).backward()
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, weight, labels, CHUNK_TOKENS)[1]
    return [loss.detach(), token_losses, hidden.grad, weight.grad, evaluated]


TAUGHT: list[Case] = [case for case in CASES if case[1:] in ((0.0, 0.0), (0.1, 1e-4))]
"""Cases beside a teacher."""


def taught_results(case: Case, temperature: float = 2.5) -> list[Tensor]:
    """The teacher knows all words but the last 70, and teaches the tokens up to the middle of the third chunk."""
    dtype, smoothing, z_loss = case
    hidden, weight, labels = inputs(dtype)
    labels, states = labels.clamp(min=0), (hidden.detach() + hidden.detach().roll(1, 0))[:19]
    teacher = Teacher(states, weight.detach().flip(1)[:-40], VOCAB - 70, 0.3, temperature)
    extras = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss, token_losses, divergences = distilled_cross_entropy(hidden, weight, labels, CHUNK_TOKENS, teacher, **extras)
    (loss * GRADIENT).backward()
    with torch.no_grad():
        evaluated = distilled_cross_entropy(hidden, weight, labels, CHUNK_TOKENS, teacher)[2]
    return [loss.detach(), token_losses, divergences, evaluated, hidden.grad, weight.grad]


def in_interpreter(path: Path) -> dict[str, object]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True)
    return torch.load(path)


if __name__ == "__main__":
    with patch.object(loss_kernel, "runs_on", lambda *_: True):
        found = {"cases": [results(case) for case in CASES], "taught": [taught_results(case) for case in TAUGHT]}
        trials = [
            loss_kernel.trial_error(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16, None)
        ]
    torch.save(found | {"trials": trials}, sys.argv[1])
