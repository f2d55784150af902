"""Build a Trainer from a FullConfig, train, and export the finished run: the only module that knows all the others, in
the order in which a run may fail cheaply."""

import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ds_encdec.base.foreign_places import outside_tested_ranges
from ds_encdec.base.plugins import load_plugin
from ds_encdec.base.quantities import count
from ds_encdec.base.terminal import without_url_secrets
from ds_encdec.base.types import Callback, ConfigError, HangError, LostRankError, Preempted, TrainingState
from ds_encdec.checkpoint.folder import Checkpoint, committed_steps
from ds_encdec.checkpoint.manager import CheckpointManager, find_checkpoint
from ds_encdec.checkpoint.upload import Uploads
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import is_auto, micro_batch_candidates, plan_lanes
from ds_encdec.data.build import build_data
from ds_encdec.data.sources.tables import resolve_commits
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import create_engine, join_ranks
from ds_encdec.evaluate.in_training import Judge, usable_metrics
from ds_encdec.exports.adapters import one_base
from ds_encdec.exports.hugging_face import average_last_checkpoints, clear_exports, export_at_end
from ds_encdec.launch.agreement import require_same_data
from ds_encdec.launch.disk import DiskRefusedError
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.peers import Peers, Watchdog, ending_recorded, is_broken_connection, named_error, record
from ds_encdec.launch.preemption import StopRequest, awaited
from ds_encdec.launch.process_group import shutdown
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.startup_errors import startup_errors_shared
from ds_encdec.launch.world import World, discover
from ds_encdec.memory.expected import ExpectedMemory, estimate_run, out_of_memory_explained
from ds_encdec.memory.gpus import grow_segments
from ds_encdec.memory.job import Job, disk_shortage
from ds_encdec.model.depth import beyond_positions
from ds_encdec.training.absent import require_here
from ds_encdec.training.auto_batch.resolve import job_here, resolve_batch_size, resolve_checkpointing
from ds_encdec.training.loop_state import Trainer
from ds_encdec.training.profiling import StepProfiler
from ds_encdec.training.reference import use_reference
from ds_encdec.training.resume import load_engine, of_its_form, refuse_other_model, restored_state, with_steps
from ds_encdec.training.run import Run, begin_recording, checkpoint_files, start_banner
from ds_encdec.training.run_model import MODEL_NAME, new_model, saved_model
from ds_encdec.training.step_plan import is_over
from ds_encdec.training.trainer import train

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Request:
    config: FullConfig
    stop: StopRequest
    resume: str | None
    allow_data_change: bool
    callbacks: Sequence[Callback]
    profile: int


def run_training(
    config: FullConfig,
    stop: StopRequest | None = None,
    *,
    resume: str | None = None,
    allow_data_change: bool = False,
    callbacks: Sequence[Callback] = (),
    profile: int = 0,
) -> TrainingState:
    """Train as configured, as the rank that the environment assigns to this process.

    `stop` has been entered; with None, signals are handled during the run only, which needs the main thread. `resume`:
    None, `auto`, or the path of a checkpoint, of any engine and number of ranks. `allow_data_change`: resume although
    this run reads other data. `callbacks` join those of `training.callbacks`, and are the same on every rank.
    `profile`: the number of steps to profile (profiling.py).

    Raises DsEncDecError subclasses, whose exit codes are also in the run's `run.json`. The log goes to the loggers of
    `ds_encdec`, which the caller configures."""
    world = discover(os.environ)  # now, since it picks a free port if none is configured
    grow_segments(os.environ)
    with startup_errors_shared(world):
        require_here(config, new=resume is None)
        if resume is None:  # a batch that the ranks cannot share is refused before the rendezvous
            (micro_batch_candidates if is_auto(config) else plan_lanes)(config, world.world_size)
    with StopRequest(world) if stop is None else nullcontext(stop) as watch:
        try:
            return _train_on_ranks(_Request(config, watch, resume, allow_data_change, callbacks, profile), world)
        except BaseException:
            if world.world_size == 1:  # one rank waits for nobody, and its process may train again
                shutdown()
            raise


def _train_on_ranks(request: _Request, world: World) -> TrainingState:
    config, stop, resume = request.config, request.stop, request.resume
    try:
        context = join_ranks(config, world, met=stop.ranks_have_met)  # from now on no rank may leave alone
    except (RuntimeError, LostRankError) as error:  # torch's; a launcher stops the ranks that one has left
        if is_broken_connection(error) and awaited(10, lambda: stop.reason is not None):
            raise Preempted(f"stopped by {stop.reason} while the ranks met: there was nothing to save") from error
        raise
    world = context.world
    if world.is_main and (untested := outside_tested_ranges()):
        logger.warning("not tested with %s: results may be wrong in places", ", ".join(untested))
    folder = RunFolder(config.infra.output_dir)
    try:
        folder.earlier = context.collectives.on_rank_zero(lambda: folder.claim(resume=resume is not None))
    except BaseException:
        context.undo.close()
        raise
    stop.folder_is_known(
        folder.stop_file if world.is_main else None,
        lambda why: record(folder, "failed", reason=f"rank {world.rank}: {why}", exit_code=HangError.exit_code),
    )
    uploads = Uploads(folder, config.infra.upload_to if world.is_main else None)
    # By default a rank counts as stuck well before a collective would give up; 0: never.
    hang_minutes = config.infra.hang_timeout_minutes
    hang_minutes = config.infra.distributed_timeout_minutes * 2 / 3 if hang_minutes is None else hang_minutes
    with (
        context.undo,
        Peers(folder, context.collectives) as peers,
        uploads.awaited_by_all(context.collectives, stop.heartbeat),  # exits after the ending is recorded, to copy it
        ending_recorded(folder, world, peers, spare=resume is not None) as begin,
        # Innermost, so it exits first: it ends a run that hangs before another ending is recorded.
        Watchdog(stop, hang_minutes or None, folder, context.collectives),
    ):
        context.collectives.on_rank_zero(lambda: uploads.claim(resume))
        profilers = [StepProfiler(request.profile, folder.profile, world.rank)] if request.profile else []
        callbacks = _open_callbacks(config, [*request.callbacks, uploads, *profilers], context.collectives)
        trainer, expected, facts = _build_trainer(request, context, folder, callbacks)
        begin(**facts)
        state = _train_and_close(trainer, peers, expected)
        has_stepped = trainer.has_stepped
        for profiler in profilers:
            profiler.finish()
    del trainer
    with stop.heartbeat.busy():  # no step follows, and nobody is stuck
        shutdown()
        if world.is_main:
            export_at_end(folder, config.training, has_trained=has_stepped)
            average_last_checkpoints(folder, last=config.training.average_checkpoints)
        uploads.finish()
    folder.release()
    return state


def _open_callbacks(
    config: FullConfig, given: Sequence[Callback], collectives: HostCollectives
) -> tuple[Callback, ...]:
    """Return the callbacks `given` in Python, then those of `training.callbacks`, called with the configuration. A
    collective. Raises ConfigError if one cannot be imported or is no `Callback`, or if the ranks' callbacks differ."""
    field = "training.callbacks"

    def made() -> tuple[Callback, ...]:
        callbacks = (*given, *(load_plugin(field, name, "callbacks")(config) for name in config.training.callbacks))
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{field}: {callback!r} is not a ds_encdec.Callback. Let its class inherit from that")
        return callbacks

    callbacks = collectives.on_every_rank(made)
    kinds = collectives.gather([type(callback).__qualname__ for callback in callbacks])
    if any(kind != kinds[0] for kind in kinds):
        raise ConfigError(f"{field} must be the same on all ranks, which would wait for each other: {kinds}")
    return callbacks


@contextmanager
def manual_gc() -> Iterator[None]:
    """Collect garbage now, never again by itself, and never over the modules, the model and the engine (`gc.freeze`).
    Left alone, the collector runs in the middle of a step, on each rank in another one, and the others wait."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _train_and_close(
    trainer: Trainer, peers: Peers | None = None, expected: ExpectedMemory | None = None
) -> TrainingState:
    exit_code, reason = 0, ""
    try:
        with out_of_memory_explained(expected, trainer.engine.device, trainer.collectives.rank), manual_gc():
            state = train(trainer)
        training = trainer.config.training
        if trainer.has_stepped and state.global_step < training.num_train_steps:
            message = (
                f"{count(state.evaluations_since_leading, 'evaluation')} in a row did not improve the {state.best_by}, "
                f"{state.leading_value:.6g}, by more than {training.early_stopping_threshold:g}"
            )
            logger.info("early stopping at step %d: %s", state.global_step, message)
            trainer.recorder.events.write(
                "early_stop", step=state.global_step, data_step=state.data_step, message=message
            )
    except BaseException as error:
        named = named_error(error, trainer.collectives.rank, peers)
        exit_code, reason = named.exit_code, without_url_secrets(str(named))
        if isinstance(named, LostRankError):  # `named_error` has looked for the lost rank
            raise named from error
        raise
    finally:
        with trainer.stop.heartbeat.busy():
            trainer.checkpoints.close()
            trainer.loader.close()
            trainer.recorder.close(exit_code, reason)
    logger.info("finished at step %d; checkpoints are in %s", state.global_step, trainer.checkpoints.folder)
    trainer.engine.close()
    return state


def _build_trainer(
    request: _Request, context: RunContext, folder: RunFolder, callbacks: Sequence[Callback]
) -> tuple[Trainer, ExpectedMemory | None, dict[str, Any]]:
    """Build all parts of a run; those that fail cheaply come first, and the run's own files last. Returns the trainer,
    the expected memory, and facts for `run.json`."""
    collectives, training = context.collectives, request.config.training
    checkpoints = CheckpointManager(
        folder.checkpoints, collectives, engine_name=context.engine, keep=training.save_total_limit
    )
    checkpoints.prepare()
    collectives.on_rank_zero(lambda: clear_exports(folder))
    run = _plan(request, context, folder)
    metrics = collectives.on_every_rank(lambda: usable_metrics(run.config)) if training.eval_generate_samples else []
    data = collectives.rank_zero_first(
        lambda: build_data(
            run.config,
            run.model.tokenizer,
            run.model.vocabulary,
            rank=context.world.rank,
            world_size=context.world.world_size,
            num_lanes=run.num_lanes,
            saved=run.checkpoint.read_json("trainer.json")["data"] if run.checkpoint else None,
            commits=run.commits,
            accept_other_data=request.allow_data_change,
            evaluation_cache=folder.root / "evaluation",
            pin_memory=context.device.type == "cuda",
        )
    )
    require_same_data(data.fingerprint, collectives)
    run = replace(run, config=with_steps(run.config, data.pipeline, run.checkpoint, collectives))
    state = (
        restored_state(run.checkpoint, data, training, is_main=context.world.is_main)
        if run.checkpoint
        else TrainingState(best_by=training.best_by)
    )
    job = job_here(run.config, context, run.model.config, run.accumulation, data.ratio)
    expected = estimate_run(job)
    if is_over(state, run.config.training):
        is_whole = state.global_step >= run.config.training.num_train_steps
        limit = "num_train_steps" if is_whole else "early_stopping_patience"
        logger.info("nothing is left to train after step %d. To train on, raise training.%s", state.global_step, limit)
    elif context.world.is_main:
        for line in start_banner(job, context, expected, start_step=state.global_step, epochs=run.epochs):
            logger.info(line)
    engine = _build_engine(run, job, expected)
    if run.checkpoint:
        state = checkpoints.adopt(run.checkpoint, state)
        logger.info("resumed from %s (step %d)", run.checkpoint.path, state.global_step)
    model, examples, stop = run.model, data.eval_examples, request.stop
    judge = Judge(
        run.config, engine, model.config, model.tokenizer, collectives, examples, metrics, lambda: stop.requested
    )
    trainer = Trainer(
        config=run.config,
        engine=engine,
        loader=data.loader,
        eval_sets={"": data.eval_batches, **data.eval_sets},
        collectives=collectives,
        recorder=begin_recording(run, state, expected),
        checkpoints=checkpoints,
        stop=stop,
        run_files=partial(checkpoint_files, run, data),
        state=state,
        require_folder=folder.require_present,
        judge=judge if metrics else None,
        callbacks=callbacks,
        before_steps=partial(use_reference, run, data, engine, stop),
        rehearses=context.device.type != "cpu",
    )
    return trainer, expected, {"parameters": job.parameters, "trainable_parameters": job.trainable_parameters}


def _plan(request: _Request, context: RunContext, folder: RunFolder) -> Run:
    """Find the checkpoint to resume from, load the model, and plan a step's micro-batches. A collective."""
    collectives, config = context.collectives, request.config
    checkpoint = _find(config, context, folder, request.resume)
    saved = checkpoint.read_json("trainer.json") if checkpoint else None
    config = of_its_form(config, checkpoint) if checkpoint else config
    # Once on each machine, since copies may differ; rank 0 writes its hashes into checkpoints.
    hashes = context.world.is_main or context.world.local_rank == 0
    model = collectives.rank_zero_first(
        lambda: (
            saved_model(config, checkpoint.path, hashes_base=hashes)
            if checkpoint
            else new_model(config, hashes_base=hashes)
        )
    )
    if config.model.lora is not None:
        one_base(collectives.gather(model.base), MODEL_NAME)
    if config.training.teacher is not None:
        one_base(collectives.gather(model.taught_by), "training.teacher")
    # Rank 0 alone queries the hub, so that all read the same commit of a data set.
    commits = collectives.on_rank_zero(
        lambda: resolve_commits(config.data, saved["data"]["dataset_commits"] if saved else None)
    )
    is_alone = not model.config.num_hidden_layers
    lengths = config.data.max_encoder_length, 0 if is_alone else config.data.max_decoder_length
    if context.world.is_main and (problem := beyond_positions(model.config, *lengths)):
        logger.warning("data.max_encoder_length, data.max_decoder_length: %s", problem)
    config = resolve_checkpointing(config, context, model.config, checkpoint)
    config = resolve_batch_size(config, context, request.stop, model.config, checkpoint, model.teacher)
    lanes = plan_lanes(config, context.world.world_size, saved["num_lanes"] if saved else None)
    return Run(config, context, folder, checkpoint, model, commits, *lanes, config.training.num_train_epochs)


def _find(config: FullConfig, context: RunContext, folder: RunFolder, resume: str | None) -> Checkpoint | None:
    """Return the checkpoint to resume from, if any; raise the reason why this run cannot resume it. A collective."""

    def accept(checkpoint: Checkpoint) -> None:
        plan_lanes(config, context.world.world_size, checkpoint.read_json("trainer.json")["num_lanes"])
        checkpoint.training_state()
        refuse_other_model(checkpoint, config)

    checkpoint = find_checkpoint(folder.checkpoints, context.collectives, resume, accept)
    if resume == "auto" and checkpoint is None:
        logger.info("--resume auto: no checkpoint is in %s, so the run begins at step 0", folder.checkpoints)
    return checkpoint


def _build_engine(run: Run, job: Job, expected: ExpectedMemory | None) -> Engine:
    model, context, folder = run.model, run.context, run.folder.checkpoints

    def check_disk_space() -> None:
        problem = disk_shortage(folder, len(committed_steps(folder)), run.config, job)
        if problem and run.config.infra.require_disk_space:
            raise DiskRefusedError(f"{problem} (infra.require_disk_space=true)")
        if problem:
            logger.warning(f"{problem} A save that does not fit fails; infra.require_disk_space=true refuses to start.")

    context.collectives.on_rank_zero(check_disk_space)
    with out_of_memory_explained(expected, context.device, context.world.rank):
        engine = create_engine(run.config, context, model.config, model.weights, run.accumulation, model.teacher)
        if run.checkpoint:
            load_engine(engine, run.checkpoint, context.collectives)
    return engine
