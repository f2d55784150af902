"""Formats numbers of things, bytes and durations as text. Every module may import this one."""

import math
from collections.abc import Sequence, Sized

GIB = 2**30  # bytes of a GiB, the unit of memory in messages


def count(things: Sized | float, noun: str) -> str:
    """Return `1 step`, `2 steps` or `2 batches`."""
    how_many = round(things) if isinstance(things, int | float) else len(things)
    return f"{how_many:,} {noun}" + ("" if how_many == 1 else "es" if noun.endswith(("ch", "ss")) else "s")


def listed(words: Sequence[str], most: int = 6) -> str:
    """Return each of the `words` on a line; beyond `most`, only how many more there are."""
    beyond = len(words) - most
    return "".join(f"\n  {line}" for line in [*words[:most], *([f"and {beyond} more"] if beyond > 0 else [])])


def short(number: float, decimals: int = 0) -> str:
    """Return a number in at most seven places: `9,999`, `100,000`, `1.57 M`, `157 B`. `decimals`: below 1,000."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size * 0.9995:
            figure = number / size
            return f"{figure:,.0f} {letter}" if figure >= 999.5 else f"{figure:.3g} {letter}"
    return f"{number:,.{decimals if number < 1_000 else 0}f}"


def disk_size(num_bytes: float) -> str:
    """Return bytes as disks are sold: `617.5 KB`, `68.2 GB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return count(num_bytes, "byte")


def gib(num_bytes: float) -> str:
    """Return memory with its unit, to three significant digits below 100 GiB, for tiny models: `0.32 GiB`."""
    amount = num_bytes / GIB
    return f"{amount:.3g} GiB" if amount < 100 else f"{amount:,.0f} GiB"


def in_gib(num_bytes: float) -> str:
    """Return memory in GiB as a figure of a table, whose header has the unit."""
    return f"{num_bytes / GIB:,.1f}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, or in days from 2 days on: `3 min 20 s`, `4.55 days`."""
    seconds = max(0.0, seconds) if math.isfinite(seconds) else 0.0
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), seconds / 86400
    if days >= 2:
        return f"{days:,.{2 if days < 100 else 0}f} days"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"
