"""Find the folder that a `name_or_path` names: a local one, or a snapshot of a repository on the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.types import CheckpointError

MODEL_FILES = ("*.json", "*.safetensors")
"""Files downloaded for a model: none that would have to be unpickled or executed."""
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja")
"""Files downloaded for a tokenizer."""


def is_hub_name(name_or_path: str) -> bool:
    """Return whether this may be a hub repository, `OWNER/NAME`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name_or_path, re.ASCII) is not None


def model_folder(name_or_path: str, files: Sequence[str], *, field: str) -> Path:
    """Return the local folder, or a hub repository's snapshot with `files` (patterns), downloaded unless it is cached.
    Raises CheckpointError that names `field` if there is no such folder, or the hub cannot be reached."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path):
        return path
    if not is_hub_name(name_or_path):
        raise CheckpointError(f"{field}: the folder {name_or_path} does not exist")
    # Imported here: local folders, `--help` and `validate` do not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError(
            f"{field}: {name_or_path} is not a local folder, is not in the Hugging Face cache, and could not be "
            f"downloaded ({reason}). Check its name and the network (and HF_TOKEN for a gated one), or download it "
            "elsewhere and give the folder's path"
        ) from error
