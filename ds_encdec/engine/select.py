"""The choice of the engine, and the rendezvous of a run's ranks for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from ds_encdec.base.types import ConfigError, WeightSource
from ds_encdec.config.rules import engine_candidates, engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape
from ds_encdec.engine.deepspeed.json import check_deepspeed
from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.host import machine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import choose_device, init_process_group, settings_restorer
from ds_encdec.launch.startup_errors import startup_errors_shared
from ds_encdec.launch.world import World
from ds_encdec.registry.engines import ENGINES, ByEngine, EngineName

if TYPE_CHECKING:
    from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
    from ds_encdec.model.distillation import TeacherSource

logger = logging.getLogger(__name__)


def resolve_engine(config: FullConfig) -> EngineName:
    """Return the engine that `infra.distributed_type` means on this machine, without importing one: for `auto`
    DeepSpeed if it is installed and supports the configuration, else FSDP2. Raises ConfigError if a needed DeepSpeed is
    not installed."""
    candidates = engine_candidates(config)
    for engine in candidates:
        if engine.package is None or importlib.util.find_spec(engine.package) is not None:
            return engine.name
    package = candidates[0].package
    if config.infra.distributed_type != "auto":
        raise ConfigError(
            f"infra.distributed_type={config.infra.distributed_type}, but {package} is not installed. Run pip install "
            f"{package}, or set infra.distributed_type=fsdp (or auto), which trains the same with torch alone"
        )
    lacks = "; ".join(f"{', '.join(one.fields)}: {one.message}" for one in engine_conflicts(config, "fsdp"))
    raise ConfigError(
        f"infra.distributed_type=auto: {package} is not installed, and FSDP2 cannot run this configuration ({lacks})"
    )


# Functions that raise ConfigError for settings that an engine refuses on these ranks, before time is spent on data.
CHECKS: ByEngine[Callable[[FullConfig, World, torch.device], object]] = ByEngine(
    deepspeed=check_deepspeed,
    fsdp=lambda config, world, _: mesh_shape(config.infra, world.world_size, world.local_world_size),
)
# The engines' classes; see `create_engine`. They are imported late: DeepSpeed may not be installed.
BUILDERS = ByEngine("ds_encdec.engine.deepspeed.zero:DeepSpeedEngine", "ds_encdec.engine.fsdp2:FSDP2Engine")


def join_ranks(config: FullConfig, world: World, *, met: Callable[[], None] = lambda: None) -> RunContext:
    """Choose engine and device, make the process group, then call `met`. Collective. Raises ConfigError on all ranks if
    a machine cannot run the configuration or ranks differ, and LostRankError for ranks that do not join."""
    restore_settings = settings_restorer()
    with startup_errors_shared(world):
        engine, device = resolve_engine(config), choose_device(config.infra.device, world)
        CHECKS[engine](config, world, device)
        check_attention_dropout(config, device)
    timeout = timedelta(minutes=config.infra.distributed_timeout_minutes)
    opened: list[HostCollectives] = []

    def open_collectives() -> None:
        met()
        opened.append(HostCollectives(timeout))
        opened[0].sum(0)

    init_process_group(
        world,
        device,
        timeout,
        engine,
        start_timeout=timedelta(minutes=config.infra.start_timeout_minutes),
        settings=config.model_dump(mode="json"),
        first=open_collectives,
    )
    machines, ranks_there = zip(*opened[0].gather((machine(), world.local_world_size)), strict=True)
    check_nodes(config, machines, ranks_there)
    counted = with_counted_nodes(world, machines)
    if counted != world:
        CHECKS[engine](config, counted, device)  # with the same result on all ranks
    context = RunContext(counted, device, engine, opened[0])
    context.undo.callback(restore_settings)
    return context


def check_nodes(config: FullConfig, machines: Sequence[str], ranks_there: Sequence[int]) -> None:
    """Raise ConfigError for a hybrid without `hybrid_shard_size` on nodes with different numbers of ranks."""
    infra = config.infra
    if not infra.sharding_stage.endswith("_hybrid") or infra.hybrid_shard_size:
        return
    is_one_node = set(ranks_there) == {len(ranks_there)}  # also if the launcher does not know of nodes
    sizes = set(map(machines.count, machines) if is_one_node else ranks_there)
    if len(sizes) > 1:
        raise ConfigError(
            f"infra.sharding_stage={infra.sharding_stage} shards over the ranks of a node, but some nodes have "
            f"{' and others '.join(map(str, sorted(sizes)))}. Set infra.hybrid_shard_size to a divisor of "
            f"{len(ranks_there)}, or start the same number of ranks on each node."
        )


def with_counted_nodes(world: World, machines: Sequence[str]) -> World:
    """Return this rank's place, with nodes counted by `machines` of ranks if its launcher does not know them."""
    nodes = list(dict.fromkeys(machines))
    sizes = {machines.count(node) for node in nodes}
    if world.num_nodes > 1 or len(nodes) == 1 or len(sizes) > 1:
        return world
    return dataclasses.replace(
        world, num_nodes=len(nodes), node_rank=nodes.index(machines[world.rank]), local_world_size=sizes.pop()
    )


def create_engine(
    config: FullConfig,
    context: RunContext,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource | None,
    gradient_accumulation_steps: int,
    teacher: TeacherSource | None = None,
) -> Engine:
    """Build the model and the context's engine for it. Collective. `weights` are the model's own, beside which new
    adapters are drawn; None: a checkpoint is loaded later. `teacher`: that of `training.teacher`. Raises ConfigError
    for ranks that do not fit the sharding, CheckpointError for weights that cannot be read."""
    if context.world.is_main:
        _warn(config, context, model_config)
    lora = config.model.lora
    if lora is not None and weights is not None:
        from ds_encdec.model.lora import with_new_adapters

        weights = with_new_adapters(weights, lora, model_config, config.training.seed)
    config = _with_compilation_decided(config, context)
    build = resolve_name(BUILDERS[context.engine])
    beside = [] if teacher is None else [teacher]
    return build(config, context, model_config, weights, gradient_accumulation_steps, *beside)


def _with_compilation_decided(config: FullConfig, context: RunContext) -> FullConfig:
    """Return `config` with true or false in place of `training.torch_compile: auto`. `auto` is true on GPUs if the
    engine can compile the layers, except for ZeRO-3, whose layers are compiled between its hooks: that has run on CPUs
    alone. Under `auto`, layers that fail to compile run as they are; under `true`, they raise."""
    if config.training.torch_compile == "auto":
        by_hooks = context.engine_spec.gathers_by_hooks and config.infra.sharding_stage.startswith("zero3")
        compiled = _compiling(config, True)
        conflicts = [*find_conflicts(compiled), *engine_conflicts(compiled, context.engine)]
        is_refused = any("training.torch_compile" in conflict.fields for conflict in conflicts)
        if context.device.type != "cuda" or by_hooks or is_refused:
            return _compiling(config, False)
        context.undo.enter_context(torch._dynamo.config.patch(suppress_errors=True))
        config = compiled
    if config.training.torch_compile and context.world.is_main:
        logger.info("the first step and the first evaluation compile the layers, which can take minutes")
    return config


def _compiling(config: FullConfig, value: bool) -> FullConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"torch_compile": value})})


def attention_kernel(config: FullConfig, device: torch.device, head_dim: int) -> tuple[str, bool]:
    """Describe the kernel of attention and why better ones are passed over; return also whether it is much slower."""
    if not config.model.use_flash_attention:
        return "one call per document (model.use_flash_attention=false)", False
    from ds_encdec.engine.sharded_engine import compute_dtype  # both need transformers
    from ds_encdec.model.attention_kernels import KernelQuery, choose_kernel

    kernel, reason = choose_kernel(
        KernelQuery(device, compute_dtype(config.training), head_dim, config.training.attention_dropout)
    )
    described = f"{kernel.name} ({reason})" if reason else kernel.name
    return described, device.type != "cpu" and not kernel.is_flash


def check_attention_dropout(config: FullConfig, device: torch.device) -> None:
    """Raise ConfigError if attention would run in a kernel without dropout. No kernel is tried yet."""
    rate = config.training.attention_dropout
    if rate and config.model.use_flash_attention:
        from ds_encdec.engine.sharded_engine import compute_dtype
        from ds_encdec.model.attention_kernels import KERNELS, KernelQuery

        plain = KernelQuery(device, compute_dtype(config.training), 128)
        wanted = dataclasses.replace(plain, dropout=rate)
        kernel = next(row for row in KERNELS if not row.refusal(plain))
        if kernel.is_flash and not any(row.is_flash and not row.refusal(wanted) for row in KERNELS):
            raise ConfigError(
                f"training.attention_dropout={rate:g}: attention on this device runs in {kernel.name}, which has no "
                "dropout. Set it to 0, install flash_attn, or set model.use_flash_attention=false (one call per "
                "document, many times slower)"
            )


def _warn(config: FullConfig, context: RunContext, model_config: Qwen3Seq2SeqConfig) -> None:
    infra, engine, preferred = config.infra, context.engine_spec, next(iter(ENGINES.values()))
    kernel, is_slow = attention_kernel(config, context.device, model_config.head_dim)
    if is_slow:
        logger.warning("attention: %s", kernel)
    if engine is not preferred:
        if infra.distributed_type == "auto":
            if lacks := [conflict.fields[0] for conflict in engine_conflicts(config, preferred.name)]:
                why = f"{preferred.title} cannot run this configuration ({', '.join(lacks)})"
            else:
                why = f"{preferred.package} is not installed"
            logger.warning("infra.distributed_type=auto: %s. Training with %s.", why, engine.title)
        extra, unmissed = infra.deepspeed_extra, {"stage3_param_persistence_threshold"}  # others shard small ones, too
        if ignored := [name for name in extra if name != "zero_optimization" or extra[name].keys() - unmissed]:
            logger.warning("infra.deepspeed_extra does nothing under %s: %s", engine.title, ", ".join(ignored))
