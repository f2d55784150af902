"""Python's garbage collector, called by the loop while a run trains.

Left alone it runs whenever enough objects were made, in the middle of a step, on each rank in another one: the others
wait for it. Inside `manual_gc` it runs in the same step on every rank, and never scans what was there before: the
program's modules, the model, the engine.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_STEPS = 50
"""Steps between two collections: what has piled up by then is small beside a step's own memory."""


@contextmanager
def manual_gc() -> Iterator[Callable[[], None]]:
    """Collect only in the function that this yields, to be called once a step.

    Collects now and freezes the survivors (`gc.freeze`); restores the collector's state on exit.
    """
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
        if not was_frozen:  # whoever froze before wants to keep it so
            gc.unfreeze()
        if was_enabled:
            gc.enable()
