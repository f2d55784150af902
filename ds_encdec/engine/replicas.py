"""The sum of the bits of tensors, by which ranks compare what they hold alike."""

from typing import Any

import torch
from torch import Tensor

from ds_encdec.engine.sharded_engine import local_tensors

ROW_BYTES = 512
PIECE_BYTES = 2**26  # bytes of a tensor that are copied at once, where 64-bit integers do not fit its place or length


@torch.no_grad()
def sum_of_bits(item: Any) -> int:
    """Return the sum of the bytes of `local_tensors`, read as 64-bit integers and wrapped to a signed one, each
    `ROW_BYTES` times another odd number, so that rows in another order have another sum. Each place in memory counts
    once. No single flipped bit is missed: it moves the sum by an odd number times a power of two below 2^64. Flips of
    the same bit in one row may cancel each other. Reads each byte once, mostly uncopied, and waits once per device."""
    sums: dict[torch.device, list[Tensor]] = {}
    odd = 1
    for tensor in {(one.device, one.data_ptr(), one.nbytes): one for one in local_tensors(item)}.values():
        for piece in tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            if piece.storage_offset() % 8 or len(piece) % ROW_BYTES:
                piece = torch.nn.functional.pad(piece, (0, -len(piece) % ROW_BYTES))
            rows = piece.view(torch.int64).view(-1, ROW_BYTES // 8).sum(1)
            odds = torch.arange(odd, odd + 2 * len(rows), 2, device=rows.device)
            odd += 2 * len(rows)
            sums.setdefault(tensor.device, []).append((rows * odds).sum())
    total = sum(int(torch.stack(of_device).sum()) for of_device in sums.values())
    return (total + 2**63) % 2**64 - 2**63
