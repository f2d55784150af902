"""GPUs by name, with the memory that a program can really use on them.

The number on the box is neither that nor, mostly, in the unit one would think: an "80 GB" H100 offers 79.1 GiB. The
figures are what torch prints as a device's total capacity (`torch.cuda.get_device_properties().total_memory`, also in
every out-of-memory message); it differs by some hundredths of a GiB between drivers. What the CUDA context takes of it
is part of the estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ds_encdec.config.settings import closest
from ds_encdec.memory.breakdown import GIB
from ds_encdec.types import ConfigError

_UNITS = {"": 1, "b": 1, "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": GIB, "tb": 10**12, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's `name`, the bytes of its memory that torch reports, and whether it computes in bfloat16."""

    name: str
    usable_bytes: int
    has_bf16: bool = True


# Seen in published out-of-memory messages and device queries, to within 0.2 GiB: a100, b200, h100, l40s (and l40),
# mi355x, rtx-4090, t4, v100-32gb. The others are from memory and unchecked: where it is tight, give bytes instead.
_USABLE_GIB = {
    "a10g": 21.99,
    "a40": 44.42,
    "a6000": 47.40,
    "a100-40gb": 39.38,
    "a100-80gb": 79.15,
    "b200": 178.35,
    "gh200": 94.50,
    "h20": 95.00,
    "h100-80gb": 79.11,
    "h100-nvl": 93.00,
    "h200": 139.72,
    "l4": 21.95,
    "l40s": 44.39,
    "mi300x": 191.98,
    "mi355x": 287.98,
    "rtx-3090": 23.58,
    "rtx-4090": 23.52,
    "rtx-5090": 31.33,
    "t4": 14.56,
    "v100-16gb": 15.77,
    "v100-32gb": 31.73,
}
# Compute capability below 8.0: torch emulates bfloat16 there, at a fraction of the speed.
_WITHOUT_BF16 = {"t4", "v100-16gb", "v100-32gb"}

GPUS = {name: Gpu(name, int(size * GIB), name not in _WITHOUT_BF16) for name, size in _USABLE_GIB.items()}
"""The known ones by name."""
DEFAULT_GPU = "a100-80gb"
"""The GPU that is assumed where none is given."""


def parse_gpu(text: str) -> Gpu:
    """The GPU that `text` means: a known name, or its memory as `parse_bytes` reads it.

    Raises ConfigError that lists the known names, and the closest.
    """
    name = "-".join(re.findall(r"[^\s_-]+", text.lower()))
    if name in GPUS:
        return GPUS[name]
    usable_bytes = parse_bytes(text)
    if usable_bytes is not None and usable_bytes >= GIB:
        return Gpu(text.strip(), usable_bytes)
    if usable_bytes is not None:
        raise ConfigError(f"--gpu {text}: {usable_bytes:,} bytes are not the memory of a GPU: write 80GB or 80GiB")
    meant = [known for known in GPUS if name and known.startswith(name)] or list(filter(None, [closest(name, GPUS)]))
    suggestion = f" Did you mean {' or '.join(meant)}?" if meant else ""
    raise ConfigError(
        f"--gpu {text}: not a known GPU.{suggestion} Known are {', '.join(GPUS)}; or give its memory: 80GB, 80GiB or "
        "bytes"
    )


def parse_bytes(text: str) -> int | None:
    """The bytes that `80GB` (1e9), `80GiB` (2**30), `80000MB` or a plain number stand for; None for anything else."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", text.strip().lower())
    if size is None or size[2] not in _UNITS:
        return None
    return int(float(size[1]) * _UNITS[size[2]])
