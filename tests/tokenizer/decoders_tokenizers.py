"""Small tokenizers of the kinds that decoders have, trained on Python's own help."""

import json
import pydoc_data.topics
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

KINDS = ("qwen", "llama 3", "llama 2", "mistral")
"""Byte-level BPE, without and with a BOS; BPE with bytes for unknown characters and a BOS, its spaces made by the
normalizer, or by the pre-tokenizer."""


def decoders_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A new tokenizer without a pad token, as Llama's and Mistral's are."""
    names = ("<|begin_of_text|>", "<|end_of_text|>") if kind in ("qwen", "llama 3") else ("<s>", "</s>")
    backend = Tokenizer.from_str(_tokenizer_json(kind, names))
    special = {"eos_token": names[1]} | ({} if kind == "qwen" else {"bos_token": names[0]})
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@cache
def _tokenizer_json(kind: str, names: tuple[str, str]) -> str:
    byte_level = kind in ("qwen", "llama 3")
    backend = Tokenizer(
        models.BPE() if byte_level else models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        first, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)  # to train on words
        first, alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*first, *names], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(list(pydoc_data.topics.topics.values())[:20], trainer)
    if not byte_level:
        fields = json.loads(backend.to_str())
        fields["added_tokens"] = [one for one in fields["added_tokens"] if not one["content"].startswith("<0x")]
        fields["pre_tokenizer"] = None
        backend = Tokenizer.from_str(json.dumps(fields))
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(spaces)
    if kind == "mistral":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "llama 2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind != "qwen":
        begins = (names[0], backend.token_to_id(names[0]))
        backend.post_processor = processors.TemplateProcessing(single=f"{names[0]} $A", special_tokens=[begins])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return backend.to_str()
