"""`ds-encdec push-to-hub`: an exported folder as a repository of the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.types import CheckpointError, ConfigError, DsEncDecError

TOKEN = "HF_TOKEN"
"""The environment variable with the token. No flag takes one: arguments stand in histories and lists of processes."""


def push_to_hub(
    folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload every file of an exported `folder` in one commit, and return the commit's address.

    The repository is made where there is none, `private` where that is asked for. `revision`: the branch, made where
    there is none. Raises CheckpointError for a folder that is no export, ConfigError for a name that cannot be one,
    without a token, and before anything of a private model is uploaded to a public repository; DsEncDecError where the
    hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    _require_export(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"REPO_ID: {error}") from error
    if "/" not in repo_id:
        raise ConfigError(f"REPO_ID: {repo_id} does not say whose it is; write OWNER/{repo_id}")
    if constants.is_offline_mode():
        raise ConfigError("HF_HUB_OFFLINE is set: nothing can be uploaded. Unset it")
    if not (token := os.environ.get(TOKEN, "").strip()):
        raise ConfigError(f"{TOKEN} is not set: put a token with the right to write into it (hf.co/settings/tokens)")
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise ConfigError(
                f"{repo_id} exists and is public: nothing was uploaded. Leave out --private, or rename it"
            )
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message or f"Upload {folder.name}"
        )
    except DsEncDecError:
        raise
    except Exception as error:  # of the HTTP library that huggingface_hub happens to use, too
        reason = f"{type(error).__name__}: {error}".replace(token, "…").splitlines()[0]
        raise DsEncDecError(f"{folder} could not be uploaded to {repo_id} at {api.endpoint} ({reason})") from None
    return str(commit.commit_url)


def _require_export(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"FOLDER: {folder} is a checkpoint; make it a model with ds-encdec export {folder} OUT")
    parts = {
        "config.json or adapter_config.json": ("config.json", "adapter_config.json"),
        "*.safetensors": ("*.safetensors",),
        "README.md": ("README.md",),
    }
    lacking = [name for name, patterns in parts.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
    if lacking:
        raise CheckpointError(f"FOLDER: {folder} is no export: it has no {', no '.join(lacking)}")
