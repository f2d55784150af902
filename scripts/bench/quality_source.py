"""The sizes of the study of quality, and its source decoder: transformers' own Qwen3ForCausalLM, until it copies.

A source that cannot copy reads little of its input, and then no form of an encoder can be better than another. Short
windows that repeat themselves come first: on these the heads that copy form within a million tokens, even through 12
layers. What it learns at each step depends on the seed and the step alone, so that a training may go on where it ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import torch
from quality_text import rows
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ds_encdec.tokenizer.load import builtin_tokenizer

SPARE_ROWS = 40  # of the vocabulary: sentinels, which the source never sees
TOKENIZER_TEXTS = 2000
LAST_RATE = 0.05  # of the largest, at the end of the cosine
SAVED_EVERY = 500  # steps


@dataclass(frozen=True)
class Phase:
    """A part of the source's training: `tokens` in windows of `window` tokens. Of these a share `shuffled` repeats a
    few tokens, at most `period`, drawn one by one from the text, until it is full; a share `passages` has a passage
    twice, with other text between and behind; the others are plain text."""

    tokens: int
    window: int
    shuffled: float
    passages: float
    period: int


@dataclass(frozen=True)
class Size:
    """One size of the study. Tokens of arms count inputs and targets; an arm is evaluated at each of its marks.
    `rates`: of arms that start from a source; from random weights they are eight times as large."""

    documents: int = 14_000  # at most; 0: the built-in corpus
    vocab_size: int = 1024
    hidden: int = 96
    layers: int = 12
    heads: tuple[int, int] = (4, 2)  # of queries, and of keys and values
    intermediate: int = 256
    phases: tuple[Phase, ...] = (Phase(1_400_000, 64, 0.5, 0.2, 16), Phase(16_600_000, 256, 0.1, 0.25, 64))
    source_rate: float = 0.006
    source_batch_tokens: int = 2048
    copied_tokens: int = 128  # of a passage that is read twice to see whether the source copies
    chunk: int = 256  # tokens of a text that become one example
    batch_examples: int = 4  # of this length, in a micro-batch
    eval_examples: int = 200
    rates: tuple[float, ...] = (2.5e-4, 5e-4, 1e-3)
    rate_tokens: int = 50_000
    seeds: int = 3
    marks: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"ul2": (50_000, 100_000, 200_000), "S": (100_000,), "long": (1_000_000,)}
    )
    task_marks: tuple[int, ...] = (20_000, 60_000)
    task_examples: int = 256  # to test on

    @property
    def source_tokens(self) -> int:
        """All tokens that the source is trained on."""
        return sum(phase.tokens for phase in self.phases)


_CI = Size(
    **{"documents": 0, "vocab_size": 512, "hidden": 48, "layers": 6, "heads": (2, 1), "intermediate": 128},
    **{"phases": (Phase(300_000, 64, 0.3, 0.2, 12),), "source_rate": 0.01, "copied_tokens": 32, "chunk": 128},
    **{"eval_examples": 80, "rate_tokens": 1000, "seeds": 1, "marks": {"ul2": (2000,), "S": (1000,), "long": ()}},
    **{"task_marks": (1000,), "task_examples": 16},
)
_GPU = Size(
    **{"documents": 40_000, "vocab_size": 16_384, "hidden": 384, "layers": 24, "heads": (12, 4)},
    **{"phases": (Phase(10_000_000, 64, 0.5, 0.2, 16), Phase(70_000_000, 512, 0.1, 0.2, 128)), "intermediate": 1024},
    **{"source_rate": 0.004, "source_batch_tokens": 65_536, "copied_tokens": 256, "chunk": 512, "batch_examples": 32},
    **{"marks": {"ul2": (500_000, 2_000_000), "S": (), "long": ()}, "task_marks": (100_000,), "task_examples": 500},
    **{"eval_examples": 500, "rate_tokens": 200_000, "seeds": 1},
)
SIZES = {"ci": _CI, "cpu": Size(), "gpu": _GPU}


class Steps:
    """The steps of a training: `taken`, and the tokens `seen`. With `path` they are kept there, and go on from it."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], path: Path | None = None) -> None:
        self._model, self._optimizers, self._path = model, optimizers, path
        self.taken = self.seen = 0
        if path is not None and path.exists():
            state = torch.load(path, map_location=next(model.parameters()).device)
            self.taken, self.seen = state["steps"], state["seen"]
            for part, saved in zip((model, *optimizers), (state["model"], *state["optimizers"]), strict=True):
                part.load_state_dict(saved)

    def take(self, loss: Tensor, rate: float, tokens: int) -> None:
        """Take a step."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.taken, self.seen = self.taken + 1, self.seen + tokens
        if self._path is not None and self.taken % SAVED_EVERY == 0:
            state = {"steps": self.taken, "seen": self.seen, "model": self._model.state_dict()}
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
            torch.save(state, self._path.with_suffix(".tmp"))
            self._path.with_suffix(".tmp").replace(self._path)

    def cosine(self, progress: float) -> float:
        """The share of the largest rate: a warm-up, then a cosine over `progress` from 0 to 1."""
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.warm_up(50) * (LAST_RATE + (1 - LAST_RATE) * share)

    def warm_up(self, steps: int = 10) -> float:
        """The same where the rate is constant behind its first steps."""
        return min(1.0, (self.taken + 1) / steps)


def muon(model: torch.nn.Module, embedding: Tensor) -> Sequence[Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def make_source(folder: Path, texts: Path, size: Size, *, seed: int, device: str) -> dict[str, Any]:
    """Train the source into `folder`, or go on; returns what is known of it, which stands in its `source.json`."""
    if (folder / "source.json").exists():
        return json.loads((folder / "source.json").read_text())
    tokenizer = _tokenizer(folder, texts, size.vocab_size)
    train, held_out = (_stream(texts / f"{role}.jsonl", tokenizer) for role in ("source", "eval"))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config(size, tokenizer.pad_token_id)).train()
    with torch.no_grad():  # scaled as GPT-2 does, so that many layers begin as a short path
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * size.layers))
    model.to(device)
    for layer in model.model.layers if which("g++") and size.source_tokens > 10**6 else ():
        layer.compile(dynamic=False)
    steps = Steps(model, muon(model, model.model.embed_tokens.weight), folder / "state.pt")
    ends = np.cumsum([phase.tokens // size.source_batch_tokens for phase in size.phases])
    while steps.taken < ends[-1]:
        phase = size.phases[np.searchsorted(ends, steps.taken, side="right")]
        rng = np.random.default_rng([seed, steps.taken])
        ids, labels = (part.to(device) for part in windows(train, phase, size.source_batch_tokens // phase.window, rng))
        with _bf16(model.device):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        steps.take(loss, size.source_rate * steps.cosine(steps.taken / ends[-1]), size.source_batch_tokens)
        if steps.taken % SAVED_EVERY == 0:
            print(f"{steps.seen} tokens", copied(model, held_out, size.copied_tokens), flush=True)
    facts = {**asdict(size), "seed": seed, "tokens": steps.seen, **copied(model, held_out, size.copied_tokens)}
    facts["parameters"] = sum(weight.numel() for weight in model.parameters())
    model.save_pretrained(folder)
    (folder / "source.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "state.pt").unlink(missing_ok=True)
    return facts


def _tokenizer(folder: Path, texts: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").exists():
        corpus = [row["text"] for row in rows(texts / "source.jsonl")[:TOKENIZER_TEXTS]]
        builtin_tokenizer(corpus, vocab_size - SPARE_ROWS).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _stream(path: Path, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """The ids of all texts of a file, int64, `<|endoftext|>` behind each."""
    ids = tokenizer([row["text"] for row in rows(path)])["input_ids"]
    return np.concatenate([np.array([*one, tokenizer.pad_token_id]) for one in ids])


def _config(size: Size, pad_id: int) -> Qwen3Config:
    layer = {"hidden_size": size.hidden, "intermediate_size": size.intermediate, "head_dim": 32}
    layer |= {"num_attention_heads": size.heads[0], "num_key_value_heads": size.heads[1]}
    ids = {"vocab_size": size.vocab_size, "pad_token_id": pad_id, "eos_token_id": pad_id, "bos_token_id": None}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "max_position_embeddings": 2048}
    # On a CPU the fused kernel's backward pass in bf16 takes half of a step.
    kernel = {"attn_implementation": "eager"}
    return Qwen3Config(num_hidden_layers=size.layers, tie_word_embeddings=True, **layer, **ids, **rope, **kernel)


def windows(train: np.ndarray, phase: Phase, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64 [count, window] each, drawn for one step."""
    shares = [phase.shuffled, phase.passages, 1 - phase.shuffled - phase.passages]
    ids = [_MAKERS[kind](train, phase, rng) for kind in rng.choice(3, size=count, p=shares)]
    return tuple(torch.from_numpy(np.stack(parts)) for parts in zip(*ids, strict=True))


def _shuffled(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    period = int(rng.integers(4, phase.period + 1))
    ids = np.resize(train[rng.integers(len(train), size=period)], phase.window)
    return ids, np.where(np.arange(phase.window) < period, -100, ids)  # nobody can know the first reading


def _passage(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    length = int(rng.integers(8, phase.window // 2 + 1))
    gap = int(rng.integers(0, phase.window - 2 * length + 1))
    here, there = rng.integers(len(train) - phase.window, size=2)
    passage, behind = train[here : here + length], train[here + length : here + phase.window]
    ids = np.concatenate([passage, train[there : there + gap], passage, behind])[: phase.window]
    return ids, ids


def _text(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    start = int(rng.integers(len(train) - phase.window))
    ids = train[start : start + phase.window]
    return ids, ids


_MAKERS = (_shuffled, _passage, _text)


@torch.no_grad()
def copied(model: Qwen3ForCausalLM, held_out: np.ndarray, length: int) -> dict[str, float]:
    """Mean losses, in nats a token, of held-out passages of `length` tokens and of the same ones right behind them."""
    passages = held_out[: min(64, len(held_out) // length) * length].reshape(-1, length)
    ids = torch.from_numpy(np.concatenate([passages, passages], axis=1)).to(model.device)
    losses = []
    for some in ids.split(8):
        with _bf16(model.device):
            logits = model(input_ids=some, use_cache=False).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), some[:, 1:], reduction="none"))
    mean = torch.cat(losses).mean(dim=0)
    return {"first reading": mean[: length - 1].mean().item(), "second reading": mean[length - 1 :].mean().item()}


def _bf16(device: torch.device) -> Any:
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16) if is_fast else nullcontext()
