"""The loss's kernel: interpreted, compiled for absent GPUs, left out where it fails, and counted in bytes."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted_loss import CASES, TAUGHT, Case, in_interpreter, results, taught_results
from loss_traffic import TOKENS, VOCAB, counted
from packaging.version import Version
from tiny_models import relative_error
from torch import Tensor

from ds_encdec.model import loss_kernel
from ds_encdec.model.loss_kernel import Rows

needs_triton = pytest.mark.skipif(loss_kernel.triton is None, reason="triton is not installed")
needs_shapes = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="torch 2.11 has no shapes for addmm with out_dtype"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_interpreter(tmp_path_factory.mktemp("interpreted") / "results.pt")


@needs_triton
@pytest.mark.parametrize("number", range(len(CASES)), ids=str)
def test_the_kernel_gives_what_the_operators_give(number: int, interpreted: dict[str, Any]) -> None:
    case: Case = CASES[number]
    tolerance = 1e-5 if case[0] == torch.float32 else torch.finfo(case[0]).eps
    for index, (found, expected) in enumerate(zip(interpreted["cases"][number], results(case), strict=True)):
        assert found.dtype == expected.dtype
        # Losses are float32 whatever the weights are.
        assert relative_error(found, expected) < (tolerance if index in (2, 3) else 1e-5)
    assert not interpreted["cases"][number][1][::5].any()  # no loss, no gradient
    assert not interpreted["cases"][number][2][::5].any()


@needs_triton
@pytest.mark.parametrize("number", range(len(TAUGHT)), ids=str)
def test_the_kernel_distils_as_the_operators_do(number: int, interpreted: dict[str, Any]) -> None:
    case: Case = TAUGHT[number]
    tolerance = 1e-5 if case[0] == torch.float32 else torch.finfo(case[0]).eps
    for index, (found, expected) in enumerate(zip(interpreted["taught"][number], taught_results(case), strict=True)):
        assert found.dtype == expected.dtype
        assert relative_error(found, expected) < (tolerance if index > 3 else 1e-5)


@needs_triton
def test_the_interpreted_kernel_passes_its_trial(interpreted: dict[str, Any]) -> None:
    assert all(error < 0.6 for error in interpreted["trials"])


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus(capability: int) -> None:
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"logits": "*fp32", "labels": "*i64", "losses": "*fp32", "extra_losses": "*fp32"}
    of_teacher = {"teacher_logits": "*fp32", "divergences": "*fp32", "teacher_columns": "i32", "teacher_words": "i32"}
    numbers = dict.fromkeys(("scale", "label_smoothing", "z_loss", "share", "temperature"), "fp32")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(9)}  # pointers, words, and teacher_columns
    flags = (True, False)
    for dtype, extras, teacher, writes in itertools.product(("fp32", "bf16", "fp16"), flags, flags, flags):
        constants = {"HAS_EXTRAS": extras, "HAS_TEACHER": teacher, "WRITES_GRADIENTS": writes}
        constants |= {"IGNORED": -100, "BLOCK": loss_kernel._BLOCK}
        signature = pointers | {"gradients": f"*{dtype}", "words": "i32"} | of_teacher | numbers
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(loss_kernel.softmax_rows, signature, constants, aligned)
        options = {"num_warps": loss_kernel._WARPS}
        compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert f"sm_{capability}" in compiled.asm["ptx"]
        assert "ld.global.v4" in compiled.asm["ptx"]  # 16 bytes for each thread at a time


def launched_right(rows: Rows, gradients: Tensor | None, *others: Any) -> None:
    made = loss_kernel._plain(rows, None if gradients is None else gradients.dtype, *others)
    if gradients is not None and made is not None:
        gradients.copy_(made)


def launched_wrong(rows: Rows, *others: Any) -> None:
    launched_right(rows, *others)
    rows.losses.mul_(1.001)


def launched_to_nan(rows: Rows, gradients: Tensor, *others: Any) -> None:
    launched_right(rows, gradients, *others)
    gradients.fill_(float("nan"))


def not_launched(*_: Any) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("launch", "reason"),
    [(launched_right, None), (launched_wrong, "off by"), (launched_to_nan, "off by"), (not_launched, "no compiler")],
)
def test_a_kernel_that_fails_its_trial_is_not_used_and_one_line_says_so(
    launch: Callable[..., None],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loss_kernel, "_launch", launch)
    loss_kernel._passes_trial.cache_clear()
    with caplog.at_level(logging.WARNING, loss_kernel.__name__):
        assert [loss_kernel._passes_trial(CPU, torch.bfloat16) for _ in range(2)] == [reason is None] * 2
    loss_kernel._passes_trial.cache_clear()
    assert len(caplog.messages) == (reason is not None)
    assert all(reason in message for message in caplog.messages if reason)


@needs_shapes
def test_a_micro_batch_moves_a_fifth_of_what_operators_move() -> None:
    found, by_operators = counted(), counted(has_kernel=False)
    assert found.num_bytes <= 24e9
    assert found.num_bytes > 10 * TOKENS * VOCAB
    assert by_operators.num_bytes > 5 * found.num_bytes
    assert found.kernels <= 65
    assert by_operators.kernels > 250


@needs_shapes
def test_beside_a_teacher_it_reads_the_logits_of_both_twice_and_writes_one_gradient() -> None:
    found, by_operators = counted(has_teacher=True), counted(has_teacher=True, has_kernel=False)
    assert 18 * TOKENS * VOCAB < found.num_bytes < 20 * TOKENS * VOCAB
    assert by_operators.num_bytes > 8 * found.num_bytes
