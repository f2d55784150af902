"""The commit of each hub data set that a run reads: found once, kept in its checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.remote import is_of_network
from ds_encdec.data.sources import LOCAL_DATASETS, hub_name, source_entries

logger = logging.getLogger(__name__)


def resolve_commits(data: DataConfig, saved: Mapping[str, str] | None = None) -> dict[str, str]:
    """The commit (a sha) that each hub data set of `data` stands at, by `hub_name`; those in `saved` stay.

    One small request for each new one. A data set that the hub does not show (no network, no such name) is
    left out: opening it looks into the local cache, and says what is wrong.
    """
    commits: dict[str, str] = {}
    for entry in source_entries(data):
        name = hub_name(entry)
        if entry.dataset_name in LOCAL_DATASETS or os.path.exists(entry.dataset_name):
            continue
        commit = (saved or {}).get(name) or _ask_hub(entry.dataset_name, entry.dataset_revision)
        if commit:
            commits[name] = commit
    return commits


def _ask_hub(dataset_name: str, revision: str | None) -> str | None:
    # Imported here because runs on local data do not need it.
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(dataset_name, revision=revision).sha
    except Exception as error:
        if not (isinstance(error, ValueError) or is_of_network(error)):
            raise
        logger.warning("%s: its commit is not known (%s: %s)", dataset_name, type(error).__name__, error)
        return None
