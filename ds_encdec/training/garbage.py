"""Run Python's garbage collector in the same step on every rank, never over the modules, the model and the engine. Left
alone it runs in the middle of a step, on each rank in another one, and the others wait."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_STEPS = 50
"""Steps between two collections; their garbage is small beside a step's own memory."""


@contextmanager
def manual_gc() -> Iterator[Callable[[], None]]:
    """Yield a function to call once a step, which alone collects garbage. Collects on entry and freezes the survivors
    (`gc.freeze`); restores the collector's state on exit."""
    was_enabled, was_frozen, steps = gc.isenabled(), gc.get_freeze_count() > 0, 0

    def end_of_step() -> None:
        nonlocal steps
        steps += 1
        if steps % EVERY_STEPS == 0:
            gc.collect()

    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield end_of_step
    finally:
        if not was_frozen:  # the caller had frozen objects before
            gc.unfreeze()
        if was_enabled:
            gc.enable()
