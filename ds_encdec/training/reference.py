"""The reference's log-probabilities, which a run of preferences computes once, before its first step: the engine's
weights are still the source's, and adapters add nothing yet. No second model is ever in memory."""

import logging
import time
import zlib
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path

from ds_encdec.base.types import CheckpointError, Example, Preempted
from ds_encdec.checkpoint.manager import MAKE_ROOM
from ds_encdec.data.build import TrainingData
from ds_encdec.data.eval_set import packed
from ds_encdec.data.examples.protocol import usable_documents, with_ids
from ds_encdec.data.fingerprint import digest
from ds_encdec.data.loader import collate, known
from ds_encdec.data.reference import ReferenceTable, copy_table, pair_digest, write_table
from ds_encdec.data.sources.sources import OpenSource, all_rows
from ds_encdec.engine.protocol import Engine
from ds_encdec.exports.adapters import base_record
from ds_encdec.launch.disk import Writing
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.model.source import base_model
from ds_encdec.objectives.preferences import PreferenceLosses
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.training.run import Run

logger = logging.getLogger(__name__)

_LINE_SECONDS = 30.0  # between two lines about the progress


def use_reference(run: Run, data: TrainingData, engine: Engine, stop: StopRequest) -> None:
    """Give the loader the table of the reference: the checkpoint's, or that of an earlier start of this run, or a new
    one. A collective. Raises CheckpointError, DataError, or Preempted."""
    if not OBJECTIVES[run.config.data.objective].has_reference:
        return
    losses, collectives, folder = engine.objective, run.context.collectives, run.folder.reference
    assert isinstance(losses, PreferenceLosses)
    if run.checkpoint is None:
        facts = collectives.on_rank_zero(lambda: _facts(run, data))
        if not collectives.on_rank_zero(lambda: _has_table(folder, facts)):
            shares = collectives.gather_to_zero(dict(_measured(run, data, engine, losses, stop)))
            with Writing(run.folder.root, "The run", MAKE_ROOM).explain_refusals():
                collectives.on_rank_zero(lambda: write_table(folder, ChainMap(*shares), facts))
    else:
        collectives.on_rank_zero(lambda: _take_over(run, folder))

    def opened() -> ReferenceTable:
        if (table := ReferenceTable.read(folder)) is None:  # a batch without it would be its own reference
            raise CheckpointError(
                f"{folder}: rank {collectives.rank} does not find the table of the reference that rank 0 wrote. Set "
                "infra.output_dir to a folder that all hosts share"
            )
        for find in data.evaluated:  # all pairs of evaluations, on all ranks: later each would look for its own
            table(find())
        return table

    data.loader.reference = collectives.on_every_rank(opened)


def _facts(run: Run, data: TrainingData) -> dict[str, str]:
    section = run.config.model
    base = run.model.base or base_record(
        section.model_name_or_path, base_model(section, run.model.config, run.config.training.seed)
    )
    tokenizer = [data.fingerprint[name] for name in ("tokenizer", "special tokens")]
    return {"reference": base["sha256"], "tokenizer": digest(tokenizer), "data": digest(data.fingerprint)}


def _has_table(folder: Path, facts: dict[str, str]) -> bool:
    found, _ = attempt(lambda: ReferenceTable.read(folder))
    return found is not None and found.facts == facts


def _take_over(run: Run, folder: Path) -> None:
    """Find the table that the checkpoint was made with, and copy it from its run if that is another one."""
    assert run.checkpoint is not None
    path = run.checkpoint.path
    wanted = run.checkpoint.read_json("trainer.json")["data"].get("reference")
    if wanted is None:
        raise CheckpointError(f"{path} was not made with data.objective=dpo. Start a new run from its export")
    places = [folder, path.parent.parent / folder.name]
    found = {table.digest: table for place in places if (table := ReferenceTable.read(place)) is not None}
    if wanted not in found:
        there = f"is {' or '.join(found)}" if found else "does not exist"
        raise CheckpointError(
            f"{folder}: {path} was made with the table {wanted} of the reference's log-probabilities, but this "
            f"{there}. Copy the folder `{folder.name}` of the checkpoint's run to it"
        )
    if found[wanted].folder != folder:
        copy_table(found[wanted], folder)


def _measured(
    run: Run, data: TrainingData, engine: Engine, losses: PreferenceLosses, stop: StopRequest
) -> Iterator[tuple[int, list[float]]]:
    """Yield this rank's share of the pairs, by digest, with their log-probabilities. Ranks go in step, with empty
    micro-batches behind the last: the engine's collectives are per call of the model."""
    collectives, pipeline = run.context.collectives, data.pipeline
    micro_batches = packed(_share(data, collectives.rank, collectives.world_size), pipeline, pipeline.budgets)
    began = logged = time.monotonic()
    done = 0
    logger.info("the reference's log-probabilities of all pairs are computed, once")
    while True:
        examples, error = attempt(lambda: known(next(micro_batches, []), pipeline))
        stopped, left = collectives.sum(stop.requested, bool(examples))
        collectives.raise_first(error)
        if stopped:
            stop.has_seen = True
            reason = next(filter(None, collectives.gather(stop.reason)), "")
            raise Preempted(f"stopped by {reason} before the first step; the next start computes the reference again")
        if not left:
            break
        assert examples is not None
        batch = collate(examples, pipeline.budgets, pipeline.maker.vocabulary.start_id)
        for _ in engine.evaluate([batch]):
            stop.heartbeat.beat()
        assert losses.measured is not None
        yield from zip(map(pair_digest, examples), losses.measured.tolist(), strict=True)
        done += len(examples)
        if time.monotonic() - logged > _LINE_SECONDS:
            logged = time.monotonic()
            logger.info("%d pairs on this rank, in %.0f s", done, logged - began)


def _share(data: TrainingData, rank: int, world_size: int) -> Iterator[Example]:
    maker, limit = data.pipeline.maker, data.pipeline.data.bad_row_limit
    for opened in data.pipeline.sources:

        def is_mine(key: str, opened: OpenSource = opened) -> bool:
            return not opened.holds_out(key) and zlib.crc32(key.encode()) % world_size == rank

        rows = with_ids(all_rows(opened.source, "reference", is_mine), maker)
        for document, ids in usable_documents(rows, limit):
            yield from (made.example for made in maker.examples(ids, document.key, 0) if made.example is not None)
    for find in data.evaluated:
        yield from find()[rank::world_size]
