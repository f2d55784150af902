"""Generation for many inputs: in any batch what each gets alone, and what transformers' own search gives."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from ds_encdec.config.generation import GenerationSettings
from ds_encdec.evaluate.generation import generate, generate_batch, plan_batches, score_targets
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.cross_attention import FORMS
from ds_encdec.model.depth import beyond_positions
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

LENGTHS = [5, 0, 17, 1, 9, 17, 3, 12]
ONE_BY_ONE = 1


@pytest.fixture(scope="module", params=["final", "aligned"])
def model(request: pytest.FixtureRequest) -> Qwen3ForSeq2SeqLM:
    return tiny_model(cross_attention=request.param, encoder_positions=FORMS[request.param].positions)


@pytest.fixture(scope="module")
def inputs() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, 97, length, dtype=np.int32) for length in LENGTHS]


def ended(model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray]) -> int:
    # The likeliest third token of the third input: as an end token it stops some rows early.
    return generate(model, inputs[2:3], GenerationSettings(max_new_tokens=3))[0][2]


@pytest.mark.parametrize(
    "how",
    [
        GenerationSettings(),
        GenerationSettings(num_beams=3, repetition_penalty=1.3),
        GenerationSettings(temperature=1.5, top_p=0.9, top_k=40, seed=5),
    ],
)
def test_each_input_gets_in_any_batch_what_it_gets_alone(
    model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray], how: GenerationSettings
) -> None:
    model.generation_config.eos_token_id = ended(model, inputs)
    how = replace(how, max_new_tokens=10)
    together, some, alone = (generate(model, inputs, replace(how, batch_tokens=n)) for n in (10**6, 90, ONE_BY_ONE))
    assert together == some == alone
    assert len({len(ids) for ids in together}) > 1  # some met the end token, which is not among theirs
    assert not any(model.generation_config.eos_token_id in ids for ids in together)
    model.generation_config.eos_token_id = 1


def test_the_tokens_are_those_of_transformers_without_the_cache(
    model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray]
) -> None:
    settings = GenerationSettings(max_new_tokens=8, num_beams=2)
    found = generate(model.train(), inputs, settings)
    assert not model.training  # no dropout
    for ids, row in zip(inputs, found, strict=True):
        if len(ids):
            expected = model.generate(torch.tensor(ids[None]), max_new_tokens=8, num_beams=2, use_cache=False)
            assert row == [*expected[0, 1:].tolist(), 1][: len(row)]
            assert len(row) == 8 or expected[0, len(row) + 1] == 1


def test_a_stop_is_seen_between_batches(model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray]) -> None:
    settings = GenerationSettings(max_new_tokens=2, batch_tokens=ONE_BY_ONE)
    whole, asked = generate(model, inputs, settings), iter([False, False, True])
    (first, second, *_) = (number for (number,) in plan_batches(inputs, settings))
    expected = [ids if number in (first, second) else [] for number, ids in enumerate(whole)]
    assert generate(model, inputs, settings, lambda: next(asked)) == expected != whole


def test_inputs_and_outputs_beyond_the_models_positions_are_named(model: Qwen3ForSeq2SeqLM) -> None:
    goes_on = model.config.encoder_positions == "prefix"
    model.config.max_position_embeddings, longest = 30, max(LENGTHS)
    assert beyond_positions(model.config, longest, 30 - longest * goes_on) is None
    problem = beyond_positions(model.config, longest, 31 - longest * goes_on)
    assert problem is not None
    assert f"tokens, {'one behind the other' if goes_on else 'each'}, take 31 positions, but the model is" in problem


def test_batches_hold_at_most_so_many_tokens_with_the_new_ones() -> None:
    settings = GenerationSettings(max_new_tokens=10, num_beams=2, batch_tokens=100)
    rows = [[7] * length for length in LENGTHS]
    batches = plan_batches(rows, settings)
    assert batches == [[2], [5], [7, 4], [0, 6, 3], [1]]
    assert sorted(number for batch in batches for number in batch) == list(range(len(LENGTHS)))


def test_samples_follow_the_distribution_and_their_seed(model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray]) -> None:
    settings = GenerationSettings(max_new_tokens=1, temperature=0.7, top_k=4)
    rows = [inputs[0]] * 2000
    first = Counter(ids[0] for ids in generate_batch(model, rows, range(2000), settings) if ids)
    logits = model(torch.tensor(inputs[0][None]), decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
    values, tokens = logits.topk(4)
    for token, share in zip(tokens.tolist(), (values / 0.7).softmax(-1).tolist(), strict=True):
        assert token == 1 or abs(first[token] / 2000 - share) < 0.05  # 4.5 standard deviations; 1 ends a row
    assert set(first) <= set(tokens.tolist())
    seeds = [generate(model, inputs, replace(settings, seed=seed, top_k=0, max_new_tokens=4)) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_targets_are_scored_as_training_does(model: Qwen3ForSeq2SeqLM, inputs: list[np.ndarray]) -> None:
    targets = [*(inputs[number][:9] for number in (2, 5, 7, 4, 0, 2, 3)), np.array([1])]
    found = score_targets(model, inputs, targets, batch_tokens=60)
    for encoder_ids, target, (log_probability, _) in zip(inputs, targets, found, strict=True):
        sides = {"encoder": encoder_ids, "decoder": target}
        layout: dict[str, Any] = {f"{side}_lengths": (len(ids),) for side, ids in sides.items()}
        layout |= {f"{s}_cu_seqlens": torch.tensor([0, len(ids)], dtype=torch.int32) for s, ids in sides.items()}
        layout |= {f"{side}_positions": torch.arange(len(ids)) for side, ids in sides.items()}
        packing = PackedLayout.build(**layout)
        ids, labels = (torch.tensor(part, dtype=torch.int64) for part in (encoder_ids, target))
        start = torch.cat([torch.zeros(1, dtype=torch.int64), labels[:-1]])
        loss = model(ids, decoder_input_ids=start, labels=labels, packing=packing).loss.item()
        assert -log_probability == pytest.approx(loss, rel=1e-5)
