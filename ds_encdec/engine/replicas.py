"""The sum of the bits of tensors, by which ranks compare what they hold alike."""

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE_BYTES = 2**26  # bytes of a tensor that are copied at once, where 64-bit integers do not fit its place or length


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the tensors' bytes, read as signed 64-bit integers and wrapped to one, in any order of the
    tensors. Each place in memory counts once. No single flipped bit is missed: it moves the sum by a power of two below
    2^64. Flips in several numbers may cancel each other, by a chance of one in 2^64 if they are independent. Reads each
    byte once, mostly without a copy, and waits once for each device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in {(one.device, one.data_ptr(), one.nbytes): one for one in tensors}.values():
        for piece in tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            if piece.storage_offset() % 8 or len(piece) % 8:
                piece = torch.nn.functional.pad(piece, (0, -len(piece) % 8))
            sums.setdefault(tensor.device, []).append(piece.view(torch.int64).sum())
    total = sum(int(torch.stack(of_device).sum()) for of_device in sums.values())
    return (total + 2**63) % 2**64 - 2**63
