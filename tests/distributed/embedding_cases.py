"""Steps of an encoder's embeddings on the ranks of either engine, and the same in plain torch, text by text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cases import full_weights, make_engine
from small_run import small_model, weights
from torch import Tensor
from torch_oracle import TorchOracle

from ds_encdec.base.types import Batch, Example, LossSum
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data.loader import collate
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.registry.objectives import COLUMNS

MODEL = small_model("final", num_hidden_layers=0, num_encoder_layers=2)
LANES, STEPS = 4, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.1},
    "all": {
        "temperature": 0.2,
        "pooling": "last",
        "matryoshka_dims": [8, 20],
        "symmetric": True,
        "false_negative_margin": 0.1,
    },
}


def config_of(settings: str, **infra: Any) -> FullConfig:
    extra = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    is_zero3 = infra["sharding_stage"] == "zero3" and infra["distributed_type"] == "deepspeed"
    training = {
        "bf16": False,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "gradient_accumulation_steps": LANES,
        "num_train_steps": 8,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "activation_checkpointing": "none",
        "contrastive": SETTINGS[settings],
        "eval_samples": 0,
    }
    places = {"device": "cpu", "offload_optimizer": "none", "deepspeed_extra": extra if is_zero3 else {}, **infra}
    data = {"objective": "contrastive", "num_negatives": 1}
    return FullConfig.model_validate({"data": data, "training": training, "infra": places})


def examples(step: int, lane: int) -> list[Example]:
    """1 to 3 examples, and none in one lane; one positive stands in two of them, and one query asks twice."""
    draw = np.random.default_rng(100 * step + lane)

    def text() -> np.ndarray:
        return draw.integers(2, MODEL.vocab_size, draw.integers(1, 9)).astype(np.int32)

    nothing = np.empty(0, dtype=np.int32)
    common = np.arange(2, 9, dtype=np.int32) + step
    made = []
    for number in range(0 if (step, lane) == (1, 2) else 1 + (step + lane) % 3):
        query = common if (lane, number) in ((0, 0), (3, 0)) else text()
        positive = common[::-1].copy() if (lane, number) in ((0, 0), (1, 1)) else text()
        made.append(Example(query, nothing, "CONTRASTIVE", "", ((positive, nothing), (text(), nothing))))
    return made


def lanes(step: int) -> list[Batch]:
    batches = [collate(examples(step, lane), Budgets(96, 0, 4), 0) for lane in range(LANES)]
    return [dataclasses.replace(batch, lane=lane, number=step) for lane, batch in enumerate(batches)]


def steps(settings: str, dropout: float = 0.0, **infra: Any) -> dict[str, Any]:
    """Train `STEPS` on this rank's lanes, and evaluate; the sums of the columns over the ranks, and norms."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = config_of(settings, **infra)
    training = config.training.model_copy(
        update={"gradient_accumulation_steps": LANES // world_size, "residual_dropout": dropout}
    )
    engine = make_engine(config.model_copy(update={"training": training}), weights, MODEL)
    found: dict[str, Any] = {"steps": [], "norms": []}
    for step in range(STEPS):
        batches = lanes(step)
        mine, sums = batches[rank::world_size], torch.zeros(2, len(COLUMNS))
        for number, loss in enumerate(engine.losses(mine), start=1):
            engine.backward(loss, num_losses=sum(one.num_losses for one in batches), last=number == len(mine))
            sums += torch.stack((loss.sums, loss.counts))
        dist.all_reduce(sums)
        found["steps"].append(sums)
        found["norms"].append(float(engine.step().grad_norm))
    sums = sum(torch.stack((loss.sums, loss.counts)) for loss in engine.evaluate(lanes(0)[rank::world_size]))
    dist.all_reduce(sums)
    found["evaluation"], found["weights"] = sums, full_weights(engine)
    engine.close()
    return found


def reference(settings: str) -> dict[str, Any]:
    """The same in plain torch: each text by itself through the model's ordinary form, and a loop over queries."""
    config = config_of(settings, sharding_stage="zero0", distributed_type="ddp")
    oracle = TorchOracle(config, MODEL, weights)
    found: dict[str, Any] = {"steps": [], "norms": []}
    for step in range(STEPS):
        made = [example for lane in range(LANES) for example in examples(step, lane)]
        sums, total = judged(oracle.model, made, settings)
        found["steps"].append(sums)
        oracle.backward(LossSum(total, *sums), num_losses=len(made), last=True)
        found["norms"].append(float(oracle.step().grad_norm))
        oracle.optimizer.zero_grad()
    made = [example for lane in range(LANES) for example in examples(0, lane)]
    found["evaluation"], found["weights"] = judged(oracle.model, made, settings)[0], oracle.named
    return found


def embedded(model: Qwen3ForSeq2SeqLM, ids: np.ndarray, pooling: str) -> Tensor:
    states = model.get_encoder()(torch.from_numpy(ids).long()[None]).last_hidden_state[0]
    return states.mean(0) if pooling == "mean" else states[-1]


def judged(model: Any, made: Sequence[Example], settings: str) -> tuple[Tensor, Tensor]:
    """The sums of the columns, and the loss with its gradient."""
    chosen = SETTINGS[settings]
    rows = [[embedded(model, ids, chosen.get("pooling", "mean")) for ids, _ in one.segments] for one in made]
    keys = [[ids.tobytes() for ids, _ in one.segments] for one in made]
    documents = [(owner, place) for owner, row in enumerate(rows) for place in range(1, len(row))]
    dims = [*chosen.get("matryoshka_dims", ()), MODEL.hidden_size]
    total, ranks = torch.zeros(()), []
    for number, row in enumerate(rows):
        for dim in dims:

            def cosine(a: Tensor, b: Tensor, dim: int = dim) -> Tensor:
                return torch.nn.functional.cosine_similarity(a[:dim], b[:dim], dim=0)

            target = cosine(row[0], row[1])

            def is_same(owner: int, place: int, number: int = number) -> bool:
                answers = place == 1 and keys[owner][0] == keys[number][0]
                return keys[owner][place] == keys[number][1] or answers

            margin = chosen.get("false_negative_margin", 1e9)
            others = [(one, cosine(row[0], rows[one[0]][one[1]])) for one in documents if not is_same(*one)]
            wrong = [value for _, value in others if value <= target + margin]
            losses = [torch.stack([target, *wrong]).div(chosen["temperature"])]
            if chosen.get("symmetric"):
                back = [
                    cosine(rows[other][0], row[1])
                    for other in range(len(rows))
                    if keys[other][0] != keys[number][0] and keys[other][1] != keys[number][1]
                ]
                back = [value for value in back if value <= target + margin]
                losses.append(torch.stack([target, *back]).div(chosen["temperature"]))
            for logits in losses:
                total = total + (logits.exp().sum().log() - logits[0]) / len(losses) / len(dims)
            if dim == dims[-1]:
                ranks.append(1 + sum(bool(value >= target) for _, value in others))
    sums, counts = torch.zeros(2, len(COLUMNS))
    for name, value in (
        ("CONTRASTIVE", float(total.detach())),
        ("retrieval_accuracy", float(sum(rank == 1 for rank in ranks))),
        ("mrr", sum(1 / rank for rank in ranks)),
    ):
        sums[COLUMNS.index(name)], counts[COLUMNS.index(name)] = value, len(ranks)
    return torch.stack((sums, counts)), total
