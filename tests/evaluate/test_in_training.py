"""Texts generated in evaluations: shared out over ranks and put together again, scored, and what may be lacking."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from ds_encdec.base.types import ConfigError, Example, LossSum
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.schema import FullConfig
from ds_encdec.evaluate.generation import generate
from ds_encdec.evaluate.in_training import SHOWN_SAMPLES, Judge, evaluate, figures_of, usable_metrics
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import Heartbeat
from ds_encdec.registry import text_metrics
from ds_encdec.registry.objectives import COLUMNS


class OneOfTwo(HostCollectives):
    def __init__(self, rank: int, others: Any) -> None:
        self.rank, self.world_size, self.given = rank, 2, others
        self._others = others

    def gather(self, record: Any) -> list[Any]:
        self.given = record
        return [record, self._others] if self.rank == 0 else [self._others, record]

    def on_every_rank(self, action: Callable[[], Any]) -> Any:
        return action()

    on_rank_zero = on_every_rank


class Digits:
    bos_token_id = cls_token_id = sep_token_id = None
    eos_token_id = pad_token_id = 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def config_of(**training: Any) -> FullConfig:
    settings = {"bf16": False, "eval_generate_samples": 11, "generation_max_new_tokens": 4, **training}
    return FullConfig.model_validate({"training": settings})


def test_losses_are_those_of_all_ranks() -> None:
    mine, theirs = torch.zeros(2, 2, len(COLUMNS), dtype=torch.float64)
    mine[:, 0], theirs[:, 0] = torch.tensor([6.0, 2.0]), torch.tensor([3.0, 7.0])  # nats, tokens
    losses = [LossSum(mine[0, 0], *mine)]
    engine: Any = SimpleNamespace(device=torch.device("cpu"), evaluate=lambda batches: losses * len(batches))
    batch: Any = None
    for rank in (0, 1):
        figures = evaluate(engine, {"": lambda: [batch]}, OneOfTwo(rank, theirs), Heartbeat())
        assert figures["eval/loss"] == 1.0


def test_every_rank_generates_its_share_and_all_come_back_in_order(caplog: pytest.LogCaptureFixture) -> None:
    model, generator = tiny_model(), np.random.default_rng(0)
    inputs = [generator.integers(2, 97, length, dtype=np.int32) for length in (5, 9, 3, 7, 1, 4, 8, 2, 6, 5, 3, 2)]
    texts = [" ".join(map(str, ids)) for ids in generate(model, inputs, GenerationSettings(max_new_tokens=4))]
    assert len(set(texts)) > 6  # or no order would show
    wrong = np.array([2, 0], dtype=np.int32)
    right = [np.array([*map(int, text.split()), 0], dtype=np.int32) for text in texts]
    examples = [Example(ids, right[i] if i < 3 else wrong, "SFT", str(i)) for i, ids in enumerate(inputs)]
    engine: Any = SimpleNamespace(device=torch.device("cpu"), full_parameters=model.named_parameters)

    def judged(collectives: HostCollectives, **how: Any) -> Any:
        given: list[Any] = [config_of(), engine, model.config, Digits(), collectives, lambda: examples, ["exact_match"]]
        return Judge(*given, **how)()

    second = OneOfTwo(1, ["?"] * 6)
    judged(second)
    assert second.given == texts[1:11:2]
    figures, samples = judged(OneOfTwo(0, second.given))
    assert figures == {"eval/exact_match": pytest.approx(100 * 3 / 11)}  # of twelve examples eleven are asked for
    assert [sample.prediction for sample in samples] == texts[:SHOWN_SAMPLES]
    assert (samples[3].input, samples[3].reference) == (" ".join(map(str, inputs[3])), "2")
    # One rank is stopped, the other is not: both drop the evaluation.
    asked = iter([False, True, True])
    stopped = OneOfTwo(0, second.given)
    assert judged(stopped, stopped=lambda: next(asked)) == ({}, [])
    assert "no figures of texts" in caplog.text
    assert judged(OneOfTwo(1, stopped.given)) == ({}, [])


def test_what_is_not_installed_is_left_out_unless_it_decides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert usable_metrics(config_of()) == ["exact_match", "rouge", "chrf", "bleu"]
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: None if name == "sacrebleu" else name)
    with caplog.at_level(logging.INFO):
        assert usable_metrics(config_of(metric_for_best_model="rougeL")) == ["exact_match", "rouge"]
    assert "texts are judged without chrf, bleu: pip install 'ds_encdec[eval]' adds them" in caplog.text
    with pytest.raises(ConfigError, match=r"pip install 'ds_encdec\[eval\]'"):
        usable_metrics(config_of(metric_for_best_model="bleu"))


def test_a_function_named_by_its_module_chooses_the_best_and_is_named_where_it_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_metrics.py").write_text(
        "def length(predictions, references):\n    return len(predictions)\n\n"
        "def wrong(predictions, references):\n    return predictions[9]\n\n"
        "def nothing(predictions, references):\n    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = usable_metrics(config_of(metric_for_best_model="own_metrics:length", eval_generate_samples=4))
    assert figures_of(names, ["a"], ["a"], best="own_metrics:length")["own_metrics:length"] == 1.0
    both = ["own_metrics:wrong", "exact_match"]
    assert figures_of(both, ["a"], ["a"], best="loss") == {"exact_match": 100.0}
    with pytest.raises(ConfigError, match="own_metrics:nothing has no figure: ValueError: it returned nan"):
        figures_of(["own_metrics:nothing"], ["a"], ["a"], best="own_metrics:nothing")
    place = tmp_path / "own_metrics.py"
    assert f"the metric own_metrics:wrong has no figure: IndexError: list index out of range ({place}:5)" in caplog.text
