"""Make two real optimizer steps at one micro-batch size in a process beside each rank, and report their memory.

`python -m ds_encdec.training.auto_batch.probe` runs beside every rank of a run, in a process group apart: the run's
engine and configuration, full micro-batches of random tokens, weights of zero, no files. All memory is freed with the
process. stdin: one line of JSON, a `ProbeTask`; the process ends when stdin is closed. stdout: one line of JSON, an
`Outcome`. Output of libraries goes to stderr. `ProbeProcess` is the rank's side.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import TypeAdapter

from ds_encdec.base.types import Batch, DsEncDecError, Example, WeightSource
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import token_budgets
from ds_encdec.data.loader import collate
from ds_encdec.engine.select import create_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.memory_errors import in_one_line, is_of_device, is_out_of_memory, says_out_of_memory
from ds_encdec.launch.preemption import stop_signals_left_to_this_process
from ds_encdec.launch.process_group import init_process_group
from ds_encdec.launch.world import World
from ds_encdec.memory.job import assumed_ratio
from ds_encdec.memory.library import device_capacity
from ds_encdec.memory.variants import HEADROOM
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.distillation import TeacherSource
from ds_encdec.model.parameter_count import ModelSizes, parameter_shapes
from ds_encdec.model.source import Base
from ds_encdec.monitor.machine import own_status, peak_host_bytes
from ds_encdec.registry.engines import EngineName
from ds_encdec.registry.objectives import OBJECTIVES, TASKS

STEPS = 2  # optimizer steps: from the second one on, the optimizer has its states
MICRO_BATCHES = 2  # micro-batches of a step, at most: from the second one on, gradients are accumulated
PROBE = (sys.executable, "-m", "ds_encdec.training.auto_batch.probe")
_LAST_BYTES = 4000  # of a probe's output that are kept
_NO_STACK = "libgomp: Thread creation failed"  # OpenMP, without memory for the stack of a thread


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a try, on one rank or on all. `peak_bytes`: of the device, libraries included; the highest of all
    ranks. `message`: the memory that ran out, or why the try `failed` for another reason. `of_device`: an accelerator's
    memory ran out, not the host's. `smaller_may_fit`: smaller micro-batches take less of it."""

    fits: bool
    peak_bytes: int = 0
    message: str = ""
    of_device: bool = False
    smaller_may_fit: bool = True
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """The task of one rank's probe. `config` has numbers as its micro-batch size and accumulation. `model`, `teacher`:
    their configurations as dicts. `number`: of the try, under which its ranks rendezvous. `free_bytes`: of the device,
    of which `HEADROOM` stays free, for fragmentation and other needs that two steps do not show."""

    config: FullConfig
    model: dict[str, Any]
    engine: EngineName
    world: World
    number: int
    device: str
    free_bytes: int
    teacher: dict[str, Any] | None = None


TASK = TypeAdapter(ProbeTask)  # writes a task as one line of JSON, and reads it


def measure(task: ProbeTask) -> Outcome:
    """Make the steps, and evaluate a micro-batch if the run evaluates. A collective over all probes."""
    config, device = task.config, torch.device(task.device)
    timeout = timedelta(minutes=config.infra.distributed_timeout_minutes)
    where = ""
    try:
        _limit(device, task)
        init_process_group(task.world, device, timeout, task.engine, meeting=f"probe {task.number}")
        context = RunContext(task.world, device, task.engine, HostCollectives(timeout))
        model = Qwen3Seq2SeqConfig.from_dict(task.model)
        accumulation = config.training.gradient_accumulation_steps
        taught_by = None if task.teacher is None else Qwen3Seq2SeqConfig.from_dict(task.teacher)
        teacher = taught_by and TeacherSource("", taught_by, Base(zero_weights(taught_by), None, {}), model.vocab_size)
        engine = create_engine(config, context, model, zero_weights(model), accumulation, teacher)
        words = min(one.vocab_size for one in (model, taught_by or model))
        batch = full_batch(config, config.training.micro_batch_size, words)
        micro_batches = min(accumulation, MICRO_BATCHES)
        num_losses = batch.num_losses * micro_batches * task.world.world_size
        for _ in range(STEPS):
            for number, loss in enumerate(engine.losses([batch] * micro_batches), start=1):
                engine.backward(loss, num_losses=num_losses, last=number == micro_batches)
            if not engine.step().applied:
                raise DsEncDecError("a step of the probe was skipped, so that the optimizer has no states")
        if config.training.eval_samples:
            where = "in an evaluation (training.per_device_eval_batch_size): "
            list(engine.evaluate([full_batch(config, config.training.per_device_eval_batch_size, words)]))
        if device.type == "cpu":
            return Outcome(fits=True, peak_bytes=peak_host_bytes())
        # With the context and the buffers that torch does not count.
        uncounted = task.free_bytes - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        return Outcome(fits=True, peak_bytes=torch.cuda.max_memory_reserved(device) + max(0, uncounted))
    except Exception as error:
        # Where nearly all memory is mapped, some errors, as of threads, do not mention memory.
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        is_full = limit != resource.RLIM_INFINITY and own_status("VmData") > 0.97 * limit
        if not (is_out_of_memory(error) or is_full):
            raise
        of_device = device.type == "cuda" and is_of_device(error, device_capacity(device).free_bytes)
        # The host of a GPU holds offloaded states, whatever the micro-batch.
        smaller_may_fit = not where and (of_device or device.type == "cpu")
        return Outcome(False, 0, where + in_one_line(error), of_device, smaller_may_fit)


def full_batch(config: FullConfig, micro_batch_size: int, vocab_size: int) -> Batch:
    """Return a micro-batch of random tokens without padding, in the fewest and so longest examples."""
    data = config.data
    budgets = token_budgets(data, micro_batch_size, assumed_ratio(data))
    sides = (budgets.encoder_tokens, data.max_encoder_length), (budgets.decoder_tokens, data.max_decoder_length)
    segments = OBJECTIVES[data.objective].segments(data)  # of an example
    count = min(max(-(-tokens // longest) for tokens, longest in sides), budgets.max_examples * segments)
    count -= count % -segments
    draw = np.random.default_rng(0).integers
    encoder_ids, decoder_ids = (
        # Lengths that differ by one at most.
        [
            draw(vocab_size, size=min(tokens // count + (index < tokens % count), longest), dtype=np.int32)
            for index in range(count)
        ]
        for tokens, longest in sides
    )
    task = max(OBJECTIVES[data.objective].tasks, key=lambda name: TASKS[name].continues)  # a teacher has most to do
    mask_id = 0 if TASKS[task].on_encoder else None
    if mask_id is not None:  # the second token of each text is predicted
        encoder_ids = [np.concatenate([[1, mask_id], ids[2:].clip(1)]).astype(np.int32) for ids in encoder_ids]
        decoder_ids = [ids[:1] for ids in encoder_ids]
    pairs = [*zip(encoder_ids, decoder_ids, strict=True)]
    groups = [pairs[first : first + segments] for first in range(0, count, segments)]
    examples = [Example(*first, task, "", tuple(others)) for first, *others in groups]
    return collate(examples, budgets, start_id=0, mask_id=mask_id)


def zero_weights(sizes: ModelSizes) -> WeightSource:
    """Return norms of 1 and matrices of 0: gradients are finite in every precision, and no step is skipped."""
    shapes = parameter_shapes(sizes)

    def weights(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        return torch.full(shapes[name], float(len(shapes[name]) == 1))[rows]

    return weights


def _limit(device: torch.device, task: ProbeTask) -> None:
    """Make allocations that leave less than `HEADROOM` fail. Otherwise a host's kernel would kill some process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)  # `free` excludes this process's context already
        usable = max(0, free - int(task.free_bytes * HEADROOM))
        torch.cuda.set_per_process_memory_fraction(usable / total, device)
        return
    # The limit is on mapped memory; stacks and arenas of threads are mostly unused.
    torch.zeros(2**22).add_(1)  # starts the threads
    limit = int(task.free_bytes * (1 - HEADROOM)) + max(0, own_status("VmData") - own_status("VmRSS"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))


class ProbeProcess:
    """One probe. Use as a context manager: the process ends with it, and with this process."""

    def __init__(self, task: ProbeTask, command: Sequence[str] = PROBE, timeout_seconds: float | None = None) -> None:
        self._outcome: Outcome | None = None
        self._on_cpu, self._began = task.device == "cpu", time.monotonic()
        self._timeout = timeout_seconds or 60 * task.config.infra.distributed_timeout_minutes
        # In a file: a full pipe would block it.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the run's own, which torch must not start again
        }
        with stop_signals_left_to_this_process():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                text=True,
                env=environment,
                start_new_session=True,  # a process group, so that its compilers end with it
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            print(TASK.dump_json(task).decode(), file=self._process.stdin, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._printed):
            assert stream is not None
            with suppress(BrokenPipeError):  # it has not read its task
                stream.close()

    def poll(self) -> Outcome | None:
        """Return the outcome, or None while the probe runs. One that runs for too long has failed."""
        if self._outcome is not None:
            return self._outcome
        code, printed = self._process.poll(), self.last_words()
        if code is None and time.monotonic() - self._began <= self._timeout:
            return None
        memory_lines = [line for line in printed.splitlines() if says_out_of_memory(line) or _NO_STACK in line]
        if code == 0:
            assert self._process.stdout is not None
            self._outcome = Outcome(**json.loads(self._process.stdout.read()))
        elif code == -signal.SIGKILL:
            message = "the kernel killed it, which it does when the machine is out of memory"
            self._outcome = Outcome(fits=False, message=message, smaller_may_fit=self._on_cpu)
        elif code is not None and memory_lines:
            of_device = not self._on_cpu and is_of_device(RuntimeError(memory_lines[-1]), free_device_bytes=0)
            self._outcome = Outcome(fits=False, message=memory_lines[-1], of_device=of_device)
        else:
            how = f"has not ended after {self._timeout / 60:.3g} min (infra.distributed_timeout_minutes)"
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._outcome = Outcome(fits=False, message=f"It {how}; its last words:\n{printed}", failed=True)
        return self._outcome

    def last_words(self) -> str:
        """Return the end of the probe's output so far."""
        file = self._printed.fileno()
        return os.pread(file, _LAST_BYTES, max(0, os.fstat(file).st_size - _LAST_BYTES)).decode(errors="replace")


def main() -> None:
    """Read the task, report, and exit at once: other probes may be waiting for this one in a collective."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first process that the kernel kills for memory
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline()

    def end_with_the_parent() -> None:
        sys.stdin.read()  # until the parent ends
        with suppress(ProcessLookupError):  # without a process group
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=end_with_the_parent, name="parent-watch", daemon=True).start()
    code = 1
    try:
        print(json.dumps(asdict(measure(TASK.validate_json(line)))), file=out, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
