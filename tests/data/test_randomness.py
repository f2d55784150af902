"""Keyed randomness: a function of its name alone, and permutations that are permutations."""

from __future__ import annotations

import numpy as np
import pytest

from ds_encdec.data.randomness import Permutation, keyed_generator, unit_hash


def test_a_generator_depends_on_its_whole_name() -> None:
    def draw(*name: int | str) -> int:
        return int(keyed_generator(1, "test", *name).integers(2**62))

    assert draw(3, "a") == draw(3, "a")
    assert len({draw(3, "a"), draw(3, "b"), draw("a", 3), draw(3), draw("3a"), draw(3, "a", "")}) == 6
    assert keyed_generator(2, "test").random() != keyed_generator(1, "test").random()


def test_draws_are_those_of_every_process_and_of_earlier_runs() -> None:
    assert keyed_generator(7, "x", "ä", 1).integers(2**62) == 531506523708626883
    assert unit_hash("k", "p") == 0.1653630540473937


def test_unit_hash_is_uniform() -> None:
    values = [unit_hash(f"document {i}", "held out") for i in range(20_000)]
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_a_permutation_is_one(size: int) -> None:
    permutation = Permutation(size, 42, "test", 0)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        permutation[size]


def test_permutations_scatter_uniformly() -> None:
    """Element 0 of 16 goes everywhere over many keys, and that neighbours do not stay neighbours."""
    places = np.array([[Permutation(16, seed, "test")[i] for i in (0, 1)] for seed in range(8000)])
    counts = np.bincount(places[:, 0], minlength=16)
    assert ((counts - 500) ** 2 / 500).sum() < 37.7  # 15 degrees of freedom, 0.1 %
    distances = np.bincount((places[:, 1] - places[:, 0]) % 16, minlength=16)[1:]
    assert ((distances - 8000 / 15) ** 2 / (8000 / 15)).sum() < 36.2  # 14 degrees of freedom


def test_a_huge_permutation_costs_no_memory() -> None:
    permutation = Permutation(10**12, 1, "test")
    images = {permutation[i] for i in range(1000)}
    assert len(images) == 1000
    assert max(images) > 10**11
