"""The plain single-process torch engine, every rank's micro-batches in one process, and comparisons with it.

It implements `engine.protocol.Engine` with nothing but torch, so its losses, norms and weights are what any
other engine must reproduce. Shared with the engines under test: the model, the seeds of dropout, and the names of the
schedule.
"""

import functools
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any
from unittest import mock

import pytest
import torch
from small_run import MODEL, REGULARIZED, lane_batches, model_of, random_batch, run_config, train_on, weights
from torch import nn

from ds_encdec.base.types import Batch, LossSum, StepResult, WeightSource
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.engine.protocol import Veto
from ds_encdec.engine.sharded_engine import masks_of, regularize
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import with_new_adapters
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.objectives.protocol import layout_of
from ds_encdec.registry.objectives import COLUMNS


def _rounded(weights: WeightSource) -> WeightSource:
    """The same, with what 4 bits leave of the matrices of the layers."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def rounded(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        weight = weights(name, rows)
        if not name.endswith("_proj.weight"):
            return weight
        packed: torch.Tensor = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))
        assert not torch.equal(packed, weight)
        return packed

    return rounded


class TorchOracle:
    """`protocol.Engine` for one process in float32."""

    def __init__(self, config: FullConfig, model_config: Qwen3Seq2SeqConfig, weights: WeightSource) -> None:
        self.device = torch.device("cpu")
        self.training = config.training
        self.model: nn.Module = Qwen3ForSeq2SeqLM(model_config)
        lora = config.model.lora
        if lora is not None:
            from peft import LoraConfig, inject_adapter_in_model

            weights = with_new_adapters(weights, lora, model_config, config.training.seed)
            if lora.quantize == "nf4":
                weights = _rounded(weights)
            peft = LoraConfig(
                r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules), lora_dropout=0.0
            )
            inject_adapter_in_model(peft, self.model)  # which freezes the rest
        self.named = {
            name.replace(".base_layer", "").replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights(name))
                if any(fnmatch(name, pattern) for pattern in config.training.freeze):
                    parameter.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.muon: torch.optim.Muon | None = None
        if self.training.optimizer == "muon":
            hidden = [p for name, p in self.named.items() if p.requires_grad and p.dim() > 1 and ".layers." in name]
            self.muon = torch.optim.Muon(
                hidden,
                weight_decay=self.training.weight_decay,
                momentum=self.training.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            trained = [p for p in trained if not any(p is one for one in hidden)]
        matrices = [p for p in trained if p.dim() > 1]
        vectors = [p for p in trained if p.dim() <= 1]
        regularize(self.model, self.training)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.training.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.training.learning_rate,
            betas=(self.training.adam_beta1, self.training.adam_beta2),
            eps=self.training.adam_epsilon,
        )
        if ":" in self.training.optimizer:
            module, _, name = self.training.optimizer.partition(":")
            kind, groups = getattr(importlib.import_module(module), name), self.optimizer.param_groups
            self.optimizer = kind(groups, lr=self.training.learning_rate, **self.training.optimizer_args)
        self.applied_steps = 0

    def use(self, training: TrainingConfig) -> None:
        """Go on with other settings."""
        self.training = training
        for group in self.optimizer.param_groups:
            group["betas"] = (training.adam_beta1, training.adam_beta2)
            group["eps"] = training.adam_epsilon
            group["weight_decay"] = training.weight_decay if group["weight_decay"] else 0.0

    def losses(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        self.model.train()
        for batch in batches:
            with masks_of(batch, self.training.seed):
                loss = self._loss(batch)
            yield loss

    def _loss(self, batch: Batch) -> LossSum:
        output = self.model(
            input_ids=batch.encoder_ids,
            decoder_input_ids=batch.decoder_input_ids,
            labels=batch.labels,
            packing=layout_of(batch),
        )
        sums, counts = torch.zeros(2, len(COLUMNS))
        for index, label in enumerate(batch.labels.tolist()):
            if label != -100:
                sums[batch.denoiser_ids[index]] += output.token_losses[index]
                counts[batch.denoiser_ids[index]] += 1
        return LossSum(output.loss, sums, counts)

    def backward(self, loss_sum: LossSum, *, num_losses: int, last: bool) -> None:
        (loss_sum.total / max(num_losses, 1)).backward()

    def step(self, veto: Veto | None = None) -> StepResult:
        rate = learning_rate(self.applied_steps, self.training)
        limit = self.training.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        applied = bool(torch.isfinite(norm)) and not (veto is not None and veto(norm))
        if applied:
            for group in (*self.optimizer.param_groups, *(self.muon.param_groups if self.muon else ())):
                group["lr"] = rate
            self.optimizer.step()
            if self.muon:
                # torch's orthogonalizes in bfloat16 whatever the run's numbers are.
                with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
                    self.muon.step()
            self.applied_steps += 1
        self.model.zero_grad()
        return StepResult(applied, norm, rate)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        self.model.eval()
        yield from map(self._loss, batches)

    def close(self) -> None:
        pass


ORACLE_FIELDS = (
    "optimizer",
    "optimizer_args",
    "lr_scheduler_type",
    "wsd_decay_fraction",
    "lora",
    "cross_attention",
    "layers",
    "freeze",
    *REGULARIZED,
)


@functools.cache
def _oracle_trajectory(world_size: int, given: str) -> dict[str, Any]:
    settings = json.loads(given)
    steps, layers = settings.pop("steps"), settings.pop("layers", None)
    config = run_config(distributed_type="ddp", sharding_stage="zero0", **settings)
    oracle = TorchOracle(config, model_of(config, layers), weights)
    held_out = random_batch(10_000, MODEL.vocab_size)
    before = float(next(oracle.evaluate([held_out])).total)
    trained = []
    for step in range(steps):
        lanes = lane_batches(step, world_size)
        target_tokens = sum(batch.target_tokens for batch in lanes)
        total, result = train_on(oracle, lanes, target_tokens)
        trained.append((total / target_tokens, float(result.grad_norm), result.learning_rate))
    after = next(oracle.evaluate([held_out]))
    return {
        "steps": trained,
        "eval": [before, float(after.total)],
        "after": after,
        "weights": {name: p.detach() for name, p in oracle.named.items()},
        "parameters": list(parameter_shapes(model_of(config, layers))),
    }


def oracle_trajectory(world_size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    asked = {field: given[field] for field in ("steps", *ORACLE_FIELDS) if field in given}
    return _oracle_trajectory(world_size, json.dumps(asked))


def assert_trained_like(found: dict[str, Any], oracle: dict[str, Any], norm: float = 1e-5) -> None:
    """The steps of a rank are the oracle's. `norm`: the relative tolerance of gradient norms."""
    max_grad_norm = run_config().training.max_grad_norm
    for mine, (loss, grad_norm, rate) in zip(found["steps"], oracle["steps"], strict=True):
        assert mine["applied"]
        assert mine["loss"] == pytest.approx(loss, abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(grad_norm, rel=norm)
        assert mine["grad_norm"] > 10 * max_grad_norm  # or clipping would not be tested
        assert mine["grad_norm_dtype"] == "torch.float32"
        assert mine["learning_rate"] == pytest.approx(rate, rel=1e-9, abs=1e-15)


def assert_evaluated_like(found: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert found["eval"] == pytest.approx(oracle["eval"], rel=1e-5)
    torch.testing.assert_close(found["sums"], oracle["after"].sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["counts"], oracle["after"].counts)
    assert float(found["sums"].sum()) == pytest.approx(found["eval"][1], rel=1e-6)


def assert_weights_of(found: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert found["weights"].keys() == oracle["weights"].keys()
    for name, expected in oracle["weights"].items():
        # Adam divides by tiny second moments: 1e-7 in a gradient is more in a weight.
        torch.testing.assert_close(found["weights"][name], expected, rtol=0, atol=1e-4, msg=name)
    assert list(found["merged"]) == oracle["parameters"]
    assert_merged(found["merged"], found["weights"])


def assert_merged(merged: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """The `merged` parameters are the trained ones, with 8 (alpha 32, rank 4) times the product of each adapter."""
    for name, found in merged.items():
        a, b = (weights.get(f"{name.removesuffix('.weight')}.lora_{half}.weight") for half in "AB")
        expected = weights[name] if a is None or b is None else weights[name] + 8 * b @ a
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=name)
        assert (a is not None) == (not torch.equal(found, weights[name])), name


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def assert_skips_leave_no_trace(skipped: list[dict[str, Any]], clean: list[dict[str, Any]]) -> None:
    """The steps of `engine_cases.skipping`, beside those of a run that never saw the third and the fifth."""
    first, second, vetoed, third, not_finite, fourth = skipped
    assert [first, second, third, fourth] == clean  # losses, norms, rates: equal to the bit
    for refused, following in ((vetoed, third), (not_finite, fourth)):
        assert not refused["applied"]
        assert refused["learning_rate"] == following["learning_rate"]  # the schedule did not move
    assert 0 < vetoed["grad_norm"] < 100
    assert not_finite["grad_norm"] == float("inf")
