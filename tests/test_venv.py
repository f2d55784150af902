"""What `scripts/venv.sh` asks pip for. A script stands for the environment's Python, and so for pip and the network."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$*" in
    "-m pip config list") echo "$PIP_SAYS" ;;
    -c*) exit 1 ;; # torch is not there
    "- https"*) exit "$INDEX_ANSWERS" ;;
    "-m pip install"*) echo "${*#*--no-compile }" >>"$ASKED"; exit 0 ;;
esac
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt", "scripts/venv.sh"):
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "repository" / name)
    for name, text in (("environment/bin/python", PYTHON), ("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")):
        (file := tmp_path / name).parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    for tool in ("bash", "sh", "cat", "cksum", "dirname", "env", "grep", "tail", "timeout", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)  # no more: there may be a uv beside them
    return tmp_path / "repository"


def enter(repository: Path, *, extras: str = "", says: str = "", index: int = 0) -> tuple[list[str], str]:
    home = repository.parent
    environment = {
        "PATH": f"{home}/bin",
        "HOME": str(home),
        "VIRTUAL_ENV": str(home / "environment"),
        "EXTRAS": extras,
        "ASKED": str(home / "asked"),
        "PIP_SAYS": says,
        "INDEX_ANSWERS": str(index),
    }
    (home / "asked").write_text("")
    script = f"set -euo pipefail; source {repository}/scripts/venv.sh; command -v python"
    found = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"{home}/environment/bin/python\n"
    asked = (home / "asked").read_text().replace(f"--constraint {repository}/constraints.txt ", "")
    return asked.replace(str(repository), "ROOT").splitlines(), found.stderr


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="elsewhere torch has no CUDA build")
def test_torch_is_the_cpu_build_where_nobody_says_otherwise(repository: Path) -> None:
    asked, told = enter(repository)
    assert asked == ["--no-deps --index-url https://download.pytorch.org/whl/cpu torch", "--editable ROOT"]
    assert "torch's CPU build is taken" in told
    (repository.parent / "environment" / ".ds_encdec-installed").unlink()
    asked, told = enter(repository, index=1)
    assert asked == ["--editable ROOT"]
    assert "has not answered within 5 s: torch is PyPI's" in told


def test_it_installs_once_and_developers_tools_when_asked(repository: Path) -> None:
    says = "global.index-url='https://mirror'"  # what pip is told wins
    assert enter(repository, says=says)[0] == ["--editable ROOT"]
    assert enter(repository, says=says) == ([], "")
    assert enter(repository, says=says, extras="dev")[0] == ["--editable ROOT[dev]"]
