"""Keeps a process ready for each rank that torchrun may start again, so that a restart imports nothing.

Under `torchrun --max-restarts` a rank starts a standby after its first step: a process in a session of its own, which
imports what the rank has imported and waits at an abstract socket. The rank of the next start sends its arguments,
environment, folder and streams there. From then on the standby is that rank; the process that torchrun knows, its
shell, passes signals on and ends with the code that the standby returns, or 9. A standby ends with its torchrun. It
is a new process and no fork of the rank, which holds a GPU and locks."""

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from ds_encdec.base.types import LostRankError
from ds_encdec.launch.preemption import (
    SHELL,
    STOP_SIGNALS,
    end_process,
    is_alive,
    launchers_above,
    process_of_launcher,
)

_MOST_RESTARTS, _RESTARTS = "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"  # which torchrun sets
SWITCH = "DS_ENCDEC_STANDBY"  # the user's: 0 starts none
_STANDS_BY = "DS_ENCDEC_STANDS_BY"  # set in a standby: whose it is, its address, and what it imports
_PACKAGES = ("ds_encdec", "deepspeed")  # whose modules a standby imports, with all that those import
_POLL_SECONDS = 1.0


def run_rank(program: Callable[[], int]) -> int:
    """Run `program`, which reads `sys.argv`, as this process's rank, and return its exit code. A standby runs it
    instead if one is ready; a process that is a standby waits for its rank first."""
    if order := os.environ.pop(_STANDS_BY, None):
        shell = _stand_by(**json.loads(order))
        code = program()
        sys.stdout.flush()
        with suppress(OSError):
            shell.sendall(str(code).encode())
        return code
    passed_on = _pass_on() if _MOST_RESTARTS in os.environ else None
    return program() if passed_on is None else passed_on


def keep_standby(script: str, has_stepped: Callable[[], bool]) -> None:
    """Start a standby that runs `script`, once `has_stepped`, if torchrun may start this rank again.
    `DS_ENCDEC_STANDBY=0` in the environment starts none."""

    def start() -> None:
        while not has_stepped():
            time.sleep(_POLL_SECONDS)
        if not (above := launchers_above(process_of_launcher())):
            return  # torchrun is gone, or unknown; whatever the parent is, it may end no sooner than the machine
        modules = [name for name in list(sys.modules) if name.partition(".")[0] in _PACKAGES]
        order = json.dumps({"torchrun": above[0].pid, "address": _address(above[0]), "modules": modules})
        environment = {name: value for name, value in os.environ.items() if name != SHELL} | {_STANDS_BY: order}
        with suppress(OSError), open(os.devnull, "r+") as nothing:
            # No child of the rank, which may kill its own.
            command = ["setsid", "--fork", sys.executable, script]
            subprocess.run(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, check=False)

    is_wanted = os.environ.get(SWITCH) != "0"
    if is_wanted and int(os.environ.get(_MOST_RESTARTS, "0")) > int(os.environ.get(_RESTARTS, "0")):
        threading.Thread(target=start, name="keep-standby", daemon=True).start()


def _address(torchrun: psutil.Process) -> str:
    # An abstract socket's: it is gone with its process, and no TMPDIR is too long for it.
    return f"\0ds_encdec-standby-{torchrun.pid}-{torchrun.create_time():.2f}-{os.environ['LOCAL_RANK']}"


def _own_peer(connection: socket.socket) -> int:
    """Return the number of the process at the other end, which gets a command line and an environment, or gives them.
    It is 0 if that is another user's or in another container, which may share this one's abstract sockets."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid if user == os.getuid() else 0


def _stand_by(torchrun: int, address: str, modules: list[str]) -> socket.socket:
    """Import, wait for the rank, become it, and return the connection to its shell. Any error ends the process unheard:
    another start's standby has the address, say."""
    agent = psutil.Process(torchrun)
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        server.settimeout(_POLL_SECONDS)
        while True:
            with suppress(TimeoutError, psutil.Error):
                shell, _ = server.accept()
                if (pid := _own_peer(shell)) and psutil.Process(pid).ppid() == torchrun:
                    break
            if not is_alive(agent):
                os._exit(0)
    shell.settimeout(60.0)
    first, streams, _, _ = socket.recv_fds(shell, 1, 3)
    rank = json.loads(first + shell.makefile("rb").readline())
    shell.settimeout(None)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv[:] = rank["arguments"]
    os.environ.clear()
    os.environ.update(rank["environment"])
    os.chdir(rank["folder"])
    shell.sendall(f"{os.getpid()}\n".encode())

    def end_with_shell() -> None:
        if not shell.recv(1):
            end_process(LostRankError.exit_code)

    threading.Thread(target=end_with_shell, name="shell-watch", daemon=True).start()
    return shell


def _pass_on() -> int | None:
    """Let a standby run this process's rank, and return its exit code; None if none is ready."""
    shell = socket.socket(socket.AF_UNIX)
    try:
        shell.connect(_address(psutil.Process(os.getppid())))
        if not _own_peer(shell):
            return None
        environment = {**os.environ, SHELL: str(os.getpid())}
        rank = {"arguments": sys.argv, "folder": os.getcwd(), "environment": environment}
        # Flushed by nobody else: this process has written nothing.
        socket.send_fds(shell, [json.dumps(rank).encode() + b"\n"], [0, 1, 2])
        replies = shell.makefile()
        standby = int(replies.readline())
    except (OSError, ValueError, psutil.Error):
        return None

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(standby, number)

    for number in (*STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, pass_on)
    with suppress(OSError, ValueError):
        return int(replies.read())
    return LostRankError.exit_code
