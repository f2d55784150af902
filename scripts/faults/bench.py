"""Runs real ranks that meet a fault and go on, and compares them with undisturbed runs: the parts of the rows."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what the rows import
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("launch", "faults", "hosts"))]

from forked_runs import ENGINES, ForkedRuns, arguments, status  # noqa: E402

SETTINGS: dict[str, Any] = {"training__num_train_steps": 12, "training__save_steps": 4, "training__logging_steps": 1}
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
LATEST_KILL = 1.2  # the latest moment, in lengths of what is to be hit
Faults = Sequence[Mapping[str, Any]]  # of tests/faults/sabotage.py


@dataclass(frozen=True)
class Result:
    """The outcome of a row. `times`: how often its fault was met. `lost`: the most steps that were trained again, where
    that was counted. `problems`: empty if it held. `skipped`: why it cannot be tried here."""

    times: int = 0
    lost: int | None = None
    problems: tuple[str, ...] = ()
    skipped: str = ""


class Unavailable(Exception):
    """Why a row cannot be tried here."""


class Bench:
    """Servers of forked runs, a folder for what they write, and the undisturbed runs, each made once. With `few`, a row
    repeats little."""

    def __init__(self, folder: Path, *, few: bool = False) -> None:
        self._folder, self.few = folder, few
        self._undisturbed: dict[str, Path] = {}
        self._servers: dict[str, ForkedRuns] = {}

    def server(self, mount: str = "") -> ForkedRuns:
        """Return a server, in a namespace in which the command `mount` was run. Raises Unavailable if that fails."""
        if mount not in self._servers:
            wrapper = (*NAMESPACE, f'{mount} && exec "$@"', "bash") if mount else ()
            if wrapper and subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
                raise Unavailable("no namespaces of users and mounts here")
            self._servers[mount] = ForkedRuns(wrapper).__enter__()  # it ends with this process
        return self._servers[mount]

    def new_folder(self) -> Path:
        return Path(mkdtemp(dir=self._folder)) / "run"

    def undisturbed(self, engine: str, without: Sequence[int] = (), **settings: Any) -> Path:
        """Return the folder of a run that met no fault, and did not read the data steps `without`."""
        key = json.dumps([engine, without, settings])
        if key not in self._undisturbed:
            never = [{"kind": "skip_data", "steps": list(without)}] if without else []
            self._undisturbed[key] = folder = self.new_folder()
            self.server().run(arguments(folder, engine, **SETTINGS | settings), ranks=2, faults=never).ended_with(0)
        return self._undisturbed[key]

    def was_undisturbed(self, folder: Path, engine: str, **settings: Any) -> None:
        self._undisturbed[json.dumps([engine, (), settings])] = folder


Fault = Callable[[Bench], Result]


@dataclass(frozen=True)
class Row:
    """`promise`: what is done, and what is promised then. `seconds`: how long it takes on two cores with few
    repetitions; a row without them is left to full runs. `minutes`: after these it is ended as one that failed."""

    promise: str
    run: Fault
    seconds: int = 0
    minutes: float = 15


@dataclass(frozen=True)
class Disturbed:
    """Two ranks meet `faults` under each engine, end with `codes` (one for all, one each, or any) and words that they
    print or `run.json` has (`says`). Unless they are complete, `--resume auto` completes them. In the end all
    checkpoints are whole, and steps, state and exports are those of an undisturbed run, to the last digit. RUN in a
    fault is the run's folder. `without`: data steps that the undisturbed run does not read (`if_rolled_back`: only if
    the last checkpoint knows of a rollback). `before`: the faults of an earlier start. `mount`: a command
    that changes what the ranks see of the file system; DISK in it is the folder around the run's, whose files are
    copied elsewhere to go on."""

    faults: Faults = ()
    codes: Sequence[int] = (0,)
    says: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    without: Sequence[int] = ()
    if_rolled_back: bool = False
    before: Faults = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    mount: str = ""

    def __call__(self, bench: Bench) -> Result:
        return collected([self.meet(bench, engine) for engine in ENGINES])

    def meet(self, bench: Bench, engine: str) -> Result:
        """Return what one engine has shown; it counts if a process was killed or `codes` say how it ends."""
        kept = bench.new_folder()
        try:
            return self._meet(bench, engine, kept)
        except Exception as error:
            error.add_note(f"under {engine}, with {self.faults}")
            raise
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    def _meet(self, bench: Bench, engine: str, kept: Path) -> Result:
        from ds_encdec.checkpoint.folder import verify_checkpoints

        folder = kept
        if "DISK" in self.mount:
            folder = bench.new_folder() / "run"
            folder.parent.mkdir()
        runs = bench.server(self.mount.replace("DISK", str(folder.parent)))
        faults = json.loads(json.dumps([*self.faults]).replace("RUN", str(folder)))
        command, options = arguments(folder, engine, **SETTINGS | self.settings), ["--resume", "auto"]
        if self.before:
            bench.server().run(command, ranks=2, faults=[dict(one) for one in self.before])
        met = runs.run(command + options * bool(self.before), ranks=2, faults=faults, limits=self.limits)
        if folder != kept:
            shutil.copytree(Path(f"/proc/{runs.pid}/root{folder}"), kept, symlinks=True)
            command = arguments(kept, engine, **SETTINGS | self.settings)
        expected = [*self.codes] * (2 if len(self.codes) == 1 else 1) or met.codes
        assert met.codes == expected, f"the ranks ended with {met.codes} instead of {expected}\n{met.output}"
        assert not met.left, f"processes are left over\n{met.output}"
        said = met.output + str(status(kept).get("reason"))
        assert self.says in said, f"{self.says!r} is not said\n{met.output}"
        newest = max((found.manifest.step for found in verify_checkpoints(kept)), default=0)
        lost = max(0, max(steps(kept), default=0) - newest)
        if status(kept)["state"] != "completed" or -9 in met.codes:
            bench.server().run([*command, *options], ranks=2).ended_with(0)
        rolled_back = '"rollbacks": 0' not in (kept / "checkpoints" / "final" / "trainer.json").read_text()
        without = self.without if rolled_back or not self.if_rolled_back else ()
        assert_equal(kept, bench.undisturbed(engine, without, **self.settings))
        return Result(int(bool(self.codes) or -9 in met.codes), lost)


@dataclass(frozen=True)
class Kills:
    """Both ranks are killed, one shortly after the other, at random moments between call `number` of `begins` and the
    return of `ends` (as `module:name`; nothing: the process's start), under each engine and each of `settings` in
    turn, until the kill came before the end `times` times. `rest`: what else is as in a Disturbed."""

    times: int
    begins: str
    ends: str
    settings: Sequence[dict[str, Any]]
    number: int = 1
    rest: Disturbed = field(default_factory=Disturbed)
    few: int = 2

    def __call__(self, bench: Bench) -> Result:
        rng, results, wanted = random.Random(self.begins), list[Result](), self.few if bench.few else self.times
        ways = [(engine, {**self.rest.settings, **settings}) for settings in self.settings for engine in ENGINES]
        seconds = [self._seconds(bench, *way) for way in ways[:wanted]]
        while sum(one.times for one in results) < wanted and len(results) < 2 * wanted:
            number = len(results) % len(seconds)
            after = rng.uniform(0.0, LATEST_KILL * seconds[number])
            kill = self._fault(self.number, (after, after + rng.uniform(-0.02, 0.02)))
            engine, settings = ways[number]
            row = replace(self.rest, faults=[*self.rest.faults, kill], codes=(), settings=settings)
            results.append(row.meet(bench, engine))
        shown = collected(results)
        return shown if shown.times else Result(problems=("no kill came in time",))

    def _fault(self, number: int, seconds: tuple[float, float]) -> dict[str, Any]:
        fault = {"kind": "killed_within", "begins": self.begins, "ends": self.ends}
        return {**fault, "number": number, "seconds": [max(0.0, one) for one in seconds]}

    def _seconds(self, bench: Bench, engine: str, settings: dict[str, Any]) -> float:
        """Return how long it takes without a kill."""
        folder, runs = bench.new_folder(), bench.server()
        command = arguments(folder, engine, **SETTINGS | settings)
        timed = [*map(dict, self.rest.faults), self._fault(0, (0.0, 0.0))]
        if self.rest.before:
            runs.run(command, ranks=2, faults=[dict(one) for one in self.rest.before])
            command += ["--resume", "auto"]
        took = re.findall(r"^it took (\S+) s$", runs.run(command, ranks=2, faults=timed).ended_with(0).output, re.M)
        if not (self.rest.faults or self.rest.before):
            bench.was_undisturbed(folder, engine, **settings)
        return max(map(float, took))


@dataclass(frozen=True)
class Program:
    """A program of the tests that holds the fault, or pytest: the `words` behind `python`."""

    words: Sequence[str]

    def __call__(self, bench: Bench) -> Result:
        ran = subprocess.run([sys.executable, *self.words], cwd=ROOT, capture_output=True, text=True, check=False)
        times = re.search(r"(\d[\d,]*) (?:passed|mutations)", ran.stdout)
        if not times and (skipped := re.search(r"^SKIPPED \[\d+\] \S+ (.*)$", ran.stdout, re.MULTILINE)):
            return Result(skipped=skipped[1])
        problem = f"{self.words[0]} ended with {ran.returncode}\n{ran.stdout[-6000:]}{ran.stderr[-2000:]}"
        return Result(int(times[1].replace(",", "")) if times else 0, problems=(problem,) if ran.returncode else ())


def collected(results: Sequence[Result]) -> Result:
    skipped = next((one.skipped for one in results if one.skipped), "")
    problems = tuple(problem for one in results for problem in one.problems)
    lost = max((one.lost for one in results if one.lost is not None), default=None)
    return Result(sum(one.times for one in results), lost, problems, skipped)


def two_starts(bench: Bench) -> Result:
    """Start one command twice, for a new run and for a resume, and hold what is left against an undisturbed run."""
    constant = SETTINGS | {"training__lr_scheduler_type": "constant"}
    with ForkedRuns() as other, ThreadPoolExecutor(2) as both:
        for engine in ENGINES:
            folder = bench.new_folder()
            for last, options in ((8, ()), (12, ("--resume", "auto"))):
                command = arguments(folder, engine, *options, **constant | {"training__num_train_steps": last})
                ends = [*both.map(lambda runs, words=command: runs.run(words, ranks=2), (bench.server(), other))]
                codes = [end.codes for end in ends]
                assert sorted(codes) == [[0, 0], [3, 3]], f"{engine}: {codes}\n{ends[0].output}\n{ends[1].output}"
            assert_equal(folder, bench.undisturbed(engine, **constant))
    return Result(2 * len(ENGINES))


def steps(run: Path) -> dict[int, tuple[float, ...]]:
    """Return loss, norm and rate of every step that was finished; a line that a kill has torn is not counted."""
    names, path = ("train/loss", "train/grad_norm", "train/learning_rate"), run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return {line["step"]: tuple(line[name] for name in names) for line in whole if names[0] in line}


def assert_equal(run: Path, undisturbed: Path) -> None:
    """Assert that two runs' steps, last weights and moments, and exports are equal to the last digit."""
    expected, found = _left(undisturbed), _left(run)
    for name, value in expected.items():
        assert found.get(name) == value, f"{name} is {found.get(name)}, undisturbed {value}"
    assert found.keys() == expected.keys(), f"the undisturbed run does not have {found.keys() - expected.keys()}"


@cache
def _left(run: Path) -> dict[str, object]:
    """Return by name what must be equal: figures of steps, digests of the last checkpoint's tensors, exported files."""
    from ds_encdec.checkpoint.zero_state import open_saved_state

    left: dict[str, object] = {f"step {step}": figures for step, figures in steps(run).items()}
    saved = open_saved_state((run / "checkpoints" / "final").resolve())
    for name, kind in product(saved.shapes, ("weight", "exp_avg", "exp_avg_sq")):
        left[f"{kind} {name}"] = hashlib.sha256(saved.read(kind, name).numpy().tobytes()).hexdigest()
    for path in (run / "export").glob("*/*"):
        is_of_weights = path.suffix == ".safetensors"
        left[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_of_weights else ""
    return left
