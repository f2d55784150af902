"""The job of a run that has not begun: on as many GPUs as `infra.num_gpus` says, evenly in so many nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ds_encdec.config.batch_size import global_batch_size, is_auto, micro_batches_per_step
from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.model_sizes import Sizes, adapter_parameters
from ds_encdec.memory.variants import resolve_engine


def indivisible(config: FullConfig, nodes: int) -> Iterator[str]:
    """What cannot be shared out evenly, as a run would find on starting."""
    gpus, infra = config.infra.num_gpus, config.infra
    if gpus % nodes:
        yield f"--gpus {gpus} --nodes {nodes}: every node must have as many GPUs; give a multiple of {nodes}"
        return
    if is_auto(config):
        sequences = global_batch_size(config, gpus)
        if sequences % gpus:
            yield f"training.global_batch_size={sequences} cannot be shared out evenly among {gpus} GPUs"
    elif (lanes := micro_batches_per_step(config, gpus)) % gpus:
        fitting = [str(number) for number in range(1, lanes + 1) if lanes % number == 0]
        yield (
            f"the {lanes} micro-batches of a step (data.num_lanes, or training.global_batch_size over the micro-batch) "
            f"cannot be shared out evenly to {gpus} GPUs: use {', '.join(fitting)} of them, or change the batch"
        )
    size = infra.hybrid_shard_size or gpus // nodes
    if infra.sharding_stage.endswith("_hybrid") and gpus % size:
        yield f"infra.hybrid_shard_size={size} does not divide {gpus} GPUs: set it to a divisor of {gpus}"


def planned_job(config: FullConfig, sizes: Sizes, nodes: int, lora_rank: int | None = None) -> Job:
    """The run of `config`, whose micro-batch size is a number; with `lora_rank`, its frozen model and adapters."""
    gpus = config.infra.num_gpus
    adapters = None if lora_rank is None else adapter_parameters(sizes, lora_rank)
    job = make_job(
        config,
        sizes,
        resolve_engine(config),
        world_size=gpus,
        ranks_per_node=gpus // nodes,
        trainable_parameters=adapters,
    )
    return job if adapters is None else dataclasses.replace(job, parameters=job.parameters + adapters)
