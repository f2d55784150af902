"""The data pipeline of a rank, from documents to the micro-batches of one optimizer step.

1. read      readers.py         a document of the lane's share    state: epoch and position in each source
2. tokenize  text_tokenizer.py  its token ids                     state: none
3. denoise   chunks.py          one chunk as an Example           state: the next chunk of the open document
4. pack      packing.py         Examples that fill a micro-batch  state: references of waiting examples, and their waits
5. collate   below              a Batch of tensors                state: none

A step consumes one micro-batch of each of `num_lanes` lanes; rank r of W serves lanes r, r + W, .... Steps 1 to 4 of a
lane depend only on the seed, the configuration and the data, so a step has the same examples for every W and every
number of workers. The saved state is that of the returned micro-batches, however far ahead the workers are.
"""

import atexit
import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch

from ds_encdec.base.types import IGNORE_INDEX, Batch, CheckpointError, DataError, Example, RowCounts
from ds_encdec.config.shares import Budgets, per_rank
from ds_encdec.data.lane import LanePipeline, lane_batches
from ds_encdec.data.reference import ReferenceTable
from ds_encdec.data.workers import Worker
from ds_encdec.registry.objectives import OBJECTIVES, TASKS

# What the model sees of a micro-batch, and so its digest.
_SEEN = ("encoder_ids", "decoder_input_ids", "labels", "encoder_cu_seqlens", "decoder_cu_seqlens")
READY_BATCHES_PER_LANE = 2  # that a worker prepares in advance
_LESS = "lower data.preprocessing_num_workers (0: no workers) or data.shuffle_buffer_size"


class LaneLoader:
    """An endless iterator: each `next` returns this rank's micro-batches of a step, in the order of its lanes. The
    first one starts the workers. `pin_memory`: use page-locked memory, for a GPU. Raises ConfigError for lanes that
    ranks do not divide; a `next` raises DataError, also for a failure in a worker."""

    def __init__(
        self, pipeline: LanePipeline, *, rank: int, world_size: int, num_workers: int, pin_memory: bool = False
    ) -> None:
        per_rank(pipeline.num_lanes, world_size, "data.num_lanes")
        self.lanes = tuple(range(rank, pipeline.num_lanes, world_size))
        self.workers: list[Worker] = []
        self.reference: ReferenceTable | None = None  # for objectives that have one, set before the first step
        self._pipeline = pipeline
        self._num_workers = max(n for n in range(num_workers + 1) if n == 0 or len(self.lanes) % n == 0)
        self._rank, self._world_size = rank, world_size
        ids, tasks = pipeline.maker.vocabulary, OBJECTIVES[pipeline.data.objective].tasks
        mask_id = ids.sentinel_ids[0] if any(TASKS[task].on_encoder for task in tasks) else None
        self._collate = partial(collate, start_id=ids.start_id, mask_id=mask_id, pin_memory=pin_memory)
        self._records: dict[int, dict[str, Any]] = {}
        self._running: dict[int, Iterator[tuple[list[Example], dict[str, Any]]]] = {}  # by lane

    def __next__(self) -> list[Batch]:
        if not self._running:
            self._start()
        taken = [next(self._running[lane]) for lane in self.lanes]
        self._records = {lane: record for lane, (_, record) in zip(self.lanes, taken, strict=True)}
        return [self._collated(*one) for one in taken]

    def _collated(self, examples: list[Example], record: dict[str, Any]) -> Batch:
        lane = record["lane"]
        batch = self._packed(known(examples, self._pipeline, f" (lane {lane})"), self._pipeline.budgets)
        return dataclasses.replace(batch, lane=lane, number=record["batches"], digest=token_digest(batch, lane))

    def _packed(self, examples: Sequence[Example], budgets: Budgets) -> Batch:
        reference = None if self.reference is None else self.reference(examples)
        return self._collate(examples, budgets, reference=reference)

    def _start(self) -> None:
        if not self._num_workers:
            self._running = dict.fromkeys(self.lanes, lane_batches(self._pipeline, self.lanes, self._records))
            return
        # Workers ignore signals: after a crash they would otherwise live until their next write.
        atexit.register(self.close)
        for first in range(self._num_workers):
            numbers = self.lanes[first :: self._num_workers]
            mine = {lane: self._records[lane] for lane in numbers if lane in self._records}
            ahead = READY_BATCHES_PER_LANE * len(numbers)
            self.workers.append(Worker(lane_batches, self._pipeline, numbers, mine, ahead=ahead, advice=_LESS))
            self._running |= dict.fromkeys(numbers, self.workers[-1])

    def collated(self, packed: Iterable[Sequence[Example]], budgets: Budgets) -> list[Batch]:
        """Return this rank's share of batches that all ranks have; empty ones make the shares equally long."""
        batches = list(packed)
        batches += [[]] * (-len(batches) % self._world_size)
        return [self._packed(examples, budgets) for examples in batches[self._rank :: self._world_size]]

    @property
    def epoch(self) -> int:
        """Return the complete passes over the data of this rank's slowest lane."""
        return min((record["epoch"] for record in self._records.values()), default=0)

    def state(self) -> list[dict[str, Any]]:
        """Return a small JSON-able record of each lane that has begun, right behind the last returned step."""
        return list(self._records.values())

    def load_state(self, records: Sequence[dict[str, Any]]) -> None:
        """Continue behind `records`: those of all lanes, from any ranks. Raises CheckpointError for other lanes."""
        by_lane = {record["lane"]: record for record in records}
        if by_lane and sorted(by_lane) != list(range(self._pipeline.num_lanes)):
            raise CheckpointError(
                f"the checkpoint has lanes {sorted(by_lane)}; this run has lanes 0 to {self._pipeline.num_lanes - 1}"
            )
        self.close()
        self._records = {lane: by_lane[lane] for lane in self.lanes if by_lane}

    def close(self) -> None:
        """End the workers; the next step starts them again behind the last returned step."""
        for worker in self.workers:
            worker.close()
        self.workers, self._running = [], {}
        atexit.unregister(self.close)


def count_rows(records: Iterable[Mapping[str, Any]]) -> RowCounts:
    """Sum the bad and long rows in these records."""
    return RowCounts.summed(
        RowCounts(
            record["bad_rows"],
            record.get("long_rows", []),
            (record["last_bad_row"][0], record["lane"], record["last_bad_row"][1]) if record["last_bad_row"] else None,
        )
        for record in records
    )


def known(examples: list[Example], pipeline: LanePipeline, lane: str = "") -> list[Example]:
    """Return `examples`. Raises DataError, which names the document, for an id that the tokenizer does not have: in the
    model it would be an error of an index, and on a GPU one of the device."""
    data, vocab_size = pipeline.data, pipeline.maker.vocabulary.vocab_size
    ids = [piece for one in examples for segment in one.segments for piece in segment]
    flat = np.concatenate([np.zeros(1, dtype=np.int64), *ids])
    if flat.min() >= 0 and flat.max() < vocab_size:
        return examples
    wrong = flat[(flat < 0) | (flat >= vocab_size)][0]
    document = next(one.document for one in examples if any(wrong in ids for pair in one.segments for ids in pair))
    field = "prepared_dir" if data.prepared_dir else "mixture" if data.mixture else "dataset_name"
    raise DataError(
        f"data.{field}: document {document}{lane} has the token id {wrong}, but the tokenizer's are 0 to "
        f"{vocab_size - 1}. Mend what gives such ids; if the data is prepared, delete it and run `ds-encdec prepare`"
    )


def token_digest(batch: Batch, lane: int) -> int:
    """Return 48 bits of the lane, and of its ids, labels and boundaries in their order. The CRC is fast, and misses no
    wrong id; the hash keeps sums from being equal, such as those of lanes that were exchanged."""
    crc = reduce(lambda crc, name: zlib.crc32(memoryview(getattr(batch, name).numpy()), crc), _SEEN, 0)
    return int.from_bytes(hashlib.blake2b(f"{lane} {crc}".encode(), digest_size=6).digest(), "little")


def collate(
    examples: Sequence[Example],
    budgets: Budgets,
    start_id: int,
    *,
    mask_id: int | None = None,
    reference: torch.Tensor | None = None,
    pin_memory: bool = False,
) -> Batch:
    """Concatenate the segments of examples into one micro-batch, with boundaries, padded at the end to the budgets; see
    `Batch`. The decoder's input is each target shifted right behind `start_id`, as in T5. `mask_id`, of tasks
    `on_encoder`: the label of each position before such an id is the next target. The packer keeps the budgets."""
    segments = [segment for example in examples for segment in example.segments]
    sources, targets = [source for source, _ in segments], [target for _, target in segments]
    encoder, decoder = partial(_padded, size=budgets.encoder_tokens), partial(_padded, size=budgets.decoder_tokens)
    labels, labelled = targets, decoder
    if mask_id is not None:
        labels, labelled = [_before_masks(*segment, mask_id) for segment in segments], encoder
        targets = [ids[:0] for ids in targets]
    encoder_lengths, decoder_lengths = tuple(map(len, sources)), tuple(map(len, targets))
    numbers = {name: number for number, name in enumerate(TASKS)}
    kinds = [numbers[one.denoiser] for one in examples for _ in one.segments]
    batch = Batch(
        encoder_ids=encoder(sources, fill=start_id),
        decoder_input_ids=decoder([np.insert(ids[:-1], 0, start_id)[: len(ids)] for ids in targets], fill=start_id),
        labels=labelled(labels, fill=IGNORE_INDEX),
        encoder_positions=encoder([np.arange(length) for length in encoder_lengths]),
        decoder_positions=decoder([np.arange(length) for length in decoder_lengths]),
        encoder_cu_seqlens=_boundaries(encoder_lengths, budgets.max_examples),
        decoder_cu_seqlens=_boundaries(decoder_lengths, budgets.max_examples),
        denoiser_ids=labelled([np.full(len(ids), kind) for ids, kind in zip(labels, kinds, strict=True)]),
        encoder_lengths=encoder_lengths,
        decoder_lengths=decoder_lengths,
        documents=tuple(example.document for example in examples),
        tasks=tuple(example.denoiser for example in examples),
        group_sizes=tuple(len(example.segments) for example in examples),
        num_losses=sum(
            1 if TASKS[example.denoiser].per_example else sum(len(target) for _, target in example.segments)
            for example in examples
        ),
        reference=reference,
    )
    if not pin_memory:
        return batch
    pinned: dict[str, Any] = {
        name: value.pin_memory() for name in Batch.__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)
    }
    return dataclasses.replace(batch, **pinned)


def _before_masks(ids: np.ndarray, targets: np.ndarray, mask_id: int) -> np.ndarray:
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    labels[np.flatnonzero(ids == mask_id) - 1] = targets
    return labels


def _padded(pieces: Sequence[np.ndarray], size: int, fill: int = 0) -> torch.Tensor:
    joined = np.concatenate([np.empty(0, dtype=np.int64), *pieces])
    return torch.from_numpy(np.pad(joined, (0, size - len(joined)), constant_values=fill))


def _boundaries(lengths: Sequence[int], max_examples: int) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths, *[0] * (max_examples - len(lengths))], dtype=np.int32))
