"""Layers are compiled where that has been tried: what `training.torch_compile` comes to, by device and engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layers_for_gpu import machine_code
from torch._dynamo.backends.common import aot_autograd

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine import compilation
from ds_encdec.engine.compilation import warn_of_ranks_that_differ, with_compilation_decided
from ds_encdec.engine.sharded_engine import ShardedEngine
from ds_encdec.engines import EngineName
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.compiled_layers import GRAPHS, compiled, uncompiled
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.loss_kernel import triton
from ds_encdec.types import ConfigError

MODEL = Qwen3Seq2SeqConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
CONTEXTS: list[RunContext] = []
RUN_TINY_LAYERS = compilation._run_tiny_layers


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The devices on which layers were tried; nothing is compiled."""
    devices: list[str] = []
    monkeypatch.setattr(compilation, "_failures", {})
    monkeypatch.setattr(compilation, "_run_tiny_layers", lambda config, device, tiny: devices.append(device.type))
    with torch._dynamo.config.patch(suppress_errors=False):
        yield devices


def decided(device: str, engine: EngineName = "fsdp", stage: str = "zero3", lora: Any = None, **training: Any) -> Any:
    infra = {"distributed_type": engine, "sharding_stage": stage}
    config = FullConfig.model_validate({"training": training, "infra": infra, "model": {"lora": lora}})
    context = RunContext(discover({}), torch.device(device), engine, HostCollectives())
    CONTEXTS.append(context)
    return with_compilation_decided(config, context, MODEL).training.torch_compile


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
def test_what_is_compiled_has_been_tried(
    compiles: bool, where: dict[str, Any], tried: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert decided(**where) is compiles
    assert caplog.text.count("the first step and the first evaluation compile the layers") == 2 * compiles
    assert tried == [where["device"]] * compiles  # once
    # Real layers that fail later run as they are, but not where compiling was asked for.
    assert torch._dynamo.config.suppress_errors is (compiles and "torch_compile" not in where)
    while CONTEXTS:
        CONTEXTS.pop().undo.close()
    assert torch._dynamo.config.suppress_errors is False  # in the process's next run


def test_where_compiling_fails_layers_run_as_they_are_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no C++\ncompiler")

    monkeypatch.setattr(compilation, "_run_tiny_layers", fail)
    with caplog.at_level(logging.WARNING):
        assert decided("cuda") is False
    assert "compiling them fails on rank 0: RuntimeError: no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"training.torch_compile=true: layers cannot be compiled on rank 0: Runtime"):
        decided("cuda", torch_compile=True)


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


@pytest.mark.parametrize("broken", [False, True])
def test_tiny_layers_run_forward_and_backward(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A stand-in for inductor runs graphs as they are, and may fail in the backward pass alone."""
    runs = []

    def run_forward(graph: Any, _inputs: Any) -> Any:
        runs.append("forward")
        return graph.forward

    def run_backward(graph: Any, _inputs: Any) -> Any:
        if broken:
            raise RuntimeError("no kernel for this")
        runs.append("backward")
        return graph.forward

    backend, capture = aot_autograd(fw_compiler=run_forward, bw_compiler=run_backward), torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options=None: capture(forward, backend=backend))
    monkeypatch.setattr(compilation, "_run_tiny_layers", RUN_TINY_LAYERS)
    training = {"activation_checkpointing": "full", "torch_compile": True}
    config = FullConfig.model_validate({"training": training, "infra": {"distributed_type": "fsdp"}})
    failure = compilation._failure(config, torch.device("cpu"), MODEL)
    assert ("no kernel for this" in failure) == broken
    assert sorted(set(runs)) == (["forward"] if broken else ["backward", "forward"])


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
