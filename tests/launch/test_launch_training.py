"""Scripts up to the launcher: how they start it, and what they refuse before."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import REPOSITORY, environment

LAUNCHER = """#!/bin/bash
echo "$(basename "$0") $*"
echo "$WANDB_PROJECT"
env | grep -o ^MLFLOW_TRACKING_TOKEN || true
"""
SECRETS = {
    **dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "HF_PASSWORD", "MLFLOW_TRACKING_TOKEN"), "secret"),
    "WANDB_BASE_URL": "https://me:secret@proxy",
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "mpi").mkdir()
    for name in ("launch_training.sh", "quickstart.sh", "mpi/run.sh"):
        (tmp_path / name).write_text((REPOSITORY / "scripts" / name).read_text())
    (tmp_path / "venv.sh").write_text(f"ROOT={REPOSITORY}; PATH={tmp_path}:$PATH\n")
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    programs = {"python": python, "ds-encdec": python.replace('"$@"', '-m ds_encdec.cli "$@"')}
    add_programs(tmp_path, **programs, **dict.fromkeys(("deepspeed", "torchrun", "mpirun"), LAUNCHER))
    return tmp_path


def add_programs(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def bash(scripts: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    for name in ("WANDB_PROJECT", "DS_ENV_FILE", "MASTER_PORT"):
        environment.pop(name, None)
    command = ("bash", *command)
    return subprocess.run(command, cwd=scripts, env=environment, capture_output=True, text=True, timeout=100)


def launch(scripts: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {"OUTPUT_DIR": str(scripts / "runs"), "NCCL_DEBUG": "INFO"} | SECRETS
    return bash(scripts, "launch_training.sh", "--config", "quickstart", *words, **variables)


def test_one_host_that_is_this_one_needs_no_ssh(scripts: Path) -> None:
    (scripts / "hosts").write_text("# mine\nlocalhost slots=2\n")
    result = launch(scripts, "--hostfile", "hosts", "training.num_train_steps=70")
    assert result.returncode == 0, result.stderr
    *_, told, started, variables, _ = result.stdout.splitlines()
    folder = re.fullmatch(rf"the run's folder is ({scripts}/runs/quickstart-\d{{8}}-\d{{6}})", told)
    assert folder is not None, told
    assert re.match(
        r"deepspeed --hostfile hosts --master_port 2\d{4} --no_ssh_check --master_addr 127\.0\.0\.1 ", started
    )
    assert started.endswith(f"--config quickstart infra.output_dir={folder[1]} training.num_train_steps=70")
    assert variables == "qwen3-encoder-decoder"


def test_other_hosts_get_variables_but_no_secrets(scripts: Path) -> None:
    (scripts / "hosts").write_text("localhost slots=1\n127.0.0.1\tslots=1\n")
    (scripts / ".deepspeed_env").write_text("MINE=1")
    result = launch(scripts, "--hostfile=hosts", "--output_dir", "run", "--resume", "auto", "--allow_data_change")
    assert result.returncode == 0, result.stderr
    given = r"\S+train.py .*=run --resume=auto --allow-data-change\n"
    assert re.search(rf"deepspeed --hostfile hosts --master_port \d+ {given}", result.stdout)
    handed_on = (scripts / "run" / "deepspeed_env").read_text().splitlines()
    expected = {"MINE=1", "NCCL_DEBUG=INFO", "WANDB_PROJECT=qwen3-encoder-decoder"}
    assert expected <= set(handed_on)
    assert not [line for line in handed_on if "secret" in line or "=" not in line]
    assert "MLFLOW_TRACKING_TOKEN" not in result.stdout  # the launcher itself would hand it on


def test_without_a_host_file_the_engine_has_its_launcher(scripts: Path) -> None:
    result = launch(scripts, "infra.distributed_type=fsdp", "--max_steps", "40", "--profile", "2", "--no_merge")
    started = re.search(r"^torchrun --nproc-per-node 2 --master-port \d+ .*", result.stdout, re.MULTILINE)
    assert started is not None, result.stderr
    assert started[0].endswith(" --max_steps 40 --no_merge --profile=2")


def test_mpirun_starts_what_the_file_says(scripts: Path) -> None:
    (scripts / "hosts").write_text("# two\n a\tslots=2\nb slots=1 # and more\n")
    done = bash(scripts, "mpi/run.sh", "hosts", "--config", "quickstart")
    assert (done.returncode, "mpirun -n 3 -hosts a:2,b:1 " in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hostfile", "hosts"], "hosts:2: localhost\n      the host is listed twice"),
        (["--resume", "auto"], "name the run to go on with: infra.output_dir=FOLDER"),
    ],
)
def test_mistakes_are_named_before_anything_starts(scripts: Path, words: list[str], message: str) -> None:
    (scripts / "hosts").write_text("localhost slots=1\nlocalhost slots=1\n")
    result = launch(scripts, *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "deepspeed " not in result.stdout
    assert not (scripts / "runs").exists()


def test_ranks_under_slurm_get_the_cores_of_their_job(tmp_path: Path) -> None:
    """From 22.05 on srun does not take them from the job by itself."""
    add_programs(tmp_path, **dict.fromkeys(("srun", "scontrol"), "#!/bin/sh\necho $SRUN_CPUS_PER_TASK cores\n"))
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix, "SLURM_CPUS_PER_TASK": "7"}
    for script in (REPOSITORY / "scripts/slurm").glob("*.sbatch"):
        done = bash(REPOSITORY, str(script), **job)
        assert "7 cores" in done.stdout, (script.name, done.stderr)


QUICKSTART_LAUNCHER = """#!/bin/bash
words="$*" run="${words##*infra.output_dir=}" run="${run%% *}"
echo "$(basename "$0"): $*"
mkdir -p "$run/export/final"
echo '{"train/loss": 8.0, "train/loss_R1": 8.5}
{"eval/loss": 5.0, "eval/loss_R1": 5.5, "eval/loss_R2": 5.25}' > "$run/metrics.jsonl"
"""


def test_the_quickstart_takes_settings_in_any_words_and_shows_a_table(scripts: Path) -> None:
    train = f'#!/bin/sh\n[ "$1" != train ] || exec {sys.executable} -m ds_encdec.cli "$@"\n'
    add_programs(scripts, **dict.fromkeys(("deepspeed", "torchrun"), QUICKSTART_LAUNCHER), **{"ds-encdec": train})
    words = ("--output_dir", str(scripts / "run"), "distributed_type=FSDP")
    result = bash(REPOSITORY, str(scripts / "quickstart.sh"), *words)
    assert result.returncode == 0, result.stderr
    assert "torchrun: " in result.stdout
    assert result.stdout.count(f"output_dir={scripts / 'run'}") == 1
    assert "  the first steps          8.00   8.50      -\n" in result.stdout


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


# A launcher: what each of its starts leaves in run.json, and its own exit code.
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
        (143, [ended("preempted", 75), None, ended("completed", 0)], 3, 0),  # SIGTERM before there was a run
        (137, [ended("preempted", 75), None, ended("completed", 0)], 3, 0),  # SIGKILL then
        (137, [None], 3, 137),
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


# A launcher that ends, and a rank that does not until it is asked by the file.
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


def test_a_signal_stops_ranks_that_have_lost_their_launcher(tmp_path: Path) -> None:
    words = ["bash", str(SUPERVISE), str(tmp_path), sys.executable, "-c", ORPHAN, str(tmp_path), "--resume", "auto"]
    script = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    assert script.stderr is not None
    assert "waiting for it" in script.stderr.readline()
    script.terminate()
    _, said = script.communicate(timeout=30)
    assert (script.returncode, "stopped as asked" in said) == (75, True), said
    assert not (tmp_path / "stop").exists()  # which would end the next start
