"""`Qwen3EncoderModel`, a stack of Qwen3 layers with bidirectional attention, and all that the decoder shares with it.
Only a module's own forward pass reads its weights, and each module is called equally often for any packed batch: ZeRO-3
gathers by module."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, ModelOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .attention import Layout, PaddedLayout
from .attention_kernels import AttentionKernel  # noqa: F401 - transformers 5.3 copies only modules imported here
from .configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from .cross_attention import form_of
from .precision import Linear, projected

Rotary = tuple[Tensor, Tensor]  # cosines and sines, [..., tokens, 1, head_dim / 2], in the dtype of the states
States: TypeAlias = list[Tensor] | None  # collects the states between layers; None for none

NO_ATTENTIONS = "output_attentions: this model's fused attention never holds its weights. Use output_hidden_states."


def refuse_unknown(module: nn.Module, given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise TypeError for arguments that `module` does not know: a dropped cache, say, gives wrong results."""
    if unknown := [name for name, value in given.items() if value is not None and name not in known]:
        raise TypeError(
            f"{type(module).__name__}.forward() does not know {', '.join(unknown)}. If generate() passes this, "
            f"transformers {transformers.__version__} is too new for this code: install an earlier one."
        )


def rotary_tables(positions: Tensor, config: Qwen3Seq2SeqConfig, dtype: torch.dtype) -> Rotary:
    """Return cosines and sines of the rotary embedding of `config` for positions, int64 [..., tokens]. Computed in
    float32 on each call: a buffer of frequencies would be rounded when a model is cast to bfloat16."""
    rope, scale = config.rope_parameters, 1.0
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
        frequencies = rope["rope_theta"] ** -exponents
    else:
        # By transformers' function: what versions 4 and 5 read of a configuration.
        read = {"rope_parameters": rope, "rope_scaling": rope, "rope_theta": rope["rope_theta"]}
        sizes = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")
        read |= {name: getattr(config, name) for name in sizes} | {"standardize_rope_params": lambda: None}
        with positions.device:  # made there, it is not copied there, for which the device would be waited for
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](SimpleNamespace(**read), positions.device)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos.to(dtype), sin.to(dtype)) if scale == 1.0 else ((cos * scale).to(dtype), (sin * scale).to(dtype))


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    # x: [..., tokens, heads, head_dim]
    cos, sin = rotary
    if torch.compiler.is_compiling():  # inductor fuses this form with the norm, backward, too: 9 % less traffic
        return x * torch.cat((cos, cos), dim=-1) + x.roll(cos.shape[-1], dims=-1) * torch.cat((-sin, sin), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Qwen3Attention(nn.Module):
    """The projections of attention: grouped-query, with RMSNorm on queries and keys as `qk_norm` has it."""

    side = "encoder"
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def __init__(self, config: Qwen3Seq2SeqConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.rotates = layer_idx not in config.unrotated_layers.get(self.side, ())
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        normed = {"head": (config.head_dim, config.head_dim), "all": (query_size, key_size), "none": (0, 0)}
        self.q_norm, self.k_norm = (
            nn.RMSNorm(size, eps=config.rms_norm_eps) if size else None for size in normed[config.qk_norm]
        )

    def queries(self, hidden_states: Tensor, rotary: Rotary) -> Tensor:
        """Return queries, rotated if the layer rotates, [..., tokens, heads, head_dim]."""
        queries = self._normed(self.q_norm, self.q_proj(hidden_states))
        return _rotated(queries, rotary) if self.rotates else queries

    def keys_values(self, hidden_states: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Return keys, rotated by `rotary` if any, and values, [..., tokens, key_value_heads, head_dim]."""
        keys = self._normed(self.k_norm, self.k_proj(hidden_states))
        keys = _rotated(keys, rotary) if self.rotates and rotary is not None else keys
        return keys, self._heads(self.v_proj(hidden_states))

    def output(self, attended: Tensor, added_to: Tensor | None) -> Tensor:
        """Project [..., tokens, heads, head_dim] back to [..., tokens, hidden], plus `added_to`."""
        return projected(self.o_proj, attended.flatten(-2), added_to)

    def _normed(self, norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
        if norm is None:
            return self._heads(x)
        return norm(self._heads(x)) if norm.normalized_shape[0] == self.head_dim else self._heads(norm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Qwen3EncoderAttention(Qwen3Attention):
    """Bidirectional self-attention."""

    def forward(
        self, hidden_states: Tensor, *, rotary: Rotary, layout: Layout, added_to: Tensor | None = None
    ) -> Tensor:
        """Map [..., Te, hidden] to the same shape, plus `added_to`."""
        keys, values = self.keys_values(hidden_states, rotary)
        return self.output(layout.attend_encoder(self.queries(hidden_states, rotary), keys, values), added_to)


class Qwen3MLP(nn.Module):
    """The SwiGLU block of a layer."""

    def __init__(self, config: Qwen3Seq2SeqConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, added_to: Tensor | None = None) -> Tensor:
        """Map [..., hidden] to the same shape, plus `added_to`."""
        gated = self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        return projected(self.down_proj, gated, added_to)


class Qwen3Layer(GradientCheckpointingLayer):
    """A layer with norms before attention and MLP, or after them, around either attention. `residual_dropout`, a
    setting of a run and in no `config.json`, is the share of the outputs of attention and MLP that training mode sets
    to zero."""

    attention: type[Qwen3Attention]
    norms_encoder = False  # reads the encoder's states through its own input norm
    residual_dropout = 0.0

    def __init__(self, config: Qwen3Seq2SeqConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        norms = {"before": (True, True, False, False), "after": (False, False, True, True)}[config.norm_position]
        self.input_layernorm, self.post_attention_layernorm, self.attention_output_norm, self.mlp_output_norm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if exists else nn.Identity() for exists in norms
        )

    def forward(self, hidden_states: Tensor, *encoder_states: Tensor, **shared: Any) -> Tensor:
        """Map [..., tokens, hidden], beside [..., Te, hidden] in a decoder's layer, to the shape of the first."""
        # Normed states have no name here: without gradients nothing keeps them while the MLP runs.
        hidden_states = self._added(
            hidden_states,
            self.self_attn,
            self.attention_output_norm,
            self.input_layernorm(hidden_states),
            *(map(self.input_layernorm, encoder_states) if self.norms_encoder else encoder_states),
            **shared,
        )
        return self._added(hidden_states, self.mlp, self.mlp_output_norm, self.post_attention_layernorm(hidden_states))

    def _added(self, stream: Tensor, part: nn.Module, norm: nn.Module, *inputs: Tensor, **shared: Any) -> Tensor:
        drops = self.residual_dropout and self.training
        if not drops and isinstance(norm, nn.Identity):
            return part(*inputs, **shared, added_to=stream)  # its last matrix product adds the two
        added = norm(part(*inputs, **shared))
        return stream + (nn.functional.dropout(added, self.residual_dropout) if drops else added)


class Qwen3EncoderLayer(Qwen3Layer):
    """A layer with bidirectional attention."""

    attention = Qwen3EncoderAttention


class Qwen3Stack(nn.Module):
    """Layers and the final norm."""

    def __init__(self, config: Qwen3Seq2SeqConfig, layer: type[Qwen3Layer], num_layers: int, *, normed: bool) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layer(config, index) for index in range(num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if normed else nn.Identity()

    def _states(
        self, hidden_states: Tensor, read: Iterable[tuple[Tensor, ...]], *, positions: Tensor, **shared: Any
    ) -> Iterator[Tensor]:
        # What each layer starts from, and the normed states of the last. A layer runs when its output is taken.
        rotary = rotary_tables(positions, self.config, hidden_states.dtype)
        for layer, encoder_states in zip(self.layers, read, strict=False):
            yield hidden_states
            hidden_states = layer(hidden_states, *encoder_states, rotary=rotary, **shared)
        hidden_states = self.norm(hidden_states)
        yield hidden_states


class Qwen3Encoder(Qwen3Stack):
    """Encoder layers, and the final norm unless decoder layers read through their own."""

    main_input_name = "input_ids"  # read by generate()

    def __init__(self, config: Qwen3Seq2SeqConfig) -> None:
        normed = not form_of(config).has_own_norm
        super().__init__(config, Qwen3EncoderLayer, config.num_encoder_layers, normed=normed)

    def states(self, inputs_embeds: Tensor, *, layout: Layout) -> Iterator[Tensor]:
        """Yield the states [..., Te, hidden] at each height, behind 0, 1, … layers, from embeddings [..., Te, hidden].
        A layer runs when the states behind it are taken."""
        return self._states(inputs_embeds, repeat(()), positions=layout.encoder_positions, layout=layout)

    def forward(self, inputs_embeds: Tensor, *, layout: Layout, kept: States = None) -> Tensor:
        """Map embeddings [..., Te, hidden] to states [..., Te, hidden]. `kept` gets the states at each height."""
        return last_of(self.states(inputs_embeds, layout=layout), kept)


def last_of(states: Iterable[Tensor], kept: States) -> Tensor:
    """Return the last of `states`; append all to `kept`."""
    for state in states:
        if kept is not None:
            kept.append(state)
    return state


def embedded(embedding: nn.Embedding, ids: Tensor | None, embeds: Tensor | None, side: str = "") -> Tensor:
    """Return `embeds`, or those of `ids`. Raises ValueError, naming `side`, unless exactly one is given."""
    if (ids is None) == (embeds is None):
        raise ValueError(f"Give either {side}input_ids or {side}inputs_embeds")
    return embedding(ids) if embeds is None else embeds


class EmbeddedEncoder(nn.Module):
    """The encoder behind the shared embedding, as a function of token ids. It has no weights besides."""

    def __init__(self, shared: nn.Embedding, encoder: Qwen3Encoder) -> None:
        super().__init__()
        self.shared = shared
        self.encoder = encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Return the states of input_ids, int64 [B, Le], or inputs_embeds, [B, Le, hidden]. attention_mask: [B, Le] or
        None. `output_hidden_states`: add the embeddings and the states behind each layer, the last ones normed; an
        aligned decoder always gets them. Attention weights are refused. There is no `**kwargs`: with it, generate()
        would pass all that it has."""
        if output_attentions:
            raise NotImplementedError(NO_ATTENTIONS)
        embeds = embedded(self.shared, input_ids, inputs_embeds)
        layout = PaddedLayout.build(encoder_length=embeds.shape[1], encoder_valid=attention_mask, device=embeds.device)
        kept: States = [] if output_hidden_states or form_of(self.encoder.config).is_aligned else None
        states = self.encoder(embeds, layout=layout, kept=kept)
        return BaseModelOutput(states, None if kept is None else tuple(kept))


class Qwen3PreTrainedModel(transformers.PreTrainedModel):
    """The traits of both models that Hugging Face reads."""

    base_model_prefix = ""
    _input_embed_layer = "shared"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Qwen3EncoderLayer", "Qwen3DecoderLayer")
    _supports_sdpa = True

    def _outputs(self, output_hidden_states: bool | None, output_attentions: bool | None) -> dict[str, bool]:
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise NotImplementedError(NO_ATTENTIONS)
        requested = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return {"output_hidden_states": bool(requested)}

    def _answer(self, output: ModelOutput, return_dict: bool | None) -> Any:
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class Qwen3EncoderModel(Qwen3PreTrainedModel):
    """The bidirectional encoder alone: contextual states of tokens, to be pooled into embeddings of texts."""

    config_class = Qwen3EncoderConfig

    def __init__(self, config: Qwen3EncoderConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = Qwen3Encoder(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """See `EmbeddedEncoder`; `last_hidden_state` is [B, Le, hidden]."""
        refuse_unknown(self, kwargs)
        requested = self._outputs(output_hidden_states, output_attentions)
        encoder = EmbeddedEncoder(self.shared, self.encoder)
        return self._answer(encoder(input_ids, attention_mask, inputs_embeds, **requested), return_dict)
