"""What a run's data order depends on, as facts that can be saved, compared and named."""

from __future__ import annotations

import json
from typing import Any

from ds_encdec.config.schema import FullConfig, Mark, marked
from ds_encdec.data.lane import Pipeline
from ds_encdec.data.readers import source_positions
from ds_encdec.data.same_sources import Facts, Fate, digest, fates, in_todays_form, source_facts
from ds_encdec.types import CheckpointError

_PROBE = "The quick brown fox, 1234567890 — jumps\n\tover: naïve {dogs}; 日本語 <extra_id_0>."

_POSITION_FACTS = ("data.num_lanes", "data.shuffle_buffer_size", "training.seed")
"""What decides, beside a source itself, which of its documents comes when."""

_CHOICE_FACTS = ("sources", "mixture weights")
"""What may differ without a difference in how a document is cut and packed."""


def fingerprint(config: FullConfig, pipeline: Pipeline) -> Facts:
    """JSON-able facts; two runs whose facts are equal see the same examples in the same order.

    Fields carry their configuration names. The tokenizer is known by what it makes of a fixed text, sources by
    commit (hub), content (built-in corpus), or names, sizes, beginnings and ends of their files (local).
    """
    vocabulary = pipeline.chunker.vocabulary
    facts = {path: getattr(config.data, path.removeprefix("data.")) for path in marked(Mark.ORDER)}
    facts |= {
        "data.num_lanes": pipeline.num_lanes,
        "training.seed": pipeline.seed,
        "training.per_device_train_batch_size": config.training.micro_batch_size,
        "tokenizer": digest(pipeline.tokenize([_PROBE])[0].tolist()),
        "special tokens": digest(
            [vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.pad_id, vocabulary.mode_token_ids]
        ),
        "sources": source_facts(pipeline.sources),
        "mixture weights": {opened.number: opened.weight for opened in pipeline.sources},
    }
    return json.loads(json.dumps(facts))


def require_same(saved: Facts, now: Facts) -> None:
    """Raise CheckpointError naming both fingerprints, every fact that differs, and what could be kept."""
    saved = in_todays_form(saved, now["sources"])
    if saved == now:
        return
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    differences = "; ".join(f"{name}: {saved.get(name)} there, {now.get(name)} now" for name in names)
    raise CheckpointError(
        f"the checkpoint was made on other data (fingerprint {digest(saved)}) than this run reads (fingerprint "
        f"{digest(now)}), so it cannot continue where it was: {differences}. Restore these settings, start a new "
        f"run, or insist with --allow-data-change ({told(saved, now)})"
    )


def told(saved: Facts, now: Facts) -> str:
    """What becomes of each source when a run goes on with the data `now`."""
    return "; ".join(fate.words for fate in _fates(saved, now))


def usable_records(records: list[dict[str, Any]], saved: Facts, now: Facts) -> list[dict[str, Any]]:
    """What of the lanes' saved `records` still holds for data of the fingerprint `now`.

    All of it where nothing differs. Else the places in sources that go on (see `told`), and of what was cut and waits
    that which comes from an unchanged one, if the rules for cutting are the same. Nothing where no place is kept.
    """
    saved = in_todays_form(saved, now["sources"])
    if saved == now:
        return records
    found = _fates(saved, now)
    kept = {fate.number for fate in found if fate.kept}
    cut_alike = all(saved.get(name) == now[name] for name in now if name not in _CHOICE_FACTS)
    same = {fate.number for fate in found if fate.same and cut_alike}
    return [_usable(record, kept, same) for record in records] if kept else []


def _usable(record: dict[str, Any], kept: set[int], same: set[int]) -> dict[str, Any]:
    """`record` with the places in the sources `kept`, and what waits from the sources `same`."""
    positions = {str(number): one for number, one in source_positions(record["reader"]).items() if number in kept}
    chunk = record["next_chunk"]
    return {
        **record,
        "reader": {**record["reader"], "sources": positions},
        "next_chunk": chunk if chunk and chunk[0][0] in same else None,
        "waiting": [entry for entry in record["waiting"] if entry[0][0] in same],
    }


def _fates(saved: Facts, now: Facts) -> list[Fate]:
    other_order = [name for name in _POSITION_FACTS if saved.get(name) != now[name]]
    return fates(in_todays_form(saved, now["sources"])["sources"], now["sources"], other_order)
