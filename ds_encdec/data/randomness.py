"""Randomness that depends on its purpose alone, never on earlier draws.

Each random decision of the data pipeline is named by a seed, a purpose and keys, whose hash is the key of a
counter-based generator (Philox, Salmon et al., SC 2011). So every process gets the same result, in any order.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

_WORD = (1 << 64) - 1


def _digest(parts: tuple[int | str, ...], num_bytes: int) -> int:
    # The length in front of each part keeps ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(piece)}:{piece}" for piece in map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes).digest())


def keyed_generator(seed: int, purpose: str, *parts: int | str) -> np.random.Generator:
    """Return the generator of the decision `(seed, purpose, *parts)`, in about 15 microseconds."""
    return np.random.Generator(np.random.Philox(key=_digest((seed, purpose, *parts), 16)))


def unit_hash(key: str, purpose: str) -> float:
    """Return a fixed number in [0, 1) for `key`: uniform over keys, the same on every machine and for every seed."""
    return _digest((purpose, key), 8) / 2**64


class Permutation:
    """A pseudo-random permutation of `range(size)` in constant memory; an element takes a few microseconds."""

    _ROUNDS = 6

    def __init__(self, size: int, seed: int, purpose: str, *parts: int | str) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [_digest((seed, purpose, *parts, turn), 8) for turn in range(self._ROUNDS)]

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        # A Feistel network on the smallest even number of bits, repeated until the result is below `size` (Black and
        # Rogaway, CT-RSA 2002). A round mixes by the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA
        # 2014).
        while True:
            left, right = index >> self._half_bits, index & self._half_mask
            for round_key in self._round_keys:
                word = right + round_key
                word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
                word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
                left, right = right, left ^ ((word ^ (word >> 31)) & self._half_mask)
            index = (left << self._half_bits) | right
            if index < self._size:
                return index
