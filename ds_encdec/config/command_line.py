"""Read command lines of options and settings: `--word value` is a setting unless an option has that name. In Amazon
SageMaker's container, hyperparameters, channels of data and the checkpoint folder are arguments, too. Their names are
its training toolkit's (github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md)."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.base.arguments import VERBOSITY, Arguments, Parser, add, mistake
from ds_encdec.base.types import ConfigError
from ds_encdec.registry.source_kinds import ENDING, kind_of_file

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

# SageMaker copies this folder to the job's `checkpoint_s3_uri`, and back before it starts the job again.
CHECKPOINTS = "/opt/ml/checkpoints"
_HYPERPARAMETERS = "SM_HPS"
_FOLDER_FIELDS = ("infra.output_dir", "output_dir", "output-dir")


def read_arguments(
    parser: argparse.ArgumentParser, table: Arguments, given: Sequence[str], *, takes_settings: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `table` and the settings. Options may have underscores for hyphens. Raises ConfigError."""
    named = {name: how for names, how in {**table, **VERBOSITY}.items() for name in names.split()}
    own, settings, remaining = list[str](), list[str](), list(given)
    while remaining:
        word = remaining.pop(0)
        name, equals, text = word.partition("=")
        option = f"--{name[2:].replace('_', '-')}" if name.startswith("--") and name not in named else name
        if option.startswith("-") and option in named:
            own.append(f"{option}{equals}{text}")
            if remaining and not equals and named[option].get("action") != "store_true":
                own.append(remaining.pop(0))
        elif takes_settings and word.startswith("--") and word not in ("--help", "--version"):
            from ds_encdec.config.words.rewording import with_value  # not for --help

            settings.append(word if equals else with_value(word, remaining))
        else:
            # A path may have the sign, too, but after a slash.
            is_setting = takes_settings and re.match("[^/]*=", word) and not word.startswith("-")
            (settings if is_setting else own).append(word)
    options, rest = parser.parse_known_args(own)
    if rest and not takes_settings:
        names = [word.partition("=")[0] for word in rest if word.startswith("-")]  # a value may be a secret
        program = parser.prog if given[0].startswith("-") else f"{parser.prog} {given[0]}"
        raise mistake(f"unrecognized arguments: {' '.join(names or rest)}", program)
    if (by_option := vars(options).pop("config_option", None)) is not None:
        if options.config is not None:
            raise ConfigError(f"{options.config} and --config {by_option}: both name a configuration; give only one")
        options.config = by_option
    return options, [*settings, *rest]


def read_program(
    name: str, description: str | None, example: str, table: Arguments, given: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options and settings of a program without verbs. Raises ConfigError."""
    parser = Parser(prog=name, description=description)
    add(parser, table)
    add(parser, VERBOSITY)
    parser.explain(example, takes_settings=True)
    return read_arguments(parser, table, given)


def config_files(
    options: argparse.Namespace, settings: Sequence[str]
) -> tuple[Path | None, Sequence[str], Path | None]:
    """Return a command line's files and settings as `load_config` takes them."""
    return options.config, settings, getattr(options, "deepspeed_config", None)


def load(options: argparse.Namespace, settings: Sequence[str]) -> FullConfig:
    """Load the configuration that a command line names. Raises ConfigError."""
    from ds_encdec.config.schema import load_config  # not for --help

    return load_config(*config_files(options, settings))


def is_container(environ: Mapping[str, str]) -> bool:
    """Return whether this is a SageMaker job."""
    return "SM_TRAINING_ENV" in environ or _HYPERPARAMETERS in environ


def container_arguments(environ: Mapping[str, str], given: Sequence[str], options: Container[str]) -> list[str]:
    """Return the arguments that the container implies, followed by `given`, which take precedence. Hyperparameters
    named like one of `train`'s `options` become options, others become settings, also in other tools' words. A channel
    of files becomes the training or evaluation data unless a hyperparameter names that. A restarted spot job resumes.
    Raises ConfigError for a channel with files of no known kind, or of several."""
    words = []
    for name, value in json.loads(environ.get(_HYPERPARAMETERS, "{}")).items():
        name, text = name.replace("-", "_"), value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{name}={text}" if f"--{name}" in options else f"{name}={text}")
    has_folder = any(word.lstrip("-").partition("=")[0] in _FOLDER_FIELDS for word in (*words, *given))
    implied = ["--resume=auto"] if has_folder else ["--resume=auto", f"infra.output_dir={CHECKPOINTS}"]
    return [*implied, *_channels(environ), *words, *given]


def _channels(environ: Mapping[str, str]) -> Iterator[str]:
    for variables, kind_field, files_field in (
        (("SM_CHANNEL_TRAINING", "SM_CHANNEL_TRAIN"), "data.dataset_name", "data.data_files"),
        (("SM_CHANNEL_VALIDATION", "SM_CHANNEL_EVAL"), "data.eval_dataset_name", "data.eval_files"),
    ):
        if variable := next((name for name in variables if environ.get(name)), None):
            folder = Path(environ[variable])
            files = (path.name for path in folder.rglob("*") if kind_of_file(path.name) and path.is_file())
            endings = sorted({found[0] for name in files if (found := ENDING.search(name))})
            kinds = {str(kind_of_file(ending)) for ending in endings}
            if len(kinds) != 1:
                holds = " and ".join(sorted(kinds)) if kinds else "no files of a kind that is read"
                raise ConfigError(
                    f"{variable}={folder} has {holds}: give the channel files of one kind, or name them by the "
                    f"hyperparameters {kind_field} and {files_field}"
                )
            yield f"{kind_field}={kinds.pop()}"
            yield f"{files_field}={json.dumps([f'{escape(str(folder))}/**/*{ending}' for ending in endings])}"
