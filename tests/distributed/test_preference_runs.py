"""Whole runs of preferences on real ranks under both engines: against plain torch, and continued by another engine."""

import json
import math
import shutil
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import RankFailure
from portable_runs import QUICKSTART, RUN, SAVED_STEP, Side, _by_world_size, continue_all, save_all, uninterrupted

from ds_encdec.base.types import Batch
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.data.build import build_data
from ds_encdec.data.reference import ReferenceTable
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.training.run_model import new_model

pytestmark = pytest.mark.distributed

STEPS, BOUND = 3, 1e-5
PAIRS: dict[str, Any] = {
    "data.objective": "dpo",
    "data.dataset_name": "builtin_pairs",
    "data.eval_fraction": 0.005,
    "data.train_split_ratio": 0.02,  # the reference is computed of all pairs to train on
    "data.val_test_split_ratio": 0.02,
    "data.on_long_row": "skip",
    "training.learning_rate": 1e-2,
    "training.warmup_steps": 0,
    "training.lr_scheduler_type": "constant",
}
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"training.dpo.label_smoothing": 0.1},
    "ipo": {"training.dpo.loss": "ipo", "training.dpo.beta": 0.5, "model.architecture.tie_word_embeddings": False},
    "hinge": {"training.dpo.loss": "hinge"},
}
# Otherwise parameters as small as these stay whole on every rank, and the head's is never gathered again.
GATHERED = {"infra.deepspeed_extra": "{zero_optimization: {stage3_param_persistence_threshold: 0}}"}
SIDES = {
    "sigmoid": [Side("DDP", 1), Side("ZeRO-3 offload", 2), Side("ZeRO-2", 4), Side("HSDP", 4)],
    "ipo": [Side("ZeRO-1", 1), Side("FSDP2", 2), Side("ZeRO-3 offload", 4)],
    "hinge": [Side("ZeRO-3 offload", 2)],
}


def config_of(steps: int, changes: dict[str, Any]) -> FullConfig:
    settings = RUN | PAIRS | changes | {"training.num_train_steps": steps, "infra.distributed_type": "ddp"}
    settings |= {"infra.sharding_stage": "zero0"}
    return load_config(Path(QUICKSTART), [f"{name}={value}" for name, value in settings.items()])


def pairs_in(batch: Batch) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    sources = batch.encoder_ids[: sum(batch.encoder_lengths)].split(list(batch.encoder_lengths))
    targets = batch.labels[: sum(batch.decoder_lengths)].split(list(batch.decoder_lengths))
    for first in range(0, len(sources), 2):
        yield [(sources[place], targets[place]) for place in (first, first + 1)]


def log_prob(model: Qwen3ForSeq2SeqLM, source: torch.Tensor, target: torch.Tensor, *, mean: bool) -> torch.Tensor:
    inputs = torch.cat([torch.tensor([model.config.decoder_start_token_id]), target[:-1]])
    logits = model(input_ids=source[None], decoder_input_ids=inputs[None], use_cache=False).logits[0]
    found = logits.log_softmax(-1)[torch.arange(len(target)), target]
    return found.mean() if mean else found.sum()


def by_plain_torch(config: FullConfig, steps: int) -> list[float]:
    """The losses of a loop with nothing of the product but the model, its weights, the data and the schedule."""
    made, training, settings = new_model(config), config.training, config.training.dpo
    assert made.weights is not None
    model = Qwen3ForSeq2SeqLM(made.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.weights(name))
    reference = deepcopy(model)
    data = build_data(config, made.tokenizer, made.vocabulary, rank=0, world_size=1, num_lanes=4)
    shapes: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        shapes[parameter.dim() > 1].append(parameter)
    groups = [{"params": shapes[True], "weight_decay": training.weight_decay}, {"params": shapes[False]}]
    betas = (training.adam_beta1, training.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=training.adam_epsilon, weight_decay=0.0)
    losses = []
    for step in range(steps):
        pairs = [pair for batch in next(data.loader) for pair in pairs_in(batch)]
        total = torch.zeros(())
        for pair in pairs:
            is_mean = settings.loss == "ipo"
            chosen, rejected = (log_prob(model, *side, mean=is_mean) for side in pair)
            with torch.no_grad():
                base_chosen, base_rejected = (log_prob(reference, *side, mean=is_mean) for side in pair)
            gain = chosen - rejected - (base_chosen - base_rejected)
            smoothing, margin = settings.label_smoothing, settings.beta * gain
            right, wrong = (torch.nn.functional.logsigmoid(sign * margin) for sign in (1, -1))
            total = (
                total
                + {
                    "sigmoid": -(1 - smoothing) * right - smoothing * wrong,
                    "ipo": (gain - 1 / (2 * settings.beta)) ** 2,
                    "hinge": torch.clamp(1 - margin, min=0),
                }[settings.loss]
            )
        loss = total / len(pairs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("loss", LOSSES)
def test_runs_equal_a_loop_of_plain_torch(loss: str, tmp_path: Path) -> None:
    changes = LOSSES[loss]
    expected = by_plain_torch(config_of(STEPS, changes), STEPS)
    assert all(abs(later - earlier) > 1e-3 for earlier, later in pairwise(expected))  # it learns
    runs = {
        side: {
            "output_dir": str(tmp_path / str(side)),
            "steps": STEPS,
            "changes": PAIRS | changes | (GATHERED if side.engine == "ZeRO-3 offload" else {}),
        }
        for side in SIDES[loss]
    }
    tables = set()
    for side, found in _by_world_size(runs).items():
        assert [found["losses"][step] for step in range(1, STEPS + 1)] == pytest.approx(expected, abs=BOUND), side
        table = ReferenceTable.read(tmp_path / str(side) / "reference")
        assert table is not None
        tables.add(tuple(table.rows["pair"].tolist()))
    assert len(tables) == 1  # the same pairs, whatever the ranks


def test_the_base_of_adapters_is_their_reference(tmp_path: Path) -> None:
    adapters = {"model.lora.r": 4, "model.lora.lora_dropout": 0.0, "training.learning_rate": 3e-2}
    sides = [Side("FSDP2", 2), Side("ZeRO-2", 1)]
    runs = {side: {"output_dir": str(tmp_path / str(side)), "steps": 3, "changes": PAIRS | adapters} for side in sides}
    found = _by_world_size(runs)
    for side in sides:
        losses = found[side]["losses"]
        assert losses[1] == pytest.approx(math.log(2), abs=1e-6)
        assert abs(losses[3] - losses[1]) > 1e-3  # they are trained
        table = ReferenceTable.read(tmp_path / str(side) / "reference")
        base = json.loads((tmp_path / str(side) / "checkpoints" / "final" / "model" / "base.json").read_text())
        assert table is not None
        assert table.facts["reference"] == base["sha256"]
    assert found[sides[0]]["losses"] == pytest.approx(found[sides[1]]["losses"], abs=BOUND)


def test_another_engine_goes_on_with_the_table_of_the_first_run(tmp_path: Path) -> None:
    evaluated = {
        "training.eval_samples": 8,
        "training.eval_steps": 2,
        "training.metric_for_best_model": "reward_accuracy",
    }
    changes, steps = PAIRS | LOSSES["sigmoid"] | evaluated, SAVED_STEP + 2
    savers = [Side("ZeRO-3 offload", 1), Side("FSDP2", 2)]
    loaders = [Side("HSDP", 4), Side("ZeRO-2", 1)]
    reference = uninterrupted(tmp_path, steps, changes)
    saved = save_all(savers, tmp_path, steps, changes)
    pairs = list(zip(savers, loaders, strict=True))
    for found in continue_all(pairs, saved, reference, tmp_path, steps, changes).values():
        assert found.same_samples
        assert found.loss_difference < BOUND
    lines = [json.loads(line) for line in (tmp_path / "uninterrupted" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/loss" in line]
    assert {name for line in evaluations for name in line if "eval/" in name} >= {
        f"eval/{name}" for name in OBJECTIVES["dpo"].figures
    }
    assert "train/reward_margin" in lines[0]
    step = saved[savers[0]]
    trainer = json.loads((step / "trainer.json").read_text())
    table = ReferenceTable.read(step.parent.parent / "reference")
    assert table is not None
    assert trainer["data"]["reference"] == table.digest
    assert trainer["state"]["best_by"] == "highest reward_accuracy"
    _refusals(step, tmp_path, steps, changes)


def _refusals(checkpoint: Path, folder: Path, steps: int, changes: dict[str, Any]) -> None:
    """A table that is missing or another, and a pair that is not in it."""
    table, side = checkpoint.parent.parent / "reference", Side("DDP", 1)

    def refused(name: str, more: dict[str, Any] | None = None) -> str:
        run = {"output_dir": str(folder / name), "steps": steps, "resume": str(checkpoint)}
        with pytest.raises(RankFailure) as caught:
            _by_world_size({side: {**run, "changes": changes | (more or {})}})
        return str(caught.value)

    kept = table.with_name("kept")
    shutil.move(table, kept)
    message = refused("missing")
    assert "reference's log-probabilities, but this does not exist. Copy the folder `reference`" in message
    shutil.copytree(kept, table)
    record = json.loads((table / "table.json").read_text())
    (table / "table.json").write_text(json.dumps({**record, "digest": "0" * 16}))
    assert "the table of the reference is damaged" in refused("damaged")
