"""Time and peak memory of the chunked loss against the plain one (whole logits), forward and backward.

    python scripts/bench/loss.py --tokens 4096 --hidden 1024 --vocab 151936 --dtype bfloat16

Memory is what a step adds to what inputs and weight take: on CUDA by torch's allocator, on Linux by the process's
high-water mark. Both forms end with the gradients of hidden states and weight.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_encdec.model.loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, device=options.device, dtype=dtype).requires_grad_()
    weight = (torch.randn(options.vocab, options.hidden, device=options.device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(options.vocab, (options.tokens,), device=options.device)
    forms: dict[str, Loss] = {"plain": plain}
    forms |= {f"chunks of {size}": chunked(size) for size in options.chunk_tokens}
    print(f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocab}, {dtype}, {options.device}")
    for name, form in forms.items():
        seconds, peak_bytes, value = measure(form, hidden, weight, labels, options.repeats)
        print(f"{name:>16}: {seconds * 1e3:9.1f} ms  {peak_bytes / 2**20:9.1f} MiB  loss {value:.4f}", flush=True)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def chunked(chunk_tokens: int) -> Loss:
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, chunk_tokens)[0]


def measure(form: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, repeats: int) -> tuple[float, int, float]:
    """Best time of a step in seconds, its peak memory in bytes, and the mean token loss in nats."""
    seconds, peak_bytes, value = [], 0, 0.0
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        before = reset_peak(hidden.device)
        start = time.perf_counter()
        loss = form(hidden, weight, labels)
        loss.backward()
        value = loss.item() / len(labels)  # waits for the device
        seconds.append(time.perf_counter() - start)
        peak_bytes = max(peak_bytes, read_peak(hidden.device) - before)
    return min(seconds), peak_bytes, value


def reset_peak(device: torch.device) -> int:
    """Start a new high-water mark; returns the memory in use, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def read_peak(device: torch.device) -> int:
    """The high-water mark since `reset_peak`, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def resident(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(match[1]) if match else 0


if __name__ == "__main__":
    main()
