"""Token budgets of a micro-batch; this module needs no numpy, which would slow the memory estimate down."""

from dataclasses import dataclass

from ds_encdec.config.schema import DataConfig


@dataclass(frozen=True, slots=True)
class Budgets:
    """Tokens of one micro-batch on each side, and its largest number of examples."""

    encoder_tokens: int
    decoder_tokens: int
    max_examples: int


def token_budgets(data: DataConfig, micro_batch_size: int, ratio: float) -> Budgets:
    """Divide a micro-batch by `ratio` (encoder to decoder tokens), so that each side fits its longest example."""
    total = micro_batch_size * (data.max_encoder_length + data.max_decoder_length)
    encoder_tokens = round(total * ratio / (1 + ratio))
    encoder_tokens = min(max(encoder_tokens, data.max_encoder_length), total - data.max_decoder_length)
    return Budgets(encoder_tokens, total - encoder_tokens, data.max_examples_per_micro_batch)
