"""The categories of the memory estimate, and an engine's memory in each part of a step."""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple


def power_of_two(num_bytes: float) -> float:
    """Round up to a power of two, as torch's allocator of pinned memory does."""
    return float(1 << (ceil(num_bytes) - 1).bit_length()) if num_bytes > 0 else 0.0


class Breakdown(NamedTuple):
    """Bytes on one device by use. `master_weights`: the optimizer's, in float32. `activations`: kept for the backward
    pass, or one layer's work. `logits`: a chunk, its gradients, and the head's buffers. `communication`: reduction
    buckets and gathered parameters. `framework`: CUDA context, workspaces and fragmentation; on a CPU libraries."""

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
        """Sum of all categories."""
        return sum(self)

    def __add__(self, other: "Breakdown") -> "Breakdown":  # type: ignore[override]  # where a tuple appends
        return Breakdown(*map(sum, zip(self, other, strict=True)))


class HostBreakdown(NamedTuple):
    """Bytes in a host's memory, for one rank or all. `save`: background saves' copies. `process`: with data workers."""

    states: float = 0.0
    parameters: float = 0.0
    activations: float = 0.0
    save: float = 0.0
    process: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all uses."""
        return sum(self)

    def scaled(self, ranks: int) -> "HostBreakdown":
        """Return the sum over `ranks` equal ranks."""
        return HostBreakdown(*(value * ranks for value in self))


class Count(NamedTuple):
    """Number of parameters in a part of the model, and of the trained ones among them."""

    all: int
    trained: int

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]  # where a tuple appends
        return Count(self.all + other.all, self.trained + other.trained)


class EngineMemory(NamedTuple):
    """An engine's parameters, gradients and optimizer on one rank, in each part of a step. `resting`: between two
    steps; the next four come on top. `forward`: at the end of the last micro-batch's forward pass. `backward(done,
    unit)`: once its backward pass is through `done` parameters, at the worst moment of a layer or embedding of `unit`
    ones, or `behind` it. `last_reduction`: after it, if gradients are not reduced layer by layer. `step`: the worst of
    the optimizer's. `build`: all, while the engine is built. `keeps_frozen_inputs`: products with frozen weights keep
    inputs that nothing needs. `sums_in_16_bits`: micro-batches are added up in 16 bits. `frozen_shares`: ranks that
    share a frozen parameter. `gathers`: most parameters of a frozen model that are whole at one time, beside a layer's
    (inf: all, until the backward pass is over); 0: it is whole in any case. `offloads_frozen`: they are on the host."""

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
    frozen_shares: int = 1
    gathers: float = 0.0
    offloads_frozen: bool = False
    behind: Callable[[Count, Count], Breakdown] = lambda _, __: Breakdown()


class Estimate(NamedTuple):
    """Bytes of one rank: on its device at the worst moment, named `moment`, and on its host."""

    peak: Breakdown
    moment: str
    host: HostBreakdown
