"""The verbs on checkpoints and exported models. They import torch only when they run."""

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
from ds_encdec.base.terminal import libraries_print_to_stderr, outlive_readers, print_text
from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.evaluate.models import is_encoder, is_ours
from ds_encdec.launch.world import discover
from ds_encdec.registry.text_metrics import TEXT_METRICS, usable


def _export(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.checkpoint.manifest import read_manifest

    if options.adapter and options.encoder_only:
        raise ConfigError("--adapter and --encoder-only: adapters stand beside both sides; give one of the two")
    refuse_existing(options.out)
    read_manifest(options.checkpoint.expanduser().resolve())  # refuses a path that is no checkpoint
    import torch

    if options.adapter:
        from ds_encdec.exports.adapters import export_adapter

        export_adapter(options.checkpoint, options.out, base=options.base)
    else:
        from ds_encdec.exports.hugging_face import export_checkpoint

        dtype, encoder_only = getattr(torch, options.dtype), options.encoder_only
        export_checkpoint(options.checkpoint, options.out, dtype=dtype, encoder_only=encoder_only, base=options.base)
    print(f"exported to {options.out}")


def _average(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.launch.run_folder import RunFolder

    run = RunFolder(str(options.run_folder))
    refuse_existing(out := options.out or run.averaged)
    import torch

    from ds_encdec.exports.hugging_face import average_checkpoints

    steps = average_checkpoints(run, out, last=options.last, base=options.base, dtype=getattr(torch, options.dtype))
    fewer = f" (there are no more in a row; --last is {options.last})" if len(steps) < options.last else ""
    print(f"the mean of steps {', '.join(map(str, steps))}{fewer} is in {out}")


def _verify(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import verify_checkpoints
    from ds_encdec.data.sources.prepared import INDEX, verified_shards

    outlive_readers()  # the exit code is the result
    is_prepared = any(options.path.glob(f"*/{INDEX}"))
    for whole in verified_shards(options.path) if is_prepared else verify_checkpoints(options.path):
        print_text(whole)


def _settings(defaults: GenerationSettings, *left_out: str, **later: str) -> Arguments:
    # `later` describes defaults that are set later.
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
    "token_accuracy": "% of the reference's tokens, given those before",
    "exact_match": "%",
}


def _generate(options: argparse.Namespace, _: Sequence[str]) -> None:
    settings = _chosen(options)
    if not settings.max_new_tokens:
        raise ConfigError("--max-new-tokens 0 generates nothing: it is for `ds-encdec evaluate`")
    if options.stream and settings.num_beams > 1:
        raise ConfigError("--stream shows tokens as they are taken, and a search with beams takes them at its end")
    if not is_ours(options.model):
        raise CheckpointError(f"--model: {options.model} is no model of ds_encdec")
    from ds_encdec.evaluate.generation import generate_text  # imports torch, so after the checks

    text = sys.stdin.read() if options.text == "-" else options.text
    if (shown := generate_text(options.model, text, settings, raw=options.raw, stream=options.stream)) is not None:
        print_text(shown)


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if options.task:
        return _judge_embeddings(options, overrides)
    if options.file or options.dimensions:
        raise ConfigError(
            f"{options.file or '--dimensions'}: this is for --task {' or --task '.join(_TASKS)}; give one"
        )
    settings = _chosen(options)
    if options.metrics and not settings.max_new_tokens:
        raise ConfigError("--metrics compares generated texts, and --max-new-tokens 0 generates none: give one of them")
    names = list(dict.fromkeys(options.metrics or ()))
    if not names and settings.max_new_tokens:
        names = [name for name, row in TEXT_METRICS.items() if options.bertscore_model or not row.needs_model]
        names, left_out = usable(names)
        if left_out:
            print(f"texts are judged without {left_out}", file=sys.stderr)
    from ds_encdec.config.schema import read_config
    from ds_encdec.evaluate.metrics import check_metrics

    is_ours(options.model)
    config = read_config(options.config or _run_config(options.model), overrides, unread=["training"]).valid()
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
    _show(found, options, options.split, out)
    if not options.json and (cut := found["cut_at_max_new_tokens"]):
        print(f"{count(cut, 'prediction')} cut off at --max-new-tokens ({settings.max_new_tokens})")
    failed = found.get("metrics_left_out", {})
    for name, why in failed.items():
        print(f"warning: the metric {name} has no figure: {why}", file=sys.stderr)
    if options.metrics and failed:
        raise DsEncDecError(f"--metrics: {', '.join(failed)} failed; the other figures are in {out}")


def _show(found: Mapping[str, Any], options: argparse.Namespace, judged: object, out: Path) -> None:
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{count(found['examples'], 'example')} of {judged}; predictions and figures are in {out}")
    for name, figure in found["figures"].items():
        print(f"{name:20} {figure:10.4f}  {_UNITS.get(name, '')}".rstrip())


_TASKS = {"sts": "read_pairs", "retrieval": "read_retrieval"}
_OF_TASKS = ("--model", "--task", "file", "--dimensions", "--out", "--batch-tokens", "--device", "--dtype", "--json")


def _judge_embeddings(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    given = {names: getattr(options, names.lstrip("-").replace("-", "_")) for names in VERBS["evaluate"].arguments}
    is_default = {names: given[names] == how.get("default") for names, how in VERBS["evaluate"].arguments.items()}
    if unused := [*(names for names in given if names not in _OF_TASKS and not is_default[names]), *overrides]:
        raise ConfigError(f"{unused[0]}: --task {options.task} judges embeddings and does not read this; leave it out")
    if options.file is None:
        raise ConfigError(f"--task {options.task} needs the file to judge by: ds-encdec evaluate … --task TASK FILE")
    from ds_encdec.evaluate import embedding_tasks

    is_encoder(options.model)
    data = getattr(embedding_tasks, _TASKS[options.task])(options.file)
    from ds_encdec.evaluate.embeddings import judge  # imports torch, so after the checks

    chosen = {name: getattr(options, name) for name in ("out", "dimensions", "batch_tokens", "device", "dtype")}
    with libraries_print_to_stderr():
        out, found = judge(options.model, options.file, data, **chosen)
    if discover(os.environ).is_main:
        _show(found, options, options.file, out)


def _run_config(model: Path) -> Path:
    export = model.resolve().parent
    if export.name != "export" or not (saved := export.parent / "config.yaml").is_file():
        raise ConfigError(
            f"--config: {model} does not lie in a run's export folder; name a configuration with the data to evaluate"
        )
    return saved


def _chosen(options: argparse.Namespace) -> GenerationSettings:
    names = {field.name for field in fields(GenerationSettings)}
    return GenerationSettings(**{k: given for k, given in vars(options).items() if k in names and given is not None})


_WEIGHTS: Arguments = {
    "--base": value("base of a LoRA run, if it is no longer where the run found it", metavar="PATH_OR_HUB_ID"),
    "--dtype": value("of the written weights (default float32)", choices=("float32", "bfloat16"), default="float32"),
}

VERBS = {
    "export": Verb(
        _export,
        "write a checkpoint as a Hugging Face model folder",
        "ds-encdec export output/checkpoints/final exported --dtype bfloat16",
        {
            "checkpoint": value("a checkpoint, e.g. output/checkpoints/final", Path),
            "out": value("folder to write; must not exist", Path),
            "--encoder-only": flag("write the encoder alone, an embedding model, also for sentence-transformers"),
            "--adapter": flag("write the adapters of a LoRA run alone, as a folder for peft (default: merged)"),
            **_WEIGHTS,
        },
    ),
    "average": Verb(
        _average,
        "write the mean of a run's last checkpoints as a Hugging Face model folder",
        "ds-encdec average output --last 3",
        {
            "run_folder": value("a run, e.g. output", Path, metavar="run"),
            "out": value("folder to write; must not exist (default RUN/export/averaged)", Path, nargs="?"),
            "--last": value("newest checkpoints to average (default 5)", int, default=5),
            **_WEIGHTS,
        },
    ),
    "verify": Verb(
        _verify,
        "compare every file of a checkpoint, a run or prepared data with its SHA-256",
        "ds-encdec verify output",
        {"path": value("a checkpoint, a run (e.g. output), or prepared data", Path)},
    ),
    "generate": Verb(
        _generate,
        "fill sentinels in a text, or continue it",
        "ds-encdec generate --model output/export/final --text 'Paris is <extra_id_0>.'",
        {
            "--model": value("exported folder", Path, required=True, metavar="DIR"),
            "--text": value("with <extra_id_0>… to fill, or a prefix to continue; - is standard input", required=True),
            "--raw": flag("print the model's output alone, without the text: the answer of a fine-tuned one"),
            "--stream": flag("print tokens as they come"),
            **_settings(GenerationSettings(max_new_tokens=64), "batch_tokens"),
        },
    ),
    "evaluate": Verb(
        _evaluate,
        "generate for a split of the data, and compare with its references; or judge embeddings",
        "ds-encdec evaluate --model output/export/final --split test --max-samples 200",
        {
            "--model": value("exported folder", Path, required=True, metavar="DIR"),
            "--task": value("judge the encoder's embeddings by FILE instead of texts", choices=tuple(_TASKS)),
            "file": value("of --task: rows (.jsonl, .csv, .tsv), or a folder in BEIR's layout", Path, nargs="?"),
            "--dimensions": value(
                "of --task: judge by the first N of each embedding, too", COUNT, nargs="+", default=[]
            ),
            "--config": value("YAML file with the data (default: of the run in whose export/ the model lies)", Path),
            "--split": value("to generate for (default test)", choices=("train", "validation", "test"), default="test"),
            "--max-samples": value("the first N examples (default all)", COUNT, metavar="N"),
            "--metrics": value(
                f"metrics to compute (default: all that need no model): some of {','.join(TEXT_METRICS)}, or "
                "`module:name`",
                lambda text: [name for name in text.split(",") if name],
                metavar="M,M",
            ),
            "--bertscore-model": value("folder of the model that BERTScore compares with", Path, metavar="DIR"),
            "--out": value("folder to write into (default MODEL-SPLIT beside the model)", Path, metavar="DIR"),
            **_settings(GenerationSettings(), max_new_tokens="data.max_decoder_length"),
            "--device": value("where to compute (default auto)", choices=("auto", "cuda", "cpu"), default="auto"),
            "--dtype": value(
                "dtype that the model's weights are loaded in (default: the stored one on a GPU, float32 on a CPU)",
                choices=("float32", "bfloat16", "float16"),
            ),
            **JSON,
        },
        takes_settings=True,
        kept="finished predictions",
    ),
}
