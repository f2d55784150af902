"""Numbers of things, and durations, in words. It stands on the floor: every room says some."""

from collections.abc import Sized


def count(things: Sized | float, noun: str) -> str:
    """`1 step`, `2 steps`, `2 batches`."""
    how_many = round(things) if isinstance(things, int | float) else len(things)
    return f"{how_many:,} {noun}" + ("" if how_many == 1 else "es" if noun.endswith("ch") else "s")


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"
