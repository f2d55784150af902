"""The losses of preferences: numbers computed by hand, figures, and packed pairs against single ones."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_encdec.base.types import Batch, Example, LossSum
from ds_encdec.config.objective_sections import PreferenceConfig
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data.loader import collate
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.objectives.preferences import PreferenceLosses, loss_sum
from ds_encdec.objectives.protocol import run_packed
from ds_encdec.registry.objectives import COLUMNS

sys.path.append(str(Path(__file__).parents[1] / "model"))

from tiny_models import tiny_config

LENGTHS = (4, 2, 1, 5)  # tokens of the chosen and the rejected answer of two pairs
LOG_PROBS = torch.tensor([[-8.0, -6.0], [-1.0, -10.0]])
REFERENCE = torch.tensor([[-10.0, -5.0], [-2.0, -7.0]])
# Rewards at beta 0.5: (1, -0.5) and (0.5, -1.5), so margins of 1.5 and 2.
MARGINS = (1.5, 2.0)


def sums_of(settings: PreferenceConfig, log_probs: torch.Tensor = LOG_PROBS) -> tuple[LossSum, dict[str, float]]:
    batch = collate([], Budgets(1, 1, 1), 0)
    batch = dataclasses.replace(batch, decoder_lengths=LENGTHS)
    found = loss_sum(log_probs, REFERENCE, batch, settings)
    means = found.sums / found.counts.clamp(min=1)
    return found, {name: float(value) for name, value in zip(COLUMNS, means, strict=True)}


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [softplus(-1.5), softplus(-2.0)]),
        (
            {"label_smoothing": 0.2},
            [0.8 * softplus(-1.5) + 0.2 * softplus(1.5), 0.8 * softplus(-2.0) + 0.2 * softplus(2.0)],
        ),
        ({"loss": "hinge"}, [0.0, 0.0]),
        ({"loss": "hinge", "beta": 0.1}, [1 - 0.3, 1 - 0.4]),
        # Means per token: (2 / 4 - -1 / 2) - 1 = 0 and (1 / 1 - -3 / 5) - 1 = 0.6, squared.
        ({"loss": "ipo"}, [0.0, 0.36]),
        ({"loss": "ipo", "beta": 0.1}, [(1.0 - 5) ** 2, (1.6 - 5) ** 2]),
    ],
    ids=str,
)
def test_losses_are_the_published_formulas(settings: dict[str, object], expected: list[float]) -> None:
    found, means = sums_of(PreferenceConfig.model_validate({"beta": 0.5, **settings}))
    assert float(found.total) == pytest.approx(sum(expected), abs=1e-5)
    assert means["DPO"] == pytest.approx(sum(expected) / 2, abs=1e-5)
    assert float(found.counts[COLUMNS.index("DPO")]) == 2


def test_figures_are_means_over_pairs() -> None:
    _, means = sums_of(PreferenceConfig(beta=0.5))
    assert {name: means[name] for name in means if "_" in name and name in COLUMNS and means[name]} == pytest.approx(
        {
            "reward_chosen": 0.75,
            "reward_rejected": -1.0,
            "reward_margin": 1.75,
            "reward_accuracy": 1.0,
            "logp_chosen": -4.5,
            "logp_rejected": -8.0,
        }
    )
    worse = torch.tensor([[-11.0, -5.0], [-2.0, -7.0]])  # one pair is worse than the reference's, one as good
    assert sums_of(PreferenceConfig(), worse)[1]["reward_accuracy"] == 0.25


def pairs_of(count: int) -> list[Example]:
    draw = np.random.default_rng(3)

    def ids(most: int) -> np.ndarray:
        return draw.integers(4, 60, draw.integers(1, most), dtype=np.int32)

    made = []
    for number in range(count):
        prompt = ids(9)
        made.append(Example(prompt, ids(9), "DPO", str(number), ((prompt, ids(9)),)))
    return made


def model() -> Qwen3ForSeq2SeqLM:
    torch.manual_seed(0)
    built = Qwen3ForSeq2SeqLM(tiny_config()).train()
    built.lm_head.per_token = True
    return built


def batch_of(examples: list[Example], budgets: Budgets = Budgets(99, 99, 16)) -> Batch:  # noqa: B008
    return collate(examples, budgets, 0)


def grads_of(batches: list[Batch], reference: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    built, losses = model(), PreferenceLosses(FullConfig(), HostCollectives())
    sums = torch.zeros(len(COLUMNS))
    rows = iter(reference.split([len(batch.documents) for batch in batches]))
    given = [dataclasses.replace(batch, reference=next(rows)) for batch in batches]
    for found in losses(lambda batch: run_packed(built, batch), given):
        found.total.backward()
        sums += found.sums
    return [parameter.grad for parameter in built.parameters() if parameter.grad is not None], sums


def test_packed_pairs_equal_single_ones() -> None:
    examples = pairs_of(5)
    reference = torch.linspace(-40, -20, 10).view(5, 2)
    together, sums = grads_of([batch_of(examples)], reference)
    alone, sums_alone = grads_of([batch_of([one], Budgets(30, 20, 1)) for one in examples], reference)
    torch.testing.assert_close(sums, sums_alone, rtol=1e-5, atol=1e-5)
    assert len(together) == len(alone) > 10
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_equal_those_of_log_softmax_over_whole_logits() -> None:
    examples, reference = pairs_of(4), torch.linspace(-40, -20, 8).view(4, 2)
    found, sums = grads_of([batch_of(examples)], reference)
    built, total = model(), torch.zeros(())
    for example, known in zip(examples, reference, strict=True):
        margin = torch.zeros(())
        for (source, target), base, sign in zip(example.segments, known, (1, -1), strict=True):
            labels = torch.from_numpy(target.astype(np.int64))
            inputs = torch.cat([torch.zeros(1, dtype=torch.int64), labels[:-1]])
            ids = torch.from_numpy(source.astype(np.int64))[None]
            logits = built(input_ids=ids, decoder_input_ids=inputs[None], use_cache=False).logits[0]
            log_prob = logits.float().log_softmax(-1)[torch.arange(len(labels)), labels].sum()
            margin = margin + sign * (log_prob - base)
        total = total - torch.nn.functional.logsigmoid(0.1 * margin)
    total.backward()
    assert float(sums[COLUMNS.index("DPO")]) == pytest.approx(float(total.detach()), abs=1e-5)
    expected = [parameter.grad for parameter in built.parameters() if parameter.grad is not None]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_reference_is_its_own_and_an_empty_one_has_no_loss() -> None:
    built, losses = model().eval(), PreferenceLosses(FullConfig(), HostCollectives())
    batch = batch_of(pairs_of(3))
    (found,) = losses(lambda one: run_packed(built, one), [batch])
    assert float(found.total.detach()) == pytest.approx(3 * math.log(2), abs=1e-6)
    assert float(found.sums[COLUMNS.index("reward_accuracy")]) == 1.5  # of three equal rewards
    assert losses.measured is not None
    assert losses.measured.shape == (3, 2)
    with torch.no_grad():
        (empty,) = losses(lambda one: run_packed(built, one), [batch_of([])])
    assert float(empty.total) == 0
    assert not empty.counts.any()
