"""The run that all engines are compared on: a tiny model, its weights, its lanes of micro-batches, and a step."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_encdec.base.types import IGNORE_INDEX, Batch, LossSum, StepResult
from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.engine.protocol import Veto
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import FORMS
from ds_encdec.model.lora import merged_weights
from ds_encdec.model.parameter_count import is_adapter, parameter_shapes
from ds_encdec.registry.denoisers import DENOISERS

ACCUMULATION = 3  # a first micro-batch, a last one, and one that is neither
SHORT_ACCUMULATION = 2
LANES = 4  # of a step of SHORT_ACCUMULATION micro-batches on each of two ranks
STEPS = 8  # the whole schedule
# The warmup and one more. With more of them, rounding grows beyond what is told apart from a fault.
SHORT_STEPS = 3
REGULARIZED = {"residual_dropout": 0.1, "attention_dropout": 0.2, "label_smoothing": 0.1, "z_loss": 1e-2}
OWN_OPTIMIZER = {"optimizer": "small_run:Momentum", "optimizer_args": {"beta": 0.8}}


def small_model(form: str = "aligned", **changed: Any) -> Qwen3Seq2SeqConfig:
    """In the aligned form the first decoder layer reads embeddings, and another one all that the encoder makes."""
    layers = changed.get("num_hidden_layers", 2)
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "loss_chunk_tokens": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "cross_attention": form,
        "encoder_positions": FORMS[form].positions,
        "num_encoder_layers": layers,
        "encoder_heights": [0, layers][-layers:] if form == "aligned" else None,
    }
    return Qwen3Seq2SeqConfig(**fields | changed)


BIASED: dict[str, Any] = {
    "qk_norm": "none",
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    "max_position_embeddings": 64,
}
"""What layers of Llama's kind have other than Qwen3's. All rotate: without, a bias of keys has no gradient."""
MODELS = {form: small_model(form) for form in FORMS} | {"biased": small_model(**BIASED)}
MODEL = MODELS["aligned"]
SHORT_MODEL = small_model(num_hidden_layers=1)  # for runs whose subject is not the layers: going on, loading, refusing


def run_config(**overrides: Any) -> FullConfig:
    """A small float32 run. `overrides`: fields of `training` and `infra`, and two of `model`, by name."""
    model = {name: overrides.pop(name, None) for name in ("lora", "cross_attention")}
    training: dict[str, Any] = {
        "bf16": False,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,  # far below the norms that occur: every step is clipped
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_steps": STEPS,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "activation_checkpointing": "none",
    }
    infra: dict[str, Any] = {"device": "cpu", "offload_optimizer": "none", "sharding_stage": "zero3"}
    if overrides.get("sharding_stage", "zero3") == "zero3":
        # Otherwise parameters as small as these stay whole on every rank, and nothing is ever gathered.
        infra["deepspeed_extra"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    for name, value in overrides.items():
        (infra if name in InfraConfig.model_fields else training)[name] = value
    return FullConfig.model_validate({"model": model, "training": training, "infra": infra})


def model_of(config: FullConfig, layers: str | None = None) -> Qwen3Seq2SeqConfig:
    return MODELS[layers or config.model.cross_attention or "aligned"]


def generating_weights(saved: Mapping[str, Tensor], **overrides: Any) -> dict[str, Tensor]:
    """What a model to generate with has for the `saved` weights: adapters merged, in the compute dtype."""
    dtype, lora = torch.bfloat16 if overrides.get("bf16") else torch.float32, run_config(**overrides).model.lora
    rounded = {name: weight.to(dtype) for name, weight in saved.items()}
    if lora is None:
        return rounded

    def lookup(name: str, rows: slice = slice(None), /) -> Tensor:
        return rounded[name][rows]

    merged = merged_weights(lookup, lookup, lora)
    return {name: merged(name).to(dtype) for name in rounded if not is_adapter(name)}


LORA: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.0}}
NF4: dict[str, Any] = {"lora": LORA["lora"] | {"quantize": "nf4"}}
FREEZE: dict[str, Any] = {"freeze": ("encoder.*", "shared.weight", "*.mlp.*")}  # all but the decoder's attention, norms


@functools.cache
def _weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    # The one form with all parameters, and then biases.
    shapes = parameter_shapes(MODELS["final"]) | parameter_shapes(MODELS["biased"])
    return {
        name: torch.randn(shape, generator=draw) * 0.15 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }


def weights(name: str, rows: slice = slice(None), /) -> Tensor:
    """A WeightSource, the same in every process."""
    return _weights()[name][rows]


def lane_batches(
    step: int, world_size: int, accumulation: int = ACCUMULATION, empty: tuple[int, int] = (2, 1)
) -> list[Batch]:
    """The micro-batches of an optimizer step, lane by lane; rank r takes lanes r, r + world size, ….

    They differ in target tokens, and the one of the step and lane `empty` has none; in the lane after it no input has a
    token.
    """
    step_of, lane_of = empty
    return [
        dataclasses.replace(
            random_batch(
                1000 * step + lane,
                MODEL.vocab_size,
                examples=0 if (step, lane) == empty else None,
                has_inputs=(step, lane) != (step_of, lane_of + 1),
            ),
            lane=lane,
            number=step,
        )
        for lane in range(accumulation * world_size)
    ]


def train_on(
    engine: Any, mine: Sequence[Batch], target_tokens: int, veto: Veto | None = None, poison: bool = False
) -> tuple[float, StepResult]:
    """One optimizer step of an engine, or of the oracle, on the lanes of a rank; the sum of their losses, which
    `poison` makes infinite for the engine, with the gradients that they have."""
    total = 0.0
    for index, batch in enumerate(mine):
        loss = next(engine.losses([batch]))
        total += float(loss.total.detach())
        if poison:
            loss = LossSum(loss.total + float("inf"), loss.sums, loss.counts)
        engine.backward(loss, num_losses=target_tokens, last=index == len(mine) - 1)
    return total, engine.step(veto)


ENCODER_TOKENS = 48
DECODER_TOKENS = 40
MAX_EXAMPLES = 6


def random_batch(seed: int, vocab_size: int, examples: int | None = None, *, has_inputs: bool = True) -> Batch:
    """A micro-batch of `examples` (default: 1 to 4, by the seed) documents, padded to the fixed budgets."""
    draw = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    count = integers(1, 5, 1)[0] if examples is None else examples
    encoder_lengths = [length * has_inputs for length in integers(1, ENCODER_TOKENS // 4 + 1, count)]
    decoder_lengths = integers(1, DECODER_TOKENS // 4 + 1, count)
    denoisers = integers(0, len(DENOISERS), count)
    targets = torch.randint(0, vocab_size, (sum(decoder_lengths),), generator=draw)
    denoiser_ids = torch.tensor(
        [id for id, length in zip(denoisers, decoder_lengths, strict=True) for _ in range(length)]
    )
    return Batch(
        encoder_ids=torch.randint(0, vocab_size, (ENCODER_TOKENS,), generator=draw),
        decoder_input_ids=torch.randint(0, vocab_size, (DECODER_TOKENS,), generator=draw),
        labels=padded(targets, DECODER_TOKENS, IGNORE_INDEX),
        encoder_positions=positions(encoder_lengths, ENCODER_TOKENS),
        decoder_positions=positions(decoder_lengths, DECODER_TOKENS),
        encoder_cu_seqlens=boundaries(encoder_lengths),
        decoder_cu_seqlens=boundaries(decoder_lengths),
        denoiser_ids=padded(denoiser_ids, DECODER_TOKENS, 0),
        encoder_lengths=tuple(encoder_lengths),
        decoder_lengths=tuple(decoder_lengths),
    )


def padded(values: Tensor, length: int, fill: int) -> Tensor:
    return torch.cat([values.to(torch.int64), torch.full((length - len(values),), fill, dtype=torch.int64)])


def positions(lengths: list[int], total: int) -> Tensor:
    return padded(torch.cat([torch.arange(n) for n in lengths] + [torch.arange(0)]), total, 0)


def boundaries(lengths: list[int]) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(MAX_EXAMPLES + 1 - len(ends))]).to(torch.int32)


class Momentum(torch.optim.Optimizer):
    """Steps by the mean of gradients: one moment, a counter that is a number, decoupled weight decay."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter))
                state["step"] += 1
                mean: Tensor = state["exp_avg"].lerp_(parameter.grad, 1 - self.beta)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean, alpha=-group["lr"] / (1 - self.beta ** state["step"]))
