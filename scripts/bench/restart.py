"""How long a run stands still when torchrun starts its ranks again, with standbys and without.

    python scripts/bench/restart.py --engine fsdp --kills 5

Two ranks train a tiny model under `torchrun --max-restarts`, with a line of metrics for every step. One rank is killed;
the time is from there to the first line of the next start. Kills with standbys and without take turns.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "model.architecture.hidden_size": 64,
    "data.preprocessing_num_workers": 0,
    "training.num_train_steps": 1_000_000,
    "training.save_steps": 20,
    "training.eval_samples": 0,
    "training.logging_steps": 1,
    "training.report_to": "[]",
}
ENGINES = {"deepspeed": {}, "fsdp": {"infra.offload_optimizer": "none"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="deepspeed")
    parser.add_argument("--kills", type=int, default=3, help="with standbys, and again without (default 3)")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"with standbys": [], "without": []}
    with tempfile.TemporaryDirectory(prefix="restart-") as scratch:
        run = Run(Path(scratch), options.engine, restarts=2 * options.kills)
        try:
            for kind in itertools.islice(itertools.cycle(seconds), 2 * options.kills):
                seconds[kind].append(run.kill_and_wait(stands_by=kind == "with standbys"))
                print(f"{kind}: {seconds[kind][-1]:.1f} s", flush=True)
        finally:
            run.torchrun.terminate()
            run.torchrun.wait()
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    times = medians["without"] / medians["with standbys"]
    print(f"{options.engine}:", *(f"{kind} {value:.1f} s," for kind, value in medians.items()), f"{times:.1f} ×")
    print(f"a standby holds {run.standby_bytes / 2**20:.0f} MiB")


class Run:
    """A run under torchrun in a folder of its own."""

    def __init__(self, folder: Path, engine: str, restarts: int) -> None:
        self.standby_bytes = 0
        self._folder, self._run = folder, folder / "run"
        words = SETTINGS | ENGINES[engine] | {"infra.distributed_type": engine, "infra.output_dir": self._run}
        command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(restarts), str(ROOT / "ds_encdec" / "train.py"), "--config", "quickstart"]
        command += [f"{name}={value}" for name, value in words.items()] + ["--resume", "auto"]
        variables = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (folder / "log").open("w") as log:
            self.torchrun = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)

    def kill_and_wait(self, *, stands_by: bool) -> float:
        """Kill the second rank while every rank has a standby, or none has, and return the seconds to the next step."""
        self._await(lambda: self._steps() >= 25 and len(self._standbys()) == 2)
        standbys = self._standbys()
        self.standby_bytes = max(process.memory_info().rss for process in standbys)
        for process in () if stands_by else standbys:
            process.kill()
        ranks = [one for one in psutil.Process(self.torchrun.pid).children() if one.status() != psutil.STATUS_ZOMBIE]
        starts, began = self._starts(), time.monotonic()
        ranks[1].kill()
        self._await(lambda: self._starts() > starts)
        lines = self._steps()
        self._await(lambda: self._steps() > lines)
        return time.monotonic() - began

    def _standbys(self) -> list[psutil.Process]:
        """Return the processes that listen at an address of this torchrun's standbys: no ranks that were standbys."""
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        name = f"@ds_encdec-standby-{self.torchrun.pid}-"
        listening = {f"socket:[{row[6]}]" for row in rows if row[3] == "00010000" and row[-1].startswith(name)}
        return [one for one in psutil.process_iter() if listening and listening & _open_files(one.pid)]

    def _starts(self) -> int:
        return _count(b'"kind": "start"', self._run / "ledger.jsonl")

    def _steps(self) -> int:
        return _count(b"\n", self._run / "metrics.jsonl")

    def _await(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            said = (self._folder / "log").read_text()[-2000:]
            assert self.torchrun.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)


def _open_files(pid: int) -> set[str]:
    names = set()
    with suppress(OSError):  # the process has ended, or closes a file
        names = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
    return names


def _count(part: bytes, path: Path) -> int:
    return path.read_bytes().count(part) if path.exists() else 0


if __name__ == "__main__":
    main()
