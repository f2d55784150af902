"""From a FullConfig to a wired Trainer, and from a finished run to a model folder.

The only place that knows everybody. It reads top to bottom in the order in which a run may fail cheaply:
the machine, the output folder, the data and the model's source, the engine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_encdec.auto_batch.resolve import Place, resolve_batch_size
from ds_encdec.checkpoint.average import average_last_checkpoints, clear_averaged
from ds_encdec.checkpoint.find import Checkpoint, find_checkpoint
from ds_encdec.checkpoint.folder import check_room
from ds_encdec.checkpoint.manager import MAKE_ROOM, CheckpointManager
from ds_encdec.config.batch_size import (
    is_auto,
    micro_batch_candidates,
    micro_batches_per_step,
    with_assumed_batch_size,
)
from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.data.build import TrainingData, build_data
from ds_encdec.data.hub_commits import resolve_commits
from ds_encdec.data.inspect import inspect_data
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engine.select import check_engine, create_engine, fallback_engine, resolve_engine
from ds_encdec.engines import EngineName
from ds_encdec.launch.atomic_files import write_atomically
from ds_encdec.launch.disk import Writing
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.peers import Peers, Watchdog, is_broken_connection
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.run_status import ending_recorded, named_error, record
from ds_encdec.launch.world import World, discover
from ds_encdec.memory.expected import ExpectedMemory, expect
from ds_encdec.memory.job import Job, make_job
from ds_encdec.memory.out_of_memory import out_of_memory_explained
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters, training_flops
from ds_encdec.model.precision import product_dtype
from ds_encdec.monitor.events import EventLog
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.peak_flops import peak_flops
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import open_sinks
from ds_encdec.resume import load_engine, refuse_other_model, restore_data
from ds_encdec.run_model import RunModel, new_model, run_tokenizer, saved_model
from ds_encdec.trainer import CheckpointContent, Trainer, train
from ds_encdec.types import ConfigError, HangError, LostRankError, Preempted, TrainingState

logger = logging.getLogger(__name__)


def run_training(
    config: FullConfig, stop: StopRequest, *, resume: str | None = None, allow_data_change: bool = False
) -> TrainingState:
    """Train as configured, on whatever ranks the environment says this process is one of.

    `stop` has been entered. `resume`: None, `auto`, or the path of a checkpoint, of whatever engine and number of
    ranks. `allow_data_change`: go on from it although this run reads other data. Raises DsEncDecError subclasses, whose
    exit codes are also in the run's `run.json`.
    """
    world = discover(os.environ)  # now: a port that is free, where none is given
    logging.basicConfig(level=logging.INFO if world.is_main else logging.WARNING, format="%(message)s", force=True)
    engine = resolve_engine(config)
    check_engine(engine, config, world)
    device = choose_device(config.infra.device, world)
    if config.training.fp16 and device.type == "cpu":  # infra.device=auto; rules.py sees the other cases
        raise ConfigError("training.fp16=true needs an accelerator: DeepSpeed trains no float16 on CPUs. Use bf16.")
    if resume is None:  # fails, if it must, before the ranks meet
        check_batch(config, world.world_size)
    if world.world_size != config.infra.num_gpus and world.is_main:
        logger.info("ranks: %d (the configuration was planned for %d)", world.world_size, config.infra.num_gpus)
    timeout = timedelta(minutes=config.infra.distributed_timeout_minutes)
    try:
        engine = init_process_group(world, device, timeout, engine, otherwise=fallback_engine(config))
        stop.ranks_have_met()
        collectives = HostCollectives(timeout)
        collectives.all_gather_ints([0])  # whoever is past this knows that none may leave alone any more
    except RuntimeError as error:  # torch's; a launcher stops those whom one has left
        if is_broken_connection(error) and stop.comes_within(seconds=10):
            raise Preempted(f"stopped by {stop.reason} while the ranks met: there was nothing to save") from error
        raise
    site = Site(world, device, engine, collectives, RunFolder(config.infra.output_dir))
    site.folder.earlier = collectives.on_rank_zero(lambda: site.folder.claim(resume=resume is not None))
    stop.before_end = lambda why: record(
        site.folder, "failed", reason=f"rank {world.rank}: {why}", exit_code=HangError.exit_code
    )
    with (
        Peers(site.folder, site.collectives) as peers,
        ending_recorded(site.folder, world, peers, spare=resume is not None) as begin,
        Watchdog(stop, _hang_timeout_minutes(config.infra), site.folder, site.collectives),
    ):
        trainer = _wire(config, site, stop, resume, allow_data_change)
        begin()
        state = _train_and_close(trainer, peers)
    del trainer
    with stop.busy():  # no step follows, and nobody is stuck
        shutdown()
        if world.is_main:
            average_last_checkpoints(site.folder, last=config.training.average_checkpoints)
    site.folder.release()
    return state


def _train_and_close(trainer: Trainer, peers: Peers | None = None) -> TrainingState:
    exit_code, reason = 0, ""
    try:
        with out_of_memory_explained(trainer.expected_memory, trainer.engine.device, trainer.collectives.rank):
            state = train(trainer)
        if state is not trainer.state and state.global_step < trainer.config.training.num_train_steps:
            _say_stopped_early(trainer, state)
    except BaseException as error:
        named = named_error(error, trainer.collectives.rank, peers)
        exit_code, reason = named.exit_code, str(named)
        if isinstance(named, LostRankError):  # looked for once
            raise named from error
        raise
    finally:
        with trainer.stop.busy():
            trainer.checkpoints.close()
            trainer.loader.close()
            trainer.recorder.close(exit_code, reason)
    logger.info("finished at step %d; checkpoints are in %s", state.global_step, trainer.checkpoints.folder)
    trainer.engine.close()
    return state


def _hang_timeout_minutes(infra: InfraConfig) -> float | None:
    """Without a word, well before a collective would give up; 0 is never."""
    if infra.hang_timeout_minutes is None:
        return infra.distributed_timeout_minutes * 2 / 3
    return infra.hang_timeout_minutes or None


def _say_stopped_early(trainer: Trainer, state: TrainingState) -> None:
    training = trainer.config.training
    message = (
        f"the evaluation's loss has not fallen by more than {training.early_stopping_threshold:g} below "
        f"{state.lowest_eval_loss:.4f} in {state.evaluations_since_lowest} evaluations"
    )
    logger.info("early stopping at step %d: %s", state.global_step, message)
    trainer.recorder.events.write("early_stop", step=state.global_step, data_step=state.data_step, message=message)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a run takes place: this rank among the others, its device, its engine, and the run's folder."""

    world: World
    device: torch.device
    engine: EngineName
    collectives: HostCollectives
    folder: RunFolder


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Micro-batches of one optimizer step: over all ranks, and on each of them."""

    num_lanes: int
    gradient_accumulation_steps: int


def plan_lanes(config: FullConfig, world_size: int, saved_lanes: int | None = None) -> LanePlan:
    """How the lanes of a run (a saved run's never change) fall on `world_size` ranks. Raises ConfigError."""
    lanes = saved_lanes or micro_batches_per_step(config, world_size)
    if lanes % world_size:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        origin = "fixed when this run first started"
        if not saved_lanes:
            by_batch = "training.global_batch_size / training.per_device_train_batch_size"
            origin = "data.num_lanes" if config.data.num_lanes else by_batch
        raise ConfigError(
            f"{world_size} ranks do not divide the run's {lanes} lanes ({origin}), so its optimizer step cannot be "
            f"shared out evenly. Start it on one of these numbers of ranks: {fitting}."
        )
    return LanePlan(lanes, lanes // world_size)


def check_batch(config: FullConfig, world_size: int) -> None:
    """Raise ConfigError for a batch that `world_size` ranks cannot share out at a first start."""
    if is_auto(config):
        micro_batch_candidates(config, world_size)
    else:
        plan_lanes(config, world_size)


def planned_deepspeed_json(config: FullConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that DeepSpeed would be given here; for a plain process, on the planned `infra.num_gpus` ranks."""
    world = discover(environ)
    ranks = world.world_size if world.world_size > 1 else config.infra.num_gpus
    device = config.infra.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = with_assumed_batch_size(config, ranks)
    plan = plan_lanes(config, ranks)
    return render_deepspeed_json(
        config, world_size=ranks, gradient_accumulation_steps=plan.gradient_accumulation_steps, device=device
    )


def inspect_run_data(config: FullConfig, *, num_examples: int, as_json: bool) -> str:
    """The first examples that a run of this configuration will see, with statistics, as text or JSON."""
    tokenizer, vocabulary = run_tokenizer(config)
    config = with_assumed_batch_size(config, config.infra.num_gpus)
    plan = plan_lanes(config, config.infra.num_gpus)
    data = build_data(config, tokenizer, vocabulary, rank=0, world_size=1, num_lanes=plan.num_lanes)
    try:
        return inspect_data(data, tokenizer, num_examples=num_examples, as_json=as_json)
    finally:
        data.loader.close()


def _wire(config: FullConfig, site: Site, stop: StopRequest, resume: str | None, allow_data_change: bool) -> Trainer:
    """Everything a run needs, in the order in which it may fail cheaply; the run's own files are touched last."""
    world, device, collectives = site.world, site.device, site.collectives
    checkpoints = CheckpointManager(
        site.folder.checkpoints,
        collectives,
        engine_name=site.engine,
        keep=config.training.save_total_limit,
    )
    checkpoints.prepare()
    collectives.on_rank_zero(lambda: clear_averaged(site.folder))

    def accept(checkpoint: Checkpoint) -> None:
        plan_lanes(config, world.world_size, checkpoint.read_json("trainer.json")["num_lanes"])
        checkpoint.training_state()
        refuse_other_model(checkpoint, config)

    found = find_checkpoint(site.folder.checkpoints, collectives, resume, accept)
    saved = found.read_json("trainer.json") if found else {}
    state = found.training_state() if found else TrainingState()
    model = collectives.rank_zero_first(lambda: saved_model(config, found.path) if found else new_model(config))
    # One rank asks the hub, so that all read the same commit of a data set.
    saved_commits = saved["data"]["dataset_commits"] if found else None
    commits = collectives.on_rank_zero(lambda: resolve_commits(config.data, saved_commits))
    place = Place(world, device, site.engine, collectives, stop)
    config = resolve_batch_size(config, place, model.config, found)
    plan = plan_lanes(config, world.world_size, saved.get("num_lanes"))
    data = collectives.rank_zero_first(
        lambda: build_data(
            config,
            model.tokenizer,
            model.vocabulary,
            rank=world.rank,
            world_size=world.world_size,
            num_lanes=plan.num_lanes,
            saved=saved.get("data"),
            commits=commits,
            accept_other_data=allow_data_change,
            evaluation_cache=site.folder.root / "evaluation",
            pin_memory=device.type == "cuda",
        )
    )
    if found:
        state = restore_data(found, data, state, is_main=world.is_main)
    job = _memory_job(config, site, model.config, data.ratio, plan)
    collectives.on_rank_zero(lambda: check_room(site.folder.checkpoints, config, job))
    expected = expect(job)
    if expected is not None:
        logger.info("%s", expected)
    with out_of_memory_explained(expected, device, world.rank):
        engine = create_engine(
            site.engine, config, world, device, model.config, model.weights, plan.gradient_accumulation_steps
        )
        if found:
            load_engine(engine, found, collectives)
    if found:
        state = checkpoints.adopt(found, state)
        logger.info("resumed from %s (step %d)", found.path, state.global_step)
    logger.info(
        "%s parameters, %d micro-batches a step on %d ranks, steps %d to %d, into %s",
        f"{count_parameters(model.config):,}",
        plan.num_lanes,
        world.world_size,
        state.global_step,
        config.training.num_train_steps,
        site.folder.root,
    )

    def open_files() -> Recorder:
        with Writing(site.folder.root, "The run", MAKE_ROOM).refusals_told():
            if world.is_main:
                _write_run_configuration(config, site, plan)
            return _open_recorder(config, site, model.config, state, expected)

    recorder = collectives.on_every_rank(open_files)
    if found:
        recorder.load_state_dict(saved["recorder"])
    recorder.events.write(
        "start",
        step=state.global_step,
        data_step=state.data_step,
        resumed_from=str(found.path) if found else None,
        world_size=world.world_size,
        engine=site.engine,
    )
    return Trainer(
        config=config,
        engine=engine,
        loader=data.loader,
        eval_batches=data.eval_batches,
        collectives=collectives,
        recorder=recorder,
        checkpoints=checkpoints,
        stop=stop,
        run_files=partial(_run_files, config=config, model=model, data=data, plan=plan),
        state=state,
        require_folder=site.folder.require_present,
        expected_memory=expected,
    )


def _memory_job(config: FullConfig, site: Site, model_config: Qwen3Seq2SeqConfig, ratio: float, plan: LanePlan) -> Job:
    """This rank's share of a step, with the sizes and budgets that it really has."""
    some_bf16 = torch.empty(0, dtype=torch.bfloat16, device=site.device)
    return make_job(
        config,
        model_config,
        site.engine,
        world_size=site.world.world_size,
        ranks_per_node=site.world.local_world_size,
        device="cuda" if site.device.type == "cuda" else "cpu",
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        ratio=ratio,
        emulates_bf16=product_dtype(some_bf16) != some_bf16.dtype,
    )


def _open_recorder(
    config: FullConfig,
    site: Site,
    model_config: Qwen3Seq2SeqConfig,
    state: TrainingState,
    expected: ExpectedMemory | None,
) -> Recorder:
    device, folder = site.device, site.folder
    return Recorder(
        device=device,
        collectives=site.collectives,
        state=state,
        warmup_steps=config.training.warmup_steps,
        settings=config.monitor,
        monitor=TrainingMonitor.from_config(config),
        events=EventLog(folder.events if site.world.is_main else None),
        sinks=open_sinks(config, folder.root, rank=site.world.rank, start_step=state.global_step),
        batch_flops=lambda batch: training_flops(model_config, batch.encoder_lengths, batch.decoder_lengths),
        peak_flops=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
        estimated_bytes=expected.peak_bytes if expected is not None else None,
    )


def _run_files(
    content: CheckpointContent, *, config: FullConfig, model: RunModel, data: TrainingData, plan: LanePlan
) -> Callable[[Path], None]:
    """What writes all that a checkpoint holds beside the engine's files; see docs/checkpoints.md."""
    trainer = {
        "state": content.state.to_dict(),
        "num_lanes": plan.num_lanes,
        "data": data.saved(),
        "recorder": content.recorder,
    }
    # Text now: by the time it is written, training may have gone on.
    texts = {
        "trainer.json": json.dumps(trainer, indent=1) + "\n",
        "data.json": json.dumps({"lanes": content.lanes}, indent=1) + "\n",
        "config.yaml": config.dump_yaml(),
    }

    def write(checkpoint: Path) -> None:
        for name, text in texts.items():
            (checkpoint / name).write_text(text, encoding="utf-8")
        model.config.save_pretrained(checkpoint / "model")
        model.tokenizer.save_pretrained(checkpoint / "model")

    return write


def _write_run_configuration(config: FullConfig, site: Site, plan: LanePlan) -> None:
    write_atomically(site.folder.config_yaml, config.dump_yaml())
    if site.engine != "deepspeed":
        site.folder.ds_config_json.unlink(missing_ok=True)  # an earlier start's, with the other engine
        return
    rendered = render_deepspeed_json(
        config,
        world_size=site.world.world_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        device=site.device.type,
        ranks_per_node=site.world.local_world_size,
    )
    write_atomically(site.folder.ds_config_json, json.dumps(rendered, indent=2) + "\n")
