"""How long a checkpoint holds training up: in the background, at once, and as the libraries save by themselves.

    torchrun --standalone --nproc-per-node 2 scripts/bench/save.py --engine deepspeed
    torchrun --standalone --nproc-per-node 2 scripts/bench/save.py --engine fsdp --hidden 768 --layers 8

Each repetition saves the same trained state three ways, one after the other: `background` (a staging copy; then
training goes on while files are written, flushed, hashed and committed), `at once` (the same without the copy), and
`library` (DeepSpeed's `save_checkpoint`, or `torch.distributed.checkpoint.save` of model and optimizer; neither flushes
nor hashes). Medians over the repetitions; the first one, which makes the staging buffers, does not count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from turns import median, report

from ds_encdec.base.types import Batch, TrainingState
from ds_encdec.checkpoint.manager import CheckpointManager, SaveOutcome
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import create_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.model.weights import random_weights
from ds_encdec.training.auto_batch.probe import full_batch

ENGINES = {
    "deepspeed": {"distributed_type": "deepspeed", "offload_optimizer": "cpu"},
    "fsdp": {"distributed_type": "fsdp", "offload_optimizer": "none"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="deepspeed")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6, help="of the encoder, and again of the decoder")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()

    world = discover(os.environ)
    device = choose_device("auto", world)
    init_process_group(world, device, timedelta(minutes=10), options.engine)
    collectives = HostCollectives()
    folder = Path(collectives.on_rank_zero(lambda: tempfile.mkdtemp(prefix="save-", dir=options.folder)))
    config, model_config = _configuration(options)
    context = RunContext(world, device, options.engine, collectives)
    engine = create_engine(config, context, model_config, random_weights(model_config, 0), 1)
    manager = CheckpointManager(folder, collectives, engine_name=options.engine, keep=1)
    batch = full_batch(config, 1, model_config.vocab_size)
    measured = [
        repetition(number, engine, manager, collectives, batch, options.engine) for number in range(options.repeats + 1)
    ][1:]
    if world.is_main:
        size = f"{count_parameters(model_config) / 1e6:.0f} M parameters, {world.world_size} ranks"
        num_bytes = median(one.pop("bytes") for one in measured)
        ratios = {way: median(one["library"] / one[way] for one in measured) for way in ("background", "at once")}
        rows = [
            {"way": way, "seconds": median(one[way] for one in measured), "library / this": ratios.get(way)}
            for way in measured[0]
        ]
        title = f"{options.engine}, {size}, {num_bytes / 1e9:.2f} GB, medians of {len(measured)}"
        report(title, rows, options.json)
        shutil.rmtree(folder)
    engine.close()
    del engine
    shutdown()


def repetition(
    number: int, engine: Any, manager: CheckpointManager, collectives: HostCollectives, batch: Batch, name: str
) -> dict[str, float]:
    """Seconds that each way held training up, and of a step beside a save and without one."""

    def step() -> None:
        loss = next(engine.losses([batch]))
        engine.backward(loss, num_losses=batch.target_tokens * dist.get_world_size(), last=True)
        engine.step()

    def save(step: int, *, in_background: bool) -> None:
        state = TrainingState(global_step=step)
        manager.save(state, engine.stage, lambda _: None, pointers=(), in_background=in_background)

    def outcome() -> SaveOutcome:
        found = manager.collect()
        if found is None or found.problem is not None:
            raise SystemExit(f"nothing was saved: {found}")
        return found

    def save_by_library() -> None:
        if name == "deepspeed":
            engine._engine.save_checkpoint(str(library_folder))
        else:  # as a user of FSDP2 would
            model, optimizer = get_state_dict(engine.model, engine.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=library_folder)

    library_folder, quiet = manager.folder / f"library-{number}", _seconds(step)
    save(2 * number, in_background=True)
    steps = [_seconds(step)]
    while not all(collectives.gather(manager.save_is_over)):
        steps.append(_seconds(step))
    background = outcome()
    save(2 * number + 1, in_background=False)
    at_once = outcome()
    dist.barrier()
    library = _seconds(save_by_library)
    if dist.get_rank() == 0:
        shutil.rmtree(library_folder)
    return {
        "quiet step": quiet,
        "background": background.blocked_seconds,
        "background, until committed": background.seconds,
        "step beside a save": statistics.mean(steps),
        "at once": at_once.blocked_seconds,
        "library": library,
        "bytes": sum(path.stat().st_size for path in manager.files.at(2 * number + 1).rglob("*") if path.is_file()),
    }


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _configuration(options: argparse.Namespace) -> tuple[FullConfig, Qwen3Seq2SeqConfig]:
    training = {"activation_checkpointing": "none", "warmup_steps": 1, "num_train_steps": 10_000}
    data = {"max_encoder_length": 256, "max_decoder_length": 256}
    infra = {"device": "auto", "sharding_stage": "zero3", **ENGINES[options.engine]}
    model_config = Qwen3Seq2SeqConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, head_dim=64, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return FullConfig.model_validate({"training": training, "data": data, "infra": infra}), model_config


if __name__ == "__main__":
    main()
