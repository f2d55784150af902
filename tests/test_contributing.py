"""The additions that CONTRIBUTING.md describes: a launcher and an engine, each added here as it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.launch import world
from ds_encdec.launch.world import Launcher, World, discover
from ds_encdec.registry.engines import DistributedType

ROOT = Path(__file__).parents[1]

# Rank 5 of 8, on the second of two nodes.
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}
FLUX |= {"RANKS_HERE": "4", "NODE_HERE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def flux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher: one row."""
    variables = {
        "rank": "FLUX_TASK_RANK",
        "local_rank": "FLUX_TASK_LOCAL_ID",
        "world_size": "FLUX_JOB_SIZE",
        "local_world_size": "RANKS_HERE",
        "node_rank": "NODE_HERE",
        "num_nodes": "FLUX_JOB_NNODES",
    }
    row = Launcher("flux", marker="FLUX_TASK_RANK", own=variables)
    monkeypatch.setattr(world, "LAUNCHERS", (row, *world.LAUNCHERS))


@pytest.mark.usefixtures("flux")
def test_a_launcher_is_a_row_whose_variables_are_checked_like_any_others() -> None:
    sizes = {"rank": 5, "local_rank": 1, "world_size": 8, "local_world_size": 4, "node_rank": 1, "num_nodes": 2}
    assert discover(FLUX) == World(**sizes, master_addr="node0", master_port=29500, launcher="flux")
    for change, message in (
        ({"FLUX_JOB_SIZE": ""}, r"Started by flux \(FLUX_TASK_RANK is set\), but FLUX_JOB_SIZE is not"),
        ({"FLUX_TASK_RANK": "8"}, r"Contradictory flux environment: FLUX_TASK_RANK=8, FLUX_JOB_SIZE=8"),
    ):
        with pytest.raises(ConfigError, match=message):
            discover({**FLUX, **change})


def python(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of the changed program, which is then the one that is imported."""
    environment = {"PYTHONPATH": str(program), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=program, env=environment, capture_output=True, text=True, timeout=300)


def test_an_addition_takes_two_places_at_most_and_has_a_test() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to add")[2]
    rows = [line.strip("| \n").split(" | ") for line in table.splitlines() if line.startswith("| a")]
    assert len(rows) == 12
    for what, where, _, test in rows:
        assert 1 <= len(re.findall(r"`ds_encdec/[\w/]+(?:\.py|\.yaml|/)`", where)) <= 2, what
        assert re.fullmatch(r"`tests/[\w/]+\.py`", test), what


def test_an_engines_own_name_is_written_in_one_file(tmp_path: Path) -> None:
    """Its row and its name are all that a program must know to accept it, and to list it in the schema."""
    shutil.copytree(ROOT / "ds_encdec", tmp_path / "ds_encdec", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "ds_encdec" / "registry" / "engines.py"
    text = path.read_text()
    row = "\nENGINES['plain'] = dataclasses.replace(ENGINES['fsdp'], name='plain', distributed_types=('plain',))\n"
    row += "ByEngine.__getitem__ = lambda table, engine: table.fsdp  # as with an entry in each of these tables\n"
    text = text.replace('EngineName = Literal["deepspeed", ', 'EngineName = Literal["plain", "deepspeed", ')
    path.write_text(f"{text}\nimport dataclasses\n{row}")
    accepted = python(tmp_path, "-m", "ds_encdec.cli", "validate", "--elsewhere", "infra.distributed_type=plain")
    assert accepted.returncode == 0, accepted.stderr
    schema = json.loads(python(tmp_path, "-m", "ds_encdec.cli", "validate", "--schema").stdout)
    allowed = schema["$defs"]["InfraConfig"]["properties"]["distributed_type"]["enum"]
    assert allowed == ["plain", *get_args(DistributedType)]


@pytest.mark.launch
def test_an_engine_is_a_module_and_a_row(tmp_path: Path) -> None:
    """It trains a run that `auto` gives it, and another engine goes on from its checkpoint."""
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    try:
        import tiny_run
    finally:
        sys.path.remove(str(ROOT / "tests" / "launch"))
    settings = tiny_run.overrides(
        tmp_path / "run",
        **{"infra__device": "cpu", "infra__offload_optimizer": "none", "training__bf16": "false"},
        **{"training__logging_steps": 1, "training__save_steps": 4, "training__average_checkpoints": 0},
        **{"training__activation_checkpointing": "none", "training__report_to": "none"},
        training__export_at_end="false",
    )
    code = f"import plain_engine; plain_engine.train_and_go_on({tiny_run.QUICKSTART!r}, {settings!r})"
    environment = tiny_run.environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'distributed'}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [line["train/loss"] for line in tiny_run.metrics(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    starts = [line for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines() if '"start"' in line]
    assert ["plain" in starts[0], "fsdp" in starts[1]] == [True, True]
