"""The question that `estimate_memory` is asked: its options read into a job, a GPU and a host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ds_encdec.config.batch_size import is_auto, micro_batch_candidates, with_micro_batch_size
from ds_encdec.config.load import find_shipped, load_config
from ds_encdec.config.schema import FullConfig
from ds_encdec.gpus import Gpu, parse_bytes, parse_gpu
from ds_encdec.memory.answer import runs_on
from ds_encdec.memory.breakdown import GIB
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job
from ds_encdec.memory.model_sizes import Sizes, run_sizes
from ds_encdec.memory.planned import contradictions, indivisible, planned_job
from ds_encdec.memory.variants import Room
from ds_encdec.memory.zero import not_estimated
from ds_encdec.types import ConfigError

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Question:
    """The run, on which GPUs and hosts; `remarks` on how it was understood. `host_bytes`: of a node, if given."""

    job: Job
    gpu: Gpu
    host_bytes: int | None
    remarks: tuple[str, ...]


def read_question(options: argparse.Namespace, overrides: Sequence[str]) -> Question:
    """Read the question in the options. Raises ConfigError that lists every problem in them."""
    problems: list[str] = []
    gpu = _attempt(lambda: parse_gpu(options.gpu), problems)
    host_bytes = _attempt(lambda: _host_bytes(options.host_memory), problems)
    counts = {"--gpus": options.gpus, "--nodes": options.nodes, "--lora-rank": options.lora_rank}
    wrong = [f"{name} {count}: must be at least 1" for name, count in counts.items() if count is not None and count < 1]
    named = {"--gpus": options.gpus, "--model": options.model}
    problems += [*wrong, *contradictions(named, overrides)]
    config = _attempt(lambda: _load(options, overrides), problems)
    sizes = job = None
    if config is not None:
        sizes = _attempt(partial(run_sizes, config), problems)
        if not wrong:
            problems += indivisible(config, options.nodes)
    if config is not None and gpu is not None and not gpu.has_bf16:
        # Flash kernels need as much as bfloat16 does: attention then runs without (model/attention.py).
        config = config.model_copy(update={"model": config.model.model_copy(update={"use_flash_attention": False})})
    if config is not None and sizes is not None and gpu is not None and not problems:
        job = _attempt(lambda: _job(config, sizes, options, gpu, host_bytes), problems)
    if job is None or gpu is None or config is None:
        raise ConfigError("\n".join(problems))
    return Question(job, gpu, host_bytes, tuple(_remarks(options, config, job, gpu)))


def _attempt(read: Callable[[], Found], problems: list[str]) -> Found | None:
    """Return what `read` returns; None where it raises ConfigError, which becomes one of `problems`."""
    try:
        return read()
    except ConfigError as error:
        problems.append(str(error))
        return None


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    num_bytes = parse_bytes(text)
    if num_bytes is None or num_bytes < GIB:
        raise ConfigError(f"--host-memory {text}: not a size of a machine; write 512GiB, 1TB or bytes")
    return num_bytes


def _model_overrides(model: str) -> list[str]:
    return [f"model.model_name_or_path={json.dumps(model)}", "model.architecture=null"]


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> FullConfig:
    """The configuration, with the options that stand for fields of it."""
    named = [] if options.model is None else _model_overrides(options.model)
    if options.gpus is not None and options.gpus > 0:
        named.append(f"infra.num_gpus={options.gpus}")
    return load_config(find_shipped(options.config), [*named, *overrides], find_shipped(options.deepspeed_config))


def _job(config: FullConfig, sizes: Sizes, options: argparse.Namespace, gpu: Gpu, host_bytes: int | None) -> Job:
    """The run; where its micro-batch size is `auto`, with the largest that fits, or with 1."""
    if not is_auto(config):
        return planned_job(config, sizes, options.nodes, options.lora_rank)
    for size in micro_batch_candidates(config, config.infra.num_gpus):
        tried = with_micro_batch_size(config, size, config.infra.num_gpus)
        job = planned_job(tried, sizes, options.nodes, options.lora_rank)
        room = Room(gpu.usable_bytes, None if host_bytes is None else host_bytes / job.ranks_per_node)
        if room.fits(estimate(job)):
            break
    return job


def _remarks(options: argparse.Namespace, config: FullConfig, job: Job, gpu: Gpu) -> Iterator[str]:
    if is_auto(config):
        yield (
            "training.per_device_train_batch_size=auto: taken to be the largest that fits by this estimate, "
            f"{job.config.training.micro_batch_size}. A run tries real steps."
        )
    if not runs_on(gpu, job):
        yield (
            f"A {gpu.name} has neither bfloat16 nor a flash kernel. The tables are of what it can train with: "
            "training.bf16=false training.fp16=true."
        )
    if job.config.infra.deepspeed_extra and (keys := ", ".join(not_estimated(job))):
        yield f"infra.deepspeed_extra: {keys}: estimated as DeepSpeed and this program have them by default."
    if job.config.training.torch_compile:
        yield "torch_compile: estimated like layers that are not compiled, whose activations may differ."
    if options.lora_rank is not None:
        yield "LoRA: what such a run would hold; the engines do not train adapters alone yet."
    if options.model is not None:
        yield f"To train what is recommended, add what --model stands for: {' '.join(_model_overrides(options.model))}"
    if options.deepspeed_config is not None:
        yield f"What {options.deepspeed_config} sets must be changed in it, too: a run refuses settings that disagree."
