"""Starts real launchers on the quickstart's configuration, made tiny."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = str(REPOSITORY / "ds_encdec" / "train.py")
QUICKSTART = str(REPOSITORY / "ds_configs" / "quickstart.yaml")
BIN = Path(sys.executable).parent

TINY = {
    "model.architecture.vocab_size": 1024,
    "model.architecture.hidden_size": 32,
    "model.architecture.num_hidden_layers": 2,  # of which the encoder has one
    "model.architecture.num_attention_heads": 2,
    "model.architecture.num_key_value_heads": 1,
    "model.architecture.head_dim": 16,
    "model.architecture.intermediate_size": 64,
    "data.max_encoder_length": 64,
    "data.max_decoder_length": 64,
    "data.num_lanes": 2,
    "data.preprocessing_num_workers": 0,
    "training.per_device_train_batch_size": 2,
    "training.num_train_steps": 6,
    "training.warmup_steps": 2,
    "training.save_steps": 3,
    "training.eval_steps": 3,
    "training.eval_samples": 8,
    "training.logging_steps": 2,
    "training.report_to": "[tensorboard]",
}


def overrides(output_dir: Path, **changes: Any) -> list[str]:
    """Command-line settings of a tiny run; `changes` use `__` for the dot."""
    settings = TINY | {"infra.output_dir": output_dir} | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"{name}={value}" for name, value in settings.items()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launcher(name: str, ranks: int = 2, script: str = TRAIN) -> list[str]:
    """The words that start train.py, or another script, under a launcher."""
    deepspeed = [str(BIN / "deepspeed"), "--master_port", str(free_port())]
    hosts = str(REPOSITORY / "hostfiles" / "localhost_cpu")
    return {
        "deepspeed": [*deepspeed, "--num_gpus", str(ranks), script],
        "hostfile": [*deepspeed, "--hostfile", hosts, "--no_ssh_check", "--master_addr", "127.0.0.1", script],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), script],
        "python": [sys.executable, script],
    }[name]


def environment() -> dict[str, str]:
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def run(command: list[str], cwd: Path, timeout: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment() | variables,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for that of the last save."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.keys() & {"train/loss", "eval/loss"}]


def losses(output_dir: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of every training and evaluation loss, exactly as logged."""
    return [
        (line["step"], name, value)
        for line in metrics(output_dir)
        for name, value in line.items()
        if name.startswith(("train/loss", "eval/loss"))
    ]
