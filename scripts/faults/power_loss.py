"""Replays a run's power losses: a run is traced, every disk is restored that a power loss at any moment may leave, and
the program's own way to resume judges it. No damaged checkpoint may be taken and no announced one lost, no start be
refused, no pointer dangle; exports must be whole, and the metrics must have all steps until there."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

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

SETTINGS = {"training__num_train_steps": 8, "training__save_steps": 2, "training__save_total_limit": 3,
    "training__logging_steps": 1, "training__eval_samples": 8, "training__eval_steps": 4,
    "training__export_at_end": "true", "training__average_checkpoints": 3}  # fmt: skip
WINDOW_STEP = 4  # the save of this step is the window's
WRITES = 50  # the moments after every 50th write are tried; what the others wrote is part of later moments
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # disks are written often


# A flush of what, by the path. A power loss without one of these must be seen to do harm.
KINDS = {
    "shards": rb"/step-\d+\.tmp/(?!\.?manifest)(.*/)?[^/]*\.[^/]+$",
    "folders": rb"/step-\d+\.tmp(/(model|dcp|zero))?$",
    "manifest": rb"\.manifest\.json",
    "checkpoints": rb"/checkpoints$",
    "metrics": rb"/metrics\.jsonl$",
    "status": rb"/\.run\.json\.[^/]*$",
    "export": rb"/export/[^/]*\.tmp",
}


class Record(NamedTuple):
    """The file operations on a run's folder, `root/run`, and on its log, which is elsewhere below `root`."""

    root: Path
    operations: list[Operation]


@dataclass
class Verdict:
    """`states`: the number of distinct disks that were judged. `problems`: on which of them each problem was found."""

    states: int = 0
    problems: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __str__(self) -> str:
        return "\n".join(f"{len(where)} × {what}: {where[0]}" for what, where in self.problems.items())


def lacking() -> str:
    """Return why no run can be traced here; nothing where one can."""
    if not shutil.which("strace"):
        return "strace is not installed (apt-get install strace)"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return f"strace may trace nothing here: {tried.stderr.strip()[-80:]}" if tried.returncode else ""


def record(engine: str, root: Path) -> Record:
    """Trace a run of two ranks to its end, with an export and an average, saved in the background under FSDP2."""
    (root / "tmp").mkdir(parents=True)
    with ForkedRuns(("env", f"TMPDIR={root / 'tmp'}", *tracer(root / "trace"))) as runs:  # its log is traced as well
        in_background = str(engine == "fsdp").lower()
        command = arguments(root / "run", engine, **SETTINGS, training__async_save=in_background)
        runs.run(command, ranks=2).ended_with(0)
    run, disk, operations = os.fsencode(root / "run"), Disk(root / "run"), list[Operation]()
    for done in read_operations(root / "trace", root):
        is_of_log = done.path.endswith(b".log")
        if is_of_log or done.path.startswith(run + b"/") or (done.path == run and done.kind == "fsync"):
            operations.append(done)
            if not is_of_log:
                disk.apply(done)
    (root / "trace").unlink()
    disk.now().write(root / "replayed")  # the record is complete
    subprocess.run(["diff", "-r", "--no-dereference", root / "run", root / "replayed"], check=True)
    return Record(root, operations)


def replay(recorded: Record, *, window: bool = False, without: bytes | None = None) -> Verdict:
    """Judge every disk that a power loss may leave: at any moment, or in the `window` of one save. `without`: as if
    the flushes of paths with this pattern had done nothing, from the first of them to the first disk with a problem."""
    verdict, disk, seen = Verdict(), Disk(recorded.root / "run"), set[tuple[bytes, object]]()
    exports = {path.name: _files(path) for path in (recorded.root / "run" / "export").iterdir()}
    announced_step, announced_exports, is_inside = 0, frozenset[str](), not (window or without)
    with tempfile.TemporaryDirectory(prefix="power-loss-", dir=MEMORY) as scratch:
        folder = Path(scratch) / "run"
        for number, done in enumerate(recorded.operations):
            if done.path.endswith(b".log"):
                for step in re.findall(rb"saved step ([\d,]+)", done.content):
                    announced_step = int(step.replace(b",", b""))
                named = re.findall(rb" is in \S+/export/(\w+)", done.content)
                announced_exports |= {name.decode() for name in named}
                if window and announced_step == WINDOW_STEP:
                    break
                continue
            if without and done.kind == "fsync" and re.search(without, done.path):
                is_inside = True
                continue
            disk.apply(done)
            is_inside |= window and done.kind == "mkdir" and done.path.endswith(b"step-%08d.tmp" % WINDOW_STEP)
            if not is_inside or (done.kind == "write" and number % WRITES):
                continue
            for state in disk.states():
                key = (state.digest(), (announced_step, announced_exports))
                if key in seen:
                    continue
                seen.add(key)
                verdict.states += 1
                state.write(folder)
                for problem in _problems(folder, announced_step, announced_exports, exports):
                    kind = re.sub(r"\d+", "N", problem.replace(str(folder), "RUN"))[:160]
                    where = f"after {done.kind} {os.fsdecode(done.path[len(os.fsencode(recorded.root)) :])}"
                    verdict.problems[kind].append(f"{where}; {state.how}")
                shutil.rmtree(folder)
                if without and verdict.problems:
                    return verdict
    return verdict


def one_save(bench: Bench) -> Result:
    """Replay the power losses of one save under FSDP2."""
    return _judged(bench, "fsdp", window=True)


def whole_runs(bench: Bench) -> Result:
    """Replay the power losses of a run of each engine."""
    return collected([_judged(bench, engine) for engine in ENGINES])


def flushes_left_out(bench: Bench) -> Result:
    """Leave out each kind of flush of a record in which, as the other rows show, there is no problem with all."""
    if why := lacking():
        return Result(skipped=why)
    seen = {kind: replay(_recorded(bench, "fsdp"), without=pattern).problems for kind, pattern in KINDS.items()}
    missed = tuple(f"nothing is seen without the flush of {kind}" for kind, problems in seen.items() if not problems)
    return Result(len(KINDS), problems=missed)


def _judged(bench: Bench, engine: str, *, window: bool = False) -> Result:
    if why := lacking():
        return Result(skipped=why)
    verdict = replay(_recorded(bench, engine), window=window)
    return Result(verdict.states, problems=(f"{engine}: {verdict}",) if verdict.problems else ())


@cache
def _recorded(bench: Bench, engine: str) -> Record:
    return record(engine, bench.new_folder())


def _problems(root: Path, step: int, announced: frozenset[str], exports: dict[str, dict[str, bytes]]) -> Iterator[str]:
    yield from _wrong_pointers(root, resumed=False)
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
    yield from _wrong_pointers(root, resumed=True)
    lines = folder.metrics.read_bytes().splitlines()
    have = {line["step"] for line in map(json.loads, lines) if "train/loss" in line}
    if not set(range(1, at + 1)) <= have:
        yield "metrics.jsonl lacks steps before the checkpoint"
    try:
        for line in folder.events.read_bytes().splitlines():
            json.loads(line)
    except ValueError:
        yield "a line of ledger.jsonl is not JSON"


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


def _wrong_pointers(root: Path, *, resumed: bool) -> Iterator[str]:
    places = {name: root / "checkpoints" / name for name in ("latest", "best", "final")}
    for path in {place.resolve() for place in places.values() if place.exists()}:
        try:
            verify_checkpoint(path)
        except Exception as error:
            yield f"a pointer leads to a damaged checkpoint: {type(error).__name__}"
    if resumed:  # until then one may dangle
        yield from (f"{name} dangles" for name, place in places.items() if place.is_symlink() and not place.exists())


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
