"""What the matrix's rows are made of: runs of real ranks that meet a fault and go on, held against undisturbed ones."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self
from xml.etree import ElementTree

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what the rows import
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("launch", "faults", "hosts"))]

from forked_runs import ENGINES, ForkedRuns, arguments, status  # noqa: E402

STEPS = 12
SETTINGS = {"training__num_train_steps": STEPS, "training__save_steps": 4, "training__logging_steps": 1}


@dataclass(frozen=True)
class Result:
    """What a row has shown. `times`: how often its fault was met. `lost`: in words. `problems`: empty if it held.
    `skipped`: why it cannot be tried here."""

    times: int = 0
    lost: str = "nothing"
    problems: tuple[str, ...] = ()
    skipped: str = ""


class Unavailable(Exception):
    """Why a row cannot be tried here."""


class Bench:
    """The server of forked runs, a folder for what they write, and the undisturbed runs, each made once."""

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="faults-")))
        self._undisturbed: dict[str, Path] = {}
        self._servers: dict[tuple[str, ...], ForkedRuns] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def runs(self) -> ForkedRuns:
        return self.server(())

    def server(self, wrapper: Sequence[str]) -> ForkedRuns:
        """Return a server behind `wrapper`, words in front of its command. Raises Unavailable if they do not work."""
        if (words := tuple(wrapper)) not in self._servers:
            if words and subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
                raise Unavailable("no namespaces of users and mounts here")
            self._servers[words] = self._stack.enter_context(ForkedRuns(words))
        return self._servers[words]

    def disk(self, options: str) -> tuple[ForkedRuns, Path, Path]:
        """Return a server that sees a new file system, its folder there, and the same as it is seen from here."""
        mounted = self.new_folder()
        mounted.mkdir()
        unshared = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
        runs = self.server((*unshared, f'mount -t tmpfs -o {options} none "{mounted}" && exec "$@"', "bash"))
        return runs, mounted, Path(f"/proc/{runs.pid}/root{mounted}")

    def new_folder(self) -> Path:
        return Path(self._stack.enter_context(TemporaryDirectory(prefix="row-", dir=self.folder))) / "run"

    def undisturbed(self, engine: str, without: Sequence[int] = (), **settings: Any) -> Path:
        """Return the folder of a run that met no fault, nor the data steps `without`."""
        key = json.dumps([engine, without, settings])
        if key not in self._undisturbed:
            never = [{"kind": "skip_data", "steps": list(without)}] if without else []
            self._undisturbed[key] = folder = self.new_folder()
            self.runs.run(arguments(folder, engine, **SETTINGS | settings), ranks=2, faults=never).ended_with(0)
        return self._undisturbed[key]


class Fault(Protocol):
    """What a row does."""

    def __call__(self, bench: Bench) -> Result: ...


@dataclass(frozen=True)
class Disturbed:
    """Two ranks meet `faults` (sabotage.py) under each engine, end with `codes` (one for all or one each) and words
    that they print or `run.json` has (`says`). Unless they are complete, `--resume auto` completes them. In the end
    steps and state must equal those of an undisturbed run, to the last digit. `without`: data steps that count as
    never met. `limits`: of the system. `wrapper`: words in front of the command. `disk`: the options of a
    file system of its own, of which what is left is taken elsewhere to go on."""

    faults: Sequence[Mapping[str, Any]] = ()
    codes: Sequence[int] = (0,)
    says: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[int] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    disk: str = ""

    def __call__(self, bench: Bench) -> Result:
        problems, lost = [], [0]
        for engine in ENGINES:
            try:
                lost.append(self._meet(bench, engine))
            except AssertionError as error:
                problems.append(f"{engine}: {error}")
            except Unavailable as why:
                return Result(skipped=str(why))
        return Result(len(ENGINES), in_steps(max(lost)), tuple(problems))

    def _meet(self, bench: Bench, engine: str) -> int:
        from ds_encdec.checkpoint.folder import verify_checkpoints

        kept = folder = bench.new_folder()
        runs, mounted = bench.server(self.wrapper), None
        if self.disk:
            runs, mounted, seen = bench.disk(self.disk)
            folder = mounted / engine
        places = {"{run}": str(folder), "{disk}": str(mounted)}
        faults = [{name: places_in(value, places) for name, value in fault.items()} for fault in self.faults]
        command = arguments(folder, engine, **SETTINGS | self.settings)
        met = runs.run(command, ranks=2, faults=faults, limits=self.limits)
        if mounted:
            shutil.copytree(seen / engine, kept, symlinks=True)
            command = arguments(kept, engine, **SETTINGS | self.settings)
        folder, expected = kept, [*self.codes] * (2 if len(self.codes) == 1 else 1)
        assert met.codes == expected, f"the ranks ended with {met.codes} instead of {expected}\n{met.output}"
        assert not met.left, f"processes are left over\n{met.output}"
        assert self.says in met.output + status(folder).get("reason", ""), f"{self.says!r} is not said\n{met.output}"
        newest = max((found.manifest.step for found in verify_checkpoints(folder)), default=0)
        trained = max(steps(folder), default=0)
        if status(folder)["state"] != "completed":
            bench.runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
        assert_equal(folder, bench.undisturbed(engine, self.without, **self.settings))
        return max(0, trained - newest)


@dataclass(frozen=True)
class Tests:
    """Tests of the suite that hold the fault: nodes of pytest. `marker`: of tests that it leaves out by default."""

    nodes: Sequence[str]
    marker: str = ""

    def __call__(self, bench: Bench) -> Result:
        report = bench.new_folder().with_suffix(".xml")
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-n", "0", f"--junitxml={report}", *self.nodes]
        command += ["-m", self.marker] if self.marker else []
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
        skipped = [str(one.get("message")) for case in cases for one in case.iter("skipped")]
        if cases and len(skipped) == len(cases):
            return Result(skipped=skipped[0])
        problems = (f"pytest ended with {ran.returncode}\n{ran.stdout[-6000:]}{ran.stderr[-2000:]}",)
        return Result(len(cases) - len(skipped), problems=problems if ran.returncode else ())


@dataclass(frozen=True)
class Function:
    """A function of a module beside this one, imported when it is called; `values` are its arguments."""

    module: str
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, bench: Bench) -> Result:
        result: Result = getattr(importlib.import_module(self.module), self.name)(bench, **self.values)
        return result


@dataclass(frozen=True)
class Row:
    """What `run` does is in docs/faults.md, with what it promises. `seconds`: about how long it takes on two cores.
    `quick`: does the same less often, in `quick_seconds` (else in `seconds`), where time is short."""

    seconds: int
    run: Fault
    quick: Fault | None = None
    quick_seconds: int = 0


def steps(run: Path) -> dict[int, tuple[float, ...]]:
    """Return loss, norm and rate of every step that was finished; a line that a kill has torn is not counted."""
    names, path = ("train/loss", "train/grad_norm", "train/learning_rate"), run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return {line["step"]: tuple(line[name] for name in names) for line in whole if names[0] in line}


def assert_equal(run: Path, undisturbed: Path) -> None:
    """Assert that the steps of two runs, and their last weights and moments, are equal to the last digit."""
    expected, found = steps(undisturbed), steps(run)
    for step, values in expected.items():
        assert found.get(step) == values, f"step {step} was {found.get(step)}, undisturbed {values}"
    for name, digest in _state(undisturbed).items():
        assert _state(run)[name] == digest, f"{name} of the last checkpoint is not that of the undisturbed run"


@cache
def _state(run: Path) -> dict[str, str]:
    from ds_encdec.checkpoint.zero_state import open_saved_state

    saved = open_saved_state((run / "checkpoints" / "final").resolve())
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    read = {f"{kind} {name}": saved.read(kind, name).numpy().tobytes() for name in saved.shapes for kind in kinds}
    return {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}


def in_steps(lost: int) -> str:
    """Return what was lost in words."""
    return "nothing" if lost == 0 else "1 step" if lost == 1 else f"{lost} steps"


def fast_folder() -> str | None:
    """Return a folder in memory for what is written often; None for the usual one where there is no such."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def places_in(value: Any, places: Mapping[str, str]) -> Any:
    for name, path in places.items():
        value = value.replace(name, path) if isinstance(value, str) else value
    return value
