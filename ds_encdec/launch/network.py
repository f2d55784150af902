"""Finds this host's name and addresses among other hosts, and who listens where, for the rendezvous."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

LOOPBACK = "lo"
RETRY_SECONDS = 0.5


def machine() -> str:
    """Return a name that is equal on ranks that see each other's processes: host, system start, and container."""
    facts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with suppress(OSError):
            facts.append(read())
    return " ".join(facts)


def own_address_towards(host: str) -> str | None:
    """Return the address that this host sends from when it reaches `host`, without sending; None if there is no way."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None."""
    import psutil  # not for --help, which knows this module

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return None


def addresses_of(host: str | None) -> set[str]:
    """Return the addresses that this host knows by the name `host`; empty for None and for an unknown name."""
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return set()


def is_loopback(address: str) -> bool:
    """Return whether `address` reaches this host alone."""
    return address == "::1" or address.startswith("127.")


def gloo_interface(
    towards_master: str | None, elsewhere: str | None, *, alone: bool, master: str | None = None
) -> str | None:
    """Return the interface by which others reach this host's ranks; None leaves the choice to gloo. `towards_master`:
    this host's address that reaches MASTER_ADDR. `elsewhere`: the same of a rank on another host. `alone`: all ranks
    are on this host. `master`: MASTER_ADDR. Gloo takes the address of the host's name, as MASTER_ADDR may: Debian makes
    that 127.0.1.1, and others a bridge of containers, which reach no other host."""
    if alone:
        return LOOPBACK if LOOPBACK in (name for _, name in socket.if_nameindex()) else None
    is_here = towards_master is None or is_loopback(towards_master) or towards_master in addresses_of(master)
    if elsewhere is not None and is_here:
        towards_master = own_address_towards(elsewhere)
    return None if towards_master is None or is_loopback(towards_master) else interface_of(towards_master)


def await_listener(host: str, port: int, deadline: float) -> str | None:
    """Wait until a program listens at `host` and `port`; return None, or the problem at the monotonic `deadline`."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return None
        except OSError as error:
            problem = unresolvable(host) or f"nobody listens at {host}:{port} ({error.strerror or error})"
        if time.monotonic() >= deadline:
            return problem
        time.sleep(RETRY_SECONDS)


def unresolvable(host: str) -> str | None:
    """Return why the name in MASTER_ADDR has no address, in words; None if it has one."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"MASTER_ADDR={host} cannot be resolved on {socket.gethostname()}: {error.strerror}"
    return None
