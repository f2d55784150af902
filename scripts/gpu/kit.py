"""The means of the kit's parts: their rows of figures, and a run's engine and micro-batches without its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_encdec.base.types import Batch, Example, WeightSource
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import token_budgets
from ds_encdec.data.examples.chunks import Chunker, documents_ratio
from ds_encdec.data.loader import collate
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import init_process_group
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import form_fields
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.tokenizer.sentinels import Vocabulary

QWEN = {"vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}  # fmt: skip
"""Qwen3-0.6B's sizes: as an encoder-decoder 1.02 B parameters."""
TINY = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}  # fmt: skip
SHORT = {"max_seq_length": 512, "max_encoder_length": 256, "max_decoder_length": 128}


@dataclass(frozen=True)
class Kit:
    """One part at work. `folder`: for its files, gone afterwards. `shared`: for those that other parts read."""

    dry_run: bool
    folder: Path
    shared: Path

    @cached_property
    def device(self) -> torch.device:
        """The GPU, on one of several ranks its own; in a dry run the CPU."""
        torch.backends.cuda.enable_cudnn_sdp(False)  # as `choose_device` has it
        return torch.device("cpu") if self.dry_run else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def sizes(self) -> dict[str, int]:
        """The model to measure: Qwen3's, in a dry run a tiny one."""
        return TINY if self.dry_run else QWEN

    def row(self, name: str, *, ok: bool = True, **figures: Any) -> None:
        """Keep a row of figures, at once: what comes later may end the process."""
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"name": name, "ok": bool(ok), **figures}, default=str) + "\n")

    def bounded(self, name: str, errors: Mapping[str, float], bound: float) -> None:
        """Keep a row of errors, none of which may be above `bound`."""
        self.row(name, ok=max(errors.values()) <= bound, bound=bound, **errors)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Keep an exception that is raised inside as a failed row."""
        try:
            yield
        except Exception as error:
            self.row(name, ok=False, error=f"{type(error).__name__}: {error}"[:500])

    def omit(self, name: str, why: str) -> None:
        """Say what is not done here, and why."""
        self.row(name, omitted=why)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def run_config(kit: Kit, sizes: Mapping[str, int], **sections: Mapping[str, Any]) -> FullConfig:
    """The configuration of a run of a model of `sizes` on one device, without reports."""
    infra = {"device": kit.device.type, "num_gpus": 1, "output_dir": str(kit.folder / "run")}
    training = {"report_to": "none", "eval_samples": 0, "warmup_steps": 1}
    given = {"training": training, "infra": infra, "model": {}, "data": {}}
    for name, section in sections.items():
        given[name] = {**given[name], **section}
    given["model"] = {"tokenizer_name_or_path": "builtin", "architecture": dict(sizes), **given["model"]}
    return FullConfig.model_validate(given)


def model_config(config: FullConfig) -> Qwen3Seq2SeqConfig:
    """The model of `run_config`, with the special tokens of `vocabulary`."""
    assert config.model.architecture is not None
    sizes = config.model.architecture.model_dump(exclude={"rope_theta"})
    sizes |= form_fields(config.model, sizes["num_hidden_layers"]) | {
        "loss_chunk_tokens": config.model.loss_chunk_tokens
    }
    return Qwen3Seq2SeqConfig(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)


def drawn_weights(model: Qwen3Seq2SeqConfig, device: torch.device) -> WeightSource:
    """Norms 1, matrices drawn on `device`: a billion of them in a second, where the CPU takes half a minute."""
    shapes = parameter_shapes(model)
    generator = torch.Generator(device).manual_seed(0)

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=device)[rows]
        return torch.randn(shape, generator=generator, device=device).mul_(0.02)[rows]

    return weights


def web_like_batches(config: FullConfig, vocab_size: int, count: int) -> tuple[list[Batch], float]:
    """Micro-batches that the run's own packer makes of denoised documents, log-normal with a median of 620 tokens.

    Returns also the ratio of encoder to decoder tokens that the documents yield.
    """
    sentinels = tuple(range(vocab_size - 100, vocab_size))
    vocabulary = Vocabulary(sentinels, eos_id=1, pad_id=0, mode_token_ids=(), vocab_size=vocab_size)
    chunker = Chunker.from_config(config.data, seed=1, vocabulary=vocabulary)
    draw = np.random.default_rng(0)

    def documents(median: int = 620) -> Iterator[int]:
        while True:
            yield max(2, int(median * np.exp(draw.normal())))

    def arrivals() -> Iterator[Waiting[Example]]:
        for number, length in enumerate(documents()):
            ids = draw.integers(2, vocab_size - 100, size=length, dtype=np.int32)
            for chunk in chunker.chunks(length, str(number), epoch=0):
                example = chunker.example(chunk, ids, str(number))
                yield Waiting(example, len(example.encoder_ids), len(example.decoder_ids))

    lengths = documents()
    ratio = documents_ratio([next(lengths) for _ in range(256)], chunker)
    budgets = token_budgets(config.data, config.training.micro_batch_size, ratio)
    packer: Packer[Example] = Packer(
        budgets,
        pool_examples=config.data.packing_pool_examples,
        max_wait_batches=config.data.packing_max_wait_batches,
    )
    waiting = arrivals()
    return [collate(packer.pack(waiting), budgets, start_id=0) for _ in range(count)], ratio


def make_engine(kit: Kit, config: FullConfig, accumulation: int) -> tuple[Engine, Qwen3Seq2SeqConfig]:
    """The run's engine with random weights, in a world of one rank."""
    world, name = discover(os.environ), resolve_engine(config)
    timeout = timedelta(minutes=2)
    init_process_group(world, kit.device, timeout, name)
    model = model_config(config)
    context = RunContext(world, kit.device, name, HostCollectives(timeout))
    weights = drawn_weights(model, kit.device)
    return create_engine(config, context, model, weights, accumulation), model


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected; NaN where anything is."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
