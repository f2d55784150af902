"""Find a run's micro-batch size (for `auto`, the largest that fits), and by the estimate the layers' recomputation.

1. Candidates are the sizes that divide a rank's share of the global batch, so that the accumulation can keep it.
2. The estimate names the largest that should fit into the memory that is free now.
3. Processes beside the ranks (probe.py) make real steps at that size. If memory runs out on any rank, all ranks try
   the next candidate of at most half the size.
4. If the first try leaves enough memory for the next larger candidate, that is tried too, twice at most.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from ds_encdec.base.quantities import gib
from ds_encdec.base.types import ConfigError, DsEncDecError, OutOfMemoryError, Preempted
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.config.schema import FullConfig, load_saved
from ds_encdec.config.shares import is_auto, micro_batch_candidates, with_first_batch_size, with_micro_batch_size
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.expected import ExpectedMemory, explanation
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.library import device_capacity
from ds_encdec.memory.variants import HEADROOM, RECOMPUTATION, choose_recompute, with_fields
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import TeacherSource
from ds_encdec.model.precision import product_dtype
from ds_encdec.training.auto_batch.probe import Outcome, ProbeProcess, ProbeTask

logger = logging.getLogger(__name__)

LARGER_TRIES = 2  # candidates above the estimate's that are tried if memory is left
POLL_SECONDS = 0.2


def resolve_batch_size(
    config: FullConfig,
    context: RunContext,
    stop: StopRequest,
    model: Qwen3Seq2SeqConfig,
    resumed_from: Checkpoint | None,
    teacher: TeacherSource | None = None,
) -> FullConfig:
    """Return `config` with a number as its micro-batch size, and with the accumulation for it. A collective. Raises on
    every rank: OutOfMemoryError if no size fits, ConfigError if `training.global_batch_size` is not that of
    `resumed_from`, Preempted if a rank is to stop, DsEncDecError if a try fails for another reason than memory."""
    world_size = context.world.world_size
    if resumed_from is not None:
        return _as_saved(config, resumed_from, world_size)
    if is_auto(config):
        return _Search(config, context, stop, model, teacher).largest()
    if config.training.global_batch_size is not None:
        return with_micro_batch_size(config, config.training.micro_batch_size, world_size)
    return config


def resolve_checkpointing(
    config: FullConfig, context: RunContext, model: Qwen3Seq2SeqConfig, resumed_from: Checkpoint | None
) -> FullConfig:
    """Return `config` with a mode instead of `training.activation_checkpointing: auto`, which a resumed run keeps if
    that still fits. A collective. It assumes a size for `auto`; call it before `resolve_batch_size`, which needs a
    mode."""
    if config.training.activation_checkpointing != "auto":
        return config
    collectives, world_size = context.collectives, context.world.world_size
    free_bytes = collectives.lowest(device_capacity(context.device).free_bytes)[0]

    def chosen() -> str:
        if resumed_from is None:
            before, first = with_first_batch_size(config, world_size), None
        else:
            before = _as_saved(config, resumed_from, world_size)
            first = load_saved(resumed_from.path / "config.yaml").training.activation_checkpointing
        mode, choice = choose_recompute(job_here(before, context, model), free_bytes, first=first)
        logger.info("%s", choice)
        return mode

    return with_fields(config, {RECOMPUTATION: collectives.on_rank_zero(chosen)})


def _as_saved(config: FullConfig, saved: Checkpoint, world_size: int) -> FullConfig:
    """Return `config` with the batch that the run began with, since its data order depends on it."""
    given = config.training.global_batch_size
    if not is_auto(config) and given is None:
        return config
    # A configured number may differ from the checkpoint's: this function does not judge that.
    size = (load_saved(saved.path / "config.yaml") if is_auto(config) else config).training.micro_batch_size
    sequences = size * saved.read_json("trainer.json")["num_lanes"]
    if given not in (None, sequences):
        raise ConfigError(
            f"training.global_batch_size={given}, but the steps of {saved.path} hold {sequences} sequences, which is "
            f"fixed when a run first starts. Give {sequences}, or start a new run from its export."
        )
    return with_micro_batch_size(with_fields(config, {"training.global_batch_size": sequences}), size, world_size)


class _Search:
    """Searches the largest size that fits. All ranks take the same steps, by figures that they exchange."""

    def __init__(
        self,
        config: FullConfig,
        context: RunContext,
        stop: StopRequest,
        model: Qwen3Seq2SeqConfig,
        teacher: TeacherSource | None,
    ) -> None:
        self._config, self._context, self._stop, self._model, self._teacher = config, context, stop, model, teacher
        self._tries = itertools.count(1)
        collectives, on_cpu = context.collectives, context.device.type == "cpu"
        share = context.world.local_world_size if on_cpu else 1  # the ranks of a machine share its memory
        self._free_bytes = collectives.lowest(device_capacity(context.device).free_bytes // share)[0]

        def needed_bytes(size: int) -> int:
            needed = self._expected(size).estimate
            return int(needed.peak.total + (needed.host.total if on_cpu else 0))

        candidates = micro_batch_candidates(config, context.world.world_size)
        # Nodes may differ in their ranks and processors: the largest need counts.
        negatives = collectives.lowest(*collectives.on_every_rank(lambda: [-needed_bytes(size) for size in candidates]))
        self._needs = {size: -negative for size, negative in zip(candidates, negatives, strict=True)}

    def largest(self) -> FullConfig:
        """Return the configuration with the largest size that fits. Raises as `resolve_batch_size` does."""
        size, outcome = largest_that_fits(self._needs, int(self._free_bytes * (1 - HEADROOM)), self._try)
        if not outcome.fits:
            device, rank = self._context.device, self._context.world.rank
            what = f"a micro-batch of {size} does not fit, and smaller ones take no less of what ran out"
            if outcome.smaller_may_fit:
                free = f"{gib(self._free_bytes)} that are free for a rank on {device.type}"
                what = f"not even a micro-batch of {size} fits into the {free}"
            raise OutOfMemoryError(
                f"training.per_device_train_batch_size=auto: {what} ({outcome.message}).\n"
                f"{explanation(self._expected(size), device, rank, of_device=outcome.of_device)}"
            )
        config = self._with(size)
        logger.info(
            f"micro-batch {size}: estimated {gib(self._needs[size])}, probed {gib(outcome.peak_bytes)} of "
            f"{gib(self._free_bytes)}; accumulation {config.training.gradient_accumulation_steps} keeps the global "
            f"batch of {config.training.global_batch_size}"
        )
        return config

    def _with(self, size: int) -> FullConfig:
        return with_micro_batch_size(self._config, size, self._context.world.world_size)

    def _expected(self, size: int) -> ExpectedMemory:
        job = job_here(self._with(size), self._context, self._model)
        return ExpectedMemory(job, estimate(job))

    def _try(self, size: int) -> Outcome:
        """Probe `size` on all ranks; once it has failed on one, the others' probes are ended."""
        context, began = self._context, time.monotonic()
        logger.info("trying micro-batches of %d on all ranks", size)
        task = ProbeTask(
            config=self._with(size),
            model=self._model.to_dict(),
            engine=context.engine,
            world=context.world,
            number=next(self._tries),
            device=str(context.device),
            free_bytes=self._free_bytes,
            teacher=None if self._teacher is None else self._teacher.config.to_dict(),
        )
        with self._stop.heartbeat.busy(), ExitStack() as opened:
            process = context.collectives.on_every_rank(lambda: opened.enter_context(ProbeProcess(task)))
            outcome = agreed_outcome(process, context.collectives, self._stop)
        how = f"fit, with {gib(outcome.peak_bytes)}" if outcome.fits else f"do not fit ({outcome.message})"
        logger.info("micro-batches of %d %s; tried in %.0f s", size, how, time.monotonic() - began)
        return outcome


def job_here(
    config: FullConfig,
    context: RunContext,
    model: Qwen3Seq2SeqConfig,
    gradient_accumulation_steps: int | None = None,
    ratio: float | None = None,
) -> Job:
    """Return this rank's share of a step, for the estimate. `gradient_accumulation_steps`, `ratio`: see `make_job`."""
    some_bf16 = torch.empty(0, dtype=torch.bfloat16, device=context.device)
    return make_job(
        config,
        model,
        context.engine,
        world_size=context.world.world_size,
        ranks_per_node=context.world.local_world_size,
        device="cuda" if context.device.type == "cuda" else "cpu",
        gradient_accumulation_steps=gradient_accumulation_steps,
        ratio=ratio,
        emulates_bf16=product_dtype(some_bf16) != some_bf16.dtype,
    )


def largest_that_fits(
    needed_bytes: Mapping[int, int], limit_bytes: int, try_size: Callable[[int], Outcome]
) -> tuple[int, Outcome]:
    """Return the largest size that fits and its outcome, or the last size tried. The first try is the largest that
    should take at most `limit_bytes` by the estimates `needed_bytes`, or the smallest, since they may be wrong."""
    candidates = sorted(needed_bytes, reverse=True)
    first = next((size for size in candidates if needed_bytes[size] <= limit_bytes), candidates[-1])
    size, outcome = first, try_size(first)
    while not outcome.fits and outcome.smaller_may_fit and size // 2 >= candidates[-1]:
        size = next(candidate for candidate in candidates if candidate <= size // 2)
        outcome = try_size(size)
    if not outcome.fits or size != first:
        return size, outcome
    for candidate in [candidate for candidate in reversed(candidates) if candidate > first][:LARGER_TRIES]:
        if outcome.peak_bytes + needed_bytes[candidate] - needed_bytes[size] > limit_bytes:
            break
        larger = try_size(candidate)
        if not larger.fits:
            break
        size, outcome = candidate, larger
    return size, outcome


def agreed_outcome(
    process: ProbeProcess, collectives: HostCollectives, stop: StopRequest, grace_seconds: float = 30.0
) -> Outcome:
    """Return the common outcome of all ranks' probes; each rank waits for its own. A collective. `grace_seconds`: once
    a probe has failed, the time for another to report that its memory ran out, which breaks the connections of others.
    Raises on every rank: Preempted if one is to stop, DsEncDecError if a probe failed for another reason."""
    failed_at = math.inf
    while True:
        now = time.monotonic()
        records = collectives.gather((process.poll(), stop.noticed, now - failed_at > grace_seconds))
        outcomes, stops, graces = zip(*records, strict=True)
        if any(stops):
            stop.has_seen = True
            raise Preempted(f"stopped by {stop.reason or 'another rank'} before the first step: nothing to save")
        ended = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
        for rank, outcome in ended.items():
            if not (outcome.fits or outcome.failed):
                return replace(outcome, message=f"rank {rank}: {outcome.message}")
        failed = [(rank, outcome.message) for rank, outcome in ended.items() if outcome.failed]
        failed_at = min(failed_at, now) if failed else failed_at
        if len(ended) == len(outcomes) or any(graces):
            for rank, message in failed:
                raise DsEncDecError(
                    f"training.per_device_train_batch_size=auto: the probe of rank {rank} failed, and not for want of "
                    f"memory. Mend that, or give a number. {message}"
                )
            return Outcome(fits=True, peak_bytes=max(outcome.peak_bytes for outcome in outcomes))
        time.sleep(POLL_SECONDS)
