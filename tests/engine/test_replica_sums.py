"""The sum of bits by which ranks compare what they hold alike, and whom a comparison names."""

import pytest
import torch

from ds_encdec.engine import replicas
from ds_encdec.engine.protocol import ReplicaDigest
from ds_encdec.engine.replicas import sum_of_bits
from ds_encdec.training.replicas import places, who_differs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_flipped_bit_changes_the_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a length and a place that 64-bit integers do not fit, in several pieces, beside a tensor of another kind."""
    monkeypatch.setattr(replicas, "PIECE_BYTES", 16)
    storage = torch.randint(0, 256, (27 * dtype.itemsize,), dtype=torch.uint8)
    tensors = [storage.view(dtype)[2:].view(5, 5), torch.randn(3)]
    whole = sum_of_bits(tensors)
    assert sum_of_bits([tensors[0].clone(), tensors[1]]) == whole
    for byte in range(2 * dtype.itemsize, len(storage)):
        for bit in range(8):
            storage[byte] ^= 1 << bit
            changed = sum_of_bits(tensors)
            assert changed != whole
            assert -(2**63) <= changed < 2**63
            storage[byte] ^= 1 << bit
    assert sum_of_bits(tensors) == whole


def test_rows_in_another_order_change_the_sum() -> None:
    """As after a collective that has put its parts together in another order."""
    weight = torch.randn(4, replicas.ROW_BYTES // 4)
    assert sum_of_bits([weight.flip(0)]) != sum_of_bits([weight])
    assert sum_of_bits([weight[:2], weight[2:]]) == sum_of_bits([weight]) != sum_of_bits([weight[2:], weight[:2]])


def test_a_tensor_that_is_named_twice_counts_once() -> None:
    """A sum of twice the same bits would lose the highest one."""
    weight = torch.randn(8)
    assert sum_of_bits([weight, weight.view(2, 4)]) == sum_of_bits([weight])
    assert sum_of_bits([weight.view(2, 4).T]) == sum_of_bits([weight.view(2, 4).T.contiguous()])  # copied as it is read
    assert sum_of_bits([]) == sum_of_bits([torch.empty(0)]) == 0


def test_the_numbers_that_ranks_exchange_agree_where_their_groups_do() -> None:
    """Two groups of two, with sums at the ends of what 64 bits hold."""
    extremes = [ReplicaDigest(0, 2, -(2**63)), ReplicaDigest(1, 2, 2**63 - 1)] * 2
    others = [*extremes[:3], ReplicaDigest(1, 2, 2**63 - 2)]
    for digests, equal in ((extremes, [True, True]), (others, [True, False])):
        exchanged = torch.tensor([places(digest) for digest in digests]).amin(0).tolist()
        assert [exchanged[at] == ~exchanged[at + 1] for at in (0, 2)] == equal


HOSTS = ("a", "a", "b", "b", "c", "c")


@pytest.mark.parametrize(
    ("totals", "groups", "ranks", "words"),
    [
        ((7, 7, 7, 8, 7, 7), 1, [3], "rank 3 (b) differs from the others in weights or optimizer states"),
        ((7, 9, 7, 8, 7, 7), 1, [1, 3], "ranks 1 (a), 3 (b) differ from the others in weights or optimizer states"),
        ((1, 2, 1, 2, 1, 5), 2, [5], "rank 5 (c) differs from the others in weights or optimizer states"),
        (
            (1, 2, 3, 1, 2, 4),
            3,
            [2, 5],
            "ranks 2 (b), 5 (c) differ in weights or optimizer states, and at least one of them is wrong",
        ),
    ],
)
def test_a_rank_unlike_most_is_named_else_all_in_question(
    totals: tuple[int, ...], groups: int, ranks: list[int], words: str
) -> None:
    digests = [ReplicaDigest(rank % groups, groups, total) for rank, total in enumerate(totals)]
    assert who_differs(digests, HOSTS) == (ranks, words)
