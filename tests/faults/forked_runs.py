"""Runs of the program, many a minute: a server imports everything once and forks the ranks of each run.

    with ForkedRuns() as runs:
        finished = runs.run(["--config", …], ranks=2)

Started as a script this module is the server: it reads a request as a line of JSON and answers with one.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from tiny_run import QUICKSTART, REPOSITORY, environment, free_port, overrides

ENGINES: dict[str, dict[str, Any]] = {
    "deepspeed": {"infra__distributed_type": "deepspeed"},  # ZeRO-3 with offload, as the quickstart
    "fsdp": {"infra__distributed_type": "fsdp", "infra__offload_optimizer": "none"},
}
QUIET = {  # a run that only trains and saves
    "training__eval_samples": 0,
    "training__average_checkpoints": 0,
    "training__export_at_end": "false",
    "training__report_to": "none",
}
# oneDNN keeps up to 1,024 compiled kernels, which is hundreds of megabytes on some CPUs, and none in a probe.
VARIABLES = {"DS_ACCELERATOR": "cpu", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


@dataclass(frozen=True)
class Finished:
    """The exit codes of a run's ranks, what they printed together, and the most that any had mapped when it ended.
    `left`: some process of their group lives on."""

    codes: list[int]
    output: str
    data_bytes: int
    left: bool

    def ended_with(self, *codes: int) -> Self:
        """Assert the ranks' exit codes, one for all or one each, and return the run."""
        expected = [*codes] * (len(self.codes) if len(codes) == 1 else 1)
        assert self.codes == expected, self.output
        return self


def arguments(folder: Path, engine: str, *options: str, **changes: Any) -> list[str]:
    """The command line of a tiny run; `changes` use `__` for the dot."""
    return ["--config", QUICKSTART, *overrides(folder, **QUIET | ENGINES[engine] | changes), *options]


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


class ForkedRuns:
    """Starts the server and asks it for runs. `wrapper`: words in front of its command line."""

    def __init__(self, wrapper: tuple[str, ...] = ()) -> None:
        self._command = [*wrapper, sys.executable, __file__]

    def __enter__(self) -> Self:
        rooms = (str(Path(__file__).parents[1] / room) for room in ("launch", "hosts"))
        python_path = os.pathsep.join([str(REPOSITORY), *rooms])
        self._server = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | VARIABLES | {"PYTHONPATH": python_path},
        )
        self.pid = self._server.pid
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()  # the server ends with its input
        self._server.wait(timeout=300)

    def run(
        self,
        arguments: list[str],
        *,
        ranks: int = 1,
        limits: Mapping[str, int] | None = None,
        faults: Sequence[dict[str, Any]] = (),
        places: Sequence[dict[str, Any]] = (),
        program: str = "train",
    ) -> Finished:
        """Run train.py, or a verb if `program` is "cli", to its end on `ranks` ranks, or on as many as there are
        `places`. They are a process group, with all they start. `limits`: what each rank may have in bytes, by the name
        of a limit of the system (RLIMIT_FSIZE). `faults`: see sabotage.py. Each place is a host's: its `first` process
        (hosts/rig.py), the rank's `variables`, its further `arguments`, and the `seconds` after which it is ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = {"arguments": arguments, "ranks": len(places) or ranks, "limits": dict(limits or {})}
        request |= {"faults": list(faults), "places": list(places), "program": program}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Finished(**json.loads(self._server.stdout.readline()))


def serve() -> None:
    """Answer requests until there are none. What every run imports and reads late is here before the first."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # and with it torch's compiler
    import torch.profiler  # noqa: F401

    from ds_encdec.data.sources.builtin_corpus import builtin_documents
    from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: F401
    from ds_encdec.training import build  # noqa: F401

    builtin_documents()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would the runs
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def answer(
    arguments: list[str],
    ranks: int,
    limits: dict[str, int],
    faults: list[Any],
    places: list[dict[str, Any]],
    program: str,
) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log, tempfile.TemporaryDirectory() as held:
        port = free_port()
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                if places:
                    be_rank(log.name, partial(on_host, arguments, **places[rank]))
                be_rank(
                    log.name, partial(on_this_host, rank, ranks, port, arguments, limits, faults, Path(held), program)
                )
            pids.append(pid)
            os.setpgid(pid, pids[0])
        # The first is reaped last: until then nobody else has the group's number.
        codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(pids)}
        data_bytes = max((int(path.read_text()) for path in Path(held).iterdir()), default=0)
        return {
            "codes": [codes[pid] for pid in pids],
            "output": log.read(),
            "data_bytes": data_bytes,
            "left": lives_on(pids[0]),
        }


def lives_on(group: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def be_rank(log: str, program: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = program()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def on_this_host(
    rank: int,
    ranks: int,
    port: int,
    arguments: list[str],
    limits: Mapping[str, int],
    faults: list[Any],
    held: Path,
    program: str,
) -> int:
    import sabotage

    from ds_encdec import cli, train

    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sabotage.apply(faults, rank)
    code = {"train": train.main, "cli": cli.main}[program](arguments)
    for act in sabotage.at_the_end:
        act()
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    (held / str(rank)).write_text(str(int(status["VmData"].split()[0]) * 1024))
    return code


def on_host(own: list[str], *, first: int, variables: dict[str, Any], arguments: list[str], seconds: int) -> int:
    from rig import enter

    from ds_encdec import train

    enter(first)
    signal.alarm(seconds)
    os.environ.update({name: str(value) for name, value in variables.items()})
    return train.main([*own, *arguments])


if __name__ == "__main__":
    serve()
