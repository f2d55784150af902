"""The garbage collector by hand: when it runs, through what, and how it is left."""

import gc
import weakref

import pytest

from ds_encdec.training.build import manual_gc


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def fail_inside() -> None:
    with manual_gc():
        assert not gc.isenabled()
        raise KeyError


def test_what_was_there_is_collected_first_and_then_passed_over() -> None:
    gc.unfreeze()
    gone, kept = cycle(), Cycle()
    seen = weakref.ref(kept)
    with manual_gc():
        assert gone() is None
        left, kept = cycle(), Cycle()
        many: list[list[int]] = [[] for _ in range(100_000)]  # would have it run many times
        assert left() is not None
        gc.collect()
        assert left() is None
        assert seen() is not None
        del many
    gc.collect()
    assert seen() is None


def test_the_collector_is_left_as_it_was() -> None:
    with pytest.raises(KeyError):
        fail_inside()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
