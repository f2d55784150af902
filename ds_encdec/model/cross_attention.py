"""The forms of cross-attention, a row of facts each: what a decoder layer reads of the encoder. No torch: memory
estimates read these facts, too."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CrossAttention:
    """One form. `is_aligned`: a decoder layer reads the encoder's states at its own height, such as entered the
    layer that it was copied from, so that no encoder layer is needed at the height of the last one; otherwise all
    layers read the encoder's last states. `has_own_norm`: it reads them through its own input norm, as it reads its
    own states, and the encoder has no final norm; otherwise through that one. `positions`: the default of
    `encoder_positions`. `words`: what a decoder layer reads."""

    is_aligned: bool
    has_own_norm: bool
    positions: str
    words: str


FORMS = {
    "aligned": CrossAttention(
        is_aligned=True,
        has_own_norm=True,
        positions="prefix",
        words="the encoder's states at its own height, through its own input norm",
    ),
    "renormed": CrossAttention(
        is_aligned=False,
        has_own_norm=True,
        positions="prefix",
        words="the encoder's last states, through its own input norm",
    ),
    "final": CrossAttention(  # T5Gemma 2's
        is_aligned=False,
        has_own_norm=False,
        positions="unrotated",
        words="the encoder's last states, through the encoder's final norm",
    ),
}
POSITIONS = {  # and what they mean for what a decoder layer reads
    "prefix": "positions go on from the input to the output, as in one text",
    "unrotated": "the input's keys are not rotated, and positions of the output begin at 0",
}


def encoder_form(sizes: Any) -> str:
    """Return the form of the encoder of a model with these sizes, alone: `final`, with a final norm, unless decoder
    layers, without an input norm, read its states as they are."""
    is_raw = form_of(sizes).has_own_norm and getattr(sizes, "norm_position", "before") != "before"
    return "renormed" if is_raw else "final"


def encoder_norm(sizes: Any) -> str:
    """Return the parameter that is the final norm of the encoder of a model with these sizes: its own, if any, or that
    of the last decoder layer, through which its last states are read."""
    if encoder_form(sizes) == "renormed" or not form_of(sizes).has_own_norm:
        return "encoder.norm.weight"
    return f"decoder.layers.{sizes.num_hidden_layers - 1}.input_layernorm.weight"


def form_of(sizes: Any) -> CrossAttention:
    """Return the form of a model with these sizes or this configuration; where they have none, it is `final`."""
    return FORMS[getattr(sizes, "cross_attention", "final")]
