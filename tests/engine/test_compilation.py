"""The values that `training.torch_compile: auto` takes by device and engine."""

import logging
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


def context_of(device: str, engine: EngineName) -> RunContext:
    return RunContext(discover({}), torch.device(device), engine, HostCollectives())


def config_of(engine: EngineName, stage: str = "zero3", lora: Any = None, **training: Any) -> FullConfig:
    infra = {"distributed_type": engine, "sharding_stage": stage}
    return FullConfig.model_validate({"training": training, "infra": infra, "model": {"lora": lora}})


@pytest.mark.parametrize(
    ("compiles", "where"),
    [
        (True, {"device": "cuda"}),
        (True, {"device": "cuda", "engine": "deepspeed", "stage": "zero2"}),
        (False, {"device": "cuda", "engine": "deepspeed", "stage": "zero3"}),
        (False, {"device": "cuda", "stage": "zero0", "lora": {"quantize": "nf4"}}),
        (False, {"device": "cuda", "torch_compile": False}),
        (False, {"device": "cpu"}),
        (True, {"device": "cpu", "torch_compile": True}),
        (True, {"device": "cuda", "engine": "deepspeed", "stage": "zero3", "torch_compile": True}),
    ],
)
def test_layers_are_compiled_where_engine_and_device_can(
    compiles: bool, where: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = {"engine": "fsdp", **where}
    context = context_of(given.pop("device"), given["engine"])
    assert _with_compilation_decided(config_of(**given), context).training.torch_compile is compiles
    assert ("the first step and the first evaluation compile the layers" in caplog.text) is compiles
    # Layers that fail run as they are, but not where compiling was asked for.
    assert torch._dynamo.config.suppress_errors is (compiles and "torch_compile" not in where)
    context.undo.close()
    assert torch._dynamo.config.suppress_errors is False  # in the process's next run


def test_an_engine_takes_back_how_many_graphs_it_lets_torch_make() -> None:
    class Bare(ShardedEngine):
        _iter_full = _states = _frozen = _continue_from = _held = None  # type: ignore[assignment]

    before = torch._dynamo.config.recompile_limit
    engine = Bare(config_of("fsdp", torch_compile=True), context_of("cpu", "fsdp"))  # type: ignore[abstract]
    assert torch._dynamo.config.recompile_limit == max(before, GRAPHS)
    engine.close()
    assert torch._dynamo.config.recompile_limit == before
