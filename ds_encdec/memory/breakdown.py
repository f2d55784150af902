"""The uses of memory: the categories of the estimate, and what an engine holds in the parts of a step."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple


def power_of_two(num_bytes: float) -> float:
    """The next power of two, which torch's allocator of pinned memory rounds up to."""
    return float(1 << (ceil(num_bytes) - 1).bit_length()) if num_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes on one device by their use.

    `weights`: parameters in the compute dtype. `master_weights`: the optimizer's float32 weights. `optimizer`: Adam's
    moments. `activations`: kept for the backward pass, and worked on by a layer. `logits`: a chunk of them, its
    gradients, and the head's buffers. `communication`: reduction buckets and gathered parameters. `framework`: the CUDA
    context, workspaces and fragmentation; on a CPU the libraries of the process.
    """

    weights: float = 0.0
    master_weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0
    framework: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(_bytes_of(self))

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(*map(operator.add, _bytes_of(self), _bytes_of(other)))


CATEGORIES = tuple(field.name for field in dataclasses.fields(Breakdown))
"""The names, in the order of the table."""
_bytes_of = operator.attrgetter(*CATEGORIES)


@dataclass(frozen=True, slots=True)
class HostBreakdown:
    """Bytes in one host's memory, for a rank or for all ranks of a node.

    `states`: offloaded master weights, moments and gradients; `parameters` and `activations`: offloaded ones. `save`:
    copies that background saves are written from. `process`: libraries and data workers.
    """

    states: float = 0.0
    parameters: float = 0.0
    activations: float = 0.0
    save: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(dataclasses.astuple(self))

    def scaled(self, ranks: int) -> HostBreakdown:
        """The sum of `ranks` equal ranks."""
        return HostBreakdown(*(value * ranks for value in dataclasses.astuple(self)))


class Count(NamedTuple):
    """The parameters of a part of the model, and how many of them are trained."""

    all: int
    trained: int

    def __add__(self, other: Count) -> Count:  # type: ignore[override]  # where a tuple appends
        return Count(self.all + other.all, self.trained + other.trained)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine's parameters, gradients and optimizer on one rank, in the parts of a step.

    On the device: `resting` between two steps. Beyond that, `forward` at the end of the last micro-batch's forward
    pass; `backward(done, unit)` in its backward pass, behind the parameters `done` and in the layer or embedding with
    the parameters `unit`; `last_reduction` of gradients behind the backward pass, where they are not reduced layer by
    layer; `step` at the worst moment of the optimizer's step. `build`: everything while the engine is built. `host`: of
    this rank. `keeps_frozen_inputs`: products with frozen weights keep inputs that nothing needs.
    `reduces_every_micro_batch`: gradients are reduced more than once a step. `sums_in_16_bits`: micro-batches are added
    up in 16 bits. `communicators`: NCCL's, where there are several ranks.
    """

    backward: Callable[[Count, Count], Breakdown]
    resting: Breakdown = Breakdown()
    forward: Breakdown = Breakdown()
    step: Breakdown = Breakdown()
    host: HostBreakdown = HostBreakdown()
    last_reduction: Breakdown = Breakdown()
    build: Breakdown = Breakdown()
    keeps_frozen_inputs: bool = False
    reduces_every_micro_batch: bool = False
    sums_in_16_bits: bool = False
    communicators: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes that one rank's device holds at its worst moment, named `moment`, and its host for this rank."""

    peak: Breakdown
    moment: str
    host: HostBreakdown
