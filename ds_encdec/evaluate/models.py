"""Check the folder of the model to judge, and open the model in it. Torch and transformers are imported only when a
model is opened, so that wrong folders are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.stored_model import require_recorded_code
from ds_encdec.config.yaml.plain_files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def require_model_folder(folder: Path) -> None:
    """Raise CheckpointError if `folder` holds no model by itself; the message suggests where one may be."""
    for name, what in (("manifest.json", "a checkpoint"), ("adapter_config.json", "an adapter without its model")):
        if (folder / name).exists():
            raise CheckpointError(f"--model: {folder} is {what}; make it a model with ds-encdec export CHECKPOINT OUT")
    if not (folder / "config.json").is_file():
        what = "has no config.json: it is no model folder" if folder.is_dir() else "does not exist"
        exports = [folder / "export" / name for name in ("final", "best", "averaged")]
        meant = next((f"; did you mean {export}?" for export in exports if export.is_dir()), "")
        raise CheckpointError(f"--model: {folder} {what}{meant}")


def _stored(folder: Path) -> dict[str, Any]:
    require_model_folder(folder)
    stored = file_of_model(folder, "config.json")
    require_recorded_code(folder, stored)
    return stored


def file_of_model(folder: Path, name: str) -> dict[str, Any]:
    """Return the fields of a JSON file of the model; none if there is no such file. Raises CheckpointError."""
    try:
        return read_json(folder / name, None) if (folder / name).is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model: {folder / name} cannot be read: {error}; export the model again") from error


def is_ours(folder: Path) -> bool:
    """Return whether the model is of our kind. Raises CheckpointError if `folder` has no encoder-decoder's export."""
    stored = _stored(folder)
    if (kind := stored.get("model_type")) is None or not stored.get("is_encoder_decoder"):
        raise CheckpointError(
            f"--model: {folder} is a {kind}, which is no encoder-decoder; ds-encdec init-model makes one of a decoder"
        )
    return bool(kind == "qwen3_seq2seq")


def is_encoder(folder: Path) -> bool:
    """Return whether a model of ours is an encoder alone. Raises CheckpointError if `folder` has no model of ours."""
    if (kind := _stored(folder).get("model_type")) not in ("qwen3_seq2seq", "qwen3_seq2seq_encoder"):
        raise CheckpointError(
            f"--model: {folder} is a {kind}, which is no model of ds_encdec: --task judges the encoders of those"
        )
    return bool(kind != "qwen3_seq2seq")


def open_encoder(folder: Path, device: torch.device, dtype: str | None = None) -> PreTrainedModel:
    """Load the encoder of a folder of ours, alone or out of an encoder-decoder, as `open_model` does."""
    import torch

    from ds_encdec.model.configuration import Qwen3EncoderConfig
    from ds_encdec.model.cross_attention import encoder_norm
    from ds_encdec.model.encoder import Qwen3EncoderModel

    if is_encoder(folder):
        return open_model(folder, device, dtype, Qwen3EncoderModel)
    whole = open_model(folder, device, dtype)
    with torch.device("meta"):
        made = Qwen3EncoderModel(Qwen3EncoderConfig.of(whole.config))
    made.shared, made.encoder.layers = whole.shared, whole.encoder.layers
    made.encoder.norm = whole.get_submodule(encoder_norm(whole.config).removesuffix(".weight"))
    return made.eval()


def open_model(
    folder: Path, device: torch.device, dtype: str | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Load the model of a folder onto `device`, in evaluation mode. No code from the folder is run. It is one of ours,
    or another encoder-decoder that transformers can load by itself. `dtype`: a name of torch's; None is the stored one
    on a GPU, and float32 on a CPU, where it is as fast or faster. Raises CheckpointError."""
    import torch
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

    disable_progress_bar()
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run: see `launch.process_group.choose_device`
    wanted = getattr(torch, dtype) if dtype else ("auto" if device.type == "cuda" else torch.float32)
    kind = kind or (Qwen3ForSeq2SeqLM if is_ours(folder) else AutoModelForSeq2SeqLM)
    try:
        return kind.from_pretrained(folder, dtype=wanted).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"--model: {folder} could not be loaded: {error}") from error
