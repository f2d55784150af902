"""Finds this host's name and addresses among other hosts, who listens where, and whether C compiles here; keeps
OpenMP's threads from spinning on shared cores. It imports no torch."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from ds_encdec.base.types import ConfigError

RETRY_SECONDS = 0.5


def machine() -> str:
    """Return a name that is equal on ranks that see each other's processes: host, system start, and container."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(facts)


def own_address_towards(host: str) -> str | None:
    """Return the address that this host sends from when it reaches `host`, without sending; None if there is no way."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def gloo_interface(
    towards_master: str | None, elsewhere: str | None, *, alone: bool, master: str | None = None
) -> str | None:
    """Return the interface by which others reach this host's ranks; None leaves the choice to gloo. `towards_master`:
    this host's address that reaches MASTER_ADDR. `elsewhere`: the same of a rank on another host. `alone`: all ranks
    are on this host. `master`: MASTER_ADDR. Gloo takes the address of the host's name, as MASTER_ADDR may: Debian makes
    that 127.0.1.1, and others a bridge of containers, which reach no other host."""
    import psutil  # not for --help, which knows this module

    if alone:
        return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None
    of_master: set[str] = set()
    with suppress(OSError):  # an unknown name
        of_master = {str(address[0]) for *_, address in socket.getaddrinfo(master, None)} if master else set()
    is_here = towards_master is None or _is_loopback(towards_master) or towards_master in of_master
    own = own_address_towards(elsewhere) if elsewhere is not None and is_here else towards_master
    if own is None or _is_loopback(own):
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if own in [one.address.partition("%")[0] for one in found]), None)


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


def wait_without_spinning(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep soon after a parallel region, unless the user has set how they wait. Call this before
    torch is imported. GNU's default spins for milliseconds. Attention to documents one by one is thousands of regions
    of microseconds: two threads on busy cores cost 47 s of CPU time, 19 s with these settings, and one thread 17 s."""
    if environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        environ.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="0")  # torch's own OpenMP is GNU's, conda's is LLVM's


def no_gpu(what: str, named: str = "infra.device=cuda") -> ConfigError:
    """Return the error of a field or option `named` that needs a GPU, on a machine that has `what` ("no GPU")."""
    if named.startswith("--"):
        return ConfigError(f"{named}: this machine has {what}. Leave it out to use a GPU only if there is one")
    return ConfigError(
        f"{named}, but this machine has {what}. To run this on the CPU, set infra.device=cpu, or auto, which uses a "
        "GPU if there is one; to try ds_encdec with a small model, take --config ds_configs/quickstart.yaml."
    )


def triton_lacks() -> tuple[str, str] | None:
    """Compile C against Python's headers, which slim images lack, with the compiler that Triton uses for its kernels;
    return the problem, and its fix and cost, or None."""
    cost = "without Triton's kernels the loss takes about five times as long, and layers are not compiled"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed", f"pip install triton: {cost}"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    command = [compiler, "-xc", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-"]
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60)
        problem = done.stderr if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem.strip():
        return None
    return (
        f"{compiler} cannot compile against Python.h, which Triton needs: {' '.join(problem.split())[:200]}",
        f"install gcc and python3-dev (or set CC): {cost}",
    )
