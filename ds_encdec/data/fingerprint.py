"""The facts that a run's data order depends on, which can be saved, compared and named.

A run continues on the same data, and refuses other data. With `--allow-data-change` the sources that are the same keep
the lanes' places in them, and all others begin at their start. A source has facts (JSON-able): its `number`, its `size`
(documents; units of a stream), and its identity, by which it is the same or another one.
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

_POSITION_FACTS = ("data.num_lanes", "data.shuffle_buffer_size", "training.seed")
"""The facts that decide, beside a source itself, which of its documents comes when."""

_CHOICE_FACTS = ("sources", "mixture weights", "mixture weights count", "evaluation sources")
"""The facts that may differ without a difference in how a document is cut and packed."""


def fingerprint(config: FullConfig, pipeline: LanePipeline, own_evaluation: Sequence[OpenSource] = ()) -> Facts:
    """JSON-able facts; two runs whose facts are equal see the same examples in the same order.

    `own_evaluation`: sources that are evaluated on and not trained on. Fields carry their configuration names; those
    that only another objective reads are left out. The tokenizer is known by what it makes of a fixed text, sources by
    commit (hub), content (built-in corpus), or names, sizes, beginnings and ends of their files (local).
    """
    maker, vocabulary = pipeline.maker, pipeline.maker.vocabulary
    mine = OBJECTIVES[config.data.objective]
    foreign = {name for row in OBJECTIVES.values() if row is not mine for name in row.own_fields}
    ordering = [path.removeprefix("data.") for path in marked(Mark.ORDER)]
    names = dict.fromkeys(name for name in (*ordering, *mine.own_fields) if name not in foreign)
    facts: Facts = {f"data.{name}": getattr(config.data, name) for name in names}
    facts |= {
        "data.num_lanes": pipeline.num_lanes,
        "training.seed": pipeline.seed,
        "training.per_device_train_batch_size": config.training.micro_batch_size,
        "tokenizer": digest(maker.tokenize(Document("probe", _PROBE)).tolist()),
        "special tokens": digest(
            [vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.pad_id, vocabulary.mode_token_ids]
        ),
        "sources": source_facts(pipeline.sources),
        "mixture weights": {opened.number: opened.weight for opened in pipeline.sources},
        **maker.facts(),
    }
    if any(opened.counts_tokens for opened in pipeline.sources):
        facts["mixture weights count"] = "tokens"
    if own_evaluation:
        facts["evaluation sources"] = source_facts(own_evaluation)
    if mine.held_out(config.data)[1] and config.data.own_split("test"):
        facts["share held out for the test"] = 0.0  # so these rows are trained on
    return json.loads(json.dumps(facts))


def differing(saved: Facts, now: Facts) -> list[str]:
    """The facts that differ, each with both values.

    A run that a long row would have stopped has met none, so it may continue with another answer to long rows.
    """
    return [
        f"{name}: {_in_words(name, saved)} there, {_in_words(name, now)} now"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name) and (name != "data.on_long_row" or saved.get(name) != "stop")
    ]


def require_same(saved: Facts, now: Facts) -> None:
    """Raise CheckpointError naming every fact that differs, and both fingerprints."""
    if differences := differing(saved, now):
        raise CheckpointError(
            f"the checkpoint was made on other data than this run reads:{listed(differences)}\nRestore this, start a "
            f"new run, or insist with --allow-data-change. Then {changes(saved, now)} (fingerprint {digest(saved)} "
            f"there, {digest(now)} now)"
        )


def changes(saved: Facts, now: Facts) -> str:
    """Say which sources a run that continues on the data `now` continues, and which it begins."""
    kept = _kept(saved, now)
    continued = [_words(facts) for facts in now["sources"] if facts["number"] in kept]
    begun = [_words(facts) for facts in now["sources"] if facts["number"] not in kept]
    parts = {"continue where they were": continued, "begin at their start": begun}
    return ", ".join(f"{'; '.join(sources)} {verb}" for verb, sources in parts.items() if sources)


def usable_records(records: list[dict[str, Any]], saved: Facts, now: Facts) -> list[dict[str, Any]]:
    """The part of the lanes' saved `records` that holds for data of the fingerprint `now`.

    That is all of it if nothing differs. Otherwise it is the places in the sources that are the same, with their
    waiting examples if documents are cut by the same rules; nothing if no source is the same.
    """
    if not differing(saved, now):
        return records
    kept = _kept(saved, now)
    cut_alike = all(saved.get(name) == now.get(name) for name in {**saved, **now} if name not in _CHOICE_FACTS)
    waiting = kept if cut_alike else set()
    return [
        {
            **record,
            "reader": {
                **record["reader"],
                "sources": {number: one for number, one in record["reader"]["sources"].items() if int(number) in kept},
            },
            "next_chunk": record["next_chunk"] if (record["next_chunk"] or [[None]])[0][0] in waiting else None,
            "waiting": [entry for entry in record["waiting"] if entry[0][0] in waiting],
        }
        for record in (records if kept else [])
    ]


def digest(value: Any) -> str:
    """A short name for a JSON-able value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def source_facts(sources: Iterable[OpenSource]) -> list[Facts]:
    """The facts of each source."""
    return [
        {"number": opened.number, "size": opened.size, **json.loads(json.dumps(opened.source.identity))}
        for opened in sources
    ]


def unknown_sources(saved: Facts, now: Sequence[Facts]) -> list[str]:
    """The sources of `now`, in words, that are not in the fingerprint `saved`, or have other content there."""
    known = [_identity(facts) for facts in saved["sources"]]
    return [_words(facts) for facts in now if _identity(facts) not in known]


def numbered(sources: Sequence[OpenSource], saved: Sequence[Facts]) -> tuple[OpenSource, ...]:
    """`sources` with the numbers that the same ones have in `saved`; others get numbers that none of those has."""
    left = list(saved)
    unused = count(max(facts["number"] for facts in saved) + 1)
    result = []
    for opened, facts in zip(sources, source_facts(sources), strict=True):
        same = next((other for other in left if _identity(other) == _identity(facts)), None)
        if same is not None:
            left.remove(same)
        result.append(dataclasses.replace(opened, number=same["number"] if same else next(unused)))
    return tuple(result)


def _kept(saved: Facts, now: Facts) -> set[int]:
    """The numbers of the sources that are the same, unless a setting gives all of them another order."""
    if any(saved.get(name) != now[name] for name in _POSITION_FACTS):
        return set()
    there = {facts["number"]: _identity(facts) for facts in saved["sources"]}
    return {facts["number"] for facts in now["sources"] if there.get(facts["number"]) == _identity(facts)}


def _identity(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if name not in ("number", "size")}


def _in_words(name: str, facts: Facts) -> Any:
    found = facts.get(name)
    return "; ".join(map(_words, found)) if found and name.endswith("sources") else found


def _words(facts: Facts) -> str:
    """The number, kind, name and first file of a source, its size, and its version."""
    first, *others = facts.get("files") or [None]
    files = f"{first} and {len(others)} more" if others else first
    words = " ".join(filter(None, [facts["kind"], facts.get("name"), files]))
    version = f"commit {facts['commit']}" if "commit" in facts else f"content {digest(_identity(facts))}"
    return f"source {facts['number']} ({words}, size {facts['size']}, {version})"
