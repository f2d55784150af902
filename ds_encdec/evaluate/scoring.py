"""Score given targets by a model's loss on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from ds_encdec.base.types import IGNORE_INDEX
from ds_encdec.evaluate.generation import TokenIds, evaluating, pad_id_of, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_LOGITS = 2**27
"""The most logits of a batch, unless one row by itself has more: 512 MiB in float32, and as much for their softmax."""


class TargetScore(NamedTuple):
    """The log-probability of a target in nats, and whether each token was the likeliest after the input and those
    before it."""

    log_probability: float
    hits: list[bool]


@torch.no_grad()
def score_targets(
    model: PreTrainedModel, encoder_ids: Sequence[TokenIds], target_ids: Sequence[TokenIds], batch_tokens: int
) -> list[TargetScore]:
    """Return the score of each target after its input; the decoder reads the target. All its tokens count, an end token
    too. `batch_tokens`: the most of a batch, of both sides together, padding included."""
    scores = [TargetScore(0.0, [])] * len(target_ids)
    order = sorted(range(len(target_ids)), key=lambda number: -len(encoder_ids[number]) - len(target_ids[number]))
    longest, longest_target = max(map(len, encoder_ids)), max(map(len, target_ids))
    most_logits = MOST_LOGITS // (longest_target * int(model.config.vocab_size))
    rows = max(1, min(batch_tokens // (longest + longest_target), most_logits))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        rated = _score_batch(model, [encoder_ids[number] for number in batch], [target_ids[number] for number in batch])
        for number, score in zip(batch, rated, strict=True):
            scores[number] = score
    return scores


def _score_batch(
    model: PreTrainedModel, encoder_ids: Sequence[TokenIds], target_ids: Sequence[TokenIds]
) -> list[TargetScore]:
    ids, mask = padded(encoder_ids, pad_id_of(model.generation_config), model.device)
    labels, _ = padded(target_ids, IGNORE_INDEX, model.device)
    with evaluating(model):
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
    hits = [row[: len(ids)] for row, ids in zip((logits.argmax(-1) == labels).tolist(), target_ids, strict=True)]
    return list(map(TargetScore, (-losses.double().sum(-1)).tolist(), hits))
