"""The settings of text generation: defaults, meanings and limits."""

from dataclasses import dataclass, field
from typing import Any

from ds_encdec.base.types import ConfigError


def _setting(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of text generation. Raises ConfigError for contradictions. `temperature` 0 searches with `num_beams`.
    `batch_tokens` limits encoder and new tokens over all rows and beams, with padding; a single row may be longer."""

    max_new_tokens: int = _setting(512, "new tokens of a text at most; 0: no text")
    num_beams: int = _setting(1, "beams of the search")
    temperature: float = _setting(0.0, "temperature of sampling; 0 takes the likeliest token")
    top_p: float = _setting(1.0, "sample from the likeliest tokens that have this share")
    top_k: int = _setting(0, "number of likeliest tokens to sample from; 0: all")
    repetition_penalty: float = _setting(1.0, "above 1: tokens that were generated are less likely")
    seed: int = _setting(0, "seed of sampling")
    batch_tokens: int = _setting(16_384, "tokens of a batch at most, input and new ones")

    def __post_init__(self) -> None:
        for name, is_sound, range_ in (
            ("max_new_tokens", self.max_new_tokens >= 0, "0 (no text) or more"),
            ("num_beams", self.num_beams >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, and at most 1 (all)"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0 (1: none)"),
            ("batch_tokens", self.batch_tokens >= 1, "1 or more"),
        ):
            if not is_sound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {range_}")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k):
            raise ConfigError("top_p and top_k limit sampling: give a temperature above 0, too (such as 0.1)")
        if self.temperature > 0 and self.num_beams > 1:
            raise ConfigError("num_beams searches for the likeliest text, a temperature samples: give one of them")
