"""What goes wrong in a run, by order: applied in a rank of `forked_runs` before the program starts there. A fault is a
dict with `kind`, the name of a function here, and that function's arguments. Data steps count from 1."""

import dataclasses
import errno
import importlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ds_encdec.base.types import Batch, Example, LossSum
from ds_encdec.checkpoint.folder import CheckpointFolder
from ds_encdec.checkpoint.upload import Uploads
from ds_encdec.data import workers
from ds_encdec.data.lane import Lane
from ds_encdec.data.loader import LaneLoader
from ds_encdec.engine import fsdp2, sharded_engine
from ds_encdec.engine.deepspeed import zero as deepspeed_zero
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch import peers
from ds_encdec.launch.preemption import SAME_CTRL_C_SECONDS, StopRequest
from ds_encdec.training import build

_next_step = LaneLoader.__next__
_losses = sharded_engine.ShardedEngine.losses
_steps_read = 0
_before_reading: list[Callable[[LaneLoader, int], None]] = []
at_the_end: list[Callable[[], None]] = []
_changes_of_data: list[Callable[[list[Batch], int], list[Batch]]] = []
_changes_of_loss: list[Callable[[LossSum], LossSum]] = []
_changes_of_evaluation: list[Callable[[LossSum], LossSum]] = []
_ballast: list[torch.Tensor] = []


def apply(faults: list[dict[str, Any]], rank: int) -> None:
    if faults:
        LaneLoader.__next__ = _read  # type: ignore[method-assign]
        sharded_engine.ShardedEngine.losses = _run  # type: ignore[method-assign]
    for fault in faults:
        globals()[fault["kind"]](rank, **{name: value for name, value in fault.items() if name != "kind"})


def nan_loss(rank: int, *, at: int, on_rank: int) -> None:
    _on_loss(rank == on_rank, at, lambda loss: _with_total(loss, loss.total * torch.nan, loss.sums * torch.nan))


def infinite_loss(rank: int, *, at: int, on_rank: int) -> None:
    """The loss of data step `at` is infinite on one rank; its gradients are what they were."""
    _on_loss(rank == on_rank, at, lambda loss: _with_total(loss, loss.total + torch.inf, loss.sums + torch.inf))


def nan_evaluation(rank: int, *, on_rank: int, first: int, last: int) -> None:
    """Losses of held-out batches are NaN on one rank, once data step `first` and no later one than `last` is read."""

    def spoiled(loss: LossSum) -> LossSum:
        return _with_total(loss, loss.total, loss.sums * torch.nan) if first <= _steps_read <= last else loss

    if rank == on_rank:
        _changes_of_evaluation.append(spoiled)


def gradient_spike(rank: int, *, at: int, factor: float) -> None:
    """The gradients, not the loss, of data step `at` are `factor` times too large."""
    _on_loss(True, at, lambda loss: _with_total(loss, loss.total * factor, loss.sums))


def bad_data(rank: int, *, at: int, until: int) -> None:
    """The targets of data steps `at` to `until` are another, seldom, token each."""

    def spoiled(batch: Batch) -> Batch:
        labels = torch.where(batch.labels >= 0, torch.arange(len(batch.labels)) % 200 + 700, batch.labels)
        return dataclasses.replace(batch, labels=labels)

    _changes_of_data.append(
        lambda batches, step: [spoiled(batch) for batch in batches] if at <= step <= until else batches
    )


def wrong_token(rank: int, *, at: int, on_rank: int, token: int) -> None:
    """In data step `at` the first encoder id of one rank is `token`, as from a damaged file. Without workers."""
    pack = Lane.__next__

    def damaged(lane: Lane) -> list[Example]:
        first, *others = pack(lane)
        if rank == on_rank and _steps_read == at and lane.record["lane"] == rank:
            ids = first.encoder_ids.copy()
            ids[0] = token
            first = dataclasses.replace(first, encoder_ids=ids)
        return [first, *others]

    Lane.__next__ = damaged  # type: ignore[method-assign]


def skip_data(rank: int, *, steps: list[int]) -> None:
    def step(loader: LaneLoader) -> list[Batch]:
        global _steps_read
        _steps_read += 1
        while _steps_read in steps:
            _next_step(loader)
            _steps_read += 1
        return _next_step(loader)

    LaneLoader.__next__ = step  # type: ignore[method-assign]


def rehearse(rank: int) -> None:
    """No fault, but what runs on GPUs do before their first step. Each rank prints the bytes of what it stages."""
    make_trainer = build.Trainer

    def make(**parts: Any) -> Any:
        stage = parts["engine"].stage

        def staged(folder: Path, *, copy: bool) -> StagedSave:
            save = stage(folder, copy=copy)
            print(f"rank {rank} stages {save.num_bytes} bytes after {_steps_read} data steps", flush=True)
            return save

        parts["engine"].stage = staged
        return make_trainer(**parts | {"rehearses": True})

    build.Trainer = make  # type: ignore[assignment, misc]


def damaged_state(
    rank: int, *, tensor: str, value: float, after: int, on_rank: int, parameter: str = "", adds: bool = False
) -> None:
    """Behind the optimizer's step of data step `after`, before anything judges or saves it, one rank's first element of
    `tensor` (weight, exp_avg, exp_avg_sq, computing) is `value`, or with `adds` larger by it. `parameter`: a part of
    the name of the parameter; any by default. Under DeepSpeed a weight is the optimizer's float32 one, and `computing`
    is the one that layers compute with, frozen or not."""
    numbers = itertools.count(1)

    def damage(engine: sharded_engine.ShardedEngine) -> None:
        for name, one in engine.model.named_parameters():
            if tensor == "computing" and parameter in name:
                flat = sharded_engine.local_part(one.detach()).view(-1)
                flat[0] = value + (flat[0] if adds else 0.0)
                print(f"rank {rank}: {name} is now {flat[0]}", flush=True)
                return
        for shard, state in engine._states():
            for piece in shard.pieces:
                if parameter in piece.name:
                    whole = shard.weights if tensor == "weight" else sharded_engine.local_part(state[tensor])
                    flat = whole.detach().view(-1)
                    flat[piece.offset] = value + (flat[piece.offset] if adds else 0.0)
                    print(f"rank {rank}: {tensor} of {piece.name} is now {flat[piece.offset]}", flush=True)
                    return
        raise AssertionError(f"rank {rank} holds no {tensor} of a parameter {parameter!r}")

    def damaging(engine_type: Any) -> None:
        step = engine_type.step

        @torch.no_grad()
        def stepped(engine: Any, *arguments: Any) -> Any:
            result = step(engine, *arguments)
            if next(numbers) == after:
                damage(engine)
            return result

        engine_type.step = stepped

    if rank == on_rank:
        for engine_type in (fsdp2.FSDP2Engine, deepspeed_zero.DeepSpeedEngine):
            damaging(engine_type)


def slow_data(rank: int, *, on_rank: int, seconds: float) -> None:
    if rank == on_rank:
        _before_reading.append(lambda loader, step: time.sleep(seconds))


def full_memory(rank: int, *, at: int, on_rank: int) -> None:
    """One rank may take no more memory from data step `at` on, and its forward pass takes what is left, to the last."""

    def fill() -> None:
        limit = psutil.Process().memory_info().vms + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            _ballast.append(torch.empty(2**22))

    _act_on_loss(rank == on_rank, at, fill)


def killed_rank(rank: int, *, at: int, on_rank: int) -> None:
    _act_on_loss(rank == on_rank, at, lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_in_save(rank: int, *, on_rank: int) -> None:
    """One rank is killed where it would write its part of its second checkpoint. FSDP2 alone."""

    def kill(number: int) -> None:
        if rank == on_rank and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    _before_writing(kill)


def slow_saves(rank: int, *, seconds: float) -> None:
    """Every save takes so long in addition. FSDP2 alone."""
    _before_writing(lambda number: time.sleep(seconds))


def slow_uploads(rank: int, *, seconds: float, alone: bool) -> None:
    """Copies of checkpoints take so long. Unless rank 0 may be `alone` then, they fail once another rank has left."""
    copy = Uploads._copy

    def slow(*arguments: Any) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            siblings = psutil.Process(os.getppid()).children()
            if not alone and any(one.status() == psutil.STATUS_ZOMBIE for one in siblings):
                raise ConnectionError("a launcher would have ended this rank by now")
            time.sleep(0.05)
        copy(*arguments)

    Uploads._copy = slow  # type: ignore[method-assign]


def own_machine(rank: int) -> None:
    """Each rank is on a machine of its own, as far as it knows."""
    peers.machine = peers.socket.gethostname = lambda: f"machine {rank}"


def deaf(rank: int, *, at: int, on_rank: int) -> None:
    """One rank does not come back from data step `at`, not for a broken connection either; nobody waits long for it."""
    peers.LEAVE_SECONDS = 1.0
    _act_on_loss(rank == on_rank, at, lambda: time.sleep(600))


def bug(rank: int, *, at: int, on_rank: int, text: str = "a bug") -> None:
    _act_on_loss(rank == on_rank, at, lambda: {}[text])


def other_order(rank: int, *, on_rank: int) -> None:
    """One rank's norms have other last bits, as if other threads had added them up."""
    norms = torch._foreach_norm
    if rank == on_rank:
        torch._foreach_norm = lambda *given, **more: [norm * (1 + 1e-6) for norm in norms(*given, **more)]


def unread_metrics(rank: int, *, on_rank: int) -> None:
    """One rank fails if it reads metrics.jsonl or the ledger of the run that it resumes."""
    if rank == on_rank:
        _around("ds_encdec.monitor.metrics_file:_step_lines", before=lambda: {}["read"])


def asked_to_stop(rank: int, *, at: int) -> None:
    _act_on_loss(True, at, lambda: os.kill(os.getpid(), signal.SIGTERM))


def deleted_folder(rank: int, *, at: int, path: str) -> None:
    _act_on_loss(rank == 0, at, lambda: shutil.rmtree(path))


def written_flushes(rank: int, *, path: str) -> None:
    """No fault: rank 0 writes down the name of each file that it flushes, as it does so."""
    flush = os.fsync

    def written(descriptor: int) -> None:
        with open(path, "a") as file:
            file.write(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name + "\n")
        flush(descriptor)

    if rank == 0:
        os.fsync = written


def full_disk(rank: int, *, after_commits: int, path: str) -> None:
    """Once the run has committed so many checkpoints its disk is full: `path` takes the rest."""

    def fill() -> None:
        with suppress(OSError), open(path, "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    _behind_commit(after_commits, fill)


def no_inodes(rank: int, *, after_commits: int, path: str) -> None:
    """Once the run has committed so many checkpoints its disk takes no more files: those in `path` are the last."""

    def fill() -> None:
        with suppress(OSError):
            os.mkdir(path)
            for number in itertools.count():
                os.close(os.open(f"{path}/{number}", os.O_CREAT))

    _behind_commit(after_commits, fill)


def stop_file(rank: int, *, after_commits: int, path: str) -> None:
    """The file that asks a run to stop appears while its checkpoint number `after_commits` is committed."""
    _behind_commit(after_commits, Path(path).touch)


def refused_flushes(rank: int, *, path: str, number: int) -> None:
    """The flush number `number` of what the pattern `path` finds fails once, as a broken disk's does."""
    flush, numbers = os.fsync, itertools.count(1)

    def refuse(descriptor: int) -> None:
        if re.search(path, os.readlink(f"/proc/self/fd/{descriptor}")) and next(numbers) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        flush(descriptor)

    os.fsync = refuse


def slow_flushes(rank: int, *, seconds: float) -> None:
    """Every flush takes so long in addition."""
    flush = os.fsync
    os.fsync = lambda descriptor: (time.sleep(seconds), flush(descriptor))[1]


def wrong_clock(rank: int, *, at: int, on_rank: int, seconds: float, pause_seconds: float = 0.0) -> None:
    """From data step `at` on, which takes `pause_seconds` more, the time of day of one rank is wrong by so many
    seconds."""
    clock = time.time

    def jump() -> None:
        time.time = lambda: clock() + seconds
        time.sleep(pause_seconds)

    _act_on_loss(rank == on_rank, at, jump)


def killed_within(rank: int, *, begins: str, ends: str, number: int, seconds: list[float]) -> None:
    """This rank is killed `seconds` (one for each rank) after call `number` of `begins`, a `module:name`; without one,
    after now. Each return of `ends` prints how long it took."""
    began: list[float] = []

    def begin() -> None:
        began.append(time.monotonic())
        if len(began) == number:
            killer = threading.Timer(seconds[rank], os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()

    def end() -> None:
        if began:
            print(f"it took {time.monotonic() - began[-1]:.3f} s", flush=True)

    if begins:
        _around(begins, before=begin)
    else:
        begin()
    _around(ends, behind=end)


def _around(
    function: str, before: Callable[[], object] = lambda: None, behind: Callable[[], object] = lambda: None
) -> None:
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    call = getattr(owner, name)

    def surrounded(*arguments: Any, **options: Any) -> Any:
        before()
        result = call(*arguments, **options)
        behind()
        return result

    setattr(owner, name, surrounded)


def _behind_commit(after_commits: int, act: Callable[[], object]) -> None:
    commit, numbers = CheckpointFolder.commit, itertools.count(1)

    def commit_and_act(folder: CheckpointFolder, step: int, pointers: Any) -> None:
        commit(folder, step, pointers)
        if next(numbers) == after_commits:
            act()

    CheckpointFolder.commit = commit_and_act  # type: ignore[method-assign]


def _before_writing(act: Callable[[int], None]) -> None:
    """Call `act` with the number of the save, from 1, before this rank writes its files."""
    stage, numbers = fsdp2.FSDP2Engine.stage, itertools.count(1)

    def staged(engine: Any, folder: Path, *, copy: bool) -> StagedSave:
        save, number = stage(engine, folder, copy=copy), next(numbers)

        def write() -> list[Path]:
            act(number)
            return save.write()

        return dataclasses.replace(save, write=write)

    fsdp2.FSDP2Engine.stage = staged  # type: ignore[method-assign]


def _on_loss(here: bool, at: int, change: Callable[[LossSum], LossSum]) -> None:
    if here:
        _changes_of_loss.append(lambda loss: change(loss) if _steps_read == at else loss)


def _act_on_loss(here: bool, at: int, act: Callable[[], object]) -> None:
    def change(loss: LossSum) -> LossSum:
        act()
        return loss

    _on_loss(here, at, change)


def _with_total(loss: LossSum, total: torch.Tensor, sums: torch.Tensor) -> LossSum:
    return dataclasses.replace(loss, total=total, sums=sums)


def signal_all(rank: int, *, signals: list[str], at: int) -> None:
    """Every process of the run gets these signals when rank 0 asks for data step `at`."""
    if rank == 0:
        _before_reading.append(lambda loader, step: _signal_group(signals) if step == at else None)


def signalled_in(rank: int, *, function: str, number: str) -> None:
    """This process gets the signal whenever `function` (`module:name`, where it is called) has returned."""
    _around(function, behind=lambda: os.kill(os.getpid(), getattr(signal, number)))


def interrupted_twice(rank: int, *, at: int) -> None:
    """Ctrl-C while data step `at` is read, and once more while it is still saved."""
    commit = CheckpointFolder.commit

    def slow(folder: CheckpointFolder, step: int, pointers: Any) -> None:
        time.sleep(SAME_CTRL_C_SECONDS + 0.5)
        os.kill(os.getpid(), signal.SIGINT)
        commit(folder, step, pointers)

    CheckpointFolder.commit = slow  # type: ignore[method-assign]
    signal_all(rank, signals=["SIGINT"], at=at)


def signal_all_at_start(rank: int, *, signals: list[str]) -> None:
    """Every process of the run gets these signals once rank 0 has started its first data worker."""
    start = workers.start_worker

    def start_and_signal() -> subprocess.Popen[bytes]:
        process = start()
        workers.start_worker = start
        _signal_group(signals)
        return process

    if rank == 0:
        workers.start_worker = start_and_signal


def signal_after_training(rank: int, *, signals: list[str]) -> None:
    """Every rank gets these signals after its last step, and once more when the program is over. One that SIGTERM finds
    without a heartbeat for half a second is taken for stuck."""
    shutdown = build.shutdown
    StopRequest.__init__.__defaults__ = (300.0, 0.2, 0.5, *StopRequest.__init__.__defaults__[3:])  # type: ignore[misc]

    def send() -> None:
        for name in signals:
            os.kill(os.getpid(), signal.Signals[name])

    build.shutdown = lambda: (send(), shutdown())[1]
    at_the_end.append(send)


def kill_workers(rank: int, *, at: int, on_rank: int, signals: list[str]) -> None:
    """Before data step `at` one rank's workers are killed, with what they had ready, and the rank gets `signals`."""

    def kill(loader: LaneLoader, step: int) -> None:
        if rank != on_rank or step != at:
            return
        for process in [worker.process for worker in loader.workers]:
            process.kill()
            assert process.stdout is not None
            process.stdout.read()
        for name in signals:
            os.kill(os.getpid(), signal.Signals[name])

    _before_reading.append(kill)


def count_collectives(rank: int, *, path: str) -> None:
    """No fault: this rank writes down what it asks of the other hosts, by how many data steps it had read by then."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def counted(name: str) -> None:
        call = getattr(dist, name)

        def count(*arguments: Any, **named: Any) -> Any:
            if Path(sys._getframe(1).f_code.co_filename).name == "host_collectives.py":
                counts[_steps_read][name] += 1
            return call(*arguments, **named)

        setattr(dist, name, count)

    for name in ("all_reduce", "broadcast_object_list", "gather", "all_gather", "all_gather_object", "gather_object"):
        counted(name)
    at_the_end.append(lambda: Path(path, f"{rank}.json").write_text(json.dumps(counts)) and None)


def _signal_group(signals: list[str]) -> None:
    for name in signals:
        os.killpg(0, signal.Signals[name])


def _read(loader: LaneLoader) -> list[Batch]:
    global _steps_read
    _steps_read += 1
    for act in _before_reading:
        act(loader, _steps_read)
    batches = _next_step(loader)
    for change in _changes_of_data:
        batches = change(batches, _steps_read)
    return batches


def _run(engine: sharded_engine.ShardedEngine, batches: Sequence[Batch]) -> Iterator[LossSum]:
    for loss in _losses(engine, batches):
        for change in _changes_of_loss if torch.is_grad_enabled() else _changes_of_evaluation:
            loss = change(loss)
        yield loss
