"""Scripts up to the launcher: how they start it, and what they refuse before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY

LAUNCHER = '#!/bin/bash\necho "$(basename "$0") $*"\necho "$WANDB_PROJECT"\n'


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
    variables = {"OUTPUT_DIR": str(scripts / "runs"), "HF_TOKEN": "secret", "NCCL_DEBUG": "INFO"}
    return bash(scripts, "launch_training.sh", "--config", "quickstart", *words, **variables)


def test_one_host_that_is_this_one_needs_no_ssh(scripts: Path) -> None:
    (scripts / "hosts").write_text("# mine\nlocalhost slots=2\n")
    result = launch(scripts, "--hostfile", "hosts", "training.num_train_steps=70")
    assert result.returncode == 0, result.stderr
    *_, told, started, variables = result.stdout.splitlines()
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
    assert not [line for line in handed_on if "TOKEN" in line or "=" not in line]


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
        (["--hostfile", "absent"], "absent: no such file"),
        (["--resume", "auto"], "name the run to go on with: infra.output_dir=FOLDER"),
    ],
)
def test_mistakes_are_named_before_anything_starts(scripts: Path, words: list[str], message: str) -> None:
    (scripts / "hosts").write_text("localhost slots=1\nlocalhost slots=1\n")
    result = launch(scripts, *words)
    assert result.returncode == 2
    assert message in result.stderr.replace("absent\n      ", "absent: ")
    assert "deepspeed " not in result.stdout
    assert not (scripts / "runs").exists()


def test_ranks_under_slurm_get_the_cores_of_their_job(tmp_path: Path) -> None:
    """From 22.05 on srun does not take them from the job by itself."""
    add_programs(tmp_path, **dict.fromkeys(("srun", "scontrol"), "#!/bin/sh\necho $SRUN_CPUS_PER_TASK cores\n"))
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_CPUS_PER_TASK": "7",
    }
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
    for script in sorted((REPOSITORY / "scripts/slurm").glob("*.sbatch")):
        done = bash(REPOSITORY, str(script), **job)
        assert "7 cores" in done.stdout, (script.name, done.stderr)


QUICKSTART_LAUNCHER = """#!/bin/bash
words="$*" run="${words##*infra.output_dir=}" run="${run%% *}"
echo "$(basename "$0"): $*"
mkdir -p "$run/export/final"
echo '{"train/loss": 8.0, "train/loss_R1": 8.5}
{"eval/loss": 5.0, "eval/loss_R1": 5.5, "eval/loss_R2": 5.25}' > "$run/metrics.jsonl"
"""


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (["output_dir={run}"], "deepspeed"),
        (["--output_dir", "{run}", "distributed_type=FSDP"], "torchrun"),
    ],
)
def test_the_quickstart_takes_settings_in_any_words_and_shows_a_table(
    scripts: Path, words: list[str], launcher: str
) -> None:
    train = f'#!/bin/sh\n[ "$1" != train ] || exec {sys.executable} -m ds_encdec.cli "$@"\n'
    add_programs(scripts, **dict.fromkeys(("deepspeed", "torchrun"), QUICKSTART_LAUNCHER), **{"ds-encdec": train})
    result = bash(REPOSITORY, str(scripts / "quickstart.sh"), *(word.format(run=scripts / "run") for word in words))
    assert result.returncode == 0, result.stderr
    assert f"{launcher}: " in result.stdout
    assert result.stdout.count(f"output_dir={scripts / 'run'}") == 1
    assert "  the first steps          8.00   8.50      -\n" in result.stdout
