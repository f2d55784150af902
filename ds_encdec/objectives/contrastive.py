"""The contrastive loss of embeddings, InfoNCE (arXiv 1807.03748): each query is to be nearer to its positive than to
all other documents of the optimizer step, those of other micro-batches and ranks too.

The gradient is cached (GradCache, arXiv 2101.06983): a first pass without gradients, under the same masks of dropout,
gives the step's embeddings, and these the loss and its gradient by each embedding, which a second pass of each
micro-batch carries on. The loss is that of one large batch, however it is divided. Every rank computes all of it, in
float32 and in the order of the lanes, so that all have the same gradients, whatever their number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ds_encdec.base.types import Batch, LossSum
from ds_encdec.config.objective_sections import SIMILARITIES, ContrastiveConfig
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.objectives.protocol import Run, example_losses

# Odd numbers of 64 bits, which mix those of tokens and positions.
_MIXERS = (-7046029254386353131, -4417276706812531889, -2643881736870682267)


class ContrastiveLosses:
    """The `Losses` of `data.objective: contrastive`."""

    def __init__(self, config: FullConfig, collectives: HostCollectives) -> None:
        self._settings, self._collectives = config.training.contrastive, collectives

    def __call__(self, run: Run, batches: Sequence[Batch]) -> Iterator[LossSum]:
        """Yield the `LossSum` of each of `batches`, with the rank of its queries' positives."""
        trains, pooling = torch.is_grad_enabled(), self._settings.pooling
        # The only micro-batch of a rank keeps its graph instead of a second pass. All ranks have equally many.
        with torch.set_grad_enabled(trains and len(batches) == 1):
            own = [pooled(run(batch).states, batch, pooling) for batch in batches]
        texts, places = self._gathered([rows.detach() for rows in own], batches)
        losses, ranks, gradient = info_nce(texts, self._settings, trains=trains)
        for batch, cached, (first_text, first_query) in zip(batches, own, places, strict=True):
            mine = slice(first_query, first_query + len(batch.group_sizes))
            total = losses[mine].sum()
            if trains:
                embeddings = cached if len(batches) == 1 else pooled(run(batch).states, batch, pooling)
                carried = (embeddings * gradient[first_text : first_text + len(embeddings)]).sum()
                total = carried + (total - carried).detach()
            figures = {"retrieval_accuracy": (ranks[mine] == 1).float(), "mrr": 1 / ranks[mine]}
            yield example_losses(total, batch, {"CONTRASTIVE": losses[mine], **figures})

    def _gathered(self, own: Sequence[Tensor], batches: Sequence[Batch]) -> tuple["Texts", list[tuple[int, int]]]:
        """Return the texts of all ranks, and the first text and the first query of each of `batches` among them."""
        groups: list[list[tuple[int, ...]]] = self._collectives.gather([batch.group_sizes for batch in batches])
        counts = [[sum(sizes) for sizes in of_rank] for of_rank in groups]
        keys = torch.cat([text_keys(batch) for batch in batches])
        rows, all_keys = (
            [part.split(count) for part, count in zip(_gather(mine, list(map(sum, counts))), counts, strict=True)]
            for mine in (torch.cat([*own]), keys)
        )
        # Lane i is micro-batch i // W of rank i % W, of a step and of a set to evaluate on.
        order = [(number, rank) for number in range(len(batches)) for rank in range(len(groups))]
        sizes = [groups[rank][number] for number, rank in order]
        firsts = zip(accumulate(map(sum, sizes), initial=0), accumulate(map(len, sizes), initial=0), strict=True)
        places = [first for first, (_, rank) in zip(firsts, order, strict=False) if rank == self._collectives.rank]
        embeddings, texts = (torch.cat([found[rank][number] for number, rank in order]) for found in (rows, all_keys))
        return Texts(embeddings, texts, [size for each in sizes for size in each]), places


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a step: `embeddings`, float32 [N, hidden], not normalized; `keys`, int64 [N], equal for equal texts;
    `group_sizes`: those of each example, which are its query, its positive, and its negatives."""

    embeddings: Tensor
    keys: Tensor
    group_sizes: Sequence[int]


def pooled(states: Tensor | None, batch: Batch, pooling: str) -> Tensor:
    """Return the embedding of each segment of `batch`, float32 [N, hidden], of the states [Te, hidden]."""
    assert states is not None
    ends, starts = batch.encoder_cu_seqlens[1:], batch.encoder_cu_seqlens[:-1]
    starts, ends = (edges[: len(batch.encoder_lengths), None] for edges in (starts, ends))
    place = torch.arange(len(states), device=states.device)
    # A product with the share of each position: unlike sums by index, it has one order of additions.
    share = place == ends - 1 if pooling == "last" else (place >= starts) & (place < ends)
    return (share / share.sum(dim=1, keepdim=True)) @ states.float()


def text_keys(batch: Batch) -> Tensor:
    """Return a number for each segment's ids, int64 [N], computed on the device; different ids differ in it."""
    segments = len(batch.encoder_lengths)
    place = torch.arange(len(batch.encoder_ids), device=batch.encoder_ids.device)
    segment = torch.searchsorted(batch.encoder_cu_seqlens[1 : segments + 1].contiguous(), place, right=True)
    mixed = (batch.encoder_ids + 1) * _MIXERS[0] + batch.encoder_positions * _MIXERS[1]
    mixed = (mixed ^ (mixed >> 29)) * _MIXERS[2]
    return mixed.new_zeros(segments + 1).index_add(0, segment, mixed ^ (mixed >> 32))[:segments]


def info_nce(texts: Texts, settings: ContrastiveConfig, *, trains: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's loss in nats and the rank of its positive among all documents, float32 [Q], and, if it
    `trains`, the gradient of the sum of the losses by the embeddings, else zeros. A document that is as near as the
    positive ranks before it. Equal texts, and positives of equal queries, are no negatives."""
    device, sizes = texts.embeddings.device, texts.group_sizes
    starts = list(accumulate(sizes, initial=0))[:-1]
    others = [place for start, size in zip(starts, sizes, strict=True) for place in range(start + 1, start + size)]
    queries, documents = (torch.tensor(places, dtype=torch.int64, device=device) for places in (starts, others))
    numbers = torch.arange(len(starts), device=device)
    own = queries - numbers  # the places of the positives among the documents
    asked, found = texts.keys[queries], texts.keys[documents]
    answered = torch.zeros_like(found).scatter(0, own, asked)  # the query that a positive is for; of negatives 0
    losses, ranks = texts.embeddings.new_zeros(2, len(starts))
    leaf = texts.embeddings.detach().requires_grad_(trains)
    dims = sorted({*settings.matryoshka_dims, leaf.shape[1]})
    with torch.set_grad_enabled(trains):
        for dim in dims:
            sides = [F.normalize(leaf[:, :dim], dim=1)[places] for places in (queries, documents)]
            query, document = (side.detach().requires_grad_(trains) for side in sides)
            for rows in numbers.split(max(1, SIMILARITIES // max(len(others), 1))):
                similarity, place = query[rows] @ document.T, own[rows]
                same = (found == found[place, None]) | (answered == asked[rows, None])
                loss = _cross_entropy(similarity, place, same, settings)
                if settings.symmetric:
                    same_query = (asked == asked[rows, None]) | (found[own] == found[place, None])
                    backward = _cross_entropy(document[place] @ query.T, rows, same_query, settings)
                    loss = (loss + backward) / 2
                if trains:
                    (loss.sum() / len(dims)).backward()
                losses[rows] += loss.detach() / len(dims)
                if dim == dims[-1]:
                    others_alone = similarity.detach().masked_fill(same, -torch.inf)
                    ranks[rows] = 1 + (others_alone >= similarity.gather(1, place[:, None])).sum(dim=1).float()
            if trains and len(starts):
                torch.autograd.backward(sides, [query.grad, document.grad])
    return losses, ranks, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _cross_entropy(similarity: Tensor, own: Tensor, same: Tensor, settings: ContrastiveConfig) -> Tensor:
    """Return the loss of each row of similarities, whose right column is `own`, without those of the `same` text."""
    column = own[:, None]
    if (margin := settings.false_negative_margin) is not None:
        same = same | (similarity > similarity.gather(1, column) + margin)
    logits = similarity.masked_fill(same.scatter(1, column, value=False), -torch.inf) / settings.temperature
    return F.cross_entropy(logits, own, reduction="none")


def _gather(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return every rank's `rows`, of which it has `counts`. A collective."""
    if len(counts) == 1:
        return [rows]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded)
    return [one[:count] for one, count in zip(everyone, counts, strict=True)]
