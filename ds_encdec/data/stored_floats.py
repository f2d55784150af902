"""Floats that a table stores in fewer bits than Python's: 0.1 stays 0.1, and is not 0.10000000149011612."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np


def shortened_fields(record: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The record of columns of these Arrow types, with each narrow float as `shortened` gives it."""
    return {name: shortened(value, types[name]) if name in types else value for name, value in record.items()}


def shortened(value: Any, kind: Any) -> Any:
    """The value of Arrow type `kind`, in which each narrow float is the shortest number that its bits stand for."""
    width = _width(kind)
    if value is None or width is None:
        return value
    if width:
        return float(str((np.float16 if width == 16 else np.float32)(value)))
    if isinstance(value, Mapping):
        return {name: shortened(inner, kind.field(name).type) for name, inner in value.items()}
    if hasattr(kind, "item_type"):  # a map's pairs
        return [(key, shortened(inner, kind.item_type)) for key, inner in value]
    return [shortened(inner, kind.value_type) for inner in value]


@lru_cache(maxsize=256)
def _width(kind: Any) -> int | None:
    """Bits of a narrow float; 0 for lists and objects with one in them; None for other types."""
    from pyarrow import types  # 0.2 s

    if types.is_float16(kind) or types.is_float32(kind):
        return int(kind.bit_width)
    if types.is_struct(kind):
        inner = [kind.field(number).type for number in range(kind.num_fields)]
    elif types.is_map(kind):
        inner = [kind.item_type]
    else:
        inner = [kind.value_type] if types.is_nested(kind) and hasattr(kind, "value_type") else []
    return 0 if any(_width(one) is not None for one in inner) else None
