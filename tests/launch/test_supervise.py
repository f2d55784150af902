"""`scripts/supervise.sh`: what it starts again, by what a run says of its end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import QUICKSTART, environment, losses, overrides

REPOSITORY = Path(__file__).parents[2]
SUPERVISE = REPOSITORY / "scripts/supervise.sh"


def supervise(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SUPERVISE), str(folder), *command, "--resume", "auto"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment() | {"SUPERVISE_SECONDS": "0", "SUPERVISE_RESTARTS": "2"} | variables,
    )


ENDS = """
import json, pathlib, sys
folder, code, *endings = sys.argv[1:-2]
folder = pathlib.Path(folder)
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
ending = json.loads(endings[min(number, len(endings) - 1)])
if ending is not None:
    (folder / "run.json").write_text(json.dumps({"reason": str(number)} | ending))
sys.exit(int(code))
"""
"""A launcher: what each of its starts leaves in run.json, and its own exit code."""


def ended(state: str, code: int | None, **more: Any) -> dict[str, Any]:
    return {"state": state, "exit_code": code} | more


@pytest.mark.parametrize(
    ("launcher", "endings", "starts", "code"),
    [
        (1, [ended("preempted", 75), ended("failed", 8), ended("completed", 0)], 3, 0),
        (0, [ended("failed", 9)], 3, 9),  # a launcher's 0 is no success; and it is given up
        (0, [ended("running", None), ended("completed", 0)], 2, 0),
        *((1, [ended("failed", code)], 1, code) for code in (2, 7)),
        (0, [ended("preempted", 75, reason="stopped at step 3 by ds-encdec stop; saved")], 1, 75),
        (2, [None], 1, 2),  # no run was made
        (1, [ended("failed", 9), None, ended("completed", 0)], 3, 0),  # a host that was not back yet
        (1, [ended("preempted", 75), None, None], 3, 1),  # a mistake more likely, found before there is a run
        (0, [None, None], 2, 9),  # pdsh was killed before there was a run
        (0, [ended("completed", 0), None], 1, 0),
        (2, [ended("running", None), None], 2, 2),  # all were killed; then somebody made a mistake
    ],
)
def test_only_what_passes_is_started_again(
    tmp_path: Path, launcher: int, endings: list[dict[str, Any] | None], starts: int, code: int
) -> None:
    words = [sys.executable, "-c", ENDS, str(tmp_path), str(launcher), *map(json.dumps, endings)]
    done = supervise(tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "starts").read_text()) == starts, done.stderr


ORPHAN = """
import fcntl, json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
lock = open(folder / ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if os.fork():
    sys.exit(1)
os.setsid()
for _ in range(600):
    if (folder / "stop").exists():
        break
    time.sleep(0.1)
(folder / "run.json").write_text(json.dumps({"state": "preempted", "exit_code": 75, "reason": "by ds-encdec stop"}))
"""
"""A launcher that ends, and a rank that does not until it is asked by the file."""


def test_a_signal_stops_ranks_that_have_lost_their_launcher(tmp_path: Path) -> None:
    words = ["bash", str(SUPERVISE), str(tmp_path), sys.executable, "-c", ORPHAN, str(tmp_path), "--resume", "auto"]
    script = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    assert script.stderr is not None
    assert "waiting for it" in script.stderr.readline()
    script.terminate()
    _, said = script.communicate(timeout=30)
    assert (script.returncode, "stopped as asked" in said) == (75, True), said


def test_a_command_that_could_not_go_on_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SUPERVISE), str(tmp_path), "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--resume auto" in done.stderr


@pytest.mark.distributed
def test_a_killed_rank_costs_a_start_and_no_step(tmp_path: Path) -> None:
    folder, killed = tmp_path / "run", tmp_path / "killed"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from ds_encdec import train; from ds_encdec.training import trainer\n"
        f"killed, advance = Path({str(killed)!r}), trainer.advance\n"
        "def and_die(state, *rest):\n"
        "    if not killed.exists() and state.global_step == 4:\n"
        "        killed.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return advance(state, *rest)\n"
        "trainer.advance = and_die\nsys.exit(train.main())\n"
    )
    (script := tmp_path / "rank.py").write_text(program)
    settings = {"training__num_train_steps": 6, "training__save_steps": 2, "training__logging_steps": 1}
    engine = {"infra__distributed_type": "fsdp", "training__eval_samples": 0}
    words = ["--config", QUICKSTART, *overrides(folder, **settings, **engine)]
    done = supervise(folder, sys.executable, str(script), *words)
    assert done.returncode == 0, done.stderr
    assert killed.exists()
    assert "ended with code 9" in done.stderr
    assert json.loads((folder / "run.json").read_text())["state"] == "completed"
    assert sorted({step for step, *_ in losses(folder)}) == [1, 2, 3, 4, 5, 6]
