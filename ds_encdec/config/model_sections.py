"""The sections about the model: its source, its sizes, and adapters beside it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ds_encdec.config.section_base import Mark, Section, words

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The matrices of a layer that can have adapters."""


class ArchitectureConfig(Section):
    """A Qwen3 architecture written out in the YAML: weights are drawn at random instead of copied."""

    vocab_size: Annotated[int, Mark.TOKENS] = Field(gt=0)
    """Rows of the embedding, sentinels included."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(gt=0)
    """Layers of the encoder, and again of the decoder."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Key/value heads (grouped-query attention); divides `num_attention_heads`."""
    head_dim: int = Field(gt=0)
    """Width of one head; even, and not necessarily hidden_size / num_attention_heads."""
    intermediate_size: int = Field(gt=0)
    """Width of the SwiGLU layer."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: float = Field(default=1e6, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the matrices' normal distribution."""
    max_position_embeddings: int = Field(default=40960, gt=0)
    """Longest sequence the model is declared for, in tokens."""


class LoraConfig(Section):
    """Adapters of low rank beside frozen matrices (LoRA, arXiv 2106.09685), which peft makes; `{}` takes the defaults.

    A product with the matrix W becomes one with W + lora_alpha / r · B A. Nothing but A and B is trained.
    """

    r: int = Field(default=32, ge=1, le=65_536)
    """Rank: rows of A and columns of B."""
    lora_alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Weight of the adapters: their product is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: Annotated[
        tuple[LoraTarget, ...],
        BeforeValidator(words, json_schema_input_type=LoraTarget | tuple[LoraTarget, ...]),
    ] = get_args(LoraTarget)
    """The matrices of each layer that have an adapter."""
    quantize: Literal["none", "nf4"] = "none"
    """Form of the frozen matrices of the layers: the compute dtype, or 4 bits (QLoRA by bitsandbytes; FSDP2 or DDP with
    zero0)."""


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    model_name_or_path: str | None = "Qwen/Qwen3-0.6B"
    """Hub id or folder of a decoder-only Qwen3 (converted on the fly) or of an encoder-decoder made by `ds-encdec
    init-model` or an export. None with `architecture`."""
    architecture: ArchitectureConfig | None = None
    """Train from scratch with these sizes."""
    lora: LoraConfig | None = None
    """Train adapters of low rank and freeze everything else (docs/lora.md)."""
    tokenizer_name_or_path: Annotated[str | None, Mark.TOKENS] = None
    """Hub id or folder of the tokenizer; None: the model's own. `builtin` trains a byte-level BPE on the built-in
    corpus once and caches it."""
    num_sentinel_tokens: Annotated[int, Mark.TOKENS] = Field(default=100, ge=1, le=4096)
    """Number of sentinel tokens `<extra_id_0>`…: the most corrupted spans of an example, which limits its raw
    length."""
    use_flash_attention: Annotated[bool, Mark.UNTRAINED] = True
    """Use variable-length flash attention on devices that have it."""
    loss_chunk_tokens: Annotated[int, Mark.UNTRAINED] = Field(default=1024, gt=0)
    """Chunk size of the loss in tokens. Smaller chunks need less memory, larger ones fewer kernel launches."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_scratch(cls, values: Any) -> Any:
        """Remove the default checkpoint if `architecture` is set, but not one that is named."""
        if isinstance(values, dict) and values.get("architecture") is not None:
            return {"model_name_or_path": None, **values}
        return values
