"""Which source of a run is which of a checkpoint's, and what becomes of the lanes' places in it.

A source has facts (JSON-able): its `number`, its `size` (documents; units of a stream), and its identity. One that
has the kind, names and column of a saved one is that one, with other content if anything else differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_encdec.data.sources import OpenSource, StreamSource

Facts = dict[str, Any]

_CONTENT = ("number", "size", "commit", "rows", "documents", "sha256", "seed")
"""Facts that another version of a source may have otherwise."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What a run does with a source. `kept`: the lanes' places in it; `same`: with the very same content."""

    number: int
    words: str
    kept: bool = False
    same: bool = False


def digest(value: Any) -> str:
    """A short name for a JSON-able value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def source_facts(sources: Iterable[OpenSource]) -> list[Facts]:
    """The facts of each source."""
    facts = [{"number": opened.number, "size": _size(opened), **opened.source.identity} for opened in sources]
    return json.loads(json.dumps(facts))


def in_todays_form(saved: Facts, now: Sequence[Facts]) -> Facts:
    """A `saved` fingerprint; an earlier one has no numbers and sizes, and weights among the facts of its sources.

    A size that was not saved is the present one where the content is the same, as the sources `now` show.
    """
    if "mixture weights" in saved:
        return saved
    sizes = {digest(_identity(facts)): facts["size"] for facts in now}
    weights = {str(number): facts["weight"] for number, facts in enumerate(saved["sources"])}
    sources = [
        {"number": number, "size": sizes.get(digest(_identity(facts))), **_identity(facts)}
        for number, facts in enumerate(saved["sources"])
    ]
    return {**saved, "sources": sources, "mixture weights": weights}


def numbered(sources: Sequence[OpenSource], saved: Sequence[Facts]) -> tuple[OpenSource, ...]:
    """`sources` with the numbers that the same ones have in `saved`; others get numbers that none of those has."""
    pairs = _pairs(saved, source_facts(sources))
    unused = max(facts["number"] for facts in saved) + 1
    numbers = []
    for _, earlier in pairs:
        numbers.append(unused if earlier is None else earlier["number"])
        unused += earlier is None
    return tuple(dataclasses.replace(opened, number=number) for opened, number in zip(sources, numbers, strict=True))


def fates(saved: Sequence[Facts], now: Sequence[Facts], other_order: Sequence[str]) -> list[Fate]:
    """What becomes of each source. `other_order`: settings that differ and give every source another order."""
    found = []
    for facts, earlier in _pairs(saved, now):
        number, name = facts["number"], _words(facts)
        if earlier is None:
            found.append(Fate(number, f"{name}: new"))
        elif other_order:
            found.append(Fate(number, f"{name}: starts over ({', '.join(other_order)} differs)"))
        elif _identity(earlier) == _identity(facts):
            found.append(Fate(number, f"{name}: goes on where it was", kept=True, same=True))
        elif earlier["size"] == facts["size"]:
            found.append(Fate(number, f"{name}: changed, and goes on where it was (as many documents)", kept=True))
        else:
            sizes = f"{'unknown' if earlier['size'] is None else earlier['size']} documents there, {facts['size']} now"
            found.append(Fate(number, f"{name}: changed, and starts over ({sizes})"))
    known = {facts["number"] for facts in now}
    dropped = [facts for facts in saved if facts["number"] not in known]
    return found + [Fate(facts["number"], f"{_words(facts)}: dropped") for facts in dropped]


def _pairs(saved: Sequence[Facts], now: Sequence[Facts]) -> list[tuple[Facts, Facts | None]]:
    """Each source of `now` with the one of `saved` that it is: the same content first, then the same names."""
    left = list(saved)
    earlier: dict[int, Facts] = {}
    for alike in (_identity, _names):
        for index, facts in enumerate(now):
            match = next((other for other in left if alike(other) == alike(facts)), None)
            if index not in earlier and match is not None:
                earlier[index] = match
                left.remove(match)
    return [(facts, earlier.get(index)) for index, facts in enumerate(now)]


def _identity(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if name not in ("number", "size", "weight")}


def _names(facts: Facts) -> Facts:
    names = {name: value for name, value in facts.items() if name not in _CONTENT}
    return {**names, "files": sorted(facts.get("files", ()))}


def _words(facts: Facts) -> str:
    files = list(facts.get("files", ()))
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    words = " ".join(filter(None, [facts["kind"], facts.get("name"), *files[:1]]))
    return f"source {facts['number']} ({words}{more})"


def _size(opened: OpenSource) -> int:
    source = opened.source
    return source.num_units if isinstance(source, StreamSource) else len(source)
