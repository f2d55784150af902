"""How FSDP2 spreads a model over ranks: a mesh for each stage, and a model built on it without ever being whole.

| stage | mesh | parameters between forward and backward |
|---|---|---|
| zero0 (DDP) | replicate W × shard 1 | whole, always |
| zero1, zero2 | shard W | whole from the first forward to the last backward of a step |
| zero3 | shard W | gathered for each layer, twice |
| zero2_hybrid, zero3_hybrid | replicate W/k × shard k | as zero2, zero3 |

FSDP2 scatters gradients as it reduces them, so zero1 is zero2 here. Each encoder and decoder layer is a unit that is
gathered at once; the root holds the rest, above all the embedding, which stays whole until its backward pass is over.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.initialization import no_init_weights

from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.config.shares import mesh_shape
from ds_encdec.engine.forward import compute_dtype
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import World
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.types import CheckpointError, WeightSource


def make_mesh(infra: InfraConfig, world: World, device: torch.device) -> DeviceMesh:
    """The mesh of `mesh_shape`, without the replicating dimension where parameters are sharded over all ranks."""
    replicas, shards = mesh_shape(infra, world.world_size, world.local_world_size)
    if replicas == 1 and infra.sharding_stage != "zero0":
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def reshards_after_forward(infra: InfraConfig) -> bool:
    """Return whether layers let go of their gathered parameters between the forward and the backward pass."""
    return infra.sharding_stage.startswith("zero3")


def build_sharded_model(
    config: FullConfig, model_config: Qwen3Seq2SeqConfig, mesh: DeviceMesh, device: torch.device
) -> Qwen3ForSeq2SeqLM:
    """The model on `mesh`: float32 shards, not yet filled, on `device` (on the CPU if they are offloaded).

    Layers recompute, compile and offload as configured. It is made without memory, cut, and only then given any.
    """
    training, infra = config.training, config.infra
    with torch.device("meta"), no_init_weights():
        model = Qwen3ForSeq2SeqLM(model_config)
    apply_activation_checkpointing(
        model,
        training.activation_checkpointing,
        every_n=training.activation_checkpointing_every_n,
        offload=training.activation_offload,
        compiled=training.torch_compile,
    )
    dtype = compute_dtype(training)
    offloaded = infra.offload_optimizer == "cpu"  # under FSDP2 the parameters are the float32 master weights
    pin_memory = infra.pin_memory and device.type != "cpu"
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=pin_memory) if offloaded else OffloadPolicy(),
    )
    for layer in (*model.encoder.layers, *model.decoder.layers):
        shard(layer, reshard_after_forward=reshards_after_forward(infra))
    # Of the root, backward needs the embedding first of all: not worth letting go.
    shard(model, reshard_after_forward=False)
    model.to_empty(device="cpu" if offloaded else device)
    return model


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """FQN → parameter, tied ones once. While a module is gathered it shows others; these stay the shards."""
    found: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        found[name] = parameter
    return found


def local_rows(parameter: DTensor) -> slice:
    """Rows of the full parameter that this rank holds; FSDP2 cuts dimension 0 as `torch.chunk` does."""
    mesh = parameter.device_mesh
    (dimension,) = (index for index, placement in enumerate(parameter.placements) if placement == Shard(0))
    rows_per_rank = -(-parameter.shape[0] // mesh.size(dimension))
    start = min(mesh.get_local_rank(dimension) * rows_per_rank, parameter.shape[0])
    held = slice(start, start + len(parameter.to_local()))
    assert held.stop == min(start + rows_per_rank, parameter.shape[0])
    return held


def fill(parameters: dict[str, DTensor], weights: WeightSource, collectives: HostCollectives) -> None:
    """Copy `weights` into this rank's shards; each rank reads its own rows.

    Collective. What one rank fails to read, or CheckpointError for another shape, is raised by all.
    """
    collectives.on_every_rank(lambda: _fill_local(parameters, weights))


@torch.no_grad()
def _fill_local(parameters: dict[str, DTensor], weights: WeightSource) -> None:
    for name, parameter in parameters.items():
        local, rows = parameter.to_local(), local_rows(parameter)
        source: Tensor = weights(name, rows)
        if source.shape != local.shape:
            raise CheckpointError(
                f"{name}: rows {rows.start} to {rows.stop} have shape {list(source.shape)} in the source, "
                f"{list(local.shape)} in the model"
            )
        local.copy_(source)


def reshard(model: nn.Module) -> None:
    """Let go of all gathered parameters: the next forward pass gathers anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
