"""Which of a run's alerts asked for a rollback that could not be made."""

from __future__ import annotations

from collections.abc import Sequence

from ds_encdec.report.read_run import Entry

_ANSWERS = ("rollback", "no_rollback", "stop", "start")
"""Entries that settle what became of the rollbacks asked for before them; a start: they were never answered."""


def refused_alerts(events: Sequence[Entry]) -> set[int]:
    """The indices in `events` of the alerts whose rollback was refused: those since the answer before a refusal."""
    refused: set[int] = set()
    asking: list[int] = []
    for index, entry in enumerate(events):
        if entry["kind"] == "alert" and entry.get("action") == "rollback":
            asking.append(index)
        elif entry["kind"] in _ANSWERS:
            if entry["kind"] == "no_rollback":
                refused.update(asking)
            asking = []
    return refused
