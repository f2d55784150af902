"""The settings and sizes of a training step that its memory depends on; no torch needed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ds_encdec.config.batch_size import micro_batches_per_step
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.budgets import token_budgets
from ds_encdec.engines import EngineName
from ds_encdec.memory.model_sizes import Sizes
from ds_encdec.model.parameter_count import ModelSizes
from ds_encdec.types import DENOISERS

_LONG_TEXT = 1_200_000
"""Tokens of a text at whose length the roundings of a denoiser do not show."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's share of a training step: the configuration, the model's sizes, and where it runs.

    `encoder_tokens`, `decoder_tokens`: of a micro-batch, padding included. `gradient_accumulation_steps`: micro-batches
    of this rank in one optimizer step. `emulates_bf16`: the device multiplies bfloat16 in float32, as CPUs without such
    instructions do (model/precision.py). `trainable_parameters`: of `parameters`; fewer where a part is frozen.
    """

    config: FullConfig
    sizes: Sizes
    engine: EngineName
    world_size: int
    ranks_per_node: int
    device: Literal["cuda", "cpu"]
    encoder_tokens: int
    decoder_tokens: int
    gradient_accumulation_steps: int
    parameters: int
    trainable_parameters: int
    emulates_bf16: bool = False
    ratio: float = 1.0
    """Encoder tokens per decoder token of the data."""

    @property
    def uses_flash(self) -> bool:
        """Return whether attention runs in a variable-length flash kernel (model/attention.py, `flash_kernel`)."""
        return self.device == "cuda" and self.compute_bytes == 2 and self.config.model.use_flash_attention

    @property
    def trains_embedding(self) -> bool:
        """Return whether the embedding is trained: where a part of the model is frozen, it is taken to be in it."""
        return self.trainable_parameters >= self.parameters

    @property
    def longest_document(self) -> tuple[int, int]:
        """Encoder and decoder tokens of the longest document that a micro-batch may hold."""
        data = self.config.data
        return data.max_encoder_length, data.max_decoder_length

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in the dtype of activations and of the parameters that layers compute with."""
        return 2 if self.config.training.bf16 or self.config.training.fp16 else 4

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; an untied output layer has as many again."""
        return self.sizes.vocab_size * self.sizes.hidden_size


def make_job(
    config: FullConfig,
    sizes: ModelSizes,
    engine: EngineName,
    *,
    world_size: int,
    ranks_per_node: int,
    device: Literal["cuda", "cpu"] = "cuda",
    gradient_accumulation_steps: int | None = None,
    ratio: float | None = None,
    trainable_parameters: int | None = None,
    emulates_bf16: bool = False,
) -> Job:
    """The job of a run. `ratio`: encoder per decoder token of its data; None: `expected_ratio`.

    `gradient_accumulation_steps` None: what the configured batch and the ranks leave.
    """
    training = config.training
    if gradient_accumulation_steps is None:
        gradient_accumulation_steps = max(1, micro_batches_per_step(config, world_size) // world_size)
    if ratio is None:
        ratio = expected_ratio(config.data.ul2_task_weights)
    budgets = token_budgets(config.data, training.micro_batch_size, ratio)
    own_sizes = Sizes.of(sizes)
    parameters = own_sizes.parameters
    return Job(
        config=config,
        sizes=own_sizes,
        engine=engine,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        device=device,
        encoder_tokens=budgets.encoder_tokens,
        decoder_tokens=budgets.decoder_tokens,
        gradient_accumulation_steps=gradient_accumulation_steps,
        parameters=parameters,
        trainable_parameters=parameters if trainable_parameters is None else trainable_parameters,
        emulates_bf16=emulates_bf16,
        ratio=ratio,
    )


def with_micro_batch(job: Job, micro_batch_size: int) -> Job:
    """The same job on micro-batches of another size, in sequences; its accumulation stays."""
    budgets = token_budgets(job.config.data, micro_batch_size, job.ratio)
    return dataclasses.replace(job, encoder_tokens=budgets.encoder_tokens, decoder_tokens=budgets.decoder_tokens)


def expected_ratio(task_weights: tuple[float, ...]) -> float:
    """Encoder tokens per decoder token of long texts under these weights of the denoisers.

    A run measures its own (data/inspect.py); on web text the two differ by a percent or two, which moves
    tokens from one side to the other and leaves their sum.
    """
    lengths = [row.lengths(_LONG_TEXT) for row in DENOISERS.values()]
    encoder, decoder = (
        sum(weight * tokens[side] for weight, tokens in zip(task_weights, lengths, strict=True)) for side in (0, 1)
    )
    return encoder / decoder
