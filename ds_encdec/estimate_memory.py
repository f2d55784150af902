"""Estimates what a run holds in the memory of its GPUs and hosts, whether it fits, and which settings to choose.

    python -m ds_encdec.estimate_memory [--config X] [--model ID_OR_DIR] [--gpus 8] [--nodes 1] [--gpu h100-80gb]

Without arguments, the default run on 8 x a100-80gb. docs/estimate-memory.md explains the table and its formulas.
Neither torch nor the network is needed, except for --trace, which imports torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.launch.preemption import reader_may_leave
from ds_encdec.memory.breakdown import in_gib
from ds_encdec.memory.gpus import DEFAULT_GPU
from ds_encdec.types import DsEncDecError

if TYPE_CHECKING:
    from ds_encdec.memory.breakdown import Estimate
    from ds_encdec.memory.trace import TracedMemory


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
        with reader_may_leave():
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
    from ds_encdec.memory.answer import answer, as_json  # not for --help, nor for other verbs
    from ds_encdec.memory.question import read_question
    from ds_encdec.memory.table import describe

    question = read_question(options, overrides)
    found = answer(question.job, question.gpu, question.host_bytes)
    traced = None
    if options.trace:
        from ds_encdec.memory.trace import trace_memory  # takes seconds, and torch

        traced = trace_memory(question.job)
    if options.json:
        result = as_json(found) | {"remarks": question.remarks}
        print(json.dumps(result if traced is None else result | {"trace": _trace_as_json(traced)}, indent=2))
        return 0
    parts = [describe(found), *question.remarks]
    if traced is not None:
        parts += [_beside(found.configured.estimate, traced), *filter(None, [traced.remark])]
    print("\n\n".join(parts))
    return 0


def _trace_as_json(traced: TracedMemory) -> dict[str, Any]:
    """Categories that are not traced are null."""
    from ds_encdec.memory.answer import breakdown_as_json

    seen = breakdown_as_json(traced.peak)
    return {
        "bytes": {name: held if name in (*traced.categories, "peak") else None for name, held in seen.items()},
        "moment": traced.moment,
        "seconds": traced.seconds,
        "remark": traced.remark,
    }


def _beside(formula: Estimate, traced: TracedMemory) -> str:
    """A traced peak beside the formula's, each at its own worst moment; a dash for a category that is not traced."""
    from ds_encdec.memory.breakdown import CATEGORIES

    lines = [
        f"The configured run traced; GiB per GPU (formula: {formula.moment}; trace: {traced.moment})",
        f"{'':16}{'formula':>10}{'traced':>10}",
    ]
    expected = {name: getattr(formula.peak, name) for name in CATEGORIES}
    for name, held in expected.items():
        seen = in_gib(getattr(traced.peak, name)) if name in traced.categories else "-"
        lines.append(f"{name:16}{in_gib(held):>10}{seen:>10}")
    comparable = sum(expected[name] for name in traced.categories)
    return "\n".join([*lines, f"{'traced ones':16}{in_gib(comparable):>10}{in_gib(traced.peak.total):>10}"])


if __name__ == "__main__":
    sys.exit(main())
