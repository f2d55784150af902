"""A trained model as an ordinary Hugging Face folder.

The folder carries the modelling code, so `AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)` (or
`AutoModel`, for an encoder alone) loads it where ds_encdec and deepspeed are not installed. Its README.md
is a model card, written from the facts of its run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig

from ds_encdec.checkpoint.find import read_training_state
from ds_encdec.checkpoint.saved_state import open_saved_state, saved_weights
from ds_encdec.checkpoint.whole_folder import refuse_existing, written_whole
from ds_encdec.config.load import load_saved
from ds_encdec.config.schema import FullConfig
from ds_encdec.model import attention, configuration, loss, modeling, precision
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters, parameter_shapes
from ds_encdec.model.weights import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import DENOISERS, TrainingState, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMOTE_CODE = (configuration, precision, attention, loss, modeling)
"""The modules copied into the folder. They import each other relatively, and nothing else of ds_encdec."""

_CARD_TEMPLATE = Path(__file__).with_name("model_card.md.j2")

AUTO_MAP = {
    "AutoConfig": "configuration.Qwen3Seq2SeqConfig",
    "AutoModelForSeq2SeqLM": "modeling.Qwen3ForSeq2SeqLM",
}
ENCODER_AUTO_MAP = {"AutoConfig": "configuration.Qwen3EncoderConfig", "AutoModel": "modeling.Qwen3EncoderModel"}


def export_hf(
    weights: WeightSource,
    config: Qwen3Seq2SeqConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    card: str,
    replace: bool = False,
) -> None:
    """Write the folder `out`: weights (safetensors, tied ones once), configuration, code, tokenizer and model card.

    Under a `Qwen3EncoderConfig` it is a `Qwen3EncoderModel`, otherwise a `Qwen3ForSeq2SeqLM`. Weights are fetched,
    converted to `dtype` and written one by one. The folder appears at `out` when it is complete, or not at all;
    `replace` and what is raised: see `written_whole`.
    """
    shapes = _model_shapes(config)
    with written_whole(out, replace=replace) as (unfinished, writing):
        writing.require_space(dtype.itemsize * sum(map(prod, shapes.values())))
        write_safetensors_folder(unfinished, shapes, weights, dtype=dtype, max_shard_bytes=max_shard_bytes)
        _write_configuration(config, dtype, unfinished)
        for module in REMOTE_CODE:
            shutil.copyfile(str(module.__file__), unfinished / Path(str(module.__file__)).name)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card)


def export_checkpoint(
    checkpoint: Path, out: Path, *, dtype: torch.dtype, max_shard_bytes: int, encoder_only: bool = False
) -> None:
    """Export a committed checkpoint, whichever engine saved it, with a model card written from its run.

    `encoder_only`: the encoder and its embedding, as a `Qwen3EncoderModel`. Raises CheckpointError.
    """
    refuse_existing(out)  # before minutes of reading
    path = checkpoint.expanduser().resolve()
    weights = saved_weights(open_saved_state(path))
    config = Qwen3Seq2SeqConfig.from_pretrained(path / "model")
    facts = RunFacts.of(path, weights=f"checkpoint `{path.name}`")
    export_hf(
        weights,
        Qwen3EncoderConfig.of(config) if encoder_only else config,
        pretrained_tokenizer(str(path / "model"), field="CHECKPOINT"),
        out,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        card=model_card(facts, encoder_only=encoder_only),
    )


def _model_shapes(config: Qwen3Seq2SeqConfig) -> dict[str, tuple[int, ...]]:
    """Neutral name → shape of what the model of `config` consists of."""
    shapes = parameter_shapes(config)
    if isinstance(config, Qwen3EncoderConfig):
        return {name: shape for name, shape in shapes.items() if name.startswith(("shared.", "encoder."))}
    return shapes


def _write_configuration(config: Qwen3Seq2SeqConfig, dtype: torch.dtype, folder: Path) -> None:
    is_encoder = isinstance(config, Qwen3EncoderConfig)
    fields = {
        **config.to_dict(),
        "architectures": ["Qwen3EncoderModel" if is_encoder else "Qwen3ForSeq2SeqLM"],
        "auto_map": ENCODER_AUTO_MAP if is_encoder else AUTO_MAP,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    if not is_encoder:
        GenerationConfig(
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        ).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that its card tells. `weights`: where in the run they are from, in words."""

    config: FullConfig
    state: TrainingState
    weights: str

    @classmethod
    def of(cls, checkpoint: Path, weights: str) -> RunFacts:
        """The facts in a committed checkpoint."""
        return cls(load_saved(checkpoint / "config.yaml"), read_training_state(checkpoint), weights)


def model_card(facts: RunFacts, *, encoder_only: bool = False) -> str:
    """The card (Markdown with Hugging Face's YAML header) of a trained encoder-decoder, or of its encoder alone.

    The encoder's shows the code that pools its states into embeddings.
    """
    config, state = facts.config, facts.state
    model, data, training = config.model, config.data, config.training
    sources = data.mixture or [data]
    names = [f"`{one.dataset_name}`" + (f" ({one.dataset_config})" if one.dataset_config else "") for one in sources]
    shares = [f"{name} × {one.weight:g}" for name, one in zip(names, data.mixture or [], strict=False)]
    best = state.best_eval_loss
    rows = {
        "Started from": f"`{model.model_name_or_path}`" if model.architecture is None else "random weights",
        "Weights": facts.weights,
        "Optimizer steps": f"{state.global_step:,} of {training.num_train_steps:,}",
        "Encoder tokens seen": f"{state.encoder_tokens_seen:,}",
        "Target tokens seen": f"{state.target_tokens_seen:,}",
        "Best held-out loss of the run (nats per target token)": "not evaluated" if best is None else f"{best:.4f}",
        "Data": ", ".join(shares or names),
        f"UL2 weights ({', '.join(DENOISERS)})": ", ".join(f"{weight:g}" for weight in data.ul2_task_weights),
        "Longest encoder and decoder sequence (tokens)": f"{data.max_encoder_length}, {data.max_decoder_length}",
        "Peak learning rate, schedule": f"{training.learning_rate:g}, {training.lr_scheduler_type}",
        "Weight decay, gradient clipping": f"{training.weight_decay:g}, {training.max_grad_norm:g}",
        "Precision": "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32",
        "Seed": str(training.seed),
    }
    base = _hub_id(model.model_name_or_path)
    return _card(
        rows,
        encoder_only,
        base_model=base,
        license="apache-2.0" if base and base.startswith("Qwen/Qwen3-") else None,  # all of these have that one
        datasets=[name for one in sources if (name := _hub_id(one.dataset_name))] or None,
    )


def untrained_model_card(description: str, config: Qwen3Seq2SeqConfig) -> str:
    """The card of a model that was initialised and not trained yet. `description`: where its weights come from."""
    return _card({"Weights": description, "Parameters": f"{count_parameters(config):,}", "Training": "none yet"})


def _card(rows: Mapping[str, str], encoder_only: bool = False, **header: Any) -> str:
    """No `pipeline_tag` for the whole: none of transformers' pipelines takes an encoder-decoder with its own code."""
    tags = ["text-encoder", "embeddings"] if encoder_only else ["encoder-decoder"]
    pipeline = "feature-extraction" if encoder_only else None
    data = ModelCardData(library_name="transformers", tags=[*tags, "ul2", "qwen3"], pipeline_tag=pipeline, **header)
    return str(ModelCard.from_template(data, template_path=str(_CARD_TEMPLATE), rows=rows, encoder=encoder_only))


def _hub_id(name: str | None) -> str | None:
    """`name`, where it can be one of the Hugging Face hub: not the path of a folder, and not a kind of local files."""
    is_id = name is not None and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return name if is_id else None
