"""Finds lost ranks, and ends all ranks, with their stacks, when the run hangs.

A killed rank reports nothing; the others meet a broken connection, or wait in a collective for ever. Every rank records
those of its machine that end without a record; if a connection breaks, the others wait some seconds for that record. If
heartbeats (preemption.py) stop for `infra.hang_timeout_minutes`, a watchdog thread writes all stacks into the run's
folder; the others then write theirs, and all end with exit code 8. Launchers kill all ranks once one has ended, so each
waits for the others' files. If native code holds the interpreter's lock, or the file system hangs, a timer of
`faulthandler` ends the rank."""

import faulthandler
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import psutil
import torch.distributed as dist

from ds_encdec.base.plugins import whose_fault
from ds_encdec.base.types import DsEncDecError, HangError, Interrupted, LostRankError, OutOfMemoryError, Preempted
from ds_encdec.launch.agreement import spans
from ds_encdec.launch.disk import atomic_file, unused_path
from ds_encdec.launch.host import machine
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.preemption import StopRequest, awaited, end_process, is_alive
from ds_encdec.launch.run_folder import RunFolder, RunFolderGoneError, start_facts
from ds_encdec.launch.world import World

logger = logging.getLogger(__name__)

_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")
SEARCH_SECONDS = 10.0  # how long a rank that has lost a connection looks for the lost rank
# How long a rank may take to end by itself after another of its machine; launchers kill all 30 seconds after that.
LEAVE_SECONDS = 20.0
_BROKEN_NCCL = ("ncclRemoteError", "remote process exited", "NCCL communicator was aborted")


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank. `machine`: equal for exactly those that see each other's processes."""

    rank: int
    pid: int
    host: str
    machine: str


class Peers:
    """The ranks of a run, each of which makes one; a context manager around all that they do together. `hosts`: the
    ranks of each, `{"node0": "0-7"}`."""

    def __init__(self, run: RunFolder, collectives: HostCollectives) -> None:
        self._run = run
        own = Peer(collectives.rank, os.getpid(), socket.gethostname(), machine())
        self._all: list[Peer] = collectives.gather(own)
        self.hosts = {
            host: spans([peer.rank for peer in self._all if peer.host == host])
            for host in dict.fromkeys(peer.host for peer in self._all)
        }
        self._rank = own.rank
        self._here: dict[Peer, psutil.Process | None] = {}
        for peer in self._all:
            if peer.machine == own.machine:
                self._here[peer] = None
                with suppress(psutil.NoSuchProcess):
                    self._here[peer] = psutil.Process(peer.pid)
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if len(self._all) > 1:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def explain(self, error: BaseException) -> DsEncDecError | None:
        """Return the error to end with if `error` comes from a lost rank, or None; search `SEARCH_SECONDS` at most."""
        if len(self._all) == 1 or not (is_broken_connection(error) or self._gone_here()):
            return None

        def look() -> DsEncDecError | None:
            gone = self._gone_here()
            return self._recorded_end() or (LostRankError(_words(gone)) if gone else None)  # a rank records, then ends

        if found := awaited(SEARCH_SECONDS, look):
            return found
        elsewhere = any(peer not in self._here for peer in self._all)
        gone = "one on another machine is gone" if elsewhere else "no rank is known to be gone"
        return LostRankError(f"the connection between the ranks broke: {gone}, or the network failed ({error})")

    def _recorded_end(self) -> DsEncDecError | None:
        status = self._run.read_status()
        if status.get("state") != "failed" or status == self._run.earlier:
            return None
        end = LostRankError(str(status.get("reason")))
        end.exit_code = status.get("exit_code") or LostRankError.exit_code
        return end

    def _watch(self) -> None:
        while not self._left.wait(1.0):
            gone = self._gone_here()
            status = self._run.read_status() if gone else {}
            if not gone or (status.get("state") in ("completed", "preempted") and status != self._run.earlier):
                continue  # it ended well, and recorded that
            if status.get("state") == "running":
                self._record(_words(gone))
            if not self._left.wait(LEAVE_SECONDS):
                self._record(_words(gone))
                end_process((self._recorded_end() or LostRankError()).exit_code)

    def _record(self, reason: str) -> None:
        if self._recorded_end() is None:  # a rank that failed has recorded it before it ended
            logger.error("rank %d: %s", self._rank, reason)
            record(self._run, "failed", reason=reason, exit_code=LostRankError.exit_code)

    def _gone_here(self) -> list[Peer]:
        return [peer for peer, process in self._here.items() if process is None or not is_alive(process)]


class Watchdog:
    """Ends this rank, and every other, if one takes no step for too long; a context manager around the loop, made on
    every rank. Before the end of the first step only `infra.distributed_timeout_minutes`, the limit of collectives,
    holds. `timeout_minutes`: None for no watch. `grace_seconds`: how long to wait for others' stacks."""

    def __init__(
        self,
        stop: StopRequest,
        timeout_minutes: float | None,
        run: RunFolder,
        collectives: HostCollectives,
        *,
        grace_seconds: float = 15.0,
        poll_seconds: float = 5.0,
    ) -> None:
        self._heartbeat = stop.heartbeat
        self._timeout_seconds = math.inf if timeout_minutes is None else timeout_minutes * 60
        self._run = run
        self._rank, self._world_size = collectives.rank, collectives.world_size
        # One folder per start: stacks of an earlier start are kept, and not taken for new ones.
        self.stacks = collectives.on_rank_zero(lambda: unused_path(run.stacks / time.strftime("%Y%m%d-%H%M%S")))
        self._grace_seconds, self._poll_seconds = grace_seconds, poll_seconds
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._timeout_seconds < math.inf:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._timeout_seconds < math.inf:
            # Errors of ended peers bring a rank here while its watchdog waits for others, and then ends the process.
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._left.wait(self._poll_seconds):
            silent_seconds = self._heartbeat.silent_seconds if self._heartbeat.has_stepped else 0.0
            # Restarted at every turn, so that it runs out only if this thread stops. Standard error goes by its file
            # descriptor: the stream may have been replaced by one without.
            faulthandler.dump_traceback_later(
                max(0.0, self._timeout_seconds - silent_seconds) + 2 * self._grace_seconds, exit=True, file=2
            )
            if silent_seconds > self._timeout_seconds or len(self._missing()) < self._world_size:
                self._end(f"no step for more than {self._timeout_seconds:g} s")

    def _end(self, why: str) -> NoReturn:
        """Write the stacks, wait for the others', and end. `why` is true of some rank, and the same on all."""
        try:
            self.stacks.mkdir(parents=True, exist_ok=True)
            names = "".join(f"  0x{thread.ident or 0:016x} {thread.name}\n" for thread in threading.enumerate())
            with atomic_file(self.stacks / f"rank-{self._rank}.txt") as file:  # the others see a complete file
                file.write(
                    f"rank {self._rank} of {self._world_size}, process {os.getpid()} on {socket.gethostname()}, "
                    f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
                    f"heartbeat {self._heartbeat.beats} was {self._heartbeat.silent_seconds:.1f} s ago "
                    f"(0: busy with a save)\nthreads:\n{names}\n".encode()
                )
                file.flush()
                faulthandler.dump_traceback(file)  # reads no source file: the file system may be what hangs
            awaited(self._grace_seconds, lambda: not self._missing())
            missing = self._missing()
            silent = f" (rank {', '.join(map(str, missing))} wrote none: stopped, or gone)" if missing else ""
            reason = f"{why}; stacks in {self.stacks}{silent}"
            self._run.write_status("failed", reason=reason, exit_code=HangError.exit_code)
            logger.error("rank %d: %s: ending.", self._rank, reason)
        except OSError:
            logger.exception("rank %d: %s; its stacks cannot be written. Ending.", self._rank, why)
        finally:
            end_process(HangError.exit_code)

    def _missing(self) -> list[int]:
        written: list[str] = []
        with suppress(OSError):  # the folder cannot be read: no rank is known to have written its stacks
            written = os.listdir(self.stacks)
        return [rank for rank in range(self._world_size) if f"rank-{rank}.txt" not in written]


def is_broken_connection(error: BaseException | None) -> bool:
    """Return whether `error` is, or comes from, a broken connection between ranks. One that timed out is not broken."""
    while error is not None:
        known = (*_BROKEN_NCCL, *(_BROKEN if "gloo" in str(error) else ()))
        if isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in known):
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(lost: Sequence[Peer]) -> str:
    ranks = ", ".join(f"rank {one.rank} (process {one.pid} on {one.host})" for one in lost)
    return (
        f"{ranks} {'is' if len(lost) == 1 else 'are'} gone without a word: killed (by a signal, or for lack of memory: "
        "see `dmesg`), crashed, or cut off. The other ranks did not fail; `--resume auto` continues from the newest "
        "checkpoint."
    )


@contextmanager
def ending_recorded(folder: RunFolder, world: World, peers: Peers, *, spare: bool) -> Iterator[Callable[..., None]]:
    """Keep `run.json` true: `running` once the yielded function is called (with facts of the run), then how the run
    ended. Earlier errors are recorded too, unless `spare`: then a refused resume keeps the earlier start's good end,
    but replaces a failure, on which a supervisor would act again. The folder keeps the first rank's reason. Every error
    leaves as a DsEncDecError."""
    began = False

    def begin(**facts: Any) -> None:
        nonlocal began
        began = True
        if world.is_main:
            record(folder, "running", **start_facts(world), hosts=peers.hosts, **facts)

    try:
        yield begin
    except BaseException as error:
        named = named_error(error, world.rank, peers)
        keeps_good_end = spare and not began and folder.earlier.get("state") in ("completed", "preempted")
        if isinstance(named, LostRankError) or not (keeps_good_end or isinstance(named, RunFolderGoneError)):
            state = "preempted" if isinstance(named, Preempted) else "failed"
            record(folder, state, reason=str(named), exit_code=named.exit_code)
        if named is error:
            raise
        raise named from error
    if world.is_main:
        record(folder, "completed", exit_code=0)


def record(folder: RunFolder, state: str, **facts: Any) -> None:
    """Write `run.json`, or log why that failed, which does not change how the run ends."""
    try:
        folder.write_status(state, **facts)
    except Exception as error:
        end = f" with exit code {facts['exit_code']}, which that file does not say" if "exit_code" in facts else ""
        logger.error("%s could not be written (%s): the run is %s%s.", folder.run_json, error, state, end)


def named_error(error: BaseException, rank: int, peers: Peers | None = None) -> DsEncDecError:
    """Return the error as a DsEncDecError with an exit code; with `peers`, the one for a lost rank, if any."""
    if isinstance(error, DsEncDecError) and type(error) is not DsEncDecError:
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("stopped by a second Ctrl-C, without a checkpoint")
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"{out_of_memory(error, rank)} A GPU needs less with training.activation_checkpointing=full, "
            "a higher infra.sharding_stage or infra.offload_optimizer=cpu, and in a new run with a smaller "
            "training.per_device_train_batch_size; the host with infra.pin_memory=false, training.async_save=false "
            "or infra.offload_optimizer=none."
        )
    if peers is not None and (lost := peers.explain(error)):
        return lost
    if isinstance(error, DsEncDecError):
        return error
    return DsEncDecError(f"rank {rank}: {whose_fault(error, or_library=False)}")
