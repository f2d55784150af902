"""The README.md of an exported model, written from the facts of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ds_encdec.checkpoint.find import read_training_state
from ds_encdec.config.load import load_saved
from ds_encdec.config.schema import FullConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.types import DENOISERS, TrainingState

_TEMPLATE = Path(__file__).with_suffix(".md.j2")


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
    return str(ModelCard.from_template(data, template_path=str(_TEMPLATE), rows=rows, encoder=encoder_only))


def _hub_id(name: str | None) -> str | None:
    """`name`, where it can be one of the Hugging Face hub: not the path of a folder, and not a kind of local files."""
    is_id = name is not None and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return name if is_id else None
