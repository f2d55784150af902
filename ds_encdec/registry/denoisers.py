"""Lists UL2's denoisers (arXiv 2205.05131), a row each; to add one, add a row (and one to the table in docs/data.md).
The five tasks and their weights are T5Gemma 2's (arXiv 2512.14856, section 3.1). `data/examples/chunks.py` divides
texts. The configuration and the memory estimate read the rows, so numpy and torch are not imported."""

from dataclasses import dataclass
from typing import NamedTuple


class DenoisedLengths(NamedTuple):
    """Lengths after denoising, in tokens; `decoder_tokens` counts the EOS. A prefix language model has no spans."""

    encoder_tokens: int
    decoder_tokens: int
    noise_tokens: int
    spans: int


@dataclass(frozen=True, slots=True)
class Denoiser:
    """Replaces spans of `mean_span` tokens on average, a share of `density` of all tokens, by sentinels. Without a
    `mean_span` it is a prefix language model: the decoder continues the text, with the last share of `density` of its
    tokens. `weight`: its default in `data.ul2_task_weights`."""

    density: float
    weight: float
    mean_span: int | None = None

    def lengths(self, raw_tokens: int) -> DenoisedLengths:
        """Return the lengths that `raw_tokens` (>= 2) become. They are fixed: no random draw changes them. Each side
        keeps at least one token. Halves round to even, as in T5's and Hugging Face's code."""
        noise = min(max(round(raw_tokens * self.density), 1), raw_tokens - 1)
        if self.mean_span is None:
            return DenoisedLengths(raw_tokens - noise, noise + 1, noise, 0)
        # A kept segment is at least one token: more spans than that cannot be separated.
        spans = min(max(round(noise / self.mean_span), 1), raw_tokens - noise)
        return DenoisedLengths(raw_tokens - noise + spans, noise + spans + 1, noise, spans)


# The rows by name, in the order of `data.ul2_task_weights`, of mode tokens and of all sums by denoiser. New rows go to
# the end: checkpoints and exported models hold such lists.
DENOISERS = {
    "R1": Denoiser(mean_span=3, density=0.15, weight=1),
    "R2": Denoiser(mean_span=12, density=0.50, weight=1),
    "X1": Denoiser(mean_span=32, density=0.15, weight=1),
    "X2": Denoiser(mean_span=32, density=0.50, weight=1),
    "S": Denoiser(density=0.75, weight=4),
}

_LONG_TEXT = 1_200_000  # tokens of a text so long that a denoiser's roundings do not show


def expected_ratio(task_weights: tuple[float, ...]) -> float:
    """Return the encoder tokens per decoder token of long texts under these weights. A run measures its own ratio
    (data/survey.py): on web text that differs by a percent or two, but not the sum of tokens."""
    lengths = [row.lengths(_LONG_TEXT) for row in DENOISERS.values()]
    encoder, decoder = (
        sum(weight * tokens[side] for weight, tokens in zip(task_weights, lengths, strict=True)) for side in (0, 1)
    )
    return encoder / decoder
