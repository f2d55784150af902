"""The facts that a run's data order depends on, which can be saved, compared and named.

A source has facts (JSON-able): its `number`, its `size` (documents; units of a stream), and its identity. One that
has the kind, names and column of a saved one is that one, with other content if anything else differs. So a comparison
says what becomes of the lanes' places in each source.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ds_encdec.config.schema import FullConfig, Mark, marked
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.sources import OpenSource, source_positions
from ds_encdec.objectives import OBJECTIVES
from ds_encdec.quantities import listed
from ds_encdec.types import CheckpointError, Document

Facts = dict[str, Any]

_PROBE = "The quick brown fox, 1234567890 — jumps\n\tover: naïve {dogs}; 日本語 <extra_id_0>."

_POSITION_FACTS = ("data.num_lanes", "data.shuffle_buffer_size", "training.seed")
"""The facts that decide, beside a source itself, which of its documents comes when."""

_CHOICE_FACTS = ("sources", "mixture weights", "mixture weights count", "evaluation sources")
"""The facts that may differ without a difference in how a document is cut and packed."""

_CONTENT = ("number", "size", "commit", "rows", "documents", "sha256", "seed")
"""Facts that another version of a source may have otherwise."""


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
        facts["mixture weights count"] = "tokens"  # else documents: earlier runs have not said so
    if own_evaluation:
        facts["evaluation sources"] = source_facts(own_evaluation)
    if mine.held_out(config.data)[1] and config.data.own_split("test"):
        facts["share held out for the test"] = 0.0  # so these rows are trained on
    return json.loads(json.dumps(facts))


def require_same(saved: Facts, now: Facts) -> None:
    """Raise CheckpointError saying what becomes of each source, every fact that differs, and both fingerprints."""
    saved = _comparable(saved, now)
    if saved == now:
        return
    differing = [*_differences(saved, now)] or ["the order of the sources"]
    raise CheckpointError(
        "the checkpoint was made on other data than this run reads, so it cannot continue where it was. With "
        f"--allow-data-change: {told(saved, now)}. What differs:{listed(differing)}\nRestore this, "
        f"start a new run, or insist with --allow-data-change (fingerprint {digest(saved)} there, {digest(now)} now)"
    )


def _differences(saved: Facts, now: Facts) -> Iterator[str]:
    """Each fact that differs, in words. What tells files apart is of no use to anybody, and is left out."""
    for name in (name for name in {**saved, **now} if saved.get(name) != now.get(name)):
        if name.endswith("sources"):
            yield from _source_differences(name, saved.get(name, []), now.get(name, []))
        elif name != "mixture weights" or not _agree(saved[name], now[name]):  # else it is the sources that differ
            yield f"{name}: {saved.get(name)} there, {now.get(name)} now"


def _agree(first: Facts, second: Facts) -> bool:
    return all(first[name] == second[name] for name in first.keys() & second.keys())


def _source_differences(what: str, saved: Sequence[Facts], now: Sequence[Facts]) -> Iterator[str]:
    """The settings of sources that differ; where two or more are read, each with the numbers of its sources."""
    pairs = [(earlier, facts) for facts, earlier in _pairs(saved, now) if earlier]
    known = [facts for pair in pairs for facts in pair]
    left = ([facts for facts in side if facts not in known] for side in (saved, now))
    for there, here in (*pairs, *zip(*left, strict=False)):
        whose = f"{what}, {there['number']}: " if len(saved) > 1 or len(now) > 1 or what != "sources" else ""
        said = [
            f"{label}: {of(there)} there, {of(here)} now" for label, of in _SETTINGS.items() if of(there) != of(here)
        ]
        if not said and _identity(there) != _identity(here):
            said = [f"the content of {_words(there)}"]
        yield from (whose + one for one in said)
    if len(saved) != len(now):
        yield f"{what}: {len(saved)} there, {len(now)} now"


def told(saved: Facts, now: Facts) -> str:
    """Say what becomes of each source when a run goes on with the data `now`."""
    return "; ".join(fate.words for fate in _fates(_comparable(saved, now), now))


def usable_records(records: list[dict[str, Any]], saved: Facts, now: Facts) -> list[dict[str, Any]]:
    """The part of the lanes' saved `records` that still holds for data of the fingerprint `now`.

    That is all of it if nothing differs. Else it is the places in sources that go on (see `told`), and those waiting
    examples that come from an unchanged source, if the rules for cutting are the same. Nothing if no place is kept.
    """
    saved = _comparable(saved, now)
    if saved == now:
        return records
    fates = _fates(saved, now)
    kept = {fate.number for fate in fates if fate.kept}
    cut_alike = all(saved.get(name) == now.get(name) for name in {**saved, **now} if name not in _CHOICE_FACTS)
    same = {fate.number for fate in fates if fate.same and cut_alike}
    return [
        {
            **record,
            "reader": {
                **record["reader"],
                "sources": {
                    str(number): one for number, one in source_positions(record["reader"]).items() if number in kept
                },
            },
            "next_chunk": record["next_chunk"] if (record["next_chunk"] or [[None]])[0][0] in same else None,
            "waiting": [entry for entry in record["waiting"] if entry[0][0] in same],
        }
        for record in (records if kept else [])
    ]


@dataclass(frozen=True, slots=True)
class Fate:
    """The use that a run makes of a source. `kept`: the lanes' places in it; `same`: with the very same content."""

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
    return [
        {"number": opened.number, "size": opened.size, **json.loads(json.dumps(opened.source.identity))}
        for opened in sources
    ]


def in_todays_form(saved: Facts, now: Sequence[Facts]) -> Facts:
    """A `saved` fingerprint; an earlier one has no numbers and sizes, and weights among the facts of its sources.

    A size that was not saved is the present one where the content is the same, as the sources `now` show.
    """
    if "mixture weights" in saved:
        return saved
    sizes = {digest(_identity(facts)): facts["size"] for facts in now}
    return {
        **saved,
        "sources": [
            {"number": number, "size": sizes.get(digest(_identity(facts))), **_identity(facts)}
            for number, facts in enumerate(saved["sources"])
        ],
        "mixture weights": {str(number): facts["weight"] for number, facts in enumerate(saved["sources"])},
    }


def _comparable(saved: Facts, now: Facts) -> Facts:
    """`saved` in today's form. A run that a long row would have stopped has met none, so it may go on in any way."""
    saved = in_todays_form(saved, now["sources"])
    name = "data.on_long_row"
    return {**saved, name: now[name]} if name in now and saved.get(name) == "stop" else saved


def unknown_sources(saved: Facts, now: Sequence[Facts]) -> list[str]:
    """The sources of `now`, in words, that are not in the fingerprint `saved`, or have other content there."""
    known = [_identity(facts) for facts in in_todays_form(saved, now)["sources"]]
    return [_words(facts) for facts in now if _identity(facts) not in known]


def numbered(sources: Sequence[OpenSource], saved: Sequence[Facts]) -> tuple[OpenSource, ...]:
    """`sources` with the numbers that the same ones have in `saved`; others get numbers that none of those has."""
    unused = count(max(facts["number"] for facts in saved) + 1)
    pairs = _pairs(saved, source_facts(sources))
    numbers = (earlier["number"] if earlier else next(unused) for _, earlier in pairs)
    return tuple(dataclasses.replace(opened, number=number) for opened, number in zip(sources, numbers, strict=True))


def _fates(saved: Facts, now: Facts) -> list[Fate]:
    """The fate of each source, the dropped ones last. `saved` is in today's form."""
    other_order = [name for name in _POSITION_FACTS if saved.get(name) != now[name]]
    known = {facts["number"] for facts in now["sources"]}
    return [_fate(facts, earlier, other_order) for facts, earlier in _pairs(saved["sources"], now["sources"])] + [
        Fate(facts["number"], f"{_words(facts)}: dropped") for facts in saved["sources"] if facts["number"] not in known
    ]


def _fate(facts: Facts, earlier: Facts | None, other_order: Sequence[str]) -> Fate:
    """The fate of one source. `other_order`: settings that differ and give every source another order."""
    number, name = facts["number"], _words(facts)
    if earlier is None:
        return Fate(number, f"{name}: new")
    if other_order:
        return Fate(number, f"{name}: starts over ({', '.join(other_order)} differs)")
    if _identity(earlier) == _identity(facts):
        return Fate(number, f"{name}: goes on where it was", kept=True, same=True)
    if earlier["size"] == facts["size"]:
        return Fate(number, f"{name}: changed, and goes on where it was (as many documents)", kept=True)
    there = "unknown" if earlier["size"] is None else earlier["size"]
    return Fate(number, f"{name}: changed, and starts over ({there} documents there, {facts['size']} now)")


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
    return {name: value for name, value in facts.items() if name not in _CONTENT} | {
        "files": sorted(facts.get("files", ()))
    }


def _words(facts: Facts) -> str:
    words = " ".join(filter(None, [facts["kind"], facts.get("name"), _file_words(facts)]))
    return f"source {facts['number']} ({words})"


def _file_words(facts: Facts) -> str | None:
    files = list(facts.get("files", ()))
    return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "") if files else None


_SETTINGS: dict[str, Callable[[Facts], Any]] = {
    "data.dataset_name": lambda facts: facts.get("name") or facts["kind"],
    "data.data_files": _file_words,
    "data.text_column": lambda facts: facts.get("text_column"),
    "commit": lambda facts: facts.get("commit"),
    "documents": lambda facts: facts.get("size"),
}
"""The facts of a source that mean something to a reader, by the field that decides them or by their name."""
