"""Runs the rendezvous of a run's ranks, before they have a process group.

Rank 0 (or torchrun's agent) keeps a store at MASTER_ADDR and MASTER_PORT. In each round every rank stores a value, or
the error that stops it, and rank 0 makes one answer within the time limit: from all values, from an error as soon as
there is one, or from the missing ranks. Only rank 0 polls; the others wait for its answer, so a thousand ranks cost
little. In the last round the ranks connect to each other in native code, which gloo lets wait five times its timeout:
there a thread waits for the answer, and ends the process if the main thread cannot."""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from ds_encdec.base import types
from ds_encdec.base.terminal import print_error
from ds_encdec.base.types import ConfigError, DsEncDecError, LostRankError
from ds_encdec.launch.agreement import ranks_in_words
from ds_encdec.launch.host import RETRY_SECONDS, await_listener, unresolvable
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.launch.peers import is_broken_connection
from ds_encdec.launch.preemption import awaited, end_process
from ds_encdec.launch.world import World

COMPANY_SECONDS = 1.0  # how long after a rank's error those of others, mostly the same one, may still come
# How long rank 0 keeps the store for others, which may still import torch, to read how the rendezvous ended.
REPORT_SECONDS = 20.0
LEAVE_SECONDS = 5.0  # how long the main thread may take to leave a connection that is known to have failed

# How often this process has joined a rendezvous of a name: the store may be an older one's.
_joined: Counter[tuple[str, int]] = Counter()


class Rendezvous:
    """The ranks of `world`, each of which makes one, and waits there for rank 0. `limit`: of each round, from the
    arrival of rank 0. Raises LostRankError, and ConfigError if another process has the address or this rank."""

    def __init__(self, world: World, limit: timedelta, name: str = "run") -> None:
        self._world = world
        self._seconds = limit.total_seconds()
        self.hosts: dict[int, str] = {}
        _joined[name, world.rank] += 1
        title = f"{name} {_joined[name, world.rank]}"
        if world.world_size == 1:
            store: dist.Store = dist.HashStore()  # one rank needs no port, which another program may have taken
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            store = _store_of_this_start(world, _store_at(world, self._seconds, keeps=False), self._seconds, title)
        else:
            store = _store_at(world, self._seconds, keeps=world.is_main)
        self.store = dist.PrefixStore(title, store)
        self.store.set_timeout(limit)
        with _store_of_rank_zero(world):
            place = self.store.add(f"place {world.rank}", 1)
        if place > 1:
            raise _alone(
                ConfigError,
                f"Two processes claim to be rank {world.rank}, one of them {os.getpid()} on {socket.gethostname()}: "
                f"either both have the same RANK, or another run uses {world.master_addr}:{world.master_port}. Give "
                "each run its own port: --master_port N.",
            )

    def round(
        self,
        name: str,
        mine: Any,
        decide: Callable[[dict[int, Any]], Any] = lambda everyones: None,
        *,
        error: Exception | None = None,
        late: str = "join",
    ) -> Any:
        """Store `mine` (of JSON's types), or `error`; return what rank 0's `decide` makes of all values. A collective.
        `late` completes "did not … within" a time. Raises the error of `decide` or of any rank, and LostRankError."""
        self._give(name, mine, error)
        return self._read(name, self._answer(self.store, name, decide, late))

    def connect(self, action: Callable[[], None]) -> None:
        """Let the ranks connect to each other by `action`, within the limit. Raises as `round` does."""
        if self._world.world_size == 1:
            return action()
        apart: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # one store's calls wait for each other
        answers: list[Mapping[str, Any]] = []
        out = threading.Event()

        def listen() -> None:
            answers.append(answer := self._answer(apart, "connect", lambda everyones: None, "connect to the others"))
            if "error" in answer and not out.wait(LEAVE_SECONDS):
                error = _revived(answer["error"])
                if self._world.is_main or not error.common:  # only this rank can print an error that only it knows
                    print_error(error)
                self._read_by_all(apart, "connect", error)
                end_process(error.exit_code)

        thread = threading.Thread(target=listen, name="meeting", daemon=True)
        thread.start()
        failure: DsEncDecError | None = None
        try:
            action()
        except DsEncDecError as error:
            failure = error
        except Exception as error:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            failure = (
                LostRankError(f"The connection broke (GLOO_SOCKET_IFNAME is {interface}): {error}")
                if is_broken_connection(error)
                else DsEncDecError(f"{type(error).__name__}: {error}")
            )
            failure.__cause__ = error
        out.set()
        self._give("connect", None, failure)
        thread.join()
        try:
            self._read("connect", answers[0])
        except DsEncDecError as ended:
            raise ended from failure  # which shows whether a connection broke

    def _give(self, name: str, value: Any, error: Exception | None) -> None:
        entry = {"host": socket.gethostname(), "value": value} | ({"error": _preserved(error)} if error else {})
        with _store_of_rank_zero(self._world):
            self.store.set(f"{name} {self._world.rank}", json.dumps(entry))
            if error is not None:
                self.store.set(f"{name} problem", "")

    def _answer(
        self, store: dist.Store, name: str, decide: Callable[[dict[int, Any]], Any], late: str
    ) -> Mapping[str, Any]:
        try:
            with _store_of_rank_zero(self._world):
                if not self._world.is_main:
                    # Rank 0 keeps the time limit, so the others wait a little longer.
                    store.wait([f"{name} answer"], timedelta(seconds=self._seconds + COMPANY_SECONDS + REPORT_SECONDS))
                    return dict(json.loads(store.get(f"{name} answer")))
                value, error = attempt(lambda: decide(self._gather(store, name, late)))
                answer = {"value": value} if error is None else {"error": _preserved(error)}
                store.set(f"{name} answer", json.dumps(answer))
                return answer
        except LostRankError as error:  # rank 0 is gone
            return {"error": _preserved(error)}

    def _gather(self, store: dist.Store, name: str, late: str) -> dict[int, Any]:
        everyone = range(self._world.world_size)
        keys = [f"{name} {rank}" for rank in everyone]
        problem = f"{name} problem"
        awaited(self._seconds, lambda: store.check(keys) or store.check([problem]))
        if store.check([problem]):
            awaited(COMPANY_SECONDS, lambda: store.check(keys))
        entries = {rank: json.loads(store.get(keys[rank])) for rank in everyone if store.check([keys[rank]])}
        self.hosts |= {rank: one["host"] for rank, one in entries.items()}
        errors = {rank: one["error"] for rank, one in entries.items() if "error" in one}
        missing = [rank for rank in everyone if rank not in entries]
        # The connections of the ranks present break because of a missing one.
        if missing and all(error["kind"] == LostRankError.__name__ for error in errors.values()):
            words = self._words(missing, late, errors)
            if unresolved := unresolvable(self._world.master_addr):
                raise ConfigError(f"{unresolved}. {words}")
            raise LostRankError(words)
        if errors:
            first = errors[min(errors)]
            alike = [rank for rank, error in errors.items() if error == first]
            who = "" if len(alike) == len(everyone) else f"{ranks_in_words(alike, self.hosts)}: "
            raise _revived(first | {"message": who + first["message"]})
        return {rank: one["value"] for rank, one in entries.items()}

    def _words(self, missing: list[int], late: str, errors: Mapping[int, Mapping[str, Any]]) -> str:
        who = ranks_in_words(missing, self.hosts)
        if errors:
            return (
                f"{ranks_in_words(errors, self.hosts)} cannot connect to {who}, which is gone or out of reach of this "
                f"network interface. {errors[min(errors)]['message']}"
            )
        return (
            f"{who} did not {late} {_within(self._seconds)}, unlike "
            f"{ranks_in_words(self.hosts.keys() - missing, self.hosts)}. Check its log, and that its host can reach "
            f"{self._world.master_addr}:{self._world.master_port}."
        )

    def _read(self, name: str, answer: Mapping[str, Any]) -> Any:
        if "error" not in answer:
            return answer["value"]
        error = _revived(answer["error"])
        self._read_by_all(self.store, name, error)
        raise error

    def _read_by_all(self, store: dist.Store, name: str, error: DsEncDecError) -> None:
        awaited_ranks = len(self.hosts) if isinstance(error, LostRankError) else self._world.world_size
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            store.add(f"{name} read", 1)
            if self._world.is_main:
                awaited(REPORT_SECONDS, lambda: store.add(f"{name} read", 0) >= awaited_ranks)


def _store_of_this_start(world: World, agents: dist.Store, seconds: float, title: str) -> dist.Store:
    """Return a store that rank 0 keeps, whose port is in `agents`: the store of torchrun's agent, or of the run that
    these are probes of. The agent's outlives its ranks, and may hold a port of earlier ones without a listener."""
    key, deadline = f"port of {title}", time.monotonic() + seconds
    if world.is_main:
        store = _tcp_store(world, 0, seconds, keeps=True)
        with _store_of_rank_zero(world):
            agents.set(key, str(store.port))
        return store
    problem: str | None = f"rank 0 did not join {_within(seconds)}"
    while time.monotonic() < deadline:
        with _store_of_rank_zero(world):  # or of the agent beside it
            port = int(agents.get(key)) if agents.check([key]) else None
            if port is not None and (problem := await_listener(world.master_addr, port, 0.0)) is None:
                return _tcp_store(world, port, seconds, keeps=False)
        time.sleep(RETRY_SECONDS)
    raise _alone(LostRankError, f"rank {world.rank} ({socket.gethostname()}) cannot start alone: {problem}")


def _store_at(world: World, seconds: float, *, keeps: bool) -> dist.Store:
    if not keeps and (problem := await_listener(world.master_addr, world.master_port, time.monotonic() + seconds)):
        kind = ConfigError if unresolvable(world.master_addr) else LostRankError
        raise _alone(
            kind,
            f"Rank 0 did not join {_within(seconds)}, so rank {world.rank} ({socket.gethostname()}) cannot start: "
            f"{problem}. Check rank 0's log, that MASTER_ADDR and MASTER_PORT are those of its host, and that no "
            "firewall blocks them.",
        )
    try:
        with _store_of_rank_zero(world):
            return _tcp_store(world, world.master_port, seconds, keeps=keeps)
    except LostRankError as error:
        if "EADDRINUSE" not in str(error.__cause__):
            raise
        raise _alone(
            ConfigError,
            f"MASTER_PORT={world.master_port}: another program on {socket.gethostname()} already listens there, maybe "
            "another run. Give all ranks a free port: --master_port N (deepspeed), --master-port N (torchrun), or "
            "MASTER_PORT if you set it yourself.",
        ) from error


def _within(seconds: float) -> str:
    return f"within {seconds / 60:g} minutes (infra.start_timeout_minutes)"


def _tcp_store(world: World, port: int, seconds: float, *, keeps: bool) -> dist.TCPStore:
    host = "127.0.0.1" if keeps else world.master_addr
    if listener := _own_listener(world, port) if keeps else None:
        host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        world.world_size,
        is_master=keeps,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _own_listener(world: World, port: int) -> socket.socket | None:
    """Return a socket that listens where the other ranks look for rank 0: torch's store would listen on every network.
    None where they may reach this host by another address: by a name, or by one that is this host's own alone."""
    with suppress(ValueError):
        if not (world.counts_nodes and world.num_nodes == 1) and ip_address(world.master_addr).is_loopback:
            return None
        with suppress(OSError):  # another host's address, or a port in use, which the store reports
            for family, *_, place in socket.getaddrinfo(world.master_addr, port, type=socket.SOCK_STREAM):
                with suppress(OSError):
                    return socket.create_server(place[:2], family=family, backlog=socket.SOMAXCONN)
    return None


@contextmanager
def _store_of_rank_zero(world: World) -> Iterator[None]:
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _alone(
            LostRankError,
            f"rank 0, at {world.master_addr}:{world.master_port}, is gone or does not answer, so rank {world.rank} "
            f"({socket.gethostname()}) cannot start. Check rank 0's log. ({str(error).splitlines()[0]})",
        ) from error


def _alone(kind: type[DsEncDecError], message: str) -> DsEncDecError:
    error = kind(message)
    error.common = False
    return error


def _preserved(error: Exception) -> dict[str, Any]:
    return {
        "kind": next(
            kind.__name__ for kind in (*type(error).__mro__, DsEncDecError) if kind.__module__ == types.__name__
        ),
        "message": str(error),
        "exit_code": getattr(error, "exit_code", DsEncDecError.exit_code),
        "common": getattr(error, "common", None) is not False,
    }


def _revived(preserved: Mapping[str, Any]) -> DsEncDecError:
    error: DsEncDecError = getattr(types, preserved["kind"], DsEncDecError)(preserved["message"])
    error.exit_code, error.common = preserved["exit_code"], preserved["common"]
    return error
