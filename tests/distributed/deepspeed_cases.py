"""What runs inside the ranks of DeepSpeed alone; see engine_cases.py."""

from collections.abc import Sequence
from typing import Any

import engine_cases
import stand_in_streams
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from engine_cases import Case, accumulate, full_weights, make_engine, run_all, short_engine, short_step
from flash_on_cpus import attention_of_gpus
from small_run import SHORT_ACCUMULATION, SHORT_MODEL, lane_batches, run_config, weights
from torch._dynamo.utils import counters

from ds_encdec.engine.deepspeed.private import shards
from ds_encdec.engine.deepspeed.zero import DeepSpeedEngine
from ds_encdec.engine.sharded_engine import compute_dtype


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """Run (name, function of this file or of those it imports, arguments)."""
    return run_all(cases, vars(engine_cases) | vars(stand_in_streams) | globals())


def master_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Every parameter in full, float32 master where there is one."""
    parameters = {name: parameter for parameter, name in engine._engine.param_names.items()}
    frozen = {}
    for name in [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        parameter = parameters.pop(name)
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            frozen[name] = parameter.detach().float().clone()
        assert (parameter.grad, parameter.dtype) == (None, compute_dtype(engine._training))
    if engine._engine.zero_optimization():
        masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    else:
        masters = {
            piece.name: shard.weights.view(-1)[piece.offset : piece.offset + piece.length].view_as(
                parameters[piece.name]
            )
            for shard in shards(engine._engine)
            for piece in shard.pieces
        }
    return frozen | {name: master.detach().float().clone() for name, master in masters.items()}


def compiling(**overrides: Any) -> dict[str, Any]:
    """Two steps, what graphs of layers they took, and how many views of gathered weights the last one kept."""
    engine = make_engine(run_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides))
    counters.clear()
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        whole = {weight.untyped_storage().data_ptr() for weight in engine._engine.module.parameters() if weight.numel()}
        kept += not isinstance(tensor, torch.nn.Parameter) and tensor.untyped_storage().data_ptr() in whole
        return tensor

    with attention_of_gpus():
        steps = [short_step(engine, 0)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            steps.append(short_step(engine, 1))
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    result = {"steps": steps, "weights": full_weights(engine), "kept": kept, "graphs": graphs, "breaks": breaks}
    engine.close()
    return result


def untrained(**overrides: Any) -> dict[str, Any]:
    """The float32 weights of an engine that has not trained, and how often its source was asked for a parameter."""
    asked: list[str] = []

    def recorded(name: str) -> torch.Tensor:
        asked.append(name)
        return weights(name)

    engine = short_engine(source=recorded, **overrides)
    result = {"weights": full_weights(engine), "asked": asked}
    engine.close()
    return result


def summed_gradient(**overrides: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient over two lanes: two micro-batches of one rank, or one of each of two."""
    accumulation = 2 // dist.get_world_size()
    engine = make_engine(run_config(gradient_accumulation_steps=accumulation, **overrides), model=SHORT_MODEL)
    lanes = lane_batches(0, dist.get_world_size(), accumulation)
    mine = lanes[dist.get_rank() :: dist.get_world_size()]
    accumulate(engine, mine, target_tokens=sum(lane.target_tokens for lane in lanes))
    parameters = engine.model.named_parameters()
    result = {name: safe_get_full_grad(parameter).float().clone() for name, parameter in parameters}
    engine.close()
    return result


def shard_sizes() -> dict[str, Any]:
    """What a rank holds of each parameter under ZeRO-3, right after the engine was built."""
    engine = make_engine(run_config(sharding_stage="zero3"))
    parameters = dict(engine.model.named_parameters())
    result = {
        "shards": {name: parameter.ds_tensor.numel() for name, parameter in parameters.items()},
        "resident": {name: parameter.numel() for name, parameter in parameters.items()},
        "full": {name: parameter.ds_numel for name, parameter in parameters.items()},
        "tied": engine.model.lm_head.weight is engine.model.shared.weight,
    }
    engine.close()
    return result
