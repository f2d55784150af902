"""Which engines a configuration may run on, without looking at what is installed; needs no torch."""

from __future__ import annotations

from ds_encdec.config.schema import FullConfig
from ds_encdec.engines import ENGINES, EngineSpec, load


def engine_candidates(config: FullConfig) -> list[EngineSpec]:
    """The engines that `infra.distributed_type` leaves the choice of, the preferred one first; never empty.

    `auto` leaves those that can do what `config` asks; the rules refuse a configuration that none can do.
    """
    kind, rows = config.infra.distributed_type, list(ENGINES.values())
    asked = [row for row in rows if kind in row.distributed_types]
    return asked or [row for row in rows if not list(load(row.lacks)(config))] or rows[-1:]
