"""The GPU kit: what happens to parts that fail, and what follows from its figures. CI makes its dry run besides."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def row(name: str, ok: bool = True, **figures: Any) -> dict[str, Any]:
    return {"name": name, "ok": ok, **figures}


def part(name: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ok": all(one["ok"] for one in rows), "seconds": 9.0, "problem": "", "rows": [*rows]}


def facts(**changes: Any) -> dict[str, Any]:
    machine = (
        row("versions", python="3.12.3", cores=16, torch="2.11.0", triton="3.6.0", deepspeed="0.19.8"),
        row("device", device="NVIDIA H200", capability="9.0", memory_gib=139.7),
        row("rates", bf16_tflops=788.4, copy_tb_per_s=4.3),
        row("context", context_gib=0.44),
        row("nccl", nccl_gib=0.1, ranks=1),
    )
    speed = {"mfu": 0.41, "micro_batch_ms": 240.2, "update_ms": 20.1, "parameters": 1_036_517_376, "documents": 24.5}
    speed |= {"tokens_a_micro_batch": 24_100.0, "allocated_gib": 55.5, "estimated_over_allocated": 1.021}
    profile = {"kernels": 4000, "busy": 0.97, "host_ms": 60.0, "waits": 1}
    top = [{"kernel": "gemm|a", "ms": 3.0, "count": 7}]
    speeds = []
    for name, tokens, fragmentation, beside in (("zero2", 81_234.5, 0.015, 0.512), ("fsdp2", 101_234.5, 0.0212, 0.731)):
        own = {"tokens_per_second": tokens, "tokens_per_second_at_64": tokens + 1000}
        own |= {"fragmentation": fragmentation, "beside_allocator_gib": beside}
        speeds.append(part(f"speed {name}", row(name, **speed, **own), row(f"profile of {name}", **profile, top=top)))
    loss = part("loss", row("bfloat16", ok=False, bound=0.02, total=0.5))
    engine = part("engine zero1", row("zero1, fp32", largest_difference=2e-5, bound=1e-3))
    memory = part("memory", row("fsdp zero2", estimated_mib=1044.0, measured_mib=1000.0, ratio=1.044))
    parts = [part("machine", *machine), *speeds, loss, engine, memory]
    return {"dry_run": False, "seconds": 480.0, "parts": parts, "left": []} | changes


def reported(folder: Path, found: dict[str, Any]) -> str:
    (folder / "gpu.json").write_text(json.dumps(found))
    result = python(str(ROOT / "scripts/gpu/report.py"), "gpu.json", folder=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_report(tmp_path: Path, golden: Callable[[object], None]) -> None:
    golden(reported(tmp_path, facts()))
    golden(reported(tmp_path, facts(dry_run=True, left=["loss", "speed zero1"], parts=[])))
