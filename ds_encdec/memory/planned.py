"""The job of a run that has not begun: on as many GPUs as `infra.num_gpus` says, evenly in so many nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ds_encdec.config.batch_size import global_batch_size, is_auto, micro_batches_per_step
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape, per_rank
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.model_sizes import Sizes, adapter_parameters
from ds_encdec.memory.variants import resolve_engine
from ds_encdec.types import ConfigError


def indivisible(config: FullConfig, nodes: int) -> Iterator[str]:
    """Name what cannot be divided evenly, as a run would find on starting."""
    gpus = config.infra.num_gpus
    if gpus % nodes:
        yield f"--gpus {gpus} --nodes {nodes}: every node must have as many GPUs; give a multiple of {nodes}"
        return
    for divide in (_divide_batch, lambda config, gpus: mesh_shape(config.infra, gpus, gpus // nodes)):
        try:
            divide(config, gpus)
        except ConfigError as error:
            yield str(error)


def _divide_batch(config: FullConfig, gpus: int) -> None:
    if is_auto(config):
        per_rank(global_batch_size(config, gpus), gpus, "training.global_batch_size", multiple=True)
    else:
        by_batch = "training.global_batch_size / training.per_device_train_batch_size"
        per_rank(micro_batches_per_step(config, gpus), gpus, "data.num_lanes" if config.data.num_lanes else by_batch)


_STANDS_FOR = {"--gpus": ("infra.num_gpus",), "--model": ("model.model_name_or_path", "model.architecture")}
"""Fields that an option of the command line sets."""


def contradictions(options: Mapping[str, object], overrides: Sequence[str]) -> Iterator[str]:
    """Options (name: value, None where not given) beside overrides of the fields that they stand for."""
    fields = [override.removeprefix("--").partition("=")[0] for override in overrides]
    for option, value in options.items():
        for field in fields if value is not None else ():
            if any(field == name or field.startswith(f"{name}.") for name in _STANDS_FOR[option]):
                yield f"{option} {value} and {field}=… set the same field: give only one"


def planned_job(config: FullConfig, sizes: Sizes, nodes: int, lora_rank: int | None = None) -> Job:
    """The run of `config`, whose micro-batch size is a number; with `lora_rank`, its frozen model and adapters.

    Raises ConfigError for what a run would refuse before it starts.
    """
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
    engine_memory(job)
    return job if adapters is None else dataclasses.replace(job, parameters=job.parameters + adapters)
