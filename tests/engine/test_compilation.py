"""The values that `training.torch_compile: auto` takes by device and engine; ranks that run something else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layers_for_gpu import machine_code

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine import compilation
from ds_encdec.engine.compilation import warn_of_ranks_that_differ, with_compilation_decided
from ds_encdec.engine.sharded_engine import ShardedEngine
from ds_encdec.engines import EngineName
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.compiled_layers import GRAPHS, compiled, uncompiled
from ds_encdec.model.loss_kernel import triton

CONTEXTS: list[RunContext] = []


@pytest.fixture(autouse=True)
def suppressing_nothing() -> Iterator[None]:
    with torch._dynamo.config.patch(suppress_errors=False):
        yield


def decided(device: str, engine: EngineName = "fsdp", stage: str = "zero3", lora: Any = None, **training: Any) -> Any:
    infra = {"distributed_type": engine, "sharding_stage": stage}
    config = FullConfig.model_validate({"training": training, "infra": infra, "model": {"lora": lora}})
    context = RunContext(discover({}), torch.device(device), engine, HostCollectives())
    CONTEXTS.append(context)
    return with_compilation_decided(config, context).training.torch_compile


@pytest.mark.parametrize(
    ("compiles", "where"),
    [
        (True, {"device": "cuda"}),
        (True, {"device": "cuda", "stage": "zero0"}),
        (True, {"device": "cuda", "activation_checkpointing": "selective"}),
        (True, {"device": "cuda", "engine": "deepspeed", "stage": "zero2"}),
        (False, {"device": "cuda", "engine": "deepspeed", "stage": "zero3"}),
        (False, {"device": "cuda", "stage": "zero0", "lora": {"quantize": "nf4"}}),
        (False, {"device": "cuda", "torch_compile": False}),
        (False, {"device": "cpu"}),
        (True, {"device": "cpu", "torch_compile": True}),
        (True, {"device": "cpu", "engine": "deepspeed", "stage": "zero1", "torch_compile": True}),
        (True, {"device": "cuda", "engine": "deepspeed", "stage": "zero3", "torch_compile": True}),
    ],
)
def test_layers_are_compiled_where_engine_and_device_can(
    compiles: bool, where: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert decided(**where) is compiles
    assert ("the first step and the first evaluation compile the layers" in caplog.text) is compiles
    # Layers that fail run as they are, but not where compiling was asked for.
    assert torch._dynamo.config.suppress_errors is (compiles and "torch_compile" not in where)
    while CONTEXTS:
        CONTEXTS.pop().undo.close()
    assert torch._dynamo.config.suppress_errors is False  # in the process's next run


class Ranks(HostCollectives):
    """The first of three ranks; `others` is what the others bring."""

    others: tuple[Any, ...] = ()

    def gather_to_zero(self, record: Any) -> list[Any]:
        return [record, *self.others]


def test_ranks_whose_model_runs_in_other_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "kernels_taken", {"attention": "varlen", "the loss of evaluations": "its kernel"})
    ranks = Ranks()
    ranks.others = ({"attention": "varlen", "the loss of evaluations": "its kernel"},) * 2
    warn_of_ranks_that_differ(ranks)
    assert not caplog.messages
    ranks.others = (
        ranks.others[0],
        {"attention": "one call per document", "each layer": "torch's operators, uncompiled"},
    )
    warn_of_ranks_that_differ(ranks)
    (warning,) = caplog.messages
    for part in (
        "attention in one call per document on rank 2, elsewhere in varlen",
        "the loss of evaluations in nothing yet on rank 2, elsewhere in its kernel",
        "each layer in torch's operators, uncompiled on rank 2, elsewhere in compiled code",
    ):
        assert part in warning


@pytest.mark.parametrize("broken", [False, True])
def test_layers_that_were_to_be_compiled_and_were_not_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    """A stand-in for inductor fails, where torch may pass over errors."""

    def backend(graph: Any, _inputs: Any) -> Any:
        if broken:
            raise RuntimeError("no kernel for this")
        return graph.forward

    capture = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options=None: capture(forward, backend=backend))
    uncompiled.clear()
    torch.compiler.reset()
    with torch._dynamo.config.patch(suppress_errors=True):
        run = compiled(lambda states, *, layout: states * 2, random=False)
        assert torch.equal(run(torch.ones(3), layout=None), torch.full((3,), 2.0))
    torch.compiler.reset()
    for warned in (broken, False):  # once
        caplog.clear()
        warn_of_ranks_that_differ(HostCollectives())
        assert ("each layer in torch's operators, uncompiled on all" in caplog.text) is warned


def test_an_engine_takes_back_how_many_graphs_it_lets_torch_make() -> None:
    class Bare(ShardedEngine):
        _whole = _states = _frozen = _continue_from = _held = None  # type: ignore[assignment]

    config = FullConfig.model_validate({"training": {"torch_compile": True}})
    before = torch._dynamo.config.recompile_limit
    engine = Bare(config, RunContext(discover({}), torch.device("cpu"), "fsdp", HostCollectives()))  # type: ignore[abstract]
    assert torch._dynamo.config.recompile_limit == max(before, GRAPHS)
    engine.close()
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_layers_of_the_shipped_size_compile_for_an_h100() -> None:
    """To machine code, of a GPU that is not there; what it computes is not seen."""
    graphs = machine_code("Qwen/Qwen3-0.6B")
    assert len(graphs) == 4  # encoder and decoder, forward and backward
    assert all(kernels and min(kernels) > 4096 for kernels in graphs), graphs
