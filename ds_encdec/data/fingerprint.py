"""What a run's data order depends on, as facts that can be saved, compared and named."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ds_encdec.config.schema import FullConfig
from ds_encdec.data.lane import Pipeline
from ds_encdec.types import CheckpointError

_PROBE = "The quick brown fox, 1234567890 — jumps\n\tover: naïve {dogs}; 日本語 <extra_id_0>."

_ORDER_FIELDS = (
    "max_seq_length",
    "max_encoder_length",
    "max_decoder_length",
    "ul2_task_weights",
    "use_mode_tokens",
    "shuffle_buffer_size",
    "max_examples_per_micro_batch",
    "packing_pool_examples",
    "packing_max_wait_batches",
    "eval_fraction",
)


_POSITION_FACTS = ("sources", "data.num_lanes", "data.shuffle_buffer_size", "training.seed")
"""What decides which document comes when. Positions in the sources mean the same as long as these are equal."""


def fingerprint(config: FullConfig, pipeline: Pipeline) -> dict[str, Any]:
    """JSON-able facts; two runs whose facts are equal see the same examples in the same order.

    Fields carry their configuration names. The tokenizer is known by what it makes of a fixed text, sources by
    commit (hub), content (built-in corpus), or names, sizes, beginnings and ends of their files (local).
    """
    vocabulary = pipeline.chunker.vocabulary
    facts = {f"data.{name}": getattr(config.data, name) for name in _ORDER_FIELDS}
    facts |= {
        "data.num_lanes": pipeline.num_lanes,
        "training.seed": pipeline.seed,
        "training.per_device_train_batch_size": config.training.micro_batch_size,
        "tokenizer": digest(pipeline.tokenize([_PROBE])[0].tolist()),
        "special tokens": digest(
            [vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.pad_id, vocabulary.mode_token_ids]
        ),
        "sources": [{"weight": opened.weight, **opened.source.identity} for opened in pipeline.sources],
    }
    return json.loads(json.dumps(facts))


def digest(value: Any) -> str:
    """A short name for a JSON-able value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def require_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise CheckpointError naming both fingerprints and every fact that differs."""
    if saved == now:
        return
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    differences = "; ".join(f"{name}: {saved.get(name)} there, {now.get(name)} now" for name in names)
    raise CheckpointError(
        f"the checkpoint was made on other data (fingerprint {digest(saved)}) than this run reads (fingerprint "
        f"{digest(now)}), so it cannot continue where it was: {differences}. Restore these settings, start a new "
        "run, or insist with --allow-data-change"
    )


def usable_records(records: list[dict[str, Any]], saved: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """What of the lanes' saved `records` still holds for data of the fingerprint `now`.

    All of it where nothing differs. Where the same documents come in the same order, the positions among them, but not
    what was cut from them and waits: the rules for that have changed. Otherwise nothing, and the lanes begin anew.
    """
    if saved == now:
        return records
    if any(saved.get(name) != now[name] for name in _POSITION_FACTS):
        return []
    return [{**record, "next_chunk": None, "waiting": []} for record in records]
