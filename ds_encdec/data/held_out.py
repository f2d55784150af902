"""Which documents are kept for evaluation: a fixed function of the document's key.

The same document is held out whatever the seed, the number of lanes and the order of reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ds_encdec.data.randomness import unit_hash

SMALL_SOURCE_DOCUMENTS = 1024
"""Sources up to this size are checked for a held-out document; larger ones have one for any sensible fraction."""


def held_out_hash(key: str) -> float:
    """The number in [0, 1) that decides about the document `key`: below the source's threshold it is held out."""
    return unit_hash(key, "held out")


def held_out_below(keys: Iterable[str], eval_fraction: float) -> float:
    """The threshold of the source with these document `keys` (read up to `SMALL_SOURCE_DOCUMENTS` of them).

    It is `eval_fraction`, raised for a small source until one document is held out. A source of one document
    holds out nothing, since training needs it.
    """
    hashes = sorted(map(held_out_hash, islice(keys, SMALL_SOURCE_DOCUMENTS + 1)))
    if eval_fraction == 0 or len(hashes) < 2:
        return 0.0
    if len(hashes) > SMALL_SOURCE_DOCUMENTS or hashes[0] < eval_fraction:
        return eval_fraction
    return (hashes[0] + hashes[1]) / 2
