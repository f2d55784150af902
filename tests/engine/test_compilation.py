"""The values that `training.torch_compile: auto` takes by device and engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import _with_compilation_decided
from ds_encdec.engine.sharded_engine import ShardedEngine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.activation_checkpointing import GRAPHS
from ds_encdec.registry.engines import EngineName

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
    return _with_compilation_decided(config, context).training.torch_compile


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


def test_an_engine_takes_back_how_many_graphs_it_lets_torch_make() -> None:
    class Bare(ShardedEngine):
        _iter_full = _states = _frozen = _continue_from = _held = None  # type: ignore[assignment]

    config = FullConfig.model_validate({"training": {"torch_compile": True}})
    before = torch._dynamo.config.recompile_limit
    engine = Bare(config, RunContext(discover({}), torch.device("cpu"), "fsdp", HostCollectives()))  # type: ignore[abstract]
    assert torch._dynamo.config.recompile_limit == max(before, GRAPHS)
    engine.close()
    assert torch._dynamo.config.recompile_limit == before
