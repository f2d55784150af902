"""The weights of a checkpoint by neutral name, one parameter at a time, whatever ZeRO stage wrote it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_encdec.checkpoint.manifest import read_manifest, verify_files, verify_listing
from ds_encdec.types import CheckpointError, WeightSource

_ZERO0_STATES = "mp_rank_00_model_states.pt"


def checkpoint_weights(checkpoint: Path) -> WeightSource:
    """Float32 weights of a committed checkpoint, on the CPU.

    The files are verified against the manifest first, since DeepSpeed's shards are pickles. ZeRO
    shards are mapped and joined parameter by parameter when asked for, so the host holds the shards
    (fp32 weights without optimizer states) and one full parameter. Raises CheckpointError.
    """
    manifest = read_manifest(checkpoint)
    verify_listing(checkpoint, manifest)
    verify_files(checkpoint, manifest.files)
    plain = [record.path for record in manifest.files if record.path.endswith(_ZERO0_STATES)]
    if (checkpoint / "latest").exists():
        state = _zero_state_dict(checkpoint)
    elif plain:
        # Stage 0 writes all weights into one file; unpickling it is safe after the hash check above.
        state = torch.load(checkpoint / plain[0], map_location="cpu", weights_only=False, mmap=True)["module"]
    else:
        raise CheckpointError(f"{checkpoint} holds no DeepSpeed weights.")

    def lookup(name: str) -> Tensor:
        if name not in state:
            raise CheckpointError(f"{checkpoint}: it has no parameter {name!r}; it was made by another architecture.")
        return state[name].contiguous().float()

    return lookup


def _zero_state_dict(checkpoint: Path) -> dict[str, Any]:
    # Imported here: deepspeed takes seconds, and stage 0 does not need it.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress by printing
        return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), lazy_mode=True)
