"""Translate Amazon SageMaker's container into settings: hyperparameters, channels of data, and the checkpoint folder.
The names are its training toolkit's (github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md)."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path

from ds_encdec.base.types import ConfigError
from ds_encdec.registry.source_kinds import LOCAL_SOURCES

# SageMaker copies this folder to the job's `checkpoint_s3_uri`, and back before it starts the job again.
CHECKPOINTS = "/opt/ml/checkpoints"
_HYPERPARAMETERS = "SM_HPS"
_FOLDERS = ("infra.output_dir", "output_dir", "output-dir")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KIND_OF = {
    ending: name for name, kind in LOCAL_SOURCES.items() if kind.reads_files for ending in (name, *kind.endings)
}


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
    has_folder = any(word.lstrip("-").partition("=")[0] in _FOLDERS for word in (*words, *given))
    implied = ["--resume=auto"] if has_folder else ["--resume=auto", f"infra.output_dir={CHECKPOINTS}"]
    return [*implied, *_channels(environ), *words, *given]


def _channels(environ: Mapping[str, str]) -> Iterator[str]:
    for variables, kind_field, files_field in (
        (("SM_CHANNEL_TRAINING", "SM_CHANNEL_TRAIN"), "data.dataset_name", "data.data_files"),
        (("SM_CHANNEL_VALIDATION", "SM_CHANNEL_EVAL"), "data.eval_dataset_name", "data.eval_files"),
    ):
        if variable := next((name for name in variables if environ.get(name)), None):
            folder, endings = Path(environ[variable]), set[tuple[str, str]]()
            for path in folder.rglob("*"):
                packed = path.suffix if path.suffix in _COMPRESSED else ""
                ending = path.name.removesuffix(packed).rpartition(".")[2]
                if ending in _KIND_OF and path.is_file():
                    endings.add((ending, packed))
            kinds = {_KIND_OF[ending] for ending, _ in endings}
            if len(kinds) != 1:
                found = " and ".join(sorted(kinds)) if kinds else "no files of a kind that is read"
                raise ConfigError(
                    f"{variable}={folder} has {found}: give the channel files of one kind ({', '.join(_KIND_OF)}), or "
                    f"name them by the hyperparameters {kind_field} and {files_field}"
                )
            patterns = [f"{escape(str(folder))}/**/*.{ending}{packed}" for ending, packed in sorted(endings)]
            yield f"{kind_field}={kinds.pop()}"
            yield f"{files_field}={json.dumps(patterns)}"
