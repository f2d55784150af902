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
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from turns import Contender, in_turns, median, report

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engine.sharded_engine import packed_forward
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import choose_device, init_process_group
from ds_encdec.launch.world import discover
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.training.auto_batch.probe import full_batch, zero_weights

LAYERS, WIDTH, TOKENS, MICRO_BATCHES = 28, 32, 32, 3

_LAYERS = ["Qwen3EncoderLayer", "Qwen3DecoderLayer"]
_ZERO3: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero3/module": {"leaf_module": {"classes": []}},
    "zero3/layer": {"leaf_module": {"classes": _LAYERS}},
    "zero3/none-whole": {"stage3_param_persistence_threshold": 0},
    "zero3/all-whole": {"stage3_param_persistence_threshold": 1_000_000},
    "zero3/plain-linear": {"memory_efficient_linear": False},
    "zero3/no-prefetch": {"stage3_prefetch_bucket_size": 0},
}
"""Settings of ZeRO-3 by row; without: as a run has them, but for the norms, which as in a wide model stay whole."""


def _zero3(zero: dict[str, Any]) -> dict[str, Any]:
    norms = {"stage3_param_persistence_threshold": WIDTH}
    return {"sharding_stage": "zero3", "deepspeed_extra": {"zero_optimization": norms | zero}}


ROWS: dict[str, dict[str, Any]] = {
    "bare": {},
    **{f"zero{stage}": {"sharding_stage": f"zero{stage}"} for stage in range(3)},
    "zero2+offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu"},
    **{name: _zero3(zero) for name, zero in _ZERO3.items()},
    "zero3+offload": _zero3({}) | {"offload_optimizer": "cpu"},
    **{f"fsdp-zero{stage}": {"sharding_stage": f"zero{stage}", "distributed_type": "fsdp"} for stage in (2, 3)},
}
"""Fields of `infra` by row. `bare`: the model in plain torch, with a loop around it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="activation checkpointing")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows, by name")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        serve(ROWS[options.row], options)
        return
    words = ["--recompute", options.recompute, "--layers", str(options.layers)]
    takes: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name in options.only.split() or ROWS:
            command = [sys.executable, __file__, "--row", name, *words]
            row = Contender(command, Path(folder) / f"{name.replace('/', '-')}.log")
            stack.callback(row.close)
            takes[name] = partial(row.take, 1)
        rounds = in_turns(takes, options.rounds)
    bare = [one["micro-step"] for (one,) in rounds.get("bare", [])]
    rows = [
        {
            "row": name,
            "micro-step": median(one["micro-step"] for (one,) in found),
            "of bare": median(one["micro-step"] for (one,) in found) / median(bare) if bare else None,
            "step": median(one["step"] for (one,) in found),
        }
        for name, found in rounds.items()
    ]
    layers = f"{options.layers}+{options.layers} layers of width {WIDTH}"
    report(f"{layers}, recompute {options.recompute}: CPU ms", rows, options.json, rounds=rounds)


def serve(infra: dict[str, Any], options: argparse.Namespace) -> None:
    """Answer each line of the input with the figures of one step, as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    micro_step, step = (_engine if infra else _bare)(_config(infra, options), _model_config(options.layers))

    def measured() -> dict[str, float]:
        times = [time.process_time()]
        for number in range(MICRO_BATCHES):
            micro_step(number == MICRO_BATCHES - 1)
        times.append(time.process_time())
        step()
        times.append(time.process_time())
        return {"micro-step": (times[1] - times[0]) * 1e3 / MICRO_BATCHES, "step": (times[2] - times[1]) * 1e3}

    for _ in range(3):  # ZeRO-3 learns the order of the modules
        measured()
    for _ in sys.stdin:
        print(json.dumps(measured()), file=answers, flush=True)


def _model_config(layers: int) -> Qwen3Seq2SeqConfig:
    return Qwen3Seq2SeqConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip


def _config(infra: dict[str, Any], options: argparse.Namespace) -> FullConfig:
    training = {
        "per_device_train_batch_size": 1,
        "num_train_steps": 1000,
        "warmup_steps": 2,
        "activation_checkpointing": options.recompute,
        "gradient_accumulation_steps": MICRO_BATCHES,
    }
    data = {"max_encoder_length": TOKENS, "max_decoder_length": TOKENS}
    common = {"device": "cpu", "offload_optimizer": "none", "distributed_type": "deepspeed"}
    return FullConfig.model_validate({"training": training, "data": data, "infra": common | infra})


Loop = tuple[Callable[[bool], None], Callable[[], object]]
"""A micro-batch, which is the last one of its step or not, and the step."""


def _bare(config: FullConfig, model_config: Qwen3Seq2SeqConfig) -> Loop:
    """Plain torch, in bfloat16 throughout."""
    batch, model = full_batch(config, 1, model_config.vocab_size), Qwen3ForSeq2SeqLM(model_config)
    apply_activation_checkpointing(model.to(torch.bfloat16).train(), config.training.activation_checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda last: packed_forward(model, batch).total.backward(), step


def _engine(config: FullConfig, model_config: Qwen3Seq2SeqConfig) -> Loop:
    """The engine that `config` asks for, on the ranks of the environment."""
    batch, world, name = full_batch(config, 1, model_config.vocab_size), discover(os.environ), resolve_engine(config)
    device = choose_device("cpu", world)
    init_process_group(world, device, timedelta(minutes=10), name)
    context = RunContext(world, device, name, HostCollectives())
    engine = create_engine(config, context, model_config, zero_weights(model_config), MICRO_BATCHES)

    def micro_step(last: bool) -> None:
        engine.backward(engine.forward(batch), target_tokens=MICRO_BATCHES * batch.target_tokens, last=last)

    return micro_step, engine.step


if __name__ == "__main__":
    main()
