"""The tie of embedding and output layer, which sharding can break in silence."""

from __future__ import annotations

from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM


def assert_ties(model: Qwen3ForSeq2SeqLM) -> None:
    """The output layer shares the embedding's parameter exactly when the configuration says so."""
    shared = model.lm_head.weight is model.shared.weight
    if shared != bool(model.config.tie_word_embeddings):
        raise AssertionError(
            f"tie_word_embeddings={model.config.tie_word_embeddings}, but lm_head and embedding share: {shared}"
        )
