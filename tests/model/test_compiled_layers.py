"""Compiled layers: one graph for each kind of layer, whatever the documents, and the numbers of layers as they are."""

import functools
from collections.abc import Iterator

import pytest
import torch
from flash_on_cpus import attention_of_gpus
from tiny_models import Packed, pack, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters

from ds_encdec.model import attention_kernels, modeling
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.cross_attention import FORMS
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

TOKENS = (16, 17)
DOCUMENTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((5, 0, 7), (4, 6, 3)),
    ((9,), (8,)),
    ((3, 3, 3, 3), (4, 4, 4, 1)),
    ((), ()),
    ((1,) * 12, (1,) * 12),  # more than a multiple of segments
    ((16,), (17,)),
]
GRAPHS = 2
"""Of encoder and decoder layers."""


def batches(tokens: tuple[int, int] = TOKENS) -> list[Packed]:
    return [pack(*lengths, *tokens, max_documents=20) for lengths in DOCUMENTS]


def step(model: Qwen3ForSeq2SeqLM, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch.inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def some_layers(dropout: float, form: str) -> Qwen3ForSeq2SeqLM:
    model = tiny_model(num_hidden_layers=4, cross_attention=form, encoder_positions=FORMS[form].positions).train()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.residual_dropout = dropout
    return model


@pytest.fixture
def lengths() -> Iterator[list[tuple[int, int]]]:
    torch._dynamo.reset()
    counters.clear()
    with attention_of_gpus() as longest:
        yield longest
    torch._dynamo.reset()


@pytest.fixture
def _not_generated(monkeypatch: pytest.MonkeyPatch, lengths: object) -> None:
    """Graphs are run as they are captured, forward and backward: inductor takes many times longer."""
    capture = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda forward, options=None: capture(forward))


def assert_same_steps(
    mode: str, dropout: float = 0.0, *, form: str = "final", breaks: bool = False
) -> Qwen3ForSeq2SeqLM:
    model, compiled = some_layers(dropout, form), some_layers(dropout, form)
    apply_activation_checkpointing(compiled, mode, compile_layers=True, random=bool(dropout))  # type: ignore[arg-type]
    for batch in batches():
        expected_loss, expected = step(model, batch)
        loss, gradients = step(compiled, batch)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        largest = max(gradient.abs().max() for gradient in expected.values())
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).abs().max() <= 1e-5 * largest, name
    assert breaks or counters["stats"]["unique_graphs"] == GRAPHS
    assert bool(counters["graph_break"]) is breaks
    return compiled


@pytest.mark.usefixtures("_not_generated")
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_of_each_kind_serves_all_documents(lengths: list[tuple[int, int]], form: str) -> None:
    compiled = assert_same_steps("full", form=form)
    assert len(set(lengths)) > 4
    with torch.no_grad():
        for batch in batches():
            compiled(**batch.inputs)
    assert counters["stats"]["unique_graphs"] == 2 * GRAPHS  # without a backward pass they are others
    assert not counters["graph_break"]


@pytest.mark.usefixtures("lengths")
def test_what_inductor_makes_of_layers_gives_the_same_numbers() -> None:
    assert_same_steps("selective", 0.2, form="aligned")


@pytest.mark.usefixtures("_not_generated")
def test_attention_by_document_ends_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "choose_kernel", attention_kernels.choose_kernel)
        assert_same_steps("selective", breaks=True)
