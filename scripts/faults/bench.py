"""Runs real ranks that meet a fault and go on, and compares them with undisturbed runs: the parts of the rows."""

import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what the rows import
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("launch", "faults", "hosts"))]

from forked_runs import ENGINES, ForkedRuns, arguments, status  # noqa: E402

SETTINGS = {"training__num_train_steps": 12, "training__save_steps": 4, "training__logging_steps": 1}
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
LATEST_KILL = 1.2  # the latest moment, in lengths of what is to be hit
Faults = Sequence[Mapping[str, Any]]  # of tests/faults/sabotage.py


@dataclass(frozen=True)
class Result:
    """The outcome of a row. `times`: how often its fault was met. `lost`: the steps that were trained again, at most.
    `problems`: empty if it held. `skipped`: why it cannot be tried here."""

    times: int = 0
    lost: int = 0
    problems: tuple[str, ...] = ()
    skipped: str = ""


class Unavailable(Exception):
    """Why a row cannot be tried here."""


class Bench:
    """Servers of forked runs, a folder for what they write, and the undisturbed runs, each made once. `few`: of what
    can be repeated a row does little."""

    def __init__(self, *, few: bool = False) -> None:
        self.few = few

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="faults-")))
        self._undisturbed: dict[str, Path] = {}
        self._servers: dict[tuple[str, ...], ForkedRuns] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def server(self, *wrapper: str) -> ForkedRuns:
        """Return a server behind the words in front of its command. Raises Unavailable if they do not work."""
        if wrapper not in self._servers:
            if wrapper and subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
                raise Unavailable("no namespaces of users and mounts here")
            self._servers[wrapper] = self._stack.enter_context(ForkedRuns(wrapper))
        return self._servers[wrapper]

    def new_folder(self) -> Path:
        return Path(self._stack.enter_context(TemporaryDirectory(prefix="row-", dir=self._folder))) / "run"

    def undisturbed(self, engine: str, without: Sequence[int] = (), **settings: Any) -> Path:
        """Return the folder of a run that met no fault, nor the data steps `without`."""
        key = json.dumps([engine, without, settings])
        if key not in self._undisturbed:
            never = [{"kind": "skip_data", "steps": list(without)}] if without else []
            self._undisturbed[key] = folder = self.new_folder()
            self.server().run(arguments(folder, engine, **SETTINGS | settings), ranks=2, faults=never).ended_with(0)
        return self._undisturbed[key]

    def was_undisturbed(self, folder: Path, engine: str, **settings: Any) -> None:
        self._undisturbed[json.dumps([engine, (), settings])] = folder


class Fault(Protocol):
    """Runs a row's fault."""

    def __call__(self, bench: Bench) -> Result: ...


@dataclass(frozen=True)
class Row:
    """`promise`: what is done, and what is promised then. `seconds`: how long it takes on two cores if `few` is asked
    for; a row without them is left to full runs."""

    promise: str
    run: Fault
    seconds: int = 0


@dataclass(frozen=True)
class Disturbed:
    """Two ranks meet `faults` under each engine, end with `codes` (one for all, one each, or any) and words that they
    print or `run.json` has (`says`). Unless they are complete, `--resume auto` completes them. In the end all
    checkpoints are whole, and steps, state and exports are those of an undisturbed run, to the last digit. RUN in a
    fault is the run's folder. `without`: data steps that count as never met (`if_rolled_back`: if the last checkpoint
    knows of a rollback). `before`: the faults of an earlier start. `wrapper`: words in front of the command. `disk`:
    the options of a file system of its own, of which what is left is taken elsewhere to go on."""

    faults: Faults = ()
    codes: Sequence[int] = (0,)
    says: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[int] = ()
    if_rolled_back: bool = False
    before: Faults = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    disk: str = ""

    def __call__(self, bench: Bench) -> Result:
        return collected([self.meet(bench, engine) for engine in ENGINES])

    def meet(self, bench: Bench, engine: str) -> Result:
        """Return what one engine has shown; it counts if a process was killed or `codes` say how it ends."""
        try:
            return self._meet(bench, engine)
        except Unavailable as why:
            return Result(skipped=str(why))
        except Exception as error:
            return Result(problems=(f"{engine}: {type(error).__name__}: {error}",))

    def _meet(self, bench: Bench, engine: str) -> Result:
        from ds_encdec.checkpoint.folder import verify_checkpoints

        kept = folder = bench.new_folder()
        runs = bench.server(*self.wrapper)
        if self.disk:
            (mounted := bench.new_folder()).mkdir()
            runs = bench.server(*NAMESPACE, f'mount -t tmpfs -o {self.disk} none "{mounted}" && exec "$@"', "bash")
            folder = mounted / "run"
        faults = [
            {key: value.replace("RUN", str(folder)) if isinstance(value, str) else value for key, value in one.items()}
            for one in self.faults
        ]
        command, options = arguments(folder, engine, **SETTINGS | self.settings), ["--resume", "auto"]
        if self.before:
            bench.server().run(command, ranks=2, faults=[dict(one) for one in self.before])
        met = runs.run(command + options * bool(self.before), ranks=2, faults=faults, limits=self.limits)
        if self.disk:
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
    turn. `rest`: what else is as in a Disturbed."""

    times: int
    begins: str
    ends: str
    settings: Sequence[Mapping[str, Any]]
    number: int = 1
    rest: Disturbed = field(default_factory=Disturbed)
    few: int = 2

    def __call__(self, bench: Bench) -> Result:
        rng, results, seconds = random.Random(self.begins), list[Result](), dict[tuple[str, int], float]()
        for number in range(self.few if bench.few else self.times):
            engine, way = [*ENGINES][number % 2], number // 2 % len(self.settings)
            settings = {**self.rest.settings, **self.settings[way]}
            if (engine, way) not in seconds:
                seconds[engine, way] = self._seconds(bench, engine, settings)
            after = rng.uniform(0.0, LATEST_KILL * seconds[engine, way])
            kill = self._fault(self.number, (after, after + rng.uniform(-0.02, 0.02)))
            row = replace(self.rest, faults=[*self.rest.faults, kill], codes=(), settings=settings)
            result = row.meet(bench, engine)
            results.append(replace(result, problems=tuple(f"{after:.3f} s: {one}" for one in result.problems)))
        shown = collected(results)
        return shown if shown.times else replace(shown, problems=(*shown.problems, "no kill came in time"))

    def _fault(self, number: int, seconds: tuple[float, float]) -> dict[str, Any]:
        fault = {"kind": "killed_within", "begins": self.begins, "ends": self.ends}
        return {**fault, "number": number, "seconds": [max(0.0, one) for one in seconds]}

    def _seconds(self, bench: Bench, engine: str, settings: Mapping[str, Any]) -> float:
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
class Tests:
    """Tests of the suite that hold the fault, as words for pytest."""

    words: Sequence[str]

    def __call__(self, bench: Bench) -> Result:
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-n", "0", *self.words]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        passed = re.search(r"(\d+) passed", ran.stdout)
        if not passed and (skipped := re.search(r"^SKIPPED \[\d+\] \S+ (.*)$", ran.stdout, re.MULTILINE)):
            return Result(skipped=skipped[1])
        problem = f"pytest ended with {ran.returncode}\n{ran.stdout[-6000:]}{ran.stderr[-2000:]}"
        return Result(int(passed[1]) if passed else 0, problems=(problem,) if ran.returncode else ())


@dataclass(frozen=True)
class Function:
    """A function, named as `module:name`, which is imported when it is called."""

    name: str

    def __call__(self, bench: Bench) -> Result:
        module, _, name = self.name.partition(":")
        result: Result = getattr(importlib.import_module(module), name)(bench)
        return result


def collected(results: Sequence[Result]) -> Result:
    skipped = next((one.skipped for one in results if one.skipped), "")
    problems = tuple(problem for one in results for problem in one.problems)
    return Result(sum(one.times for one in results), max(one.lost for one in results), problems, skipped)


def changed_configurations(bench: Bench, count: int = 2000) -> Result:
    """Validate configurations that were changed at random."""
    command = [sys.executable, "tests/nightly/mutate_configs.py", "--count", str(count)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Result(count, problems=(ran.stdout + ran.stderr,) if ran.returncode else ())


def steps(run: Path) -> dict[int, tuple[float, ...]]:
    """Return loss, norm and rate of every step that was finished; a line that a kill has torn is not counted."""
    names, path = ("train/loss", "train/grad_norm", "train/learning_rate"), run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return {line["step"]: tuple(line[name] for name in names) for line in whole if names[0] in line}


def assert_equal(run: Path, undisturbed: Path) -> None:
    """Assert that two runs' steps, last weights and moments, and exports are equal to the last digit."""
    expected, found = steps(undisturbed), steps(run)
    for step, values in expected.items():
        assert found.get(step) == values, f"step {step} was {found.get(step)}, undisturbed {values}"
    for name, digest in _state(undisturbed).items():
        assert _state(run)[name] == digest, f"{name} of the last checkpoint is not that of the undisturbed run"
    assert exports(run) == exports(undisturbed), "the exports are not those of the undisturbed run"


def exports(run: Path) -> dict[str, str]:
    """Return the files of a run's exports, with the digests of the weights."""
    paths = sorted(path for path in (run / "export").glob("*/*") if path.is_file())
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.suffix == ".safetensors"}
    return {str(path.relative_to(run)): digests.get(path, "") for path in paths}


@cache
def _state(run: Path) -> dict[str, str]:
    from ds_encdec.checkpoint.zero_state import open_saved_state

    saved = open_saved_state((run / "checkpoints" / "final").resolve())
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    read = {f"{kind} {name}": saved.read(kind, name).numpy().tobytes() for name in saved.shapes for kind in kinds}
    return {name: hashlib.sha256(content).hexdigest() for name, content in read.items()}
