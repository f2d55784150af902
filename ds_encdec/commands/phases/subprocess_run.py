"""Run the ordinary program in a subprocess, under a launcher: a run of its own leaves no memory behind. The launcher
gets its own session: a Ctrl-C would otherwise end it before its ranks have saved."""

import ctypes
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.preemption import STOP_SIGNALS
from ds_encdec.launch.world import LAUNCHER_PROGRAMS, TASK_PROGRAMS, free_port
from ds_encdec.registry.engines import ByEngine

TRAIN_PROGRAM = Path(__file__).resolve().parents[2] / "train.py"
POLL_SECONDS = 0.5
# Time that ranks may outlive their launcher: they give themselves 300 seconds to save (launch/preemption.py).
LAST_RANKS_SECONDS = 330.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def launcher_command(config: FullConfig, launcher: str | None) -> list[str]:
    """Return the words before the program: those of `launcher`, or a command that starts `infra.num_gpus` ranks here.
    srun and mpirun start any program, so `python` is added unless named. Raises ConfigError for an unknown launcher."""
    if launcher is not None:
        words = shlex.split(launcher)
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"--launcher {launcher!r}: there is no such program; give e.g. 'deepspeed --num_gpus 8'")
        programs = {Path(word).name for word in words}
        starts_python = programs & LAUNCHER_PROGRAMS or any(name.startswith("python") for name in programs)
        return [*words, sys.executable, "-u"] if programs & TASK_PROGRAMS and not starts_python else words
    if (ranks := config.infra.num_gpus) == 1:
        return [sys.executable]
    import torch

    from ds_encdec.engine.select import resolve_engine

    beside = Path(sys.executable).with_name("deepspeed")  # the console script of this environment
    commands: ByEngine[list[str]] = ByEngine(
        deepspeed=[
            # Without the variable, each of the launcher's processes would warn that there is no GPU.
            *([] if torch.cuda.is_available() else ["env", "DS_ACCELERATOR=cpu"]),
            *(str(beside) if beside.exists() else beside.name, "--log_level", "warning"),
            *("--num_gpus", str(ranks), "--master_port", str(free_port())),
        ],
        fsdp=[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
    )
    return commands[resolve_engine(config)]


class SubprocessRun:
    """Runs the program and passes on stop signals; use it in the main thread, as a context manager. Between two runs a
    signal is only kept, in `signal_name`."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._pending: list[int] = []

    def __enter__(self) -> "SubprocessRun":
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # nohup
        self._previous_handlers = {
            number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS if number not in ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """Run `command` to its end and that of all its ranks; return the launcher's exit code."""
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)
        launcher = psutil.Process(child.pid)
        ranks: list[psutil.Process] = []
        complete = False
        try:
            while child.poll() is None:
                if not complete or self._pending:  # listing all processes takes milliseconds
                    found = _below(launcher, _is_rank)
                    complete = 0 < len(found) <= len(ranks)  # they start one after the other
                    ranks = found or ranks
                while self._pending:
                    number = self._pending.pop(0)
                    # Signal the ranks themselves, since `deepspeed` would end without them; or, if the ranks are on
                    # other hosts, srun or mpirun, which pass SIGUSR1 on, and at SIGTERM kill their ranks.
                    starters = [] if ranks else _below(launcher, lambda process: process.name() in TASK_PROGRAMS)
                    for process in ranks or starters or [launcher]:
                        with suppress(psutil.NoSuchProcess):
                            process.send_signal(signal.SIGUSR1 if starters else number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_SECONDS)
        finally:
            # DeepSpeed's launcher may end before its ranks, which then save and end by themselves.
            _, remaining = psutil.wait_procs(ranks, LAST_RANKS_SECONDS)
            for rank in remaining:
                rank.kill()
        return child.returncode

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
        self._pending.append(number)


def _below(launcher: psutil.Process, is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    try:  # the launcher may itself be the only rank
        return [process for process in (launcher, *launcher.children(recursive=True)) if is_wanted(process)]
    except psutil.Error:
        return []


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    launchers = {Path(word).name for word in words[1:4]}.intersection(LAUNCHER_PROGRAMS)  # after python's own -u and -m
    return str(TRAIN_PROGRAM) in words and Path(words[0]).name.startswith("python") and not launchers


def _end_with_parent() -> None:
    # The kernel sends SIGTERM to this process, which is about to become the launcher, when its parent dies.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
