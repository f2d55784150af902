"""Writes the model card of an export: the facts of its run, and a header for the Hugging Face hub and its search."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from ds_encdec.base.foreign_places import range_of
from ds_encdec.base.types import TrainingState
from ds_encdec.config.objective_sections import ContrastiveConfig
from ds_encdec.config.schema import DataConfig, FullConfig
from ds_encdec.exports.model_code import Origin, code_row
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import FORMS, POSITIONS
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.objectives import CHAT, OBJECTIVES, template_parts


def _objective_rows(data: DataConfig, chosen: ContrastiveConfig, forms: Sequence[str]) -> dict[str, str]:
    if data.objective == "ul2":
        return {f"UL2 weights ({', '.join(DENOISERS)})": ", ".join(f"{weight:g}" for weight in data.ul2_task_weights)}
    if data.objective == "mntp":
        what = f"masked next-token prediction (`data.objective: mntp`) of {data.mask_share:g} of the tokens"
        return {"Objective": what}
    if data.objective == "contrastive":
        prompts = {"query": data.query_prefix, "document": data.document_prefix}
        shown = {f"Prompt `{name}`": f"`{text!r}`".replace("|", "\\|") for name, text in prompts.items() if text}
        cut = {"Sizes to which embeddings may be cut": ", ".join(map(str, chosen.matryoshka_dims))}
        return {
            "Objective": "contrastive (`data.objective: contrastive`)",
            "Negatives of a query's own": f"{data.num_negatives}",
            "Pooling, temperature": f"{chosen.pooling}, {chosen.temperature:g}",
            **shown,
            **(cut if chosen.matryoshka_dims else {}),
        }
    names = () if [*forms] == [CHAT] else ("input_template", "output_template")
    conversations = {"Conversations": "through the tokenizer's chat template"} if CHAT in forms else {}
    templates = {name: f"`{getattr(data, name)!r}`".replace("|", "\\|") for name in names}  # else a column ends there
    words = {"sft": "supervised fine-tuning", "dpo": "preferences among answers"}[data.objective]
    return {"Objective": f"{words} (`data.objective: {data.objective}`)", **templates, **conversations}


def _lengths(data: DataConfig) -> dict[str, str]:
    if OBJECTIVES[data.objective].encoder_only:
        return {"Longest text (tokens)": f"{data.max_encoder_length}"}
    return {"Longest encoder and decoder sequence (tokens)": f"{data.max_encoder_length}, {data.max_decoder_length}"}


def _cross_attention(made: Qwen3Seq2SeqConfig) -> dict[str, str]:
    words = f"each decoder layer reads {FORMS[made.cross_attention].words}; {POSITIONS[made.encoder_positions]}"
    return {"Cross-attention": f"`{made.cross_attention}`, `{made.encoder_positions}`: {words}"}


def model_card(
    config: FullConfig,
    made: Qwen3Seq2SeqConfig,
    state: TrainingState,
    weights: str,
    trained_by: Origin,
    *,
    forms: Sequence[str] = (),
) -> str:
    """Return the card (Markdown with Hugging Face's YAML header) of a trained encoder-decoder or, as `made` says, of
    its encoder. `weights`: their origin in words. `trained_by`: the code that saved them. `forms`: of the fine-tuning
    inputs, if known (`objectives.TEMPLATES`, `CHAT`)."""
    encoder_only = isinstance(made, Qwen3EncoderConfig)
    model, data, training = config.model, config.data, config.training
    names = [
        f"`{one.dataset_name}`" + (f" ({one.dataset_config})" if one.dataset_config else "")
        for one in data.mixture or [data]
    ]
    shares = [f"{name} × {one.weight:g}" for name, one in zip(names, data.mixture or [], strict=False)]
    lora, frozen, best = model.lora, ", ".join(f"`{pattern}`" for pattern in training.freeze), state.best_value
    trained = {"Frozen": frozen} if frozen else {}
    if lora is not None:
        trained = {"Trained": f"LoRA adapters (r {lora.r}, alpha {lora.lora_alpha:g}), merged"}
    rows = {
        "Started from": f"`{model.model_name_or_path}`" if model.architecture is None else "random weights",
        "Weights": weights,
        **({} if encoder_only else _cross_attention(made)),
        **trained,
        "Optimizer steps": f"{state.global_step:,} of {training.num_train_steps:,}",
        "Encoder tokens seen": f"{state.encoder_tokens_seen:,}",
        "Target tokens seen": f"{state.target_tokens_seen:,}",
        "Best on held-out examples (losses are nats per target token)": "not evaluated"
        if best is None
        else f"{state.best_by}, {best:.4f}",
        "Data": ", ".join(shares or names),
        **_objective_rows(data, training.contrastive, forms),
        **({"Loss of a pair, beta": f"{training.dpo.loss}, {training.dpo.beta:g}"} if data.objective == "dpo" else {}),
        **_lengths(data),
        "Peak learning rate, schedule": f"{training.learning_rate:g}, {training.lr_scheduler_type}",
        "Weight decay, gradient clipping": f"{training.weight_decay:g}, {training.max_grad_norm:g}",
        "Precision": "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32",
        "Seed": str(training.seed),
        "Code of ds_encdec": code_row(trained_by),
    }
    return _card(rows, config, encoder_only, is_chat=[*forms] == [CHAT])


def untrained_model_card(description: str, config: Qwen3Seq2SeqConfig, facts: Mapping[str, str]) -> str:
    """Return the card of an initialised, untrained model. `description`: the origin of its weights; `facts`: rows."""
    rows = {name.capitalize(): fact for name, fact in facts.items()} | _cross_attention(config)
    return _card({"Weights": description, **rows, "Training": "none yet"}, None)


def _card(
    rows: Mapping[str, str], config: FullConfig | None, encoder_only: bool = False, *, is_chat: bool = False
) -> str:
    """Return the card of a model that `config` trained, or (None) of an untrained one. `is_chat`: all its inputs were
    conversations. The header names only what can be on the hub; licence and language are those of the model that the
    run started from. The whole model has no `pipeline_tag`: transformers 5 has no pipeline for encoder-decoders of
    text."""
    objective, prompt = "ul2", "The capital of France is <extra_id_0>."
    if config is not None and config.data.objective in ("sft", "dpo"):
        parts = template_parts(config.data.input_template)
        objective = config.data.objective
        prompt = "".join(text if name is None else f"{text}{{{name}}}" for text, name in parts)
    elif config is not None:
        objective = config.data.objective
    tags = ["sentence-transformers", "text-encoder", "embeddings"] if encoder_only else ["encoder-decoder"]
    header = ModelCardData(
        library_name="sentence-transformers" if encoder_only else "transformers",
        pipeline_tag="feature-extraction" if encoder_only else None,
        tags=[*tags, objective],
        **({} if config is None else _origin(config)),
    )
    loads_under = (
        # 4.57 loads exports as well, though nothing else here runs under it.
        f"torch {range_of('torch')}, transformers {range_of('transformers')} or 4.57 (written under "
        f"{torch.__version__} and {transformers.__version__})"
    )
    card = ModelCard.from_template(
        header,
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        rows={**rows, "Loads under": loads_under},
        encoder=encoder_only,
        objective=objective,
        last=config is not None and config.training.contrastive.pooling == "last",
        is_chat=is_chat,
        prompt=json.dumps(prompt, ensure_ascii=False),
    )
    return str(card)


def _origin(config: FullConfig) -> dict[str, Any]:
    name, data = config.model.model_name_or_path, config.data
    named = [*(one.dataset_name for one in data.mixture or [data]), data.eval_dataset_name]
    datasets = list(dict.fromkeys(known for one in named if (known := hub_id(one))))
    if config.model.architecture is not None:
        return {"datasets": datasets or None}
    # The card of the base in its folder or in the hub's cache.
    path: Any = Path(name or "").expanduser() / "README.md"
    if not path.is_file() and hub_id(name):
        path = try_to_load_from_cache(str(name), "README.md")
    found = isinstance(path, (str, Path)) and Path(path).is_file()
    card = ModelCard(Path(path).read_text(), ignore_metadata_errors=True).data.to_dict() if found else {}
    base = hub_id(name) or card.get("base_model")
    inherited = {key: card.get(key) for key in ("license", "license_name", "license_link", "language")}
    if inherited["license"] is None and str(base).startswith("Qwen/Qwen3-"):
        inherited["license"] = "apache-2.0"  # all of these have that one
    return {"base_model": base, "datasets": datasets or None, **inherited}


def hub_id(name: str | None) -> str | None:
    """Return `name` if it can be one on the hub: no folder's path, and no kind of local files."""
    can_be = name and name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).is_dir()
    return name if can_be else None
