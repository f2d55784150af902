"""The header of a model card: what the Hugging Face hub and its search read of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from ds_encdec.config.schema import FullConfig

_INHERITED = ("license", "license_name", "license_link", "language")
"""Fields that a card takes over from that of the model it started from, where this machine has that."""


def card_header(config: FullConfig | None, *, objective: str, encoder_only: bool, languages: Sequence[str]) -> Any:
    """The header of a model that `config` trained, or (None) of one that was not trained.

    It says nothing that is not known: names are those that can be on the hub, the language is `languages` (codes such
    as `en`) or what the card of the model it started from says.

    The whole model has no `pipeline_tag`: version 5 of transformers has no pipeline for encoder-decoders of text.
    """
    tags = ["sentence-transformers", "text-encoder", "embeddings"] if encoder_only else ["encoder-decoder"]
    facts: dict[str, Any] = {} if config is None else _origin(config)
    if languages:
        facts["language"] = list(languages)
    return ModelCardData(
        library_name="sentence-transformers" if encoder_only else "transformers",
        pipeline_tag="feature-extraction" if encoder_only else None,
        tags=[*tags, objective, "qwen3"],
        **facts,
    )


def _origin(config: FullConfig) -> dict[str, Any]:
    """The model that `config` started from, what its card says of it, and the datasets of the run."""
    name, data = config.model.model_name_or_path, config.data
    named = [one.dataset_name for one in data.mixture or [data]]
    datasets = list(dict.fromkeys(hub_id for one in named if (hub_id := _hub_id(one))))
    if config.model.architecture is not None:
        return {"datasets": datasets or None}
    card = _card_of(name)
    base = _hub_id(name) or card.get("base_model")
    inherited = {key: card.get(key) for key in _INHERITED}
    if inherited["license"] is None and str(base).startswith("Qwen/Qwen3-"):
        inherited["license"] = "apache-2.0"  # all of these have that one
    return {"base_model": base, "datasets": datasets or None, **inherited}


def _card_of(name: str | None) -> dict[str, Any]:
    """The header of the card of a model in a folder or in the hub's cache; empty where there is none to read."""
    path: Any = Path(name or "").expanduser() / "README.md"
    if not path.is_file() and _hub_id(name):
        path = try_to_load_from_cache(str(name), "README.md")
    if not isinstance(path, (str, Path)) or not Path(path).is_file():
        return {}
    return ModelCard(Path(path).read_text(), ignore_metadata_errors=True).data.to_dict()


def _hub_id(name: str | None) -> str | None:
    """`name`, where it can be one of the hub: not the path of a folder, and not a kind of local files."""
    return name if name and name.count("/") == 1 and not name.startswith((".", "/", "~")) else None
