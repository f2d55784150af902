"""Optimizer states on a local disk (`infra.offload_optimizer: nvme`), where DeepSpeed 0.19.8 keeps them between steps.

DeepSpeed writes each sub-group's float32 weights and moments into files, and leaves empty tensors until it steps it.
`states_mapped` maps tensors to their files, for saves and resumes. Sub-groups below 1 MiB are never swapped.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_encdec.base.quantities import disk_size
from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.deepspeed.private import optimizer_state
from ds_encdec.launch.disk import free_bytes

SWAPPED_BYTES = 16
"""Bytes on the disk for each trained parameter: float32 weights, two moments, and the gradients of a step."""


def prepare_folder(folder: Path, num_parameters: int) -> None:
    """Check that `folder` can take the states of `num_parameters`, and compile DeepSpeed's async I/O, which takes
    minutes once. Raises ConfigError for a folder that is not writable or too small, and for a machine without
    libaio."""
    field = "infra.nvme_path"
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{field}: {folder} cannot be written: {error.strerror}") from error
    needed, free = SWAPPED_BYTES * num_parameters, free_bytes(folder)
    reused = sum(file.stat().st_size for file in folder.rglob("*.swp"))  # files of a killed run, which are overwritten
    if free is not None and free + reused < needed:
        raise ConfigError(
            f"{field}: {folder} has {disk_size(free + reused)} free, but the optimizer's states on this machine take "
            f"{disk_size(needed)}, {SWAPPED_BYTES} bytes for each trained parameter. Name a folder on a larger disk"
        )
    try:
        AsyncIOBuilder().load()
    except Exception as error:
        raise ConfigError(
            "infra.offload_optimizer=nvme: DeepSpeed's async_io could not be compiled. It needs a C++ compiler, ninja, "
            "on a GPU CUDA's toolkit (nvcc), and libaio with its headers (Debian, Ubuntu: apt-get install libaio-dev): "
            f"{error}"
        ) from error


@contextmanager
def states_mapped(engine: DeepSpeedEngine, *, of: TrainingConfig | None = None) -> Iterator[None]:
    """Map swapped tensors to their files inside the context. `of`: make missing moments, as zeros."""
    swapper: Any = getattr(engine.optimizer, "optimizer_swapper", None)
    infos = list(swapper.swap_params_info.values()) if swapper is not None else []
    try:
        for info in infos:
            _map(info)
            if of is not None and not info.has_state_tensors:
                weights = info.tensors[0].compute_tensor
                optimizer_state(engine.basic_optimizer, weights, of)
                swapper._get_param_swap_info(weights)  # registers the moments made above
                aligned = swapper._io_aligned_numel(info.numel()) * weights.element_size()
                for one in info.tensors[1:]:
                    with open(one.swap_path, "wb") as file:
                        file.truncate(aligned)
                _map(info)
        yield
    finally:
        for info in infos:
            info.release_memory()
            for one in info.tensors:
                _flush(one.swap_path)


def _map(info: Any) -> None:
    for one in info.tensors:
        one.compute_tensor.data = torch.from_file(one.swap_path, shared=True, size=info.numel(), dtype=info.dtype())


def _flush(path: str) -> None:
    """Flush writes through a map to the disk: DeepSpeed reads past the kernel's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_states(engine: DeepSpeedEngine) -> None:
    """Delete the files of this rank, which no other run can use, and the run's folders if they are then empty."""
    swapper: Any = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        shutil.rmtree(swapper.swap_folder, ignore_errors=True)
        with suppress(OSError):
            for folder in Path(swapper.swap_folder).parents[:3]:  # optimizer, zero_stage_3, and the run's own
                folder.rmdir()
