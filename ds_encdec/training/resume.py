"""Resume from a checkpoint, at a run's start or by a rollback in its midst; refuse those of other models."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_encdec.base.quantities import listed
from ds_encdec.base.types import CheckpointError, DivergedError, TrainingState
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import CheckpointManager, find_checkpoint
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.config.schema import FullConfig, TrainingConfig, load_saved
from ds_encdec.data.build import TrainingData
from ds_encdec.data.fingerprint import changes, differing, usable_records
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.survey import steps_of_epochs, with_steps_of_epochs
from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import form_settings
from ds_encdec.model.source import architecture
from ds_encdec.monitor.metrics_file import JUDGED_AT_SAVES
from ds_encdec.monitor.recorder import Alert, Recorder
from ds_encdec.training.run_model import MODEL_NAME, new_model, saved_model

logger = logging.getLogger(__name__)

_TOKENIZER_NAME = "model.tokenizer_name_or_path"
# The counters of data, which a rollback does not take back.
_OF_DATA = ("data_step", "epoch", "total_tokens_seen", "target_tokens_seen", "bad_rows", "long_rows")


def with_steps(
    config: FullConfig, pipeline: LanePipeline, checkpoint: Checkpoint | None, collectives: HostCollectives
) -> FullConfig:
    """Return `config` with the steps of its epochs, if any: those of the checkpoint, or counted now. A collective."""
    epochs = config.training.num_train_epochs
    if epochs is None:
        return config
    if checkpoint and checkpoint.read_json("trainer.json").get("num_train_epochs") == epochs:
        steps = load_saved(checkpoint.path / "config.yaml").training.num_train_steps
    else:
        steps = collectives.on_rank_zero(lambda: steps_of_epochs(pipeline, epochs))
        logger.info("num_train_epochs=%g: %d optimizer steps", epochs, steps)
    return with_steps_of_epochs(config, steps)


def refuse_other_model(checkpoint: Checkpoint, config: FullConfig) -> None:
    """Raise CheckpointError if `config` trains another model or tokenizer than `checkpoint`; reads the small files
    only. A moved folder is still the same model, since the weights come from the checkpoint."""
    config, saved = (of_its_form(one, checkpoint) for one in (config, load_saved(checkpoint.path / "config.yaml")))
    theirs, ours = _model_settings(saved), _model_settings(config)
    differing = _differences(theirs, ours)
    if not differing:
        return
    if all(ours[name] == theirs[name] for name in (ours.keys() & theirs.keys()) - {MODEL_NAME, _TOKENIZER_NAME}):
        models = saved_model(config, checkpoint.path, hashes_base=False), new_model(config, hashes_base=False)
        contents = _differences(*(architecture(model.config) for model in models))
        tokenizers = {model.tokenizer.backend_tokenizer.to_str() for model in models}
        contents += ["the tokenizers differ"] * (len(tokenizers) > 1)
        if not contents:
            logger.info("%s is the same model and tokenizer: %s.", checkpoint.path, "; ".join(differing))
            return
        differing += contents
    raise CheckpointError(
        f"{checkpoint.path} was made with another model or tokenizer:{listed(differing)}\n"
        "Give the checkpoint's values, or start a new run from its export."
    )


def of_its_form(config: FullConfig, checkpoint: Checkpoint) -> FullConfig:
    """Return `config` with the form of cross-attention and the depth of the model in `checkpoint` where it sets none: a
    new model would get today's defaults."""
    made = Qwen3Seq2SeqConfig.from_pretrained(checkpoint.path / "model")
    form = form_settings(load_saved(checkpoint.path / "config.yaml").model, made)
    unset = {name: value for name, value in form.items() if getattr(config.model, name) is None}
    return config.model_copy(update={"model": config.model.model_copy(update=unset)})


def restored_state(
    checkpoint: Checkpoint, data: TrainingData, training: TrainingConfig, *, is_main: bool
) -> TrainingState:
    """Move the loader of `data` to the checkpoint's position, and return its state, with the best checkpoint forgotten
    if this run has another `metric_for_best_model` or other data."""
    if is_main:
        _warn_of_another_optimizer(checkpoint, training)
    state, path = checkpoint.training_state(), checkpoint.path
    from_here = "From here the best checkpoint is chosen, and early stopping counts."
    if (then := state.best_by) != (now := training.best_by):
        logger.info("The best checkpoint of %s is by the %s, and of this run by the %s. %s", path, then, now, from_here)
    state = state.with_best_by(training.best_by)
    fingerprint = checkpoint.read_json("trainer.json")["data"]["fingerprint"]
    data.loader.load_state(usable_records(checkpoint.read_json("data.json")["lanes"], fingerprint, data.fingerprint))
    if not differing(fingerprint, data.fingerprint):
        return state
    level, found = logging.WARNING if is_main else logging.DEBUG, changes(fingerprint, data.fingerprint)
    logger.log(level, "This run reads other data than %s: %s. %s", path, found, from_here)
    return state.without_best()


def _warn_of_another_optimizer(checkpoint: Checkpoint, training: TrainingConfig) -> None:
    theirs = load_saved(checkpoint.path / "config.yaml").training
    then, now = (f"{one.optimizer} {one.optimizer_args or ''}".strip() for one in (theirs, training))
    if then != now:
        logger.warning(
            "%s was saved with training.optimizer=%s, but this run has %s: states of the same names are kept, though "
            "their meaning may differ. To start with states of zeros, start a new run from the export.",
            *(checkpoint.path, then, now),
        )


def load_engine(engine: Engine, checkpoint: Checkpoint, collectives: HostCollectives) -> None:
    """Fill the engine of every rank. A collective: if one rank cannot open its files, all raise its error."""
    engine.load(collectives.on_every_rank(lambda: open_saved_state(checkpoint.path, verified=True)))


def go_back(
    state: TrainingState, alert: Alert, engine: Engine, checkpoints: CheckpointManager, recorder: Recorder
) -> TrainingState | None:
    """Load an earlier checkpoint in mid-run and skip the data read since. Returns the new state, or None if none fits.
    Weights, optimizer, schedule and the monitor's windows become the checkpoint's, and the data loader stays where it
    is: the run goes on as one that trained up to that checkpoint and never saw the data in between. None: no checkpoint
    is old enough, and the run goes on as it is. A collective, with no save under way. The caller saves the new state at
    once: it has the checkpoint's step, but other data behind it. Raises DivergedError if the run has used up its
    rollbacks, CheckpointError if every checkpoint that is old enough is damaged."""
    settings, collectives = recorder.settings, recorder.collectives
    if state.rollbacks >= settings.max_rollbacks:
        raise DivergedError(
            f"{alert['type']}: {alert['message']}. All monitor.max_rollbacks={settings.max_rollbacks} rollbacks are "
            "used. Checkpoints are untouched: lower training.learning_rate, or check the data."
        )
    where = {"step": state.global_step, "data_step": state.data_step}
    age = 0 if alert["type"] in JUDGED_AT_SAVES else settings.rollback_min_steps
    oldest = alert["step"] - age
    checkpoint = find_checkpoint(checkpoints.folder, collectives, "auto", at_most=oldest)
    if checkpoint is None:
        needed = f"of step {oldest} or before" if oldest > 0 else f"{age} steps old"
        refusal = f"No rollback: there is no checkpoint {needed}{' (monitor.rollback_min_steps)' if age else ''}."
        recorder.events.write("no_rollback", **where, message=refusal)
        if collectives.rank == 0:
            logger.error(refusal)
        return None
    then = checkpoint.training_state().with_best_by(state.best_by)
    load_engine(engine, checkpoint, collectives)
    skipped, number = state.data_step - then.global_step, state.rollbacks + 1
    of_data = {name: getattr(state, name) for name in _OF_DATA}
    now = checkpoints.adopt(checkpoint, replace(then, skipped_steps=skipped, rollbacks=number, **of_data))
    recorder.go_back(checkpoint.read_json("trainer.json")["recorder"], now)
    recorder.events.write(
        "rollback",
        **where,
        type=alert["type"],
        message=alert["message"],
        to_step=then.global_step,
        to_data_step=then.data_step,
        number=number,
    )
    if collectives.rank == 0:
        logger.warning(
            f"Rollback {number} of at most {settings.max_rollbacks}: back to step {then.global_step}; "
            f"data steps {then.data_step + 1} to {state.data_step} are not trained on again."
        )
    return now


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]


def _model_settings(config: FullConfig) -> dict[str, Any]:
    section = config.model
    sizes = section.architecture.model_dump() if section.architecture else {}
    return {
        "model.lora": section.lora and section.lora.model_dump(exclude={"lora_dropout"}),
        "training.freeze": config.training.freeze,
        **{f"model.{name}": value for name, value in form_settings(section, section).items()},
        MODEL_NAME: section.model_name_or_path,
        _TOKENIZER_NAME: section.tokenizer_name_or_path or section.model_name_or_path,
        "model.num_sentinel_tokens": section.num_sentinel_tokens,
        "data.use_mode_tokens": config.data.use_mode_tokens,
        **{f"model.architecture.{name}": value for name, value in sizes.items()},
    }
