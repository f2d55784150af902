"""Which engine a configuration gets, whether it compiles there, and what is refused before anything is built."""

import importlib.util
import logging
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine import fsdp2, select
from ds_encdec.engine.select import (
    CHECKS,
    _with_compilation_decided,
    attention_kernel,
    create_engine,
    resolve_engine,
)
from ds_encdec.engine.sharded_engine import ShardedEngine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World, discover, free_port
from ds_encdec.model import attention_kernels
from ds_encdec.model.activation_checkpointing import GRAPHS
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.registry.engines import EngineName

MODEL = Qwen3Seq2SeqConfig(num_hidden_layers=1)
QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"


def configured(training: dict[str, Any] | None = None, **infra: Any) -> FullConfig:
    return FullConfig.model_validate({"training": training or {}, "infra": infra})


def context(engine: EngineName, world: World | None = None, device: str = "cpu") -> RunContext:
    return RunContext(world or discover({}), torch.device(device), engine, HostCollectives())


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == "deepspeed" else find(name)

    monkeypatch.setattr(select.importlib.util, "find_spec", find_spec)


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "FSDP2Engine", lambda *_: None)


OFFLOADED = {"offload_params": "cpu", "offload_optimizer": "none"}


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        (configured(distributed_type="deepspeed"), "deepspeed"),
        (configured(distributed_type="fsdp"), "fsdp"),
        (configured(distributed_type="auto"), "deepspeed"),
        (configured(distributed_type="auto", sharding_stage="zero2_hybrid"), "fsdp"),
    ],
)
def test_the_engine_of_a_configuration(config: FullConfig, engine: str) -> None:
    assert resolve_engine(config) == engine


@pytest.mark.usefixtures("without_deepspeed")
def test_without_deepspeed() -> None:
    assert resolve_engine(configured(distributed_type="fsdp")) == "fsdp"
    assert resolve_engine(configured(distributed_type="auto")) == "fsdp"
    with pytest.raises(ConfigError, match=r"deepspeed is not installed.*infra\.distributed_type=fsdp \(or auto\)"):
        resolve_engine(configured(distributed_type="deepspeed"))
    with pytest.raises(ConfigError, match=r"auto: deepspeed is not installed, and FSDP2 cannot.*offload_optimizer"):
        resolve_engine(configured(distributed_type="auto", **OFFLOADED))


BROKEN = """
import os, sys
from datetime import timedelta
if os.environ["RANK"] == "1":
    sys.path.insert(0, sys.argv[1])  # holds a deepspeed whose import fails
from ds_encdec.launch.process_group import choose_device, init_process_group
from ds_encdec.launch.world import discover
from ds_encdec.base.types import ConfigError
world = discover(os.environ)
try:
    init_process_group(world, choose_device("cpu", world), timedelta(seconds=60), "deepspeed")
except ConfigError as error:
    print(error.exit_code, error)
"""


def test_all_ranks_refuse_a_deepspeed_that_one_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('CUDA_HOME does not exist')")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BROKEN, str(tmp_path)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        printed = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    refusal = "2 deepspeed is installed, but cannot be imported (rank 1: RuntimeError: CUDA_"
    for output, errors in printed:
        assert output.startswith(refusal), errors
        assert "infra.distributed_type=fsdp" in output


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize(
    ("device", "capability", "is_slow", "said"),
    [
        ("cuda", 9, False, "torch.nn.attention.varlen"),
        ("cuda", 7, True, "one call per document (flash kernels need compute capability 8.0"),
        ("cpu", 0, False, "one call per document (there is no flash kernel for cpu devices)"),
    ],
)
def test_what_attention_runs_in_is_known_and_warned_of_once(
    device: str, capability: int, is_slow: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(attention_kernels, "_failure", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
    config = configured({"torch_compile": False}, distributed_type="fsdp")
    place = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with caplog.at_level(logging.INFO):
        for rank in (0, 1):
            world = discover({**place, "RANK": str(rank)})
            create_engine(config, context("fsdp", world, device), MODEL, None, 1)
    found = attention_kernel(config, torch.device(device), MODEL.head_dim)
    assert (found[0].startswith(said), found[1]) == (True, is_slow)
    warned = [(record.levelno, record.message) for record in caplog.records]
    assert warned == [(logging.WARNING, f"attention: {found[0]}")] * is_slow


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize(
    ("config", "warning"),
    [
        (
            configured({"activation_checkpointing": "selective"}, distributed_type="auto"),
            "DeepSpeed cannot run this configuration (training.activation_checkpointing). Training with FSDP2",
        ),
        (
            configured(distributed_type="fsdp", deepspeed_extra={"zero_optimization": {"overlap_comm": False}}),
            "infra.deepspeed_extra does nothing under FSDP2: zero_optimization",
        ),
        (FullConfig.from_yaml(QUICKSTART, ["infra.distributed_type=fsdp"]), None),
    ],
)
def test_what_is_not_as_asked_is_said_once(config: FullConfig, warning: str | None, caplog: Any) -> None:
    create_engine(config, context(resolve_engine(config)), MODEL, None, 1)
    assert len(caplog.messages) == (warning is not None)
    assert warning is None or warning in caplog.text


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_hybrids_that_do_not_divide_the_ranks_are_refused_before_the_ranks_meet(kind: str) -> None:
    infra = {"distributed_type": kind, "sharding_stage": "zero3_hybrid", "hybrid_shard_size": 3, "device": "cpu"}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    config = FullConfig.model_validate({"infra": infra})
    with pytest.raises(ConfigError, match=r"hybrid_shard_size.* do not divide 4 ranks"):
        CHECKS[resolve_engine(config)](config, discover(place), torch.device("cpu"))


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
    place = context(given["engine"], device=given.pop("device"))
    assert _with_compilation_decided(config_of(**given), place).training.torch_compile is compiles
    assert ("the first step and the first evaluation compile the layers" in caplog.text) is compiles
    # Layers that fail run as they are, but not where compiling was asked for.
    assert torch._dynamo.config.suppress_errors is (compiles and "torch_compile" not in where)
    place.undo.close()
    assert torch._dynamo.config.suppress_errors is False  # in the process's next run


def test_an_engine_takes_back_how_many_graphs_it_lets_torch_make() -> None:
    class Bare(ShardedEngine):
        _iter_full = _states = _frozen = _continue_from = _held = None  # type: ignore[assignment]

    before = torch._dynamo.config.recompile_limit
    engine = Bare(config_of("fsdp", torch_compile=True), context("fsdp"))  # type: ignore[abstract]
    assert torch._dynamo.config.recompile_limit == max(before, GRAPHS)
    engine.close()
    assert torch._dynamo.config.recompile_limit == before
