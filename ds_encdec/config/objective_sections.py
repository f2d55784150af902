"""The sections about single objectives."""

from typing import Literal

from pydantic import Field

from ds_encdec.config.section_base import Section


class PreferenceConfig(Section):
    """How answers are preferred (`data.objective: dpo`)."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Of a pair's margin, the difference of its answers' rewards: DPO's own, IPO's (of mean log-probabilities per
    token), or SLiC's."""
    beta: float = Field(default=0.1, gt=0, le=1000)
    """Reward of an answer per nat by which its log-probability exceeds the reference's. Smaller: further from the
    reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs whose order is taken to be wrong (`sigmoid`)."""
