"""The objectives, a row each: how documents become examples, and what the rest of the program has to know of that.

It stands on the floor, beside the denoisers, so that the configuration's rules and the memory estimate ask a row
without numpy or torch. A function of a row that takes `data` is given the configuration's section.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_encdec.denoisers import DENOISERS, expected_ratio

TASKS: Mapping[str, Any] = ChainMap({"SFT": None}, DENOISERS)
"""The kinds of examples by name, in the order of all sums by kind: the denoisers, and pairs of input and output."""


@dataclass(frozen=True, slots=True)
class Objective:
    """How a document becomes examples.

    `maker`: the dotted name of what makes them: a class with `from_config` that is a `data.examples.ExampleMaker`.
    `tasks`: the names of its kinds of examples. `expected_ratio`: encoder tokens per decoder token that are assumed
    before data is looked at. `described`: rows of the model card. `tag`: that of the model card.
    """

    maker: str
    tasks: Mapping[str, Any]
    expected_ratio: Callable[[Any], float]
    described: Callable[[Any], dict[str, str]]
    tag: str


def _described_mixture(data: Any) -> dict[str, str]:
    weights = ", ".join(f"{weight:g}" for weight in data.ul2_task_weights)
    return {f"UL2 weights ({', '.join(DENOISERS)})": weights}


OBJECTIVES = {
    "ul2": Objective(
        maker="ds_encdec.data.chunks:ChunkMaker",
        tasks=DENOISERS,
        expected_ratio=lambda data: expected_ratio(data.ul2_task_weights),
        described=_described_mixture,
        tag="ul2",
    ),
}
"""The rows by the value of `data.objective`."""
