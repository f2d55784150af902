"""What a run would hold in the memory of its GPUs and hosts, whether it fits, and which settings to choose.

    python -m ds_encdec.estimate_memory [--config X] [--model ID_OR_DIR] [--gpus 8] [--nodes 1] [--gpu h100-80gb]

Without arguments, the default run on 8 x a100-80gb. docs/estimate-memory.md explains the table and its formulas.
Neither torch nor the network is needed, except for --trace, which imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ds_encdec.config.batch_size import (
    is_auto,
    micro_batch_candidates,
    with_micro_batch_size,
)
from ds_encdec.config.load import find_shipped, load_config
from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.answer import answer, as_json, breakdown_as_json
from ds_encdec.memory.breakdown import CATEGORIES, Breakdown
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.gpus import DEFAULT_GPU, Gpu, parse_bytes, parse_gpu
from ds_encdec.memory.job import Job
from ds_encdec.memory.model_sizes import Sizes, run_sizes
from ds_encdec.memory.planned import indivisible, planned_job
from ds_encdec.memory.table import describe, gib
from ds_encdec.memory.variants import fits
from ds_encdec.types import ConfigError, DsEncDecError

Found = TypeVar("Found")


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate as told by the command line; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_encdec.estimate_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="further arguments: section.field=value",
        allow_abbrev=False,  # an abbreviation may be a misspelt setting
    )
    add_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    try:
        return run(options, overrides)
    except DsEncDecError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, shared with `ds-encdec estimate-memory`."""
    parser.add_argument("--config", type=Path, help="YAML of the run (default: the schema's defaults)")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", type=Path, help="raw DeepSpeed JSON")
    parser.add_argument("--model", metavar="ID_OR_DIR", help="a model, instead of the configuration's")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in total (default infra.num_gpus)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines they are in (default 1)")
    parser.add_argument(
        "--gpu", default=DEFAULT_GPU, metavar="NAME|SIZE", help=f"e.g. h100-80gb, 80GiB (default {DEFAULT_GPU})"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="of each machine, e.g. 1TB: judge the host, too")
    parser.add_argument("--lora-rank", type=int, metavar="R", help="as if adapters of this rank were trained alone")
    parser.add_argument("--trace", action="store_true", help="also trace the configured run's step (needs torch)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Read the options, estimate and print. Raises ConfigError that lists every problem found."""
    question = _read(options, overrides)
    found = answer(question.job, estimate(question.job), question.gpu, question.host_bytes)
    remarks = list(question.remarks)
    traced: dict[str, Any] | None = None
    if options.trace:
        from ds_encdec.memory.trace import trace_memory  # takes seconds, and torch

        trace = trace_memory(question.job)
        traced = {
            "bytes": breakdown_as_json(trace.peak),
            "moment": trace.moment,
            "seconds": trace.seconds,
            "remark": trace.remark,
        }
        remarks += [_beside(found.estimate.peak, trace.peak, trace.moment), *filter(None, [trace.remark])]
    if options.json:
        result = as_json(found) | {"remarks": question.remarks} | ({"trace": traced} if traced else {})
        print(json.dumps(result, indent=2))
    else:
        print("\n\n".join([describe(found), *remarks]))
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    """What is asked: the run, on which GPUs and hosts; `remarks` on how it was understood."""

    job: Job
    gpu: Gpu
    host_bytes: int | None
    remarks: tuple[str, ...]


def _read(options: argparse.Namespace, overrides: Sequence[str]) -> _Question:
    """The question in the options. Raises ConfigError that lists every problem in them."""
    problems: list[str] = []
    gpu = _attempt(lambda: parse_gpu(options.gpu), problems)
    host_bytes = None if options.host_memory is None else parse_bytes(options.host_memory)
    if options.host_memory is not None and not host_bytes:
        problems.append(f"--host-memory {options.host_memory}: not a size; write 512GiB, 1TB or bytes")
    counts = {"--gpus": options.gpus, "--nodes": options.nodes, "--lora-rank": options.lora_rank}
    problems += [
        f"{name} {count}: must be at least 1" for name, count in counts.items() if count is not None and count < 1
    ]
    config = _attempt(lambda: _load(options, overrides), problems)
    sizes = None
    if config is not None:
        sizes = _attempt(partial(run_sizes, config), problems)
        if not any(count is not None and count < 1 for count in counts.values()):
            problems += indivisible(config, options.nodes)
    if problems or gpu is None or config is None or sizes is None:
        raise ConfigError("\n".join(problems))
    remarks = []
    if is_auto(config):
        config = _with_fitting_micro_batch(config, sizes, options, gpu)
        remarks.append(
            "training.per_device_train_batch_size=auto: taken to be the largest that fits by this estimate, "
            f"{config.training.micro_batch_size}. A run tries real steps."
        )
    if options.lora_rank is not None:
        remarks.append("LoRA: what such a run would hold; the engines do not train adapters alone yet.")
    return _Question(planned_job(config, sizes, options.nodes, options.lora_rank), gpu, host_bytes, tuple(remarks))


def _attempt(read: Callable[[], Found], problems: list[str]) -> Found | None:
    """What `read` returns; None where it raises ConfigError, which becomes one of `problems`."""
    try:
        return read()
    except ConfigError as error:
        problems.append(str(error))
        return None


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> FullConfig:
    """The configuration, with the options that stand for fields of it."""
    named = []
    if options.model is not None:
        named += [f"model.model_name_or_path={json.dumps(options.model)}", "model.architecture=null"]
    if options.gpus is not None and options.gpus > 0:
        named.append(f"infra.num_gpus={options.gpus}")
    return load_config(find_shipped(options.config), [*named, *overrides], find_shipped(options.deepspeed_config))


def _with_fitting_micro_batch(config: FullConfig, sizes: Sizes, options: argparse.Namespace, gpu: Gpu) -> FullConfig:
    """`config` with the largest micro-batch that fits `gpu`, or with 1."""
    candidates = micro_batch_candidates(config, config.infra.num_gpus)
    for size in candidates:
        tried = with_micro_batch_size(config, size, config.infra.num_gpus)
        if size == 1 or fits(estimate(planned_job(tried, sizes, options.nodes, options.lora_rank)), gpu.usable_bytes):
            break
    return tried


def _beside(formula: Breakdown, traced: Breakdown, moment: str) -> str:
    """A traced peak beside the formula's, by category; a dash where nothing was traced."""
    pairs = [(name, getattr(formula, name), getattr(traced, name)) for name in CATEGORIES]
    pairs.append(("peak", formula.total, traced.total))
    lines = [
        f"The configured run traced (worst moment: {moment}); GiB per GPU",
        f"{'':16}{'formula':>10}{'traced':>10}",
    ]
    lines += [f"{name:16}{gib(by_formula):>10}{gib(seen) if seen else '-':>10}" for name, by_formula, seen in pairs]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
