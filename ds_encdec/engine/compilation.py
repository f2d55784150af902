"""The choice of `training.torch_compile`, and a warning where ranks do not run what was chosen."""

import logging
from collections import Counter

import torch

from ds_encdec.config.rules import engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.model.compiled_layers import uncompiled
from ds_encdec.model.precision import kernels_taken

logger = logging.getLogger(__name__)


def with_compilation_decided(config: FullConfig, context: RunContext) -> FullConfig:
    """`config` with true or false in place of `training.torch_compile: auto`.

    `auto` is true on GPUs for what the engine can compile, except for ZeRO-3, whose layers are compiled between its
    hooks: that has run on CPUs alone. Layers that cannot be compiled then run as they are, with torch's warning; where
    `true` was asked for, the first step raises torch's error.
    """
    if config.training.torch_compile == "auto":
        by_hooks = context.engine_spec.gathers_by_hooks and config.infra.sharding_stage.startswith("zero3")
        compiles = context.device.type == "cuda" and not by_hooks
        compiled = _with(config, True)
        found = [*find_conflicts(compiled), *engine_conflicts(compiled, context.engine)] if compiles else []
        compiles = compiles and not any("training.torch_compile" in conflict.fields for conflict in found)
        if compiles:
            context.undo.enter_context(torch._dynamo.config.patch(suppress_errors=True))
        config = _with(config, compiles)
    if config.training.torch_compile and context.world.is_main:
        logger.info("the first step and the first evaluation compile the layers, which takes up to some minutes")
    return config


def warn_of_ranks_that_differ(collectives: HostCollectives) -> None:
    """Warn, after a first step, of ranks whose layers were to be compiled and were not, or that took other kernels.

    Collective. Layers that stop being compiled later are in torch's own warning alone, on their rank.
    """
    here = dict(kernels_taken) | ({"each layer": "torch's operators, uncompiled"} if uncompiled else {})
    uncompiled.clear()
    ranks = collectives.gather_to_zero(here)
    lines = []
    for part in dict.fromkeys(part for taken in ranks for part in taken):
        by_rank = [taken.get(part, "compiled code" if part == "each layer" else "nothing yet") for taken in ranks]
        (usual, _), *others = Counter(by_rank).most_common()
        if part == "each layer" and not others:
            lines.append(f"{part} in {usual} on all")
        for other, _ in others:
            where = ", ".join(str(rank) for rank, kernel in enumerate(by_rank) if kernel == other)
            lines.append(f"{part} in {other} on rank {where}, elsewhere in {usual}")
    if lines:
        logger.warning(
            "Parts of the model do not run in what was planned on all %d ranks, and all wait for the slowest: %s. The "
            "log of a rank that differs says why its trial or compiler failed; its memory is not what was estimated",
            len(ranks),
            "; ".join(lines),
        )


def _with(config: FullConfig, compile_layers: bool) -> FullConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"torch_compile": compile_layers})})
