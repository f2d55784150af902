"""Folders of runs that never ran, with everything that can happen to one: written in a moment, the same every time."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_encdec.checkpoint.manifest import seal
from ds_encdec.config.schema import FullConfig
from ds_encdec.registry.denoisers import DENOISERS

TIME = "2026-01-02T03:04:05+0000"


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def write_run(
    folder: Path,
    *,
    steps: int = 200,
    every: int = 10,
    seed: int = 0,
    only: tuple[str, ...] | None = None,
    **settings: Any,
) -> Path:
    """A run without trouble, with `only` some of the metrics; `settings` of the configuration use `__` for the dot."""
    lines = [
        {name: value for name, value in line.items() if only is None or name in ("step", *only)}
        for line in metrics(steps, every, seed)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "ledger.jsonl", [{"time": TIME, "kind": "start", "step": 0, "data_step": 0,
                                           "resumed_from": None, "world_size": 8, "engine": "deepspeed"}])  # fmt: skip
    write_config(folder, **settings)
    status = {"started_at": TIME, "world_size": 8, "launcher": "torchrun", "state": "completed", "reason": "",
              "exit_code": 0, "updated_at": "2026-01-04T05:04:05+0000"}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(status))
    return folder


def change_status(folder: Path, **values: Any) -> None:
    status = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(status | values))


def write_config(folder: Path, **settings: Any) -> None:
    values = FullConfig().model_dump(mode="json")
    for name, value in settings.items():
        section, field = name.split("__")
        values[section][field] = value
    (folder / "config.yaml").write_text(json.dumps(values))  # JSON is YAML


def metrics(steps: int, every: int, seed: int = 0, start: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of a run of `steps` steps, from behind step `start`."""
    noise = random.Random(seed)
    for step in range(start + every, steps + 1, every):
        loss = 2.6 + 9.0 / (1 + step / (steps / 60)) ** 0.7 + noise.gauss(0, 0.08)
        yield {
            "step": step,
            "data_step": step,
            "train/loss": loss,
            **{f"train/loss_{name}": loss + 0.3 * i + noise.gauss(0, 0.1) for i, name in enumerate(DENOISERS)},
            "train/learning_rate": 2e-4 * min(1, step / (steps / 50)) * (1 - step / (steps + 1)),
            "train/grad_norm": 0.4 + 3 / (1 + step / (steps / 40)) + abs(noise.gauss(0, 0.1)),
            "train/skipped_steps": 0,
            "train/tokens_seen": step * 500_000,
            "perf/tokens_per_sec": 410_000 + noise.gauss(0, 8000),
            "perf/step_time_s": 1.22 + abs(noise.gauss(0, 0.02)),
            "perf/data_wait_frac": abs(noise.gauss(0.01, 0.01)),
            "perf/mfu": 0.41 + noise.gauss(0, 0.01),
            "mem/peak_bytes": 61.2 * 2**30,
            "mem/host_bytes": (20 + step / steps) * 2**30,
            "mem/device_bytes": 58 * 2**30,
            "health/slowest_rank_ratio": 1.04 + abs(noise.gauss(0, 0.02)),
        }
        if step % (every * 10) == 0:
            texts = {f"eval/{name}": 100 * step / steps for name in ("exact_match", "rougeL", "chrf", "bleu")}
            yield {"step": step, "data_step": step, "eval/loss": loss + 0.1, **texts}
        if step % (every * 10) == every and step > every:  # the first line after the save
            yield {"step": step, "data_step": step, "ckpt/blocked_s": 0.8, "ckpt/total_s": 21 + noise.random()}


def write_troubled_run(folder: Path, *, steps: int = 100_000, every: int = 10) -> Path:
    """A long run with alerts of every type, rollbacks and what they took back, a restart, and values not finite."""
    write_run(folder, steps=steps, every=every)
    noise = random.Random(1)
    lines = list(metrics(steps, every))
    for number in range(0, len(lines), 997):
        lines[number] |= {name: None for name in ("train/loss", "train/grad_norm") if name in lines[number]}
    for number in range(50, len(lines), 1500):
        if "train/grad_norm" in lines[number]:
            lines[number] |= {"train/grad_norm": 40.0 + number / 100, "train/skipped_steps": 1}
    write_lines(folder / "metrics.jsonl", lines)

    ledger = [json.loads((folder / "ledger.jsonl").read_text())]
    abandoned = []
    for number, (end, back) in enumerate([(0.2, 0.17), (0.55, 0.5), (0.56, 0.5)], start=1):
        at, to = int(steps * end), int(steps * back)
        for line in metrics(at, every, seed=number, start=to):
            if "train/loss" in line:
                line |= {"train/loss": line["train/loss"] * (1 + 1.5 * ((line["step"] - to) / (at - to)) ** 4)}
            abandoned.append(line | {"rollback": number})
        ledger.append(alert("loss_spike", at, 7.9, "rollback"))
        ledger.append({"time": TIME, "kind": "rollback", "step": at, "data_step": at, "type": "loss_spike",
                       "message": f"step {at}: loss 7.9000 is above 6.0000", "to_step": to, "to_data_step": to,
                       "number": number})  # fmt: skip
    write_lines(folder / "metrics.abandoned.jsonl", abandoned)
    kinds = ("grad_explosion", "throughput_drop", "straggler", "memory_growth", "data_wait", "learning_rate_off",
             "loss_plateau", "non_finite", "loss_spike")  # fmt: skip
    for index in range(300):
        ledger.append(alert(kinds[index % len(kinds)], noise.randrange(1, steps), 12.5, "warn"))
    ledger.append({"time": TIME, "kind": "start", "step": steps // 3, "data_step": steps // 3,
                   "resumed_from": "checkpoints/step-1", "world_size": 8, "engine": "deepspeed"})  # fmt: skip
    ledger.append({"time": TIME, "kind": "stop", "step": steps, "data_step": steps, "exit_code": 7,
                   "message": "diverged after 3 rollbacks"})  # fmt: skip
    write_lines(folder / "ledger.jsonl", ledger)
    change_status(folder, state="failed", exit_code=7, reason=f"step {steps}: loss 9 is above 6, after 3 rollbacks")
    return folder


def alert(kind: str, step: int, value: float, action: str) -> dict[str, Any]:
    return {"time": TIME, "kind": "alert", "step": step, "data_step": step, "type": kind, "value": value,
            "threshold": 6.0, "message": f"step {step}: {kind} {value:.1f} is above 6.0", "action": action}  # fmt: skip


SAVED = {"time": "2026-11-02T09:30:00+00:00", "loss": 3.25, "reason": "stop"}


def write_checkpoint(folder: Path, step: int) -> Path:
    """A committed checkpoint with one file, which `latest` points at."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"saved": SAVED, "data": {"fingerprint": {"tokenizer": "abc"}}}))
    seal(path, step=step, world_size=8, engine="deepspeed", engine_files=())
    latest = folder / "checkpoints" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(path.name)
    return path


def write_phases(folder: Path, only: tuple[str, ...] | None = None) -> Path:
    """Three phases, of which the last one failed its gate."""
    for name, steps, passed in (("sanity_check", 100, True), ("validation", 500, True), ("medium", 2000, False)):
        phase = write_run(folder / "phases" / name, steps=steps, every=max(1, steps // 100), seed=steps, only=only)
        messages = {"loss after warm-up 4.2, at most 8 allowed": True, "loss fell by 0.6, at least 1 asked for": passed}
        checks = [{"passed": good, "message": message} for message, good in messages.items()]
        result = {"phase": name, "passed": passed, "checks": checks, "started": TIME, "ended": TIME}
        (phase / "result.json").write_text(json.dumps(result | {"steps": steps, "tokens_seen": steps * 500_000}))
    return folder
