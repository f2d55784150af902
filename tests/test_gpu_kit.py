"""The GPU kit: what happens to parts that fail, and what follows from its figures. CI makes its dry run besides."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PARTS = """
import multiprocessing, os, signal, time
def fine(kit): kit.row("a figure", value=2.5)
def wrong(kit): kit.row("a figure", ok=False, value=3.5)
def raises(kit):
    kit.row("before", value=1)
    raise RuntimeError("no such kernel")
def killed(kit): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(kit):
    if os.fork() == 0: time.sleep(3600)
    time.sleep(3600)
def reads(kit): kit.row("read", value=(kit.shared / "left").read_text())
def leaves(kit): (kit.shared / "left").write_text("there")
def spawned_only(kit): type(multiprocessing.current_process()).__name__ == "SpawnProcess" or killed(kit)
"""
RUN = """
import sys
from pathlib import Path
import kit
from check import Check, Part
names = ["leaves", "fine", "wrong", "raises", "killed", "hangs"]
parts = [Part(name, f"some_parts:{name}", 3 if name == "hangs" else 300, alone=name == "fine") for name in names]
parts.append(Part("reads", "some_parts:reads", 300, needs=("leaves", "hangs")))
check = Check(parts, Path("out"), 900, dry_run=False, forks=True)
print("passed:", check.run())
Check([Part("late", "some_parts:fine", 60)], Path("late"), 5, dry_run=False).run()
unforked = Part("machine", "some_parts:spawned_only", 300, proves_forks=True)
print("without forks:", Check([unforked], Path("again"), 900, dry_run=True).run())
"""


CONFIGURATIONS = """
from pathlib import Path
from engine_parts import DTYPES, INFRA, training_config
from kit import Kit
from settings import SPEED_SETTINGS
from speed_parts import speed_config
kit = Kit(False, Path("folder"), Path("shared"))
for setting in SPEED_SETTINGS:
    assert speed_config(kit, setting).infra.device == "cuda"
for name in INFRA:
    for dtype in DTYPES if INFRA[name]["distributed_type"] == "deepspeed" else ("fp32", "bf16"):
        compiles = name in ("fsdp zero2", "zero1")
        config = training_config(kit, name, dtype, Path("run"), torch_compile=compiles)
        print(config.infra.device, name, dtype)
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts" / "gpu", folder)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_part_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "some_parts.py").write_text(PARTS)
    result = python("-c", RUN, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "passed: False" in result.stdout
    assert "without forks: True" in result.stdout
    assert "RuntimeError: no such kernel" in result.stdout
    found = {part["name"]: part for part in json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]}
    assert {name for name, part in found.items() if part["ok"]} == {"leaves", "fine", "reads"}
    assert found["fine"]["rows"] == [{"name": "a figure", "ok": True, "value": 2.5}]
    assert found["raises"]["rows"] == [{"name": "before", "ok": True, "value": 1}]
    assert found["killed"]["problem"] == "killed by SIGSEGV"
    assert "too slow, or stuck" in found["hangs"]["problem"]
    assert "no such kernel" in (tmp_path / "out" / "gpu.txt").read_text()
    written = json.loads((tmp_path / "late" / "gpu.json").read_text())
    (late,) = written["parts"]
    assert written["left"] == []
    assert late["rows"][0]["omitted"] == "not reached: 5 s were left"


def test_what_only_a_gpu_runs_is_configured_soundly(tmp_path: Path) -> None:
    result = python("-c", CONFIGURATIONS, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cuda zero3 fp16" in result.stdout
    assert "cpu reference fp32" in result.stdout
