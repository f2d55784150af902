"""The source decoder of the study of quality: transformers' own Qwen3ForCausalLM, trained until it copies.

A source that cannot copy reads little of its input, and then no form of an encoder can be better than another. Short
windows that repeat themselves come first: on these the heads that copy form within a million tokens, even through 12
layers. What it learns at each step depends on the seed and the step alone, so that a training may go on where it ended.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import torch
from quality_sizes import HEAD_DIM, Phase, Size
from quality_text import SPARE_ROWS, make_tokenizer, stream
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

WARM_UP = 50  # steps
LAST_RATE = 0.05  # of the largest, at the end of the cosine
SAVED_EVERY = 500  # steps
COPIED_WINDOWS = 64
COPIES_FROM = 1.0  # nats that the second reading of a passage is below the first


def make_source(folder: Path, texts: Path, size: Size, *, seed: int, device: str, compiled: bool) -> dict[str, Any]:
    """Train the source into `folder`, or go on; returns what is known of it, which stands in its `source.json`."""
    if (folder / "source.json").exists():
        return json.loads((folder / "source.json").read_text())
    tokenizer = make_tokenizer(folder, texts, size.vocab_size)
    train, held_out = (stream(texts / f"{role}.jsonl", tokenizer) for role in ("source", "eval"))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(source_config(size, tokenizer.pad_token_id))
    shrink_outputs(model)
    model.to(device).train()
    if compiled and which("g++"):
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    trainer = _Trainer(model, size, seed, folder / "state.pt")
    log = folder / "training.jsonl"
    for step in trainer.steps(train, size.vocab_size):
        if step % SAVED_EVERY == 0:
            trainer.save(step)
            line = {**trainer.facts(step), **copied(model, held_out, size.copied_tokens)}
            print(json.dumps(line), flush=True)
            with log.open("a") as file:
                print(json.dumps(line), file=file)
    facts = {**asdict(size), **trainer.facts(trainer.total_steps), **copied(model, held_out, size.copied_tokens)}
    facts |= {"seed": seed, "parameters": sum(weight.numel() for weight in model.parameters())}
    model.save_pretrained(folder, state_dict=_plain_state(model))
    (folder / "source.json").write_text(json.dumps(facts, indent=1) + "\n")
    trainer.path.unlink(missing_ok=True)
    return facts


def source_config(size: Size, pad_id: int) -> Qwen3Config:
    """A configuration of Qwen3's shape: grouped queries, q/k norm, tied embeddings."""
    return Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads[0],
        num_key_value_heads=size.heads[1],
        head_dim=HEAD_DIM,
        intermediate_size=size.intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        attn_implementation="eager",  # on a CPU the fused kernel's backward pass in bf16 takes half of a step
        pad_token_id=pad_id,
        eos_token_id=pad_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def shrink_outputs(model: Qwen3ForCausalLM) -> None:
    """Scale what each layer adds to the stream, as GPT-2 does, so that many layers begin as a short path."""
    factor = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(factor)


def windows(train: np.ndarray, phase: Phase, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64 [count, window] each, drawn for one step."""
    shares = [phase.shuffled, phase.passages, 1 - phase.shuffled - phase.passages]
    pairs = [_MAKERS[kind](train, phase, rng) for kind in rng.choice(3, size=count, p=shares)]
    ids, unknown = (torch.from_numpy(np.stack(parts)) for parts in zip(*pairs, strict=True))
    return ids, ids.masked_fill(unknown, -100)


def _shuffled(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    period = int(rng.integers(4, phase.period + 1))
    first = train[rng.integers(len(train), size=period)]
    return np.resize(first, phase.window), np.arange(phase.window) < period  # nobody can know the first reading


def _passage(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    length = int(rng.integers(8, phase.window // 2 + 1))
    gap = int(rng.integers(0, phase.window - 2 * length + 1))
    here, there = rng.integers(len(train) - phase.window, size=2)
    passage, behind = train[here : here + length], train[here + length : here + phase.window]
    ids = np.concatenate([passage, train[there : there + gap], passage, behind])[: phase.window]
    return ids, np.zeros(phase.window, bool)


def _text(train: np.ndarray, phase: Phase, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    start = int(rng.integers(len(train) - phase.window))
    return train[start : start + phase.window], np.zeros(phase.window, bool)


_MAKERS = (_shuffled, _passage, _text)


@torch.no_grad()
def copied(model: Qwen3ForCausalLM, held_out: np.ndarray, length: int) -> dict[str, float]:
    """Mean losses, in nats a token, of held-out passages of `length` tokens and of the same ones right behind them."""
    passages = held_out[: COPIED_WINDOWS * length].reshape(-1, length)
    ids = torch.from_numpy(np.concatenate([passages, passages], axis=1)).to(model.device)
    model.eval()
    losses = torch.cat([_losses(model, rows) for rows in ids.split(8)]).mean(dim=0)
    model.train()
    return {"first reading": losses[: length - 1].mean().item(), "second reading": losses[length - 1 :].mean().item()}


def _losses(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    with _bf16(model.device):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def _bf16(device: torch.device) -> Any:
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16) if is_fast else nullcontext()


def optimizers(model: torch.nn.Module, embedding: Tensor) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def apply(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Take a step at this rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def share_of_rate(step: int, total_steps: int) -> float:
    """The share of the largest rate: a warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1, step / total_steps)))
    return min(1, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)


class _Trainer:
    """Takes the steps, and saves itself."""

    def __init__(self, model: Qwen3ForCausalLM, size: Size, seed: int, path: Path) -> None:
        self._model, self._size, self._seed, self.path = model, size, seed, path
        self._optimizers = optimizers(model, model.model.embed_tokens.weight)
        self._phase_steps = [phase.tokens // size.source_batch_tokens for phase in size.phases]
        self.total_steps = sum(self._phase_steps)
        self._losses: list[Tensor] = []
        self._seconds, self._began = 0.0, time.process_time()

    def steps(self, train: np.ndarray, vocab_size: int) -> Iterator[int]:
        """Take the steps that are left, and yield the number of each when it is done."""
        assert train.max() < vocab_size - SPARE_ROWS
        for step in range(self._load(), self.total_steps):
            phase = self._size.phases[np.searchsorted(np.cumsum(self._phase_steps), step, side="right")]
            rng = np.random.default_rng([self._seed, step])
            count = self._size.source_batch_tokens // phase.window
            ids, labels = (ids.to(self._model.device) for ids in windows(train, phase, count, rng))
            with _bf16(self._model.device):
                loss = self._model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            apply(self._optimizers, self._size.source_rate * share_of_rate(step, self.total_steps))
            self._losses.append(loss.detach())
            yield step + 1

    def facts(self, step: int) -> dict[str, Any]:
        """Where the training stands behind `step` steps."""
        loss = torch.stack(self._losses[-100:]).mean().item() if self._losses else None
        seconds = self._seconds + time.process_time() - self._began
        return {
            "step": step,
            "tokens": step * self._size.source_batch_tokens,
            "loss": loss,
            "cpu seconds": round(seconds),
        }

    def save(self, step: int) -> None:
        """Save all that the next steps depend on."""
        state = {
            "step": step,
            "model": _plain_state(self._model),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "seconds": self.facts(step)["cpu seconds"],
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def _load(self) -> int:
        if not self.path.exists():
            return 0
        state = torch.load(self.path, map_location=self._model.device)
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._seconds = state["seconds"]
        return state["step"]


def _plain_state(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): weight for name, weight in model.state_dict().items()}
