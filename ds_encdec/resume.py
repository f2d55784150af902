"""Resuming: a run takes over its state from a checkpoint, or refuses it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from ds_encdec.checkpoint.find import Checkpoint
from ds_encdec.checkpoint.saved_state import open_saved_state
from ds_encdec.config.load import load_saved
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import TrainingData
from ds_encdec.data.fingerprint import told, usable_records
from ds_encdec.data.same_sources import in_todays_form
from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.source import architecture
from ds_encdec.run_model import new_model, saved_model
from ds_encdec.types import CheckpointError, DsEncDecError, TrainingState

logger = logging.getLogger(__name__)

_MODEL_NAME = "model.model_name_or_path"
_TOKENIZER_NAME = "model.tokenizer_name_or_path"


def refuse_other_model(found: Checkpoint, config: FullConfig) -> None:
    """Raise CheckpointError where `config` trains another model or tokenizer; reads the small files only.

    A moved folder is still the same model, under another name: the weights come from the checkpoint.
    """
    theirs, ours = _model_settings(load_saved(found.path / "config.yaml")), _model_settings(config)
    differing = _differences(theirs, ours)
    if not differing:
        return
    if all(ours[name] == theirs[name] for name in (ours.keys() & theirs.keys()) - {_MODEL_NAME, _TOKENIZER_NAME}):
        contents = _different_contents(found, config)
        if not contents:
            logger.info("%s is the same model and tokenizer: %s.", found.path, "; ".join(differing))
            return
        differing += contents
    raise CheckpointError(
        f"{found.path} was made with another model or tokenizer: {'; '.join(differing)}. Give the checkpoint's "
        "values, or start a new run from its export."
    )


def restore_data(found: Checkpoint, data: TrainingData, state: TrainingState, *, is_main: bool) -> TrainingState:
    """Put the loader of `data` where the checkpoint was; returns `state`, without a best loss if the data is other."""
    fingerprint = found.read_json("trainer.json")["data"]["fingerprint"]
    lanes = usable_records(found.read_json("data.json")["lanes"], fingerprint, data.fingerprint)
    data.loader.load_state(lanes)
    if data.fingerprint == in_todays_form(fingerprint, data.fingerprint["sources"]):
        return state
    logger.log(
        logging.WARNING if is_main else logging.DEBUG,
        "Going on with other data than %s was made on: %s (%s). The best checkpoint is chosen anew.",
        found.path,
        "the lanes keep their places among the documents" if lanes else "the lanes begin anew",
        told(fingerprint, data.fingerprint),
    )
    return dataclasses.replace(state, best_eval_loss=None, best_step=None)


def load_engine(engine: Engine, found: Checkpoint, collectives: HostCollectives) -> None:
    """Fill the engine of every rank from the files of `found`. Where one rank cannot open them, all raise its error."""
    engine.load(collectives.on_every_rank(lambda: open_saved_state(found.path, verified=True)))


def _different_contents(found: Checkpoint, config: FullConfig) -> list[str]:
    """The differences, in words, between the model and tokenizer that `config` names and the saved ones."""
    saved = saved_model(config, found.path)
    try:
        named = new_model(config)
    except DsEncDecError as error:
        return [f"and whether it is the same cannot be seen here: {error}"]
    words = _differences(architecture(saved.config), architecture(named.config))
    saved_tokenizer, named_tokenizer = (model.tokenizer.backend_tokenizer.to_str() for model in (saved, named))
    return words + (["the tokenizers differ"] if saved_tokenizer != named_tokenizer else [])


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]


def _model_settings(config: FullConfig) -> dict[str, Any]:
    """The settings that decide what is trained, by their names in the configuration."""
    section = config.model
    sizes = section.architecture.model_dump() if section.architecture else {}
    return {
        _MODEL_NAME: section.model_name_or_path,
        _TOKENIZER_NAME: section.tokenizer_name_or_path or section.model_name_or_path,
        "model.num_sentinel_tokens": section.num_sentinel_tokens,
        "data.use_mode_tokens": config.data.use_mode_tokens,
        **{f"model.architecture.{name}": value for name, value in sizes.items()},
    }
