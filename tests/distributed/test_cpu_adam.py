"""DeepSpeed's compiled CPU optimizer: nearly the oracle's, and nearly exact on resume.

Compiling it takes minutes, so this runs only where it has been compiled: after any run with optimizer offload and
`training.torch_adam=false` on this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks

from ds_encdec.launch.disk import build_folder

COMPILED = (build_folder(os.environ) / "cpu_adam" / "cpu_adam.so").exists()

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not COMPILED, reason="CPUAdam has not been compiled on this machine"),
]


def test_cpu_adam_resumes_within_1e_6(tmp_path: Path) -> None:
    settings = {"offload_optimizer": "cpu", "torch_adam": False}
    plan = [
        ("compiled", "trajectory", {"steps": 4, **settings}),
        ("torch", "trajectory", {"steps": 4, **settings, "torch_adam": True}),
        ("resume", "resuming", {"directory": str(tmp_path / "checkpoint"), **settings}),
    ]
    # Where it was compiled for another environment it is compiled again.
    found, _ = run_ranks("engine_cases.py:run_cases", 2, {"cases": plan}, timeout_seconds=900)
    assert not [result for result in found.values() if isinstance(result, str)]
    for mine, expected in zip(found["compiled"]["steps"], found["torch"]["steps"], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
    # It multiplies its bias corrections up step by step and, after loading, starts from powers instead.
    straight, straight_weights = found["resume"]["straight"]
    resumed, resumed_weights = found["resume"]["resumed"]
    for mine, expected in zip(resumed, straight, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    for name, expected in straight_weights.items():
        torch.testing.assert_close(resumed_weights[name], expected, rtol=0, atol=5e-6, msg=name)
