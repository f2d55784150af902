"""Memory of any model: this machine's, that of training by published formulas, and the largest batch that fits."""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_encdec.base.types import ConfigError, OutOfMemoryError
from ds_encdec.launch.memory_errors import in_one_line, is_out_of_memory
from ds_encdec.monitor.machine import peak_host_bytes

logger = logging.getLogger(__name__)
GB = 1e9
_FIGURES = ("allocated", "reserved", "max_allocated", "free", "total")  # of `get_memory_stats`
# Bytes of a number of weights, gradients and activations, and of master weights (0: no master weights).
_PRECISIONS = {
    **dict.fromkeys(("fp32", "float32"), (4, 0)),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), (2, 0)),
    **dict.fromkeys(("bf16_mixed", "fp16_mixed"), (2, 4)),
}
# Bytes of optimizer states per parameter. Adafactor's depend on the width.
_OPTIMIZER_BYTES = {
    **dict.fromkeys(("adam", "adamw"), 8.0),  # two float32 moments
    **dict.fromkeys(("adam8bit", "adamw8bit"), 2.0 + 8 / 256),  # of a byte; a float32 scale for 256 (arXiv 2110.02861)
    "lion": 4.0,  # one float32 momentum (arXiv 2302.06675)
    "sgd": 0.0,
    "sgd_momentum": 4.0,
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of a device's memory: usable in all, and free now."""

    total_bytes: int
    free_bytes: int


def get_memory_stats(device: torch.device | str | int | None = None) -> dict[str, float]:
    """Return `allocated_gb`, `reserved_gb`, `max_allocated_gb`, `free_gb` and `total_gb` of `device`, in 1e9 bytes.
    None is the current GPU, or the CPU without one. On a GPU the first three come from torch's allocator (the maximum
    since the start or the last `clear_memory`), the last two from the driver, which counts other processes. On the CPU
    allocated and reserved are this process's resident memory, with its peak since it began; free and total are those of
    the machine, or of the control group (container, batch job) that limits it. Raises ConfigError if torch cannot use
    the device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={place}: it must be a GPU (cuda) or the CPU")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={place}: torch finds no GPU here; leave it out, or give cpu")
    capacity, resident = device_capacity(place), psutil.Process().memory_info().rss
    # The kernel updates a process's peak a little later.
    held = [resident, resident, max(peak_host_bytes(), resident)]
    if place.type == "cuda":
        of_torch = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated)
        held = [figure(place) for figure in of_torch]
    figures = zip(_FIGURES, (*held, capacity.free_bytes, capacity.total_bytes), strict=True)
    return {f"{name}_gb": figure / GB for name, figure in figures}


def log_memory_stats(prefix: str = "", device: torch.device | str | int | None = None) -> None:
    """Log the figures of `get_memory_stats` in one line, after `prefix`."""
    stats = get_memory_stats(device)
    figures = ", ".join(f"{name.removesuffix('_gb').replace('_', ' ')} {value:.2f} GB" for name, value in stats.items())
    logger.info("%s%s", f"{prefix}: " if prefix else "", figures)


def clear_memory() -> None:
    """Collect garbage, return torch's unused GPU memory to the driver, and reset the GPUs' peaks."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def device_capacity(device: torch.device) -> Capacity:
    """Return a GPU's memory as the driver reports it; a CPU's is the machine's or this process's control group's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, free)
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _control_groups():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Capacity(total, free)


def _control_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group (version 1 or 2) around this process that has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # no Linux
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounted / "memory" if controllers else mounted
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers  # version 1
            else ("memory.max", "memory.current", "inactive_file")
        )
        inner = root / path.strip("/")
        for group in (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)):
            with suppress(OSError):  # the root group of a machine has no such files
                limit, used = (group / names[0]).read_text().strip(), int((group / names[1]).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if limit != "max":
                    # The kernel drops cached files that were not read lately before memory runs out.
                    yield int(limit), used - int(stat.get(names[2], 0))


def estimate_model_memory(
    num_params: float,
    batch_size: int,
    seq_length: int,
    hidden_size: int,
    num_layers: int,
    dtype: str = "bf16_mixed",
    optimizer: str = "adamw",
    gradient_checkpointing: bool = True,
) -> dict[str, float]:
    """Return GB (1e9 bytes) of training a transformer on one device: `{model,optimizer,gradient,activation,total}_gb`.
    `dtype`: fp32 (float32); bf16 or fp16 (bfloat16, float16, half), in which weights and gradients take 2 bytes each
    and the optimizer updates these weights; bf16_mixed or fp16_mixed, in which it updates float32 master weights, whose
    4 bytes per parameter count in `optimizer_gb`. Moments do not depend on `dtype`. So 7e9 parameters with Adam take 14
    + 14 + 56 GB in bf16, and 14 + 14 + 84 in bf16_mixed (K = 12 of ZeRO, arXiv 1910.02054). `optimizer`: adam, adamw,
    adam8bit, adamw8bit, adafactor without momentum, lion, sgd, sgd_momentum.

    Activations of `batch_size` sequences of `seq_length` tokens follow Korthikanti et al. (arXiv 2205.05198, equation 1
    and table 2): 34·s·b·h bytes per layer in 16 bit, attention scores not kept; with `gradient_checkpointing` each
    layer's input, 2·s·b·h. In float32 66 and 4: dropout masks are bytes in either. The logits and the recomputed layer
    come on top. Raises ConfigError for any other value."""
    sizes = {"num_params": num_params, "batch_size": batch_size, "seq_length": seq_length}
    for name, value in {**sizes, "hidden_size": hidden_size, "num_layers": num_layers}.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not (0 < value < math.inf):
            raise ConfigError(f"{name}={value!r}: it must be a positive number")
    # Adafactor: sums of rows and of columns (arXiv 1804.04235), of matrices taken to be as wide as the model.
    states = _OPTIMIZER_BYTES | {"adafactor": 2 * 4 / hidden_size}
    words = {"dtype": str(dtype).lower().removeprefix("torch."), "optimizer": str(optimizer).lower()}
    for name, known in (("dtype", [*_PRECISIONS]), ("optimizer", [*states])):
        if words[name] not in known:
            raise ConfigError(f"{name}={words[name]!r}: it must be one of {', '.join(known)}")
    (weight, master_weight), state_bytes = _PRECISIONS[words["dtype"]], states[words["optimizer"]]
    numbers, masks = (1, 0) if gradient_checkpointing else (16, 2)  # kept per token, layer and unit of width
    memory = {
        "model_gb": num_params * weight / GB,
        "optimizer_gb": num_params * (master_weight + state_bytes) / GB,
        "gradient_gb": num_params * weight / GB,
        "activation_gb": num_layers * seq_length * batch_size * hidden_size * (numbers * weight + masks) / GB,
    }
    return memory | {"total_gb": sum(memory.values())}


def auto_find_batch_size(
    model: torch.nn.Module, sample_batch_fn: Callable[[int], Any], start_batch_size: int = 32, min_batch_size: int = 1
) -> int:
    """Return the first of `start_batch_size`, its half, …, `min_batch_size` that runs forward and backward.
    `sample_batch_fn(size)` makes a batch on the model's device: a mapping (keyword arguments of the model), a sequence
    (positional ones), or one argument. The loss is the output's `.loss`, or the output itself if it is a tensor
    (summed). Optimizer states are not made: leave memory for them. A run of ds_encdec has
    `training.per_device_train_batch_size: auto`.

    Parameters stay as they are, and gradients are gone afterwards; buffers that the model changes (batch normalisation)
    and the random state have moved on. Raises OutOfMemoryError if even `min_batch_size` does not fit, ValueError for
    wrong sizes, and the model's other errors."""
    if not 1 <= min_batch_size <= start_batch_size:
        given = f"start_batch_size={start_batch_size}, min_batch_size={min_batch_size}"
        raise ValueError(f"{given}: 1 <= min_batch_size <= start_batch_size must hold")
    size = start_batch_size
    while True:
        reason = None
        try:
            batch = sample_batch_fn(size)
            positional: Any = batch if isinstance(batch, Sequence) else [batch]
            output = model(**batch) if isinstance(batch, Mapping) else model(*positional)
            (output if isinstance(output, torch.Tensor) else output.loss).sum().backward()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = in_one_line(error)
        finally:
            model.zero_grad(set_to_none=True)
        batch = positional = output = None  # frees their memory
        clear_memory()  # not inside `except`, where the error keeps frames and their activations alive
        if reason is None:
            return size
        if size == min_batch_size:
            raise OutOfMemoryError(f"not even a batch of {size} fits: {reason}")
        logger.info("a batch of %d does not fit (%s)", size, reason)
        size = max(min_batch_size, size // 2)
