"""GPUs by name: their usable memory and their speed.

A GPU offers less memory than its name says: an "80 GB" H100 has 79.1 GiB. The sizes are torch's total capacity, as in
out-of-memory messages; drivers differ by some hundredths of a GiB. The estimate counts the CUDA context in it."""

import glob
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from ds_encdec.base.types import ConfigError
from ds_encdec.config.settings import closest

_UNITS = {"": 1, "b": 1, "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30, "tb": 10**12, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's name, the bytes of memory that torch reports, and whether it computes in bfloat16."""

    name: str
    usable_bytes: int
    has_bf16: bool = True


# Words of a device's name, its peak in TFLOP/s (None: unknown), and its variants with their memory in GiB.
#
# Peaks are of dense bfloat16 tensor cores with float32 accumulation, from NVIDIA's and AMD's data sheets (half of the
# printed number if it counts 2:4 sparsity). Published out-of-memory messages and device queries confirm to within 0.2
# GiB the memory of a100, b200, h100, l40s (and l40), mi355x, rtx-4090, t4 and v100-32gb. The others are unchecked: if
# it is tight, give bytes instead.
_ROWS: tuple[tuple[str, float | None, dict[str, float]], ...] = (
    ("A10", 125, {}),
    ("A10G", None, {"a10g": 21.99}),
    ("A30", 165, {}),
    ("A40", 149.7, {"a40": 44.42}),
    ("A6000", None, {"a6000": 47.40}),
    ("A100", 312, {"a100-40gb": 39.38, "a100-80gb": 79.15}),  # A100 data sheet: SXM and PCIe alike
    ("A800", 312, {}),
    ("B200", 2250, {"b200": 178.35}),  # HGX B200: 36 PFLOP/s sparse over 8
    ("GB200", 2500, {}),  # GB200 NVL72: 360 PFLOP/s sparse over 72
    ("GH200", 989, {"gh200": 94.50}),
    ("H20", None, {"h20": 95.00}),
    ("H100", 989, {"h100-80gb": 79.11}),  # H100 data sheet, SXM5: 1,979 sparse
    ("H100 PCIe", 756, {}),
    ("H100 NVL", 835, {"h100-nvl": 93.00}),
    ("H200", 989, {"h200": 139.72}),  # H200 data sheet, SXM: 1,979 sparse
    ("H200 NVL", 835, {}),
    ("H800", 989, {}),
    ("L4", 121, {"l4": 21.95}),
    ("L40S", 362, {"l40s": 44.39}),
    ("MI300X", 1307, {"mi300x": 191.98}),  # MI300X data sheet
    ("MI355X", None, {"mi355x": 287.98}),
    ("RTX 3090", None, {"rtx-3090": 23.58}),
    ("RTX 4090", None, {"rtx-4090": 23.52}),
    ("RTX 5090", None, {"rtx-5090": 31.33}),
    ("T4", None, {"t4": 14.56}),
    ("V100", None, {"v100-16gb": 15.77, "v100-32gb": 31.73}),
)
# GPUs of compute capability below 8.0: torch emulates bfloat16 there, at a fraction of the speed.
_WITHOUT_BF16 = {"T4", "V100"}

GPUS = {
    name: Gpu(name, int(size * 2**30), words not in _WITHOUT_BF16)
    for words, _, variants in _ROWS
    for name, size in variants.items()
}
DEFAULT_GPU = "a100-80gb"  # The assumed GPU if no option names one
# Device files of NVIDIA's driver, AMD's and WSL's, and of NVIDIA's boards with an integrated GPU.
_DRIVERS = ("/dev/nvidia[c0-9]*", "/dev/kfd", "/dev/dxg", "/dev/nvmap", "/dev/nvhost-ctrl*")


def has_gpu() -> bool:
    """Return whether this machine seems to have a GPU, without importing torch."""
    return any(map(glob.glob, _DRIVERS))


def grow_segments(environ: MutableMapping[str, str]) -> None:
    """Make torch's allocator grow its segments, against fragmentation, unless the user has set the variable. Torch
    reads it at its import, or at the latest with the first tensor on a GPU."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def parse_gpu(text: str) -> Gpu:
    """Return the GPU of that name, or of that memory (`parse_bytes`). ConfigError lists the names and the closest."""
    name = "-".join(re.findall(r"[^\s_-]+", text.lower()))
    if name in GPUS:
        return GPUS[name]
    usable_bytes = parse_bytes(text)
    if usable_bytes is None or usable_bytes < 2**30:  # "80" is no memory of a GPU
        meant = [known for known in GPUS if name and known.startswith(name)] or [*filter(None, [closest(name, GPUS)])]
        suggestion = f" Did you mean {' or '.join(meant)}?" if meant else ""
        raise ConfigError(
            f"--gpu {text}: not a known GPU.{suggestion} Known are {', '.join(GPUS)}; or give its memory: 80GB, 80GiB "
            "or bytes"
        )
    return Gpu(text.strip(), usable_bytes)


def parse_bytes(text: str) -> int | None:
    """Return the bytes of `80GB` (GB: 1e9), `80GiB` (GiB: 2**30), `80000MB` or a plain number; else None."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", text.strip().lower())
    return int(float(size[1]) * _UNITS[size[2]]) if size and size[2] in _UNITS else None


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of a device as `torch.cuda.get_device_name()` names it; None if unknown.
    Rows match whole words (an "A10G" is no A10), and the longest wins: PCIe and NVL cards are slower than SXM ones."""
    matches = [row for row in _ROWS if f" {row[0]} " in f" {device_name.replace('-', ' ')} "]
    tflops = max(matches, key=lambda row: len(row[0]))[1] if matches else None
    return tflops and tflops * 1e12
