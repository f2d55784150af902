"""Measures what a micro-step costs the host: a model so deep and narrow that computing takes next to nothing.

    python scripts/bench/host_time.py
    python scripts/bench/host_time.py --recompute full --only "bare zero3" --json host_time.json

On a GPU this is the time in which the host queues the work of one micro-batch: where the device needs less, it stands
idle. Each row is a process of its own that stays; they take turns, in `--rounds` rounds. What counts is a process's CPU
time, so a busy machine changes little: the median over the rounds, in milliseconds, of a forward and a backward pass
(mean of the micro-batches of a step), and of the optimizer's step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LAYERS, WIDTH, TOKENS, MICRO_BATCHES = 28, 32, 32, 3

ROWS: dict[str, dict[str, str]] = {
    "bare": {},
    **{f"zero{stage}": {"distributed_type": "deepspeed", "sharding_stage": f"zero{stage}"} for stage in range(4)},
    **{
        f"zero{stage}+offload": {
            "distributed_type": "deepspeed",
            "sharding_stage": f"zero{stage}",
            "offload_optimizer": "cpu",
        }
        for stage in (2, 3)
    },
    **{f"fsdp-zero{stage}": {"distributed_type": "fsdp", "sharding_stage": f"zero{stage}"} for stage in (2, 3)},
}
"""Fields of `infra` by row. `bare`: the model in plain torch, with a loop around it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="activation checkpointing")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows, by name")
    parser.add_argument("--extra", type=json.loads, default={}, help="infra.deepspeed_extra, as JSON")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        serve(ROWS[options.row], options)
        return
    found = measure(options.only.split() or list(ROWS), options)
    print(f"{options.layers}+{options.layers} layers of width {WIDTH}, recompute {options.recompute}: CPU ms")
    print(f"{'':16}{'micro-step':>12}{'of bare':>10}{'step':>10}")
    bare = found.get("bare", {}).get("micro_step_ms")
    for name, row in found.items():
        ratio = f"{row['micro_step_ms'] / bare:.2f}" if bare else ""
        print(f"{name:16}{row['micro_step_ms']:12.1f}{ratio:>10}{row['step_ms']:10.1f}")
    if options.json:
        settings = {name: getattr(options, name) for name in ("recompute", "layers", "rounds", "extra")}
        options.json.write_text(json.dumps({"settings": settings, "rows": found}, indent=1) + "\n")


def measure(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The medians of each row, and its figures of every round."""
    processes = {name: _start(name, options) for name in names}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"{name} has ended with exit code {process.wait()}")
            rounds[name].append(json.loads(answer))
    for process in processes.values():
        process.communicate()
    return {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} | {"rounds": found}
        for name, found in rounds.items()
    }


def _start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    from ds_encdec.launch.world import free_port

    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    }
    words = ["--row", name, "--recompute", options.recompute, "--layers", str(options.layers)]
    words += ["--extra", json.dumps(options.extra)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, *words], env=environment, **pipes)


def serve(infra: dict[str, str], options: argparse.Namespace) -> None:
    """Answer each line of the input with the figures of one step, as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    micro_step, step = _runner(infra, options)
    for _ in range(3):  # ZeRO-3 learns the order of the modules
        _timed_step(micro_step, step)
    for _ in sys.stdin:
        answers.write(json.dumps(_timed_step(micro_step, step)) + "\n")
        answers.flush()


def _timed_step(micro_step: Callable[[bool], None], step: Callable[[], None]) -> dict[str, float]:
    times = [time.process_time()]
    for number in range(MICRO_BATCHES):
        micro_step(number == MICRO_BATCHES - 1)
    times.append(time.process_time())
    step()
    times.append(time.process_time())
    return {"micro_step_ms": (times[1] - times[0]) * 1e3 / MICRO_BATCHES, "step_ms": (times[2] - times[1]) * 1e3}


def _runner(infra: dict[str, str], options: argparse.Namespace) -> tuple[Callable[[bool], None], Callable[[], None]]:
    """Runs a micro-batch (told if it is the last one of a step), and the step."""
    import torch

    from ds_encdec.auto_batch.probe import full_batch, zero_weights
    from ds_encdec.config.schema import FullConfig
    from ds_encdec.engine.select import create_engine, resolve_engine
    from ds_encdec.engine.sharded_engine import packed_forward
    from ds_encdec.launch.host_collectives import HostCollectives, RunContext
    from ds_encdec.launch.process_group import choose_device, init_process_group
    from ds_encdec.launch.world import discover
    from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
    from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
    from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

    model_config = Qwen3Seq2SeqConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    config = FullConfig.model_validate(
        {
            "training": {
                "per_device_train_batch_size": 1,
                "torch_adam": True,
                "num_train_steps": 1000,
                "warmup_steps": 2,
                "activation_checkpointing": options.recompute,
                "gradient_accumulation_steps": MICRO_BATCHES,
            },
            "data": {"max_encoder_length": TOKENS, "max_decoder_length": TOKENS},
            "infra": {
                "device": "cpu",
                "offload_optimizer": "none",
                **infra,
                "deepspeed_extra": options.extra if infra.get("distributed_type") == "deepspeed" else {},
            },
        }
    )
    batch = full_batch(config, 1, model_config.vocab_size)
    if not infra:
        model = Qwen3ForSeq2SeqLM(model_config).to(torch.bfloat16).train()
        apply_activation_checkpointing(model, options.recompute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def run(last: bool) -> None:
            packed_forward(model, batch).total.backward()

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return run, update
    world = discover(os.environ)
    device = choose_device("cpu", world)
    name = resolve_engine(config)
    init_process_group(world, device, timedelta(minutes=10), name)
    context = RunContext(world, device, name, HostCollectives())
    engine = create_engine(config, context, model_config, zero_weights(model_config), MICRO_BATCHES)

    def micro_step(last: bool) -> None:
        engine.backward(engine.forward(batch), target_tokens=MICRO_BATCHES * batch.target_tokens, last=last)

    def step() -> None:
        engine.step()

    return micro_step, step


if __name__ == "__main__":
    main()
