"""From a FullConfig to a wired Trainer, and from a finished run to a model folder.

The only place that knows everybody. It reads top to bottom in the order in which a run may fail cheaply:
the machine, the output folder, the data and the model's source, the engine.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ds_encdec.checkpoint.convert import checkpoint_weights
from ds_encdec.checkpoint.export import export_hf, model_card
from ds_encdec.checkpoint.manager import Checkpoint, CheckpointManager, write_json
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import build_data
from ds_encdec.data.builtin_corpus import builtin_documents
from ds_encdec.data.inspect import inspect_data
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engine.select import check_engine, create_engine
from ds_encdec.launch.agreement import Agreement
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.run_folder import RunFolder, write_atomically
from ds_encdec.launch.world import World, discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.flops import training_flops
from ds_encdec.model.source import resolve_model
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.peak_flops import peak_flops
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import open_sinks
from ds_encdec.tokenizer.load import load_tokenizer, pretrained_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary
from ds_encdec.trainer import CheckpointContent, Trainer, train
from ds_encdec.types import (
    CheckpointError,
    ConfigError,
    DsEncDecError,
    OutOfMemoryError,
    Preempted,
    TrainingState,
)

logger = logging.getLogger(__name__)


def run_training(config: FullConfig, *, resume: str | None = None) -> TrainingState:
    """Train as configured, on whatever ranks the environment says this process is one of.

    `resume`: None, `auto`, or the path of a checkpoint. Raises DsEncDecError subclasses, whose exit
    codes are also in the run's `run.json`.
    """
    world = discover(os.environ)
    logging.basicConfig(level=logging.INFO if world.is_main else logging.WARNING, format="%(message)s", force=True)
    check_engine(config)
    device = choose_device(config.infra.device, world)
    if config.training.fp16 and device.type == "cpu":
        raise ConfigError("training.fp16=true needs an accelerator: DeepSpeed trains no float16 on CPUs. Use bf16.")
    if resume is None:
        plan_lanes(config, world.world_size)  # fails, if it must, before the ranks meet
    init_process_group(world, device, timedelta(minutes=config.infra.distributed_timeout_minutes))
    agreement = Agreement()
    folder = RunFolder(config.infra.output_dir, config.infra.logging_dir)
    agreement.on_rank_zero(lambda: folder.claim(resume=resume is not None))
    with StopRequest(world) as stop, _status(folder, world):
        trainer = _wire(config, world, device, agreement, folder, stop, resume)
        exit_code = 1
        try:
            state = train(trainer)
            exit_code = 0
        except DsEncDecError as error:
            exit_code = error.exit_code
            raise
        finally:
            trainer.loader.close()
            trainer.recorder.close(exit_code)
    trainer.engine.close()
    del trainer
    shutdown()
    return state


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Micro-batches of one optimizer step: over all ranks, and on each of them."""

    num_lanes: int
    gradient_accumulation_steps: int


def plan_lanes(config: FullConfig, world_size: int, saved_lanes: int | None = None) -> LanePlan:
    """How the lanes of a run (a saved run's never change) fall on `world_size` ranks. Raises ConfigError."""
    lanes = saved_lanes or config.data.num_lanes or world_size * config.training.gradient_accumulation_steps
    if lanes % world_size:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        origin = "fixed when this run first started" if saved_lanes else "data.num_lanes"
        raise ConfigError(
            f"{world_size} ranks do not divide the run's {lanes} lanes ({origin}), so its optimizer step cannot be "
            f"shared out evenly. Start it on one of these numbers of ranks: {fitting}."
        )
    return LanePlan(lanes, lanes // world_size)


def planned_deepspeed_json(config: FullConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that DeepSpeed would be given here; for a plain process, on the planned `infra.num_gpus` ranks."""
    world = discover(environ)
    ranks = world.world_size if world.world_size > 1 else config.infra.num_gpus
    device = config.infra.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = plan_lanes(config, ranks)
    return render_deepspeed_json(
        config, world_size=ranks, gradient_accumulation_steps=plan.gradient_accumulation_steps, device=device
    )


def inspect_run_data(config: FullConfig, *, num_examples: int, as_json: bool) -> str:
    """The first examples that a run of this configuration will see, with statistics, as text or JSON."""
    tokenizer, vocabulary = _load_tokenizer(config)
    plan = plan_lanes(config, config.infra.num_gpus)
    data = build_data(config, tokenizer, vocabulary, rank=0, world_size=1, num_lanes=plan.num_lanes)
    try:
        return inspect_data(data, tokenizer, num_examples=num_examples, as_json=as_json)
    finally:
        data.loader.close()


def export_checkpoint(checkpoint: Path, out: Path, *, dtype: str, max_shard_bytes: int) -> None:
    """Write a committed checkpoint as a Hugging Face folder with a model card. Raises CheckpointError."""
    path = checkpoint.expanduser().resolve()
    weights = checkpoint_weights(path)
    model_config = Qwen3Seq2SeqConfig.from_pretrained(path / "model")
    tokenizer = pretrained_tokenizer(str(path / "model"), field="CHECKPOINT")
    facts = {
        "config": FullConfig.from_yaml(path / "config.yaml").model_dump(mode="json"),
        "state": json.loads((path / "trainer.json").read_text())["state"],
        "checkpoint": path.name,
    }
    export_hf(
        weights,
        model_config,
        tokenizer,
        out,
        dtype=getattr(torch, dtype),
        max_shard_bytes=max_shard_bytes,
        card=model_card(facts),
    )


def _load_tokenizer(config: FullConfig) -> tuple[Any, Vocabulary]:
    return load_tokenizer(
        config.model,
        builtin_texts=lambda: (document.text for document in builtin_documents()),
        mode_tokens=config.data.use_mode_tokens,
    )


def _wire(
    config: FullConfig,
    world: World,
    device: torch.device,
    agreement: Agreement,
    folder: RunFolder,
    stop: StopRequest,
    resume: str | None,
) -> Trainer:
    checkpoints = CheckpointManager(
        folder.checkpoints, agreement, engine_name=config.infra.distributed_type, keep=config.training.save_total_limit
    )
    checkpoints.prepare()
    found = checkpoints.find(resume)
    saved = found.read_json("trainer.json") if found else {}
    state = TrainingState(**saved.get("state", {}))
    plan = plan_lanes(config, world.world_size, saved.get("num_lanes"))

    tokenizer, vocabulary = agreement.rank_zero_first(lambda: _load_tokenizer(config))
    source = agreement.rank_zero_first(lambda: resolve_model(config.model, vocabulary, seed=config.training.seed))
    data = agreement.rank_zero_first(
        lambda: build_data(
            config,
            tokenizer,
            vocabulary,
            rank=world.rank,
            world_size=world.world_size,
            num_lanes=plan.num_lanes,
            saved=saved.get("data"),
        )
    )

    if found:
        _refuse_other_model(found, source.config)
        data.loader.load_state(found.read_json("data.json")["lanes"])
    engine = create_engine(config, world, device, source.config, source.weights, plan.gradient_accumulation_steps)
    if found:
        engine.load(found.path)
        logger.info("resumed from %s (step %d)", found.path, state.global_step)
    # The run's own files are touched last: everything that can refuse a resume has had its chance.
    agreement.on_rank_zero(lambda: _write_run_configuration(config, world, plan, device, folder))
    recorder = Recorder(
        device=device,
        num_devices=world.world_size,
        warmup_steps=config.training.warmup_steps,
        monitor=TrainingMonitor(),
        sinks=open_sinks(config, folder.root, rank=world.rank, start_step=state.global_step),
        batch_flops=lambda batch: training_flops(source.config, batch.encoder_lengths, batch.decoder_lengths),
        peak_flops=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
    )
    if found:
        recorder.load_state_dict(saved["recorder"])

    def write_run_files(checkpoint: Path, content: CheckpointContent) -> None:
        write_json(
            checkpoint / "trainer.json",
            {
                "state": content.state.to_dict(),
                "num_lanes": plan.num_lanes,
                "data": data.saved(),
                "recorder": content.recorder,
            },
        )
        write_json(checkpoint / "data.json", {"lanes": content.lanes})
        config.to_yaml(checkpoint / "config.yaml")
        source.config.save_pretrained(checkpoint / "model")
        tokenizer.save_pretrained(checkpoint / "model")

    return Trainer(
        config=config,
        engine=engine,
        loader=data.loader,
        eval_batches=data.eval_batches,
        agreement=agreement,
        recorder=recorder,
        checkpoints=checkpoints,
        stop=stop,
        write_run_files=write_run_files,
        state=state,
    )


def _write_run_configuration(
    config: FullConfig, world: World, plan: LanePlan, device: torch.device, folder: RunFolder
) -> None:
    config.to_yaml(folder.config_yaml)
    rendered = render_deepspeed_json(
        config,
        world_size=world.world_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        device=device.type,
        ranks_per_node=world.local_world_size,
    )
    write_atomically(folder.ds_config_json, json.dumps(rendered, indent=2) + "\n")


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)


def _refuse_other_model(found: Checkpoint, config: Qwen3Seq2SeqConfig) -> None:
    """Raise CheckpointError where the checkpoint's sizes are not this run's."""
    saved = Qwen3Seq2SeqConfig.from_pretrained(found.path / "model").to_dict()
    ours = config.to_dict()
    differing = [f"{name} {saved[name]} there, {ours[name]} here" for name in _SIZES if saved[name] != ours[name]]
    if differing:
        raise CheckpointError(f"{found.path} holds another architecture: {'; '.join(differing)}.")


@contextmanager
def _status(folder: RunFolder, world: World) -> Iterator[None]:
    """Keep `run.json` true: running, then completed, preempted or failed with the reason and exit code.

    Any rank may be the one that fails, so any rank may write the failure.
    """
    if world.is_main:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        folder.write_status("running", started_at=started, world_size=world.world_size, launcher=world.launcher)
    try:
        yield
    except Preempted as error:
        folder.write_status("preempted", reason=str(error), exit_code=error.exit_code)
        raise
    except DsEncDecError as error:
        folder.write_status("failed", reason=str(error), exit_code=error.exit_code)
        raise
    except torch.OutOfMemoryError as error:
        out_of_memory = OutOfMemoryError(
            f"rank {world.rank} ran out of device memory: {error}. Lower training.per_device_train_batch_size, or use "
            "training.activation_checkpointing=full, infra.offload_optimizer=cpu or a higher infra.sharding_stage."
        )
        folder.write_status("failed", reason=str(out_of_memory), exit_code=out_of_memory.exit_code)
        raise out_of_memory from error
    except BaseException as error:
        folder.write_status("failed", reason=f"rank {world.rank}: {type(error).__name__}: {error}", exit_code=1)
        raise
    if world.is_main:
        folder.write_status("completed", exit_code=0)
