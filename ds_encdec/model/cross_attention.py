"""The forms of cross-attention, a row of facts each: what a decoder layer reads of the encoder. No torch: memory
estimates read these facts, too."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CrossAttention:
    """One form. `is_aligned`: a decoder layer reads the encoder's states at its own height, such as entered the layer
    that it was copied from; otherwise all layers read the encoder's last states. `has_own_norm`: it reads them through
    its own input norm, as it reads its own states, and the encoder has no final norm; otherwise through that one.
    `positions`: the default of `encoder_positions`."""

    is_aligned: bool
    has_own_norm: bool
    positions: str

    def last_height(self, num_layers: int) -> int:
        """Return the most encoder layers that `num_layers` decoder layers read: no layer above gets a gradient."""
        return num_layers - self.is_aligned


FORMS = {
    "aligned": CrossAttention(is_aligned=True, has_own_norm=True, positions="prefix"),
    "renormed": CrossAttention(is_aligned=False, has_own_norm=True, positions="prefix"),
    "final": CrossAttention(is_aligned=False, has_own_norm=False, positions="unrotated"),  # T5Gemma 2's
}
# `prefix`: the encoder's keys are rotated, and the decoder's positions go on behind the input, as in one text.
# `unrotated`: only the decoder's keys are rotated, from position 0.
POSITIONS = ("prefix", "unrotated")


def form_of(sizes: Any) -> CrossAttention:
    """Return the form of a model with these sizes or this configuration; where they have none, it is `final`."""
    return FORMS[getattr(sizes, "cross_attention", "final")]
