"""A process that makes two real optimizer steps at one micro-batch size, and says what they took.

`python -m ds_encdec.memory.probe` runs beside every rank of a run, as a world of its own: the run's engine with its
configuration and number of ranks, full micro-batches of random tokens, weights of zero, and no files. The second step
finds Adam's moments in their place. What runs out of memory here takes nothing of the run with it, and all that was
taken is given back with the process.

stdin: one line of JSON, a `ProbeTask`; it stays open as long as the rank lives, and the process ends with it. stdout:
one line of JSON, a `ProbeReport`. Everything that libraries print goes to stderr. A process that ends without a report
has failed for another reason than memory, unless the kernel has killed it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from ds_encdec.config.schema import FullConfig
from ds_encdec.data.collate import collate
from ds_encdec.data.packing import token_budgets
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import create_engine
from ds_encdec.launch.memory_errors import is_out_of_memory
from ds_encdec.launch.process_group import init_process_group
from ds_encdec.launch.world import World
from ds_encdec.memory.job import expected_ratio
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import ModelSizes, parameter_shapes
from ds_encdec.types import DENOISERS, Batch, DsEncDecError, EngineName, Example, WeightSource

STEPS = 2
"""Optimizer steps: from the second one on, the optimizer has its states."""
MICRO_BATCHES = 2
"""Of a step, at most: from the second one on, gradients are accumulated."""


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """What one rank's probe is to do.

    `config`: with a number as its micro-batch size. `model`: the model's configuration as a dict. `world`: this rank's
    place, and a port of the probes' own. `available_bytes`: of the rank's device, free before the probe; it may take
    `limit_bytes` of them.
    """

    config: FullConfig
    model: dict[str, Any]
    engine: EngineName
    world: World
    device: str
    gradient_accumulation_steps: int
    available_bytes: int
    limit_bytes: int

    def dump(self) -> str:
        """One line of JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        world, config = dataclasses.asdict(self.world), self.config.model_dump(mode="json")
        return json.dumps({**fields, "world": world, "config": config})

    @classmethod
    def parse(cls, line: str) -> ProbeTask:
        """The task of a line that `dump` made."""
        fields = json.loads(line)
        config, world = FullConfig.model_validate(fields.pop("config")), World(**fields.pop("world"))
        return cls(config=config, world=world, **fields)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """How the steps went. `peak_bytes`: of the device, libraries included; 0 where memory ran out, by `message`."""

    fits: bool
    peak_bytes: int = 0
    message: str = ""


def measure(task: ProbeTask) -> ProbeReport:
    """Make the steps, and a micro-batch of an evaluation where the run will have any. Collective over all probes."""
    config, device = task.config, torch.device(task.device)
    timeout = timedelta(minutes=config.infra.distributed_timeout_minutes)
    try:
        _limit(device, task)
        init_process_group(task.world, device, timeout, task.engine)
        model = Qwen3Seq2SeqConfig.from_dict(task.model)
        accumulation = task.gradient_accumulation_steps
        engine = create_engine(task.engine, config, task.world, device, model, zero_weights(model), accumulation)
        batch = full_batch(config, config.training.micro_batch_size, model.vocab_size)
        for _ in range(STEPS):
            _step(engine, batch, min(accumulation, MICRO_BATCHES), task.world.world_size)
        if config.training.eval_samples:
            engine.evaluate(full_batch(config, config.training.per_device_eval_batch_size, model.vocab_size))
        return ProbeReport(fits=True, peak_bytes=_peak_bytes(device, task.available_bytes))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return ProbeReport(fits=False, message=first_line)


def _step(engine: Engine, batch: Batch, micro_batches: int, world_size: int) -> None:
    target_tokens = batch.target_tokens * micro_batches * world_size
    for index in range(1, micro_batches + 1):
        loss = engine.forward(batch)
        engine.backward(loss, target_tokens=target_tokens, last=index == micro_batches)
    if not engine.step().applied:
        raise DsEncDecError("a step of the probe was skipped, so that the optimizer has no states")


def full_batch(config: FullConfig, micro_batch_size: int, vocab_size: int) -> Batch:
    """A micro-batch of random tokens without padding, in as few examples as hold them: attention is at its longest."""
    data = config.data
    budgets = token_budgets(data, micro_batch_size, expected_ratio(data.ul2_task_weights))
    sides = (
        (budgets.encoder_tokens, data.max_encoder_length),
        (budgets.decoder_tokens, data.max_decoder_length),
    )
    count = min(max(math.ceil(tokens / longest) for tokens, longest in sides), budgets.max_examples)
    draw = np.random.default_rng(0).integers
    encoder_ids, decoder_ids = (
        [draw(vocab_size, size=min(length, longest), dtype=np.int32) for length in _shares(tokens, count)]
        for tokens, longest in sides
    )
    examples = [
        Example(encoder, decoder, DENOISERS[0], "") for encoder, decoder in zip(encoder_ids, decoder_ids, strict=True)
    ]
    return collate(examples, budgets, decoder_start_id=0, pad_id=0)


def _shares(tokens: int, count: int) -> list[int]:
    """`tokens` divided into `count` numbers that differ by one at most."""
    return [tokens // count + (index < tokens % count) for index in range(count)]


def zero_weights(sizes: ModelSizes) -> WeightSource:
    """Norms 1, matrices 0: nothing is drawn, and gradients are finite in every precision: no step is skipped."""
    shapes = parameter_shapes(sizes)

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        shape = shapes[name]
        return (torch.ones(shape) if len(shape) == 1 else torch.zeros(shape))[rows]

    return weights


def _limit(device: torch.device, task: ProbeTask) -> None:
    """Have allocations fail that would take more than `limit_bytes`.

    On a CPU an allocation beyond what there is does not fail: the kernel kills some process, maybe another one.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)  # the context of this process is taken from `free` already
        reserve = task.available_bytes - task.limit_bytes
        torch.cuda.set_per_process_memory_fraction(max(0, free - reserve) / total, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = task.limit_bytes if soft == resource.RLIM_INFINITY else min(task.limit_bytes, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _peak_bytes(device: torch.device, available_bytes: int) -> int:
    """The most that this process has had: of a GPU with its context and buffers that torch does not count."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        uncounted = available_bytes - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(0, uncounted)
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux
        return psutil.Process().memory_info().rss
    # Not getrusage: its peak begins with that of the process that started this one.
    peak_line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak_line.split()[1]) * 1024


def main() -> None:
    """Read the task, report, and end at once: other probes may be waiting for this one in a collective."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent is asked as well, and decides
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_the_parent, name="parent-watch", daemon=True).start()
    try:
        print(json.dumps(dataclasses.asdict(measure(ProbeTask.parse(line)))), file=out, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_parent() -> None:
    sys.stdin.read()  # ends when the other end is closed, by whatever ended the parent
    os._exit(1)


if __name__ == "__main__":
    main()
