"""The sections about single objectives."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ds_encdec.config.section_base import Mark, Section

SIMILARITIES = 1 << 22  # of queries and documents, that are computed at one time


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


class ContrastiveConfig(Section):
    """The loss of embeddings (`data.objective: contrastive`), and how an encoder's states become them
    (docs/embeddings.md)."""

    temperature: Annotated[float, Mark.TUNABLE] = Field(default=0.05, gt=0, le=100)
    """Divides the cosine similarities before the softmax: the smaller, the more the nearest negatives count."""
    pooling: Literal["mean", "last"] = "mean"
    """An embedding is the mean of a text's states, or its last one."""
    matryoshka_dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Sizes to which embeddings may be cut: the loss is the mean over these sizes and the whole embedding."""
    symmetric: bool = False
    """Let each positive find its query as well, and take the mean of both losses."""
    false_negative_margin: Annotated[float | None, Mark.TUNABLE] = Field(default=None, ge=-2, le=2)
    """A document whose similarity to a query exceeds the positive's by more than this is no negative of it (0.1 in
    Qwen3-Embedding). None: only equal texts, and positives of equal queries, are left out."""

    @field_validator("matryoshka_dims")
    @classmethod
    def _ascending(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        if list(dims) != sorted({*dims}):
            raise ValueError("must be ascending, each size once")
        return dims
