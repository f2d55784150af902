"""The verbs `generate` and `evaluate`. They import torch only when they run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ds_encdec.base.arguments import COUNT, JSON, Arguments, Verb, flag, value
from ds_encdec.base.quantities import count
from ds_encdec.base.terminal import libraries_print_to_stderr
from ds_encdec.base.types import ConfigError, DsEncDecError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.evaluate.models import is_ours, require_ours, run_config
from ds_encdec.launch.host import no_gpu
from ds_encdec.launch.world import discover
from ds_encdec.memory.gpus import has_gpu
from ds_encdec.registry.text_metrics import TEXT_METRICS, usable


def _settings(defaults: GenerationSettings, *left_out: str, **later: str) -> Arguments:
    """Return an option for each generation setting except `left_out`; `later` describes defaults that are set later."""
    found = {field: getattr(defaults, field.name) for field in fields(defaults) if field.name not in left_out}
    return {
        f"--{field.name.replace('_', '-')}": value(
            f"{field.metadata['meaning']} (default {later.get(field.name, default)})",
            type(default),
            default=None if field.name in later else default,
            metavar="N" if isinstance(default, int) else "X",
        )
        for field, default in found.items()
    }


_UNITS = {
    "loss": "nats per token of the reference",
    "perplexity": "",
    "token_accuracy": "% of the reference's tokens, given those before",
    "exact_match": "%",
}


def _generate(options: argparse.Namespace, _: Sequence[str]) -> None:
    settings = _chosen(options)
    if not settings.max_new_tokens:
        raise ConfigError("--max-new-tokens 0 generates nothing: it is for `ds-encdec evaluate`")
    if options.stream and settings.num_beams > 1:
        raise ConfigError("--stream shows tokens as they are taken, and a search with beams takes them at its end")
    require_ours(options.model)
    from ds_encdec.evaluate.one_text import generate_text  # imports torch, so after the checks

    text = sys.stdin.read() if options.text == "-" else options.text
    shown = generate_text(options.model, text, settings, raw=options.raw, stream=options.stream)
    if shown is not None:
        print(shown)


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    settings = _chosen(options)
    if options.metrics and not settings.max_new_tokens:
        raise ConfigError("--metrics compares generated texts, and --max-new-tokens 0 generates none: give one of them")
    names = list(dict.fromkeys(options.metrics or ()))
    if not names and settings.max_new_tokens:
        names = [name for name, row in TEXT_METRICS.items() if options.bertscore_model or not row.needs_model]
        names, left_out = usable(names)
        if left_out:
            print(f"texts are judged without {left_out}", file=sys.stderr)
    if options.device == "cuda" and not has_gpu():
        raise no_gpu("no GPU", "--device cuda")
    from ds_encdec.config.schema import read_config
    from ds_encdec.evaluate.metrics import check_metrics

    is_ours(options.model)
    config = read_config(options.config or run_config(options.model), overrides, unread=["training"]).valid()
    check_metrics(names, options.bertscore_model)
    if options.max_new_tokens is None:
        settings = replace(settings, max_new_tokens=config.data.max_decoder_length)
    from ds_encdec.evaluate.evaluation import evaluate  # imports torch, so after the checks

    with libraries_print_to_stderr():
        out, found = evaluate(
            options.model,
            config,
            options.split,
            out=options.out,
            settings=settings,
            metrics=names,
            max_samples=options.max_samples,
            bertscore_model=options.bertscore_model,
            device=options.device,
            dtype=options.dtype,
        )
    if not discover(os.environ).is_main:
        return
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _show(options, settings, out, found)
    wanted, failed = options.metrics or (), found.get("metrics_left_out", {})
    for name, why in failed.items():
        print(f"warning: the metric {name} has no figure: {why}", file=sys.stderr)
    if wanted and failed:
        raise DsEncDecError(f"--metrics: {', '.join(failed)} failed; the other figures are in {out}")


def _show(options: argparse.Namespace, settings: GenerationSettings, out: Path, found: Mapping[str, Any]) -> None:
    print(f"{count(found['examples'], 'example')} of {options.split}; predictions and figures are in {out}")
    for name, figure in found["figures"].items():
        print(f"{name:20} {figure:10.4f}  {_UNITS.get(name, '')}".rstrip())
    if cut := found["cut_at_max_new_tokens"]:
        print(f"{count(cut, 'prediction')} cut off at --max-new-tokens ({settings.max_new_tokens})")


def _chosen(options: argparse.Namespace) -> GenerationSettings:
    values = vars(options)
    return GenerationSettings(
        **{field.name: values[field.name] for field in fields(GenerationSettings) if values.get(field.name) is not None}
    )


GENERATE = Verb(
    _generate,
    "fill sentinels in a text, or continue it",
    "ds-encdec generate --model output/export/final --text 'Paris is <extra_id_0>.'",
    {
        "--model": value("exported folder", Path, required=True, metavar="DIR"),
        "--text": value("with <extra_id_0>… to fill, or a prefix to continue; - reads standard input", required=True),
        "--raw": flag("print what the model writes, and nothing of the text: the answer of a fine-tuned one"),
        "--stream": flag("print tokens as they come"),
        **_settings(GenerationSettings(max_new_tokens=64), "batch_tokens"),
    },
)
EVALUATE = Verb(
    _evaluate,
    "generate for a split of the data, and compare with its references",
    "ds-encdec evaluate --model output/export/final --split test --max-samples 200",
    {
        "--model": value("exported folder", Path, required=True, metavar="DIR"),
        "--config": value("YAML file with the data (default: that of the run whose export/ the model lies in)", Path),
        "--split": value(
            "split to generate for (default test)", choices=("train", "validation", "test"), default="test"
        ),
        "--max-samples": value("the first N examples (default all)", COUNT, metavar="N"),
        "--metrics": value(
            f"metrics to compute (default: all that need no model): some of {','.join(TEXT_METRICS)}, or `module:name`",
            lambda text: [name for name in text.split(",") if name],
            metavar="M,M",
        ),
        "--bertscore-model": value("folder of the model that BERTScore compares with", Path, metavar="DIR"),
        "--out": value(
            "folder to write into (default MODEL-SPLIT beside the model, or the next such that is free)",
            Path,
            metavar="DIR",
        ),
        **_settings(GenerationSettings(), max_new_tokens="data.max_decoder_length"),
        "--device": value("where to compute (default auto)", choices=("auto", "cuda", "cpu"), default="auto"),
        "--dtype": value(
            "dtype that the model's weights are loaded in (default: the stored one on a GPU, float32 on a CPU)",
            choices=("float32", "bfloat16", "float16"),
        ),
        **JSON,
    },
    takes_settings=True,
)
