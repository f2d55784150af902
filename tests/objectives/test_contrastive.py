"""The contrastive loss: one large batch however it is divided, and which texts are no negatives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_encdec.base.types import Batch, Example
from ds_encdec.config.objective_sections import ContrastiveConfig
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data.loader import collate
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.modeling import PackedLossOutput
from ds_encdec.objectives import contrastive
from ds_encdec.objectives.contrastive import ContrastiveLosses, Texts, info_nce, pooled, text_keys
from ds_encdec.registry.objectives import COLUMNS

HIDDEN = 24


def example(*texts: Sequence[int]) -> Example:
    nothing = np.empty(0, dtype=np.int32)
    first, *others = (np.array(text, dtype=np.int32) for text in texts)
    return Example(first, nothing, "CONTRASTIVE", "", tuple((one, nothing) for one in others))


def random_examples(count: int, seed: int = 0) -> list[Example]:
    draw = np.random.default_rng(seed)
    return [example(*(draw.integers(2, 90, draw.integers(1, 7)) for _ in range(3))) for _ in range(count)]


def batch_of(examples: Sequence[Example], number: int = 0, tokens: int = 96) -> Batch:
    return dataclasses.replace(collate(examples, Budgets(tokens, 0, 16), 0), number=number)


class Encoder(torch.nn.Module):
    """A stand-in for the model: states depend on ids and their neighbours; it counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = torch.nn.Embedding(97, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.passes: list[bool] = []

    def __call__(self, batch: Batch) -> PackedLossOutput:
        self.passes.append(torch.is_grad_enabled())
        return PackedLossOutput(states=torch.tanh(self.layer(self.embedding(batch.encoder_ids))))


def losses_by(encoder: Encoder, batches: Sequence[Batch], **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The columns' sums of a step, and the gradients."""
    config = FullConfig.model_validate({"data": {"objective": "contrastive"}, "training": {"contrastive": settings}})
    encoder.zero_grad()
    sums = torch.zeros(2, len(COLUMNS))
    for loss in ContrastiveLosses(config, HostCollectives())(encoder, batches):
        assert loss.total.item() == pytest.approx(float(loss.sums[COLUMNS.index("CONTRASTIVE")]), rel=1e-6)
        loss.total.backward()
        sums += torch.stack((loss.sums, loss.counts))
    return sums, {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_micro_batches_have_the_loss_of_one_large_batch(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, encoder = random_examples(14), Encoder()
    settings = {"pooling": pooling, "matryoshka_dims": [8], "symmetric": True, "false_negative_margin": 0.2}
    whole, gradients = losses_by(encoder, [batch_of(examples, tokens=320)], **settings)
    assert encoder.passes == [True]  # no second pass where nothing is divided
    encoder.passes.clear()
    parts = [batch_of(examples[start : start + 3], start) for start in (0, 3, 6, 9, 12)] + [batch_of([], 15)]
    monkeypatch.setattr(contrastive, "SIMILARITIES", 3 * len(examples) * 2)  # blocks of three queries
    divided, cached = losses_by(encoder, parts, **settings)
    assert encoder.passes == [False] * 6 + [True] * 6
    torch.testing.assert_close(divided, whole, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        assert (cached[name] - gradient).norm() < 1e-6 * gradient.norm()


def test_an_evaluation_takes_one_pass_without_gradients() -> None:
    encoder, examples = Encoder(), random_examples(6)
    config = FullConfig.model_validate({"data": {"objective": "contrastive"}})
    with torch.no_grad():
        found = list(
            ContrastiveLosses(config, HostCollectives())(encoder, [batch_of(examples[:2]), batch_of(examples[2:])])
        )
    assert encoder.passes == [False, False]
    assert [int(one.counts[COLUMNS.index("mrr")]) for one in found] == [2, 4]
    assert not any(one.total.requires_grad for one in found)


def texts_of(vectors: Tensor, keys: Sequence[int], group_sizes: Sequence[int]) -> Texts:
    return Texts(vectors, torch.tensor(keys), group_sizes)


def test_a_collapsed_encoder_finds_nothing() -> None:
    _, ranks, _ = info_nce(texts_of(torch.ones(8, 4), range(8), [2] * 4), ContrastiveConfig(), trains=False)
    assert ranks.tolist() == [4.0] * 4


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        pytest.param([0, 1, 2, 3, 4, 5], [], id="all others are negatives"),
        pytest.param([0, 1, 2, 1, 4, 5], [1], id="the same text as the positive"),
        pytest.param([0, 1, 0, 3, 4, 5], [1], id="a positive of the same query"),
    ],
)
def test_texts_that_may_answer_are_no_negatives(keys: list[int], left_out: list[int]) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(6, 5)
    unit = F.normalize(vectors, dim=1)
    losses, _, _ = info_nce(texts_of(vectors, keys, [2, 2, 2]), ContrastiveConfig(temperature=0.5), trains=False)
    scores = torch.stack([unit[0] @ unit[place] for place in (1, 3, 5)]) / 0.5
    kept = torch.stack([one for number, one in enumerate(scores) if number not in left_out])
    torch.testing.assert_close(losses[0], kept.logsumexp(0) - scores[0])


def test_a_margin_leaves_near_documents_out_of_the_loss_and_not_of_the_ranks() -> None:
    angles = torch.tensor([0.0, 0.5, 3.0, 0.1])  # the other positive is nearer to the first query than its own
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    texts = texts_of(vectors, range(4), [2, 2])
    near, wide = (
        info_nce(texts, ContrastiveConfig(false_negative_margin=margin), trains=False) for margin in (0.05, 0.5)
    )
    assert near[0][0] == 0
    assert wide[0][0] > 1
    assert near[1].tolist() == wide[1].tolist() == [2.0, 2.0]


def test_keys_tell_texts_apart_and_know_equal_ones() -> None:
    texts = [[5], [5, 0], [0, 5], [5, 5], [6, 4], [4, 6], [7, 3, 2], [5], [1, 2, 3, 4], [2, 1, 4, 3], [2, 2, 2, 4]]
    keys = text_keys(batch_of([example(*texts)]))
    assert keys[0] == keys[7]
    assert len(set(keys.tolist())) == len(texts) - 1


def test_pooling_reads_each_text_alone() -> None:
    batch, states = batch_of([example([3, 4], [5], [6, 7, 8])], tokens=9), torch.randn(9, 4, dtype=torch.bfloat16)
    parts = states[:6].float().split([2, 1, 3])
    torch.testing.assert_close(pooled(states, batch, "mean"), torch.stack([part.mean(0) for part in parts]))
    torch.testing.assert_close(pooled(states, batch, "last"), torch.stack([part[-1] for part in parts]))
    assert pooled(states, batch_of([], tokens=9), "mean").shape == (0, 4)
