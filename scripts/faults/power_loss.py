"""Replays a run's power losses: a run is traced, every disk is restored that a power loss at any moment may leave, and
the program's own way to resume judges it. No damaged checkpoint may be taken, and no announced one lost; no start
refused, no pointer may dangle, no export be a part of one, and the metrics must have all steps until there."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bench import ENGINES, Bench, ForkedRuns, Result, arguments, collected
from disk_record import Operation, read_operations, tracer
from disk_states import Disk

from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import CheckpointManager, find_checkpoint
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.exports.hugging_face import clear_exports
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.monitor.metrics_file import EventLog
from ds_encdec.monitor.sinks import JsonlSink

SETTINGS = {
    "training__num_train_steps": 8,
    "training__save_steps": 2,
    "training__save_total_limit": 3,
    "training__eval_samples": 8,
    "training__eval_steps": 4,
    "training__logging_steps": 1,
    "training__export_at_end": "true",
    "training__average_checkpoints": 3,
}
WINDOW_STEP = 4  # the save of this step is the window's
WRITES = 50  # of so many writes the moment after one is tried; its data is also part of all later moments
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # disks are written often
POINTERS = ("latest", "best", "final")


def _matches(pattern: str) -> Callable[[Operation], bool]:
    compiled = re.compile(pattern.encode())
    return lambda done: done.kind == "fsync" and compiled.search(done.path) is not None


# What a flush is of, by the path. Each must be missed.
KINDS: dict[str, Callable[[Operation], bool]] = {
    "shards": _matches(r"/step-\d+\.tmp/(?!\.?manifest)(.*/)?[^/]*\.[^/]+$"),
    "folders": _matches(r"/step-\d+\.tmp(/(model|dcp|zero))?$"),
    "manifest": _matches(r"\.manifest\.json"),
    "checkpoints": _matches(r"/checkpoints$"),
    "metrics": _matches(r"/metrics\.jsonl$"),
    "status": _matches(r"/\.run\.json\.[^/]*$"),
    "export": _matches(r"/export/[^/]*\.tmp"),
}
OUTSIDE_WINDOW = ("status", "export")


@dataclass
class Record:
    """A run's file operations, below `root`; its folder is `root/run`."""

    root: Path
    operations: list[Operation]

    def is_of_run(self, done: Operation) -> bool:
        run = os.fsencode(self.root / "run")
        return done.path.startswith(run + b"/") or (done.path == run and done.kind == "fsync")


@dataclass
class Verdict:
    """`states`: distinct disks that were judged. `problems`: how often each was seen. `examples`: the first of each."""

    states: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"{times} × {what}: {self.examples[what]}" for what, times in self.problems.most_common())


def lacking() -> str:
    """Return why no run can be traced here; nothing where one can."""
    if not shutil.which("strace"):
        return "strace is not installed (apt-get install strace)"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return f"strace may trace nothing here: {tried.stderr.strip()[-80:]}" if tried.returncode else ""


def record(engine: str, root: Path) -> Record:
    """Trace a run of two ranks to its end, with an export and an average, saved in the background under FSDP2."""
    (root / "tmp").mkdir(parents=True)
    before, tempfile.tempdir = os.environ.get("TMPDIR"), None
    os.environ["TMPDIR"] = str(root / "tmp")  # the run's log is traced as well
    try:
        with ForkedRuns(tracer(root / "trace")) as runs:
            in_background = str(engine == "fsdp").lower()
            command = arguments(root / "run", engine, **SETTINGS, training__async_save=in_background)
            runs.run(command, ranks=2).ended_with(0)
    finally:
        del os.environ["TMPDIR"]
        os.environ |= {} if before is None else {"TMPDIR": before}
    recorded = Record(root, read_operations(root / "trace", root))
    (root / "trace").unlink()
    disk = Disk(root / "run")
    for done in filter(recorded.is_of_run, recorded.operations):
        disk.apply(done)
    disk.now().write(root / "replayed")  # the record is complete
    subprocess.run(["diff", "-r", "--no-dereference", root / "run", root / "replayed"], check=True)
    return recorded


def replay(recorded: Record, *, window: bool = False, without: str | None = None) -> Verdict:
    """Judge every disk that a power loss may leave: at any moment, or in the `window` of one save. `without`: the kind
    of flush that is taken not to have happened."""
    verdict, disk, seen = Verdict(), Disk(recorded.root / "run"), set[tuple[bytes, object]]()
    exports = {path.name: _files(path) for path in (recorded.root / "run" / "export").iterdir()}
    announced_step, announced_exports, is_inside = 0, frozenset[str](), not window
    with tempfile.TemporaryDirectory(prefix="power-loss-", dir=MEMORY) as scratch:
        for number, done in enumerate(recorded.operations):
            if done.path.endswith(b".log"):
                for step in re.findall(rb"saved step ([\d,]+)", done.content):
                    announced_step = int(step.replace(b",", b""))
                named = re.findall(rb" is in \S+/export/(\w+)", done.content)
                announced_exports |= {name.decode() for name in named}
                if window and announced_step == WINDOW_STEP:
                    break
            if not recorded.is_of_run(done) or (without and KINDS[without](done)):
                continue
            disk.apply(done)
            is_inside |= done.kind == "mkdir" and done.path.endswith(b"step-%08d.tmp" % WINDOW_STEP)
            if not is_inside or (done.kind == "write" and number % WRITES):
                continue
            for state in disk.states():
                key = (state.digest, (announced_step, announced_exports))
                if key in seen:
                    continue
                seen.add(key)
                verdict.states += 1
                folder = Path(scratch) / "run"
                state.write(folder)
                for problem in _problems(folder, announced_step, announced_exports, exports):
                    kind = re.sub(r"\d+", "N", problem.replace(str(folder), "RUN"))[:160]
                    verdict.problems[kind] += 1
                    where = f"after {done.kind} {os.fsdecode(done.path[len(os.fsencode(recorded.root)) :])}"
                    verdict.examples.setdefault(kind, f"{where}; {state.how}")
                shutil.rmtree(folder)
    return verdict


def one_save(bench: Bench) -> Result:
    """Replay the power losses of one save under FSDP2."""
    return _judged(bench, "fsdp", window=True)


def whole_runs(bench: Bench) -> Result:
    """Replay the power losses of a run of each engine."""
    return collected([_judged(bench, engine) for engine in ENGINES])


def flushes_left_out(bench: Bench) -> Result:
    """Leave out each kind of flush, which must show problems that the whole record has not."""
    missed = []
    if why := lacking():
        return Result(skipped=why)
    for kind in KINDS:
        window = kind not in OUTSIDE_WINDOW
        usual, without = (_replayed(bench, "fsdp", window, left_out) for left_out in (None, kind))
        if not without.problems.keys() - usual.problems.keys():
            missed.append(f"nothing is seen without the flush of {kind}")
    return Result(len(KINDS), problems=tuple(missed))


def _judged(bench: Bench, engine: str, *, window: bool = False) -> Result:
    if why := lacking():
        return Result(skipped=why)
    verdict = _replayed(bench, engine, window, None)
    return Result(verdict.states, problems=(f"{engine}: {verdict}",) if verdict.problems else ())


@cache
def _replayed(bench: Bench, engine: str, window: bool, without: str | None) -> Verdict:
    return replay(_recorded(bench, engine), window=window, without=without)


@cache
def _recorded(bench: Bench, engine: str) -> Record:
    return record(engine, bench.new_folder())


def _problems(root: Path, step: int, announced: frozenset[str], exports: dict[str, dict[str, bytes]]) -> Iterator[str]:
    yield from _wrong_pointers(root, may_dangle=True)  # until the next start
    folder = RunFolder(str(root))
    for name, files in exports.items():
        is_there = (folder.exports / name).exists()
        if (is_there and _files(folder.exports / name) != files) or (not is_there and name in announced):
            yield f"export/{name} is {'not whole' if is_there else 'lost'}"
    for path in (folder.run_json, *(root / "evaluation").glob("examples-*.json")):
        try:
            json.loads(path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError:
            yield f"{path.name} is damaged"
    if folder.config_yaml.exists() and b"\0" in (folder.config_yaml.read_bytes() or b"\0"):
        yield "config.yaml is damaged"
    try:
        folder.claim(resume=True)
        found = _resumed(folder)
    except Exception as error:
        yield f"the start is refused: {type(error).__name__}: {error}"
        return
    finally:
        folder.release()
    at = found.manifest.step if found else 0
    if at < step:
        yield f"announced step {step}, and resumes from {at}"
    yield from _wrong_pointers(root)
    lines = folder.metrics.read_bytes().splitlines()
    have = {line["step"] for line in map(json.loads, lines) if "train/loss" in line}
    if not set(range(1, at + 1)) <= have:
        yield "metrics.jsonl lacks steps before the checkpoint"
    try:
        for line in folder.events.read_bytes().splitlines():
            json.loads(line)
    except ValueError:
        yield "ledger.jsonl has a line that is none"


def _resumed(folder: RunFolder) -> Checkpoint | None:
    """Do what a start with `--resume auto` does to the folder."""
    collectives = HostCollectives()
    manager = CheckpointManager(folder.checkpoints, collectives, engine_name="fsdp", keep=3)
    manager.prepare()
    clear_exports(folder)
    found = find_checkpoint(folder.checkpoints, collectives, "auto")
    if found is not None:
        found.read_json("data.json")
        manager.adopt(found, found.training_state())
    JsonlSink(folder.metrics, start_step=found.manifest.step if found else 0).close()
    EventLog(folder.events).write("start", step=0, data_step=0)
    return found


def _wrong_pointers(root: Path, *, may_dangle: bool = False) -> Iterator[str]:
    for name in POINTERS:
        pointer = root / "checkpoints" / name
        if os.path.lexists(pointer):
            try:
                verify_checkpoint(pointer.resolve(strict=True))
            except FileNotFoundError:
                if not may_dangle:
                    yield f"{name} dangles after a resume"
            except Exception as error:
                yield f"{name} leads to a damaged checkpoint: {type(error).__name__}"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
