"""The tokens of a micro-batch on either side; without numpy, which the memory estimate does not wait for."""

from dataclasses import dataclass

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import DataConfig


@dataclass(frozen=True, slots=True)
class Budgets:
    """Tokens of one micro-batch on either side, and the most examples in it."""

    encoder_tokens: int
    decoder_tokens: int
    max_examples: int


def token_budgets(data: DataConfig, micro_batch_size: int, ratio: float) -> Budgets:
    """The budgets of a micro-batch of `micro_batch_size` x (max_encoder_length + max_decoder_length) tokens.

    `ratio`: encoder tokens per decoder token that the data yields. Each side has room for its longest example.
    """
    if ratio <= 0:
        raise ConfigError(f"the ratio of encoder to decoder tokens must be positive, got {ratio}")
    total = micro_batch_size * (data.max_encoder_length + data.max_decoder_length)
    encoder_tokens = round(total * ratio / (1 + ratio))
    encoder_tokens = min(max(encoder_tokens, data.max_encoder_length), total - data.max_decoder_length)
    return Budgets(encoder_tokens, total - encoder_tokens, data.max_examples_per_micro_batch)
