"""`Qwen3ForSeq2SeqLM`: an encoder-decoder whose every weight has a place in a Qwen3 checkpoint. The decoder's layers
have parameters like the encoder's (encoder.py). Their attention takes its queries from the decoder and its keys and
values, through the layer's own projections, from the encoder's states *and* the decoder's, under one softmax (merged
attention, T5Gemma 2, arXiv 2512.14856). Which states of the encoder a layer reads, and how, is the model's form of
cross-attention (cross_attention.py). Two call forms have equal logits: packed flat buffers (`packing=PackedLayout`,
training) and Hugging Face's ordinary [batch, length] with masks (`generate`, `from_pretrained`)."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, ModelOutput, Seq2SeqLMOutput

from .attention import Layout, PackedLayout, PaddedLayout
from .attention_kernels import KernelQuery, choose_kernel
from .configuration import Qwen3Seq2SeqConfig
from .cross_attention import form_of
from .encoder import (
    EmbeddedEncoder,
    Qwen3Attention,
    Qwen3Encoder,
    Qwen3Layer,
    Qwen3PreTrainedModel,
    Qwen3Stack,
    Rotary,
    States,
    embedded,
    last_of,
    refuse_unknown,
    rotary_tables,
)
from .loss import OwnLoss, linear_cross_entropy, token_cross_entropy
from .loss_kernel import IGNORE_INDEX
from .precision import Linear

_CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
Cache: TypeAlias = EncoderDecoderCache | None  # keys and values of a generation so far; None in training


class Qwen3MergedAttention(Qwen3Attention):
    """Attention of decoder queries over encoder and decoder states, under one softmax."""

    side = "decoder"

    def forward(
        self,
        hidden_states: Tensor,
        encoder_states: Tensor,
        *,
        rotary: Rotary,
        encoder_rotary: Rotary | None,
        layout: Layout,
        generated: Cache = None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """Map [..., Td, hidden] and [..., Te, hidden] to [..., Td, hidden], plus `added_to`. `encoder_rotary`: None for
        keys from the encoder that are not rotated."""
        queries = self.queries(hidden_states, rotary)
        decoder = self.keys_values(hidden_states, rotary)
        if generated is None:
            encoder = self.keys_values(encoder_states, encoder_rotary)
        else:
            decoder = self._cached(generated.self_attention_cache, decoder)
            # The encoder's are computed at the first step of a generation, and cached for the others.
            is_cached = generated.is_updated.get(self.layer_idx, False)
            new = None if is_cached else self.keys_values(encoder_states, encoder_rotary)
            encoder = self._cached(generated.cross_attention_cache, new)
            generated.is_updated[self.layer_idx] = True
        keys, values = map(layout.merged_rows, encoder, decoder)
        return self.output(layout.attend_merged(queries, keys, values), added_to)

    def _cached(self, cache: DynamicCache, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if new is None:
            cached = cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        else:
            # transformers 4 needs the positions that a static cache writes; 5 counts by itself.
            positions = torch.arange(new[0].shape[1], device=new[0].device) + cache.get_seq_length(self.layer_idx)
            cached = cache.update(*(x.transpose(1, 2) for x in new), self.layer_idx, {"cache_position": positions})
        keys, values = (x.transpose(1, 2) for x in cached)
        return keys, values


class Qwen3DecoderLayer(Qwen3Layer):
    """A layer with merged attention."""

    attention = Qwen3MergedAttention

    def __init__(self, config: Qwen3Seq2SeqConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.norms_encoder = form_of(config).has_own_norm


class Qwen3Decoder(Qwen3Stack):
    """Decoder layers and the final norm."""

    def __init__(self, config: Qwen3Seq2SeqConfig) -> None:
        super().__init__(config, Qwen3DecoderLayer, config.num_hidden_layers, normed=config.num_hidden_layers > 0)

    def forward(
        self,
        inputs_embeds: Tensor,
        encoder_states: Iterable[Tensor],
        *,
        layout: Layout,
        generated: Cache = None,
        kept: States = None,
    ) -> Tensor:
        """Map embeddings [..., Td, hidden] to states [..., Td, hidden]. `encoder_states`, [..., Te, hidden] at each
        height, are taken as layers need them: an encoder that makes them then runs in step with the decoder, and of the
        gradients of its states, in the backward pass, only one exists at a time."""
        goes_on, dtype = self.config.encoder_positions == "prefix", inputs_embeds.dtype
        positions = layout.continued_positions() if goes_on else layout.decoder_positions
        states = self._states(
            inputs_embeds,
            self._at_heights(iter(encoder_states)),
            positions=positions,
            encoder_rotary=rotary_tables(layout.encoder_positions, self.config, dtype) if goes_on else None,
            layout=layout,
            generated=generated,  # not by transformers' name: before 5.24 its checkpointed layers drop it in training
        )
        return last_of(states, kept)

    def _at_heights(self, states: Iterator[Tensor]) -> Iterator[tuple[Tensor]]:
        taken = -1
        for height in self.config.encoder_heights or [self.config.num_encoder_layers] * len(self.layers):
            while taken < height:
                state = next(states)
                taken += 1
            yield (state,)


class LanguageModelHead(Linear):
    """The output layer, and with it the training loss: the only reader of its (usually tied) weight. Training mode
    applies `label_smoothing`, `z_loss` and `own_loss` (loss.py), settings of a run and in no `config.json`."""

    label_smoothing = 0.0
    z_loss = 0.0
    own_loss: OwnLoss | None = None
    per_token = False

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, chunk_tokens: int = 0
    ) -> Tensor | tuple[Tensor | None, Tensor]:
        """Return logits [..., vocab] without labels; else the sum and token losses of `linear_cross_entropy`, or with
        `per_token` None and the token losses of `token_cross_entropy`, which have a gradient."""
        if labels is None:
            return super().forward(hidden_states)
        if self.per_token:
            return None, token_cross_entropy(hidden_states, self.weight, labels, chunk_tokens)
        optimised = (self.label_smoothing, self.z_loss, self.own_loss) if self.training else ()
        return linear_cross_entropy(hidden_states, self.weight, labels, chunk_tokens, *optimised)


@dataclass
class PackedLossOutput(ModelOutput):
    """Loss of one packed micro-batch: `loss`, float32 scalar with gradient, the *sum* of the optimised losses over
    tokens, in nats; `token_losses`, plain cross-entropy, float32 [Td], 0 where the label is -100. They are detached,
    unless the head is `per_token`: then they have the gradient, and `loss` is None. Of an encoder alone without labels:
    its `states` [Te, hidden], with gradient. Beside a teacher: the `divergences` from it of the tokens that it teaches,
    detached."""

    loss: Tensor | None = None
    token_losses: Tensor | None = None
    states: Tensor | None = None
    divergences: Tensor | None = None


class Qwen3ForSeq2SeqLM(Qwen3PreTrainedModel, GenerationMixin):
    """The encoder-decoder with its language-model head. `attention_dropout`, a setting of a run and in no
    `config.json`, is the share of attention weights that training mode sets to zero, in the packed form."""

    attention_dropout = 0.0
    head: type[LanguageModelHead] = LanguageModelHead

    config_class = Qwen3Seq2SeqConfig
    _skip_keys_device_placement = ("past_key_values", "cache", "generated")
    _tied_weights_keys = {"lm_head.weight": "shared.weight"}  # noqa: RUF012 - Hugging Face's own form

    def __init__(self, config: Qwen3Seq2SeqConfig) -> None:
        super().__init__(config)
        self.loss_type = config.loss_type
        self.shared = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = Qwen3Encoder(config)
        self.decoder = Qwen3Decoder(config)
        self.lm_head = self.head(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            # Here and not only in post_init: a tie made after zero.Init has partitioned both would not hold.
            self.lm_head.weight = self.shared.weight
        self.post_init()

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Tie the output layer to the embedding: early versions 5 of transformers treat them as different."""
        super().tie_weights(*arguments, **options)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.shared.weight

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the encoder as a function of token ids."""
        return EmbeddedEncoder(self.shared, self.encoder)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Return the decoder's mask [B, length] as it is: for a static cache `generate` would make it 4-dimensional."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *_: Any, **__: Any) -> bool:
        # For a static cache `generate` would compile each step: masks grow.
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        packing: PackedLayout | None = None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> PackedLossOutput | Seq2SeqLMOutput | tuple[Tensor, ...]:
        """Return the loss of a packed batch, with `packing`, or the logits of an ordinary one. Packed: input_ids int64
        [Te], decoder_input_ids and labels int64 [Td] → `PackedLossOutput`; an encoder alone takes labels [Te] of its
        own positions, or none. Ordinary: input_ids int64 [B, Le] (or `inputs_embeds`, `encoder_outputs`),
        decoder_input_ids int64 [B, Ld] (or `decoder_inputs_embeds`, or labels shifted right), masks [B, length],
        non-zero on real tokens → `Seq2SeqLMOutput` with logits [B, Ld, vocab] and, for labels (-100: no loss), the mean
        token loss, which takes `kwargs`. transformers 5.24 calls `past_key_values` `cache`. Raises TypeError for
        unknown arguments."""
        for_loss = self._for_loss(kwargs)
        if packing is not None:
            return self._packed_loss(input_ids, decoder_input_ids, labels, packing)
        generated = self._cache_of_call(
            past_key_values, cache, self.config.use_cache if use_cache is None else use_cache
        )
        requested = self._outputs(output_hidden_states, output_attentions)
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, inputs_embeds, **requested)
        encoded = BaseModelOutput(*encoder_outputs) if isinstance(encoder_outputs, tuple) else encoder_outputs
        encoder_states, kept_states = encoded.last_hidden_state, self._encoder_states(encoded, generated)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        decoder_embeds = embedded(self.shared, decoder_input_ids, decoder_inputs_embeds, "decoder_")
        layout = PaddedLayout.build(
            encoder_length=encoder_states.shape[1],
            encoder_valid=attention_mask,
            decoder_length=decoder_embeds.shape[1],
            decoder_valid=decoder_attention_mask,
            past_length=0 if generated is None else int(generated.get_seq_length()),
            device=encoder_states.device,
        )
        kept: States = [] if requested["output_hidden_states"] else None
        hidden_states = self.decoder(decoder_embeds, kept_states, layout=layout, generated=generated, kept=kept)
        logits = self.lm_head(hidden_states)
        output = Seq2SeqLMOutput(
            loss=None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **for_loss),
            logits=logits,
            **{_CACHE: generated},
            decoder_hidden_states=None if kept is None else tuple(kept),
            encoder_last_hidden_state=encoder_states,
            encoder_hidden_states=encoded.hidden_states if requested["output_hidden_states"] else None,
        )
        return self._answer(output, return_dict)

    def _encoder_states(self, encoded: BaseModelOutput, generated: Cache) -> Iterable[Tensor]:
        # The encoder's states at each height; where the decoder reads the last or the cache, the last stand for all.
        last, states = encoded.last_hidden_state, encoded.hidden_states
        if not form_of(self.config).is_aligned or (generated is not None and generated.is_updated.get(0)):
            return repeat(last)
        # `generate` repeats tensors, but no tuples of them.
        beams, others = divmod(len(last), max(1, len(states[0]))) if states else (0, 0)
        if not states or len(states) != self.config.num_encoder_layers + 1 or others or (len(last) and not beams):
            raise ValueError(
                "encoder_outputs lacks the hidden_states that layers read: give what get_encoder() returns"
            )
        return states if beams == 1 else (state.repeat_interleave(beams, dim=0) for state in states)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # After the first step the cache has all that is read of the encoder's states.
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        encoded = updated.get("encoder_outputs")
        if encoded is not None and updated.get("past_key_values", updated.get("cache")) is not None:
            updated["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded.last_hidden_state)
        return updated

    def _cache_of_call(self, past_key_values: object, cache: object, use_cache: bool) -> Cache:
        caches = [one for one in (past_key_values, cache) if one is not None]
        if not caches:
            return EncoderDecoderCache(DynamicCache(), DynamicCache()) if use_cache and not self.training else None
        chosen = caches[0]
        if chosen is not caches[-1] or not isinstance(chosen, EncoderDecoderCache):
            raise TypeError(
                "past_key_values, cache: give one EncoderDecoderCache(DynamicCache(), DynamicCache()), not "
                f"{' and '.join(type(one).__name__ for one in caches)}."
            )
        if self.training and torch.is_grad_enabled() and self.decoder.layers[0].gradient_checkpointing:
            raise NotImplementedError(
                "gradient checkpointing would write to the cache twice: call gradient_checkpointing_disable() or eval()"
            )
        return chosen

    def _for_loss(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not arguments:
            return {}
        taken = inspect.signature(self.loss_function).parameters.keys() - {"logits", "labels", "vocab_size", "kwargs"}
        # cache_position: positions of new tokens, in transformers up to 5.3. The cache counts its own.
        refuse_unknown(self, arguments, {"cache_position", *taken})
        return {name: value for name, value in arguments.items() if name in taken}

    def _packed_loss(
        self, input_ids: Tensor | None, decoder_input_ids: Tensor | None, labels: Tensor | None, packing: PackedLayout
    ) -> PackedLossOutput:
        is_alone = self.config.num_hidden_layers == 0
        decoder_input_ids = input_ids[:0] if is_alone and input_ids is not None else decoder_input_ids
        if input_ids is None or decoder_input_ids is None or (labels is None and not is_alone):
            raise ValueError("The packed form needs input_ids, decoder_input_ids and labels")
        hidden_states = self.packed_states(input_ids, decoder_input_ids, packing)
        if labels is None:
            return PackedLossOutput(states=hidden_states)
        return PackedLossOutput(*self.lm_head(hidden_states, labels, self.config.loss_chunk_tokens))

    def packed_states(self, input_ids: Tensor, decoder_input_ids: Tensor, packing: PackedLayout) -> Tensor:
        """Return the decoder's last states [Td, hidden] of a packed batch; an encoder alone its own [Te, hidden]."""
        dropout = self.attention_dropout if self.training else 0.0
        # One look-up for both sides: the embedding's gradient, as large as the embedding, exists once.
        embeds = self.shared(torch.cat([input_ids, decoder_input_ids]))
        wanted = KernelQuery(embeds.device, embeds.dtype, self.config.head_dim, dropout)
        kernel, _ = choose_kernel(wanted, flash=self.config.use_flash_attention)
        packing = replace(packing, kernel=kernel, dropout=dropout)
        encoder_embeds, decoder_embeds = embeds.split([len(input_ids), len(decoder_input_ids)])
        states = self.encoder.states(encoder_embeds, layout=packing)
        is_alone = self.config.num_hidden_layers == 0
        return last_of(states, None) if is_alone else self.decoder(decoder_embeds, states, layout=packing)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor | None) -> Tensor:
        """Shift labels [B, Ld] right behind `decoder_start_token_id`; -100 becomes the pad token."""
        if labels is None:
            raise ValueError("The decoder needs decoder_input_ids, or labels to make them from")
        shifted = labels.roll(1, dims=-1)
        shifted[..., 0] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORE_INDEX, self.config.pad_token_id)
