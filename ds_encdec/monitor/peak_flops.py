"""Peak arithmetic of the GPUs that MFU is quoted against."""

from __future__ import annotations

# Dense bfloat16 tensor-core peak in TFLOP/s with float32 accumulation, from NVIDIA's and AMD's data sheets
# (which print twice the number where they count 2:4 sparsity). The longest matching key wins, so that the
# PCIe and NVL cards, which are slower, are not taken for the SXM ones.
_DENSE_BF16_TFLOPS: dict[str, float] = {
    "A100": 312,  # A100 data sheet: SXM and PCIe alike
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "L4": 121,
    "L40S": 362,
    "H100": 989,  # H100 data sheet, SXM5: 1,979 sparse
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H200": 989,  # H200 data sheet, SXM: 1,979 sparse
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,  # HGX B200: 36 PFLOP/s sparse over 8
    "GB200": 2500,  # GB200 NVL72: 360 PFLOP/s sparse over 72
    "MI300X": 1307,  # MI300X data sheet
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the device that `torch.cuda.get_device_name()` names; None if unknown.

    A key matches whole words only: an "A100-SXM4-80GB" is an A100, an "A10G" is no A10.
    """
    words = f" {device_name.replace('-', ' ')} "
    matches = [key for key in _DENSE_BF16_TFLOPS if f" {key} " in words]
    return _DENSE_BF16_TFLOPS[max(matches, key=len)] * 1e12 if matches else None
