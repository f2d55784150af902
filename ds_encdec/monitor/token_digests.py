"""Digests of the token ids that a run has read, for its ledger: `ds-encdec compare` finds by them where runs part. Of
each step there are two sums over all lanes, of 32 bits each, which do not depend on the number of ranks: of the digests
of its micro-batches, and of the same times the lane's number + 1. If one lane alone differs, the two name it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

from ds_encdec.base.types import Batch

# Among which the one that differs is looked for; where several do, 1 in 2^16 cases names a wrong one.
MOST_LANES = 2**16


def digest_sums(micro_batches: Iterable[Batch]) -> tuple[int, int]:
    """Return a rank's part of the two sums of a step."""
    digests = [(batch.lane + 1, batch.digest) for batch in micro_batches]
    return sum(digest for _, digest in digests), sum(factor * digest for factor, digest in digests) % 2**32


def entry(sums: Sequence[tuple[int, int]], last: int) -> dict[str, Any]:
    """Return the facts of an entry of the ledger, from the two sums of each data step up to `last`."""
    steps = (f"{plain % 2**32:08x}{by_lane % 2**32:08x}" for plain, by_lane in sums)
    return {"data_step": last, "first": last + 1 - len(sums), "steps": " ".join(steps)}


class StepDigest(NamedTuple):
    """The two sums of a data step, and the number of ranks then."""

    plain: int
    by_lane: int
    ranks: int

    def other_lane(self, other: "StepDigest") -> int | None:
        """Return the lane in which alone the steps of two runs differ; None if others do, too."""
        plain, by_lane = self.plain - other.plain, self.by_lane - other.by_lane
        found = [lane for lane in range(MOST_LANES) if ((lane + 1) * plain - by_lane) % 2**32 == 0]
        return found[0] if len(found) == 1 else None


def read_digests(ledger: Iterable[Mapping[str, Any]]) -> dict[int, StepDigest]:
    """Return the digests by data step; of a step that a resume took again, that of the last time."""
    found = dict[int, StepDigest]()
    for line in ledger:
        with suppress(KeyError, AttributeError, TypeError, ValueError):  # it may come from another program
            if line["kind"] == "tokens":
                first, ranks = index(line["first"]), index(line["ranks"]) or 1
                sums = [(int(step[:8], 16), int(step[8:], 16)) for step in line["steps"].split()]
                found |= {number: StepDigest(*pair, ranks) for number, pair in enumerate(sums, first)}
    return found
