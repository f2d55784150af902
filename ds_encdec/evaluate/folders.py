"""The folder of a model that is judged: whether it can be, and what it belongs to. Nothing heavy is imported for it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds_encdec.config.plain_files import read_json
from ds_encdec.types import CheckpointError, ConfigError


def require_model_folder(folder: Path) -> None:
    """Raise CheckpointError where `folder` holds no model by itself; it says where one may be."""
    for name, what in (("manifest.json", "a checkpoint"), ("adapter_config.json", "an adapter without its model")):
        if (folder / name).exists():
            raise CheckpointError(f"--model: {folder} is {what}; make it a model with ds-encdec export CHECKPOINT OUT")
    if not (folder / "config.json").is_file():
        what = "has no config.json: it is no model folder" if folder.is_dir() else "does not exist"
        exports = [folder / "export" / name for name in ("final", "best", "averaged")]
        meant = next((f"; did you mean {export}?" for export in exports if export.is_dir()), "")
        raise CheckpointError(f"--model: {folder} {what}{meant}")


def is_ours(folder: Path) -> bool:
    """True for a model of our own kind. Raises CheckpointError where `folder` holds no encoder-decoder's export."""
    require_model_folder(folder)
    try:
        stored = read_json(folder / "config.json", None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model: {folder} is no model folder: {error}") from error
    kind = stored.get("model_type") if isinstance(stored, dict) else None
    if kind is None or not stored.get("is_encoder_decoder"):
        raise CheckpointError(
            f"--model: {folder} is a {kind}, which is no encoder-decoder; ds-encdec init-model makes one of a Qwen3"
        )
    return bool(kind == "qwen3_seq2seq")


def require_ours(folder: Path) -> None:
    """Raise CheckpointError where `folder` holds no model of our own kind."""
    if not is_ours(folder):
        raise CheckpointError(f"--model: {folder} is not a model of ours; ds-encdec init-model makes one of a Qwen3")


class Inputs(NamedTuple):
    """The inputs that a fine-tuned model was taught to read: `template`, None where it was conversations alone.

    `has_chat`: there were conversations.
    """

    template: str | None
    has_chat: bool


def taught_inputs(folder: Path) -> Inputs | None:
    """The inputs of a fine-tuned model's training, as its card says; None for any other model."""
    try:
        card = (folder / "README.md").read_text("utf-8")
        row = re.search(r"^\| input_template \| `(.+)` \|$", card, re.MULTILINE)
        template = row and str(ast.literal_eval(row[1].replace("\\|", "|")))
    except (OSError, ValueError, SyntaxError):  # somebody has written another card
        return None
    has_chat = re.search(r"^\| Conversations \| .+ \|$", card, re.MULTILINE) is not None
    return Inputs(template, has_chat) if has_chat or template is not None else None


def default_outs(model: Path, split: str) -> Iterator[Path]:
    """The folders beside the model's that its evaluations are written to: MODEL-SPLIT, MODEL-SPLIT-2, …"""
    model = model.resolve()
    first = model.with_name(f"{model.name}-{split}")
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))


def run_config(model: Path) -> Path:
    """The configuration of the run in whose `export` folder a model lies. Raises ConfigError where there is none."""
    export = model.resolve().parent
    if export.name != "export" or not (found := export.parent / "config.yaml").is_file():
        raise ConfigError(
            f"--config: {model} does not lie in a run's export folder, so it is not known what data to evaluate "
            "on; name the configuration that says it"
        )
    return found
