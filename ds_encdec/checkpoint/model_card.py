"""The README.md of an exported model, written from the facts of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_encdec.checkpoint.find import read_training_state
from ds_encdec.config.load import load_saved
from ds_encdec.config.schema import DataConfig, FullConfig, ModelConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.types import DENOISERS, TrainingState


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a card tells of a run. `weights`: where in the run they are from, in words."""

    config: FullConfig
    state: TrainingState
    weights: str

    @classmethod
    def of(cls, checkpoint: Path, weights: str) -> RunFacts:
        """The facts in a committed checkpoint."""
        return cls(load_saved(checkpoint / "config.yaml"), read_training_state(checkpoint), weights)


def model_card(facts: RunFacts) -> str:
    """The card (Markdown with Hugging Face's YAML header) of a trained encoder-decoder."""
    return _CARD.format(base_model=_base_model_line(facts.config.model), table=_run_table(facts))


def encoder_card(facts: RunFacts) -> str:
    """The card of the encoder of a trained encoder-decoder, with the code that pools its states into embeddings."""
    return _ENCODER_CARD.format(base_model=_base_model_line(facts.config.model), table=_run_table(facts))


def untrained_model_card(description: str, config: Qwen3Seq2SeqConfig) -> str:
    """The card of a model that was initialised and not trained yet. `description`: where its weights come from."""
    rows = f"| Weights | {description} |\n| Parameters | {count_parameters(config):,} |\n| Training | none yet |"
    return _CARD.format(base_model="", table=rows)


def _run_table(facts: RunFacts) -> str:
    model, data, training, state = facts.config.model, facts.config.data, facts.config.training, facts.state
    best = state.best_eval_loss
    rows = {
        "Started from": f"`{model.model_name_or_path}`" if model.architecture is None else "random weights",
        "Weights": facts.weights,
        "Optimizer steps": f"{state.global_step:,} of {training.num_train_steps:,}",
        "Encoder tokens seen": f"{state.encoder_tokens_seen:,}",
        "Target tokens seen": f"{state.target_tokens_seen:,}",
        "Best held-out loss of the run (nats per target token)": "not evaluated" if best is None else f"{best:.4f}",
        "Data": _data_in_words(data),
        f"UL2 weights ({', '.join(DENOISERS)})": ", ".join(f"{weight:g}" for weight in data.ul2_task_weights),
        "Longest encoder and decoder sequence (tokens)": f"{data.max_encoder_length}, {data.max_decoder_length}",
        "Peak learning rate, schedule": f"{training.learning_rate:g}, {training.lr_scheduler_type}",
        "Weight decay, gradient clipping": f"{training.weight_decay:g}, {training.max_grad_norm:g}",
        "Precision": "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32",
        "Seed": str(training.seed),
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _base_model_line(model: ModelConfig) -> str:
    name = model.model_name_or_path  # None where the sizes were given and the weights drawn
    is_hub_id = name is not None and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return f"base_model: {name}\n" if is_hub_id else ""


def _data_in_words(data: DataConfig) -> str:
    if data.mixture:
        return ", ".join(f"`{source.dataset_name}` × {source.weight:g}" for source in data.mixture)
    return f"`{data.dataset_name}`" + (f" ({data.dataset_config})" if data.dataset_config else "")


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [encoder-decoder, ul2, qwen3]
{base_model}---

# Qwen3 encoder-decoder

An encoder-decoder made of Qwen3 layers (`Qwen3ForSeq2SeqLM`): bidirectional encoder, decoder with merged attention over
the encoder's output and its own past. Made with ds_encdec for pre-training on UL2's mixture of denoisers.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("The capital of France is <extra_id_0>.", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

`<extra_id_0>`, `<extra_id_1>`, … in the input mark gaps; the output repeats each with the text that fills it. An input
without them is a prefix, and the output continues it.
"""

_ENCODER_CARD = """---
library_name: transformers
pipeline_tag: feature-extraction
tags: [text-encoder, embeddings, ul2, qwen3]
{base_model}---

# Qwen3 encoder

The bidirectional encoder (`Qwen3EncoderModel`) of an encoder-decoder made of Qwen3 layers, on its own. Made with
ds_encdec by pre-training the whole on UL2's mixture of denoisers.

| | |
|---|---|
{table}

It gives one state per token. The embedding of a text is their mean, over the text's own tokens and not over padding:

```python
import torch
from transformers import AutoModel, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
texts = ["The capital of France is Paris.", "Paris lies on the Seine.", "Bread is baked."]
inputs = tokenizer(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    states = model(**inputs).last_hidden_state.float()  # [texts, tokens, hidden]
mask = inputs["attention_mask"].unsqueeze(-1)  # [texts, tokens, 1]
embeddings = (states * mask).sum(dim=1) / mask.sum(dim=1)
embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
print(embeddings @ embeddings.T)  # cosine similarities
```

Denoising has not taught it which texts are alike: for retrieval or similarity, tune it on pairs first.
"""
