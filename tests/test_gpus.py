"""GPUs by name, sizes in words, and peaks."""

from __future__ import annotations

import pytest

from ds_encdec.base.quantities import GIB
from ds_encdec.base.types import ConfigError
from ds_encdec.memory.gpus import GPUS, grow_segments, parse_bytes, parse_gpu, peak_flops


def test_a_name_has_less_than_its_number() -> None:
    """In GiB; and what torch reports is within a few percent of the number in GB."""
    for name, written in (("a100-80gb", 80), ("a100-40gb", 40), ("h100-80gb", 80), ("h200", 141), ("b200", 192)):
        assert 0.98 * written * 1e9 < parse_gpu(name).usable_bytes < written * GIB
    assert parse_gpu("H100-80GB") is parse_gpu(" h100_80gb ") is GPUS["h100-80gb"]  # as people write them
    assert [name for name, gpu in GPUS.items() if not gpu.has_bf16] == ["t4", "v100-16gb", "v100-32gb"]


SIZES = {"80GB": 80 * 10**9, "80GiB": 80 * GIB, "85899345920": 80 * GIB, "1.5 TiB": 1536 * GIB, "80000mb": 8e10}


def test_sizes() -> None:
    for text, expected in SIZES.items():
        assert parse_bytes(text) == parse_gpu(text).usable_bytes == expected
    for text in ("80G", "eighty", "-80GB", "80 GB each", ""):
        assert parse_bytes(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "Did you mean h100-80gb or h100-nvl"),
        ("a100-80g", "Did you mean a100-80gb"),
        ("tpu", "Known are .*h200"),
        ("80", "80 bytes are not the memory of a GPU"),
    ],
)
def test_an_unknown_gpu_lists_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpu(text)


TFLOPS = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "A100-SXM4-80GB": 312, "L40S": 362}
TFLOPS |= {"A100 80GB PCIe": 312, "B200": 2250, "GH200 480GB": 989, "L4": 121}


def test_peaks_by_the_names_of_devices() -> None:
    for name, tflops in TFLOPS.items():
        assert peak_flops(f"NVIDIA {name}") == tflops * 1e12, name
    assert peak_flops("AMD Instinct MI300X") == 1307e12
    for name in ("NVIDIA A10G", "NVIDIA A1000", "NVIDIA GeForce RTX 2080", "cpu", ""):
        assert peak_flops(name) is None, name


def test_segments_grow_unless_the_user_has_said_how_memory_is_held() -> None:
    name, older = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given, found in (
        ({}, {name: "expandable_segments:True"}),
        ({name: ""}, {name: ""}),
        ({older: "backend:cudaMallocAsync"}, {older: "backend:cudaMallocAsync"}),
    ):
        grow_segments(environ := dict(given))
        assert environ == found
