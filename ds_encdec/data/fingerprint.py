"""The facts that a run's data order depends on: they are saved, compared, and named by a digest.

With `--allow-data-change` the lanes keep their places in unchanged sources, and begin all others at their start.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from ds_encdec.base.quantities import listed
from ds_encdec.base.types import CheckpointError, Document
from ds_encdec.config.schema import FullConfig, Mark, marked
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.sources.sources import OpenSource
from ds_encdec.registry.objectives import OBJECTIVES

Facts = dict[str, Any]

_PROBE = "The quick brown fox, 1234567890 — jumps\n\tover: naïve {dogs}; 日本語 <extra_id_0>."

# The facts that, beside a source itself, decide the order of its documents.
_POSITION_FACTS = ("data.num_lanes", "data.shuffle_buffer_size", "training.seed")

# The facts that do not affect how a document is cut and packed.
_CHOICE_FACTS = ("sources", "mixture weights", "mixture weights count", "evaluation sources")


def fingerprint(config: FullConfig, pipeline: LanePipeline, own_evaluation: Sequence[OpenSource] = ()) -> Facts:
    """Return JSON-able facts; two runs with equal facts see the same examples in the same order. The tokenizer is
    identified by its ids of a fixed text, sources by commit (hub), content (built-in corpus), or names, sizes,
    beginnings and ends of their files (local)."""
    maker, ids = pipeline.maker, pipeline.maker.vocabulary
    mine = OBJECTIVES[config.data.objective]
    foreign = {name for row in OBJECTIVES.values() for name in row.own_fields} - {*mine.own_fields}
    ordering = [path.removeprefix("data.") for path in marked(Mark.ORDER)]
    tests_elsewhere = mine.held_out(config.data)[1] and config.data.own_split("test")
    facts: Facts = {
        **{f"data.{name}": getattr(config.data, name) for name in (*ordering, *mine.own_fields) if name not in foreign},
        "data.num_lanes": pipeline.num_lanes,
        "training.seed": pipeline.seed,
        "training.per_device_train_batch_size": config.training.micro_batch_size,
        "tokenizer": digest(maker.tokenize(Document("probe", _PROBE)).tolist()),
        "special tokens": digest([ids.sentinel_ids, ids.eos_id, ids.pad_id, ids.mode_token_ids, *ids.beginning()]),
        "sources": source_facts(pipeline.sources),
        "mixture weights": {opened.number: opened.weight for opened in pipeline.sources},
        **maker.facts(),
        **({"mixture weights count": "tokens"} if any(one.counts_tokens for one in pipeline.sources) else {}),
        **({"evaluation sources": source_facts(own_evaluation)} if own_evaluation else {}),
        **({"share held out for the test": 0.0} if tests_elsewhere else {}),  # so these rows are trained on
    }
    return json.loads(json.dumps(facts))


def differing(saved: Facts, now: Facts) -> list[str]:
    """Return the facts that differ, each with both values."""

    def in_words(name: str, facts: Facts) -> Any:
        value = facts.get(name)
        return "; ".join(map(_words, value)) if value and name.endswith("sources") else value

    # A run that a long row would have stopped has met none, so it may continue with any `data.on_long_row`.
    return [
        f"{name}: {in_words(name, saved)} there, {in_words(name, now)} now"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name) and (name != "data.on_long_row" or saved.get(name) != "stop")
    ]


def require_same(saved: Facts, now: Facts) -> None:
    """Raise CheckpointError with every fact that differs, and both fingerprints."""
    if differences := differing(saved, now):
        raise CheckpointError(
            f"the checkpoint was made on other data than this run reads:{listed(differences)}\nRestore this, start a "
            f"new run, or insist with --allow-data-change. Then {changes(saved, now)} (fingerprint {digest(saved)} "
            f"there, {digest(now)} now)"
        )


def changes(saved: Facts, now: Facts) -> str:
    """Return which sources a run that goes on with the data `now` continues, and which it begins."""
    kept = _unchanged(saved, now)
    continued = [_words(facts) for facts in now["sources"] if facts["number"] in kept]
    begun = [_words(facts) for facts in now["sources"] if facts["number"] not in kept]
    parts = {"continue where they were": continued, "begin at their start": begun}
    return ", ".join(f"{'; '.join(sources)} {verb}" for verb, sources in parts.items() if sources)


def usable_records(records: list[dict[str, Any]], saved: Facts, now: Facts) -> list[dict[str, Any]]:
    """Return the lanes' saved `records`, with only the places and waiting examples that are valid for `now`."""
    if not differing(saved, now):
        return records
    kept = _unchanged(saved, now)
    changed = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    waiting = kept if {*changed} <= {*_CHOICE_FACTS} else set()
    usable = []
    for record in records if kept else ():
        reader, chunk = record["reader"], record["next_chunk"]
        sources = {number: place for number, place in reader["sources"].items() if int(number) in kept}
        usable.append(
            {
                **record,
                "reader": {**reader, "sources": sources},
                "next_chunk": chunk if chunk and chunk[0][0] in waiting else None,
                "waiting": [entry for entry in record["waiting"] if entry[0][0] in waiting],
            }
        )
    return usable


def digest(value: Any) -> str:
    """Return a short name for a JSON-able value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


def source_facts(sources: Iterable[OpenSource]) -> list[Facts]:
    """Return the facts of each source."""
    return [
        {"number": opened.number, "size": opened.size, **json.loads(json.dumps(opened.source.identity))}
        for opened in sources
    ]


def unknown_sources(saved: Facts, now: Sequence[Facts]) -> list[str]:
    """Describe the sources of `now` that the fingerprint `saved` lacks, or has with other content."""
    return [_words(facts) for facts in now if _identity(facts) not in map(_identity, saved["sources"])]


def numbered(sources: Sequence[OpenSource], saved: Sequence[Facts]) -> tuple[OpenSource, ...]:
    """Give `sources` the numbers that they have in `saved`, and others numbers that are not used there."""
    left = list(saved)
    unused = count(max(facts["number"] for facts in saved) + 1)
    result = []
    for opened, facts in zip(sources, source_facts(sources), strict=True):
        same = next((other for other in left if _identity(other) == _identity(facts)), None)
        if same is not None:
            left.remove(same)
        result.append(dataclasses.replace(opened, number=same["number"] if same else next(unused)))
    return tuple(result)


def _unchanged(saved: Facts, now: Facts) -> set[int]:
    if any(saved.get(name) != now[name] for name in _POSITION_FACTS):
        return set()
    then = {facts["number"]: _identity(facts) for facts in saved["sources"]}
    return {facts["number"] for facts in now["sources"] if then.get(facts["number"]) == _identity(facts)}


def _identity(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if name not in ("number", "size")}


def _words(facts: Facts) -> str:
    first, *others = facts.get("files") or [None]
    files = f"{first} and {len(others)} more" if others else first
    words = " ".join(filter(None, [facts["kind"], facts.get("name"), files]))
    version = f"commit {facts['commit']}" if "commit" in facts else f"content {digest(_identity(facts))}"
    return f"source {facts['number']} ({words}, size {facts['size']}, {version})"
