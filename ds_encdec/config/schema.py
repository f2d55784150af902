"""The whole configuration of a run, and the one way to it: defaults, then a YAML file, then the command line, agreed
with a DeepSpeed JSON.

A run looks for what its configuration names itself, later and more closely. A configuration may be made for another
machine, so loading one does not look unless it is asked to; `ds-encdec validate` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import GenerateJsonSchema

from ds_encdec.config.deepspeed_json import merge_deepspeed_json, read_deepspeed_json
from ds_encdec.config.first_rows import evaluated_and_trained_on, unusable_rows
from ds_encdec.config.hostfile import read_hosts, read_variables
from ds_encdec.config.implied import imply
from ds_encdec.config.model_folder import is_hub_name
from ds_encdec.config.model_sections import ArchitectureConfig, LoraConfig, ModelConfig  # noqa: F401  also found here
from ds_encdec.config.monitor_sections import MonitorConfig, PhaseOverrides, PhasesConfig  # noqa: F401
from ds_encdec.config.rewording import read_overrides, read_words
from ds_encdec.config.rules import Sections, find_conflicts, marked  # noqa: F401
from ds_encdec.config.sections import LOCAL_FORMATS, DataConfig, Mark, MixtureSource, Section, Source  # noqa: F401
from ds_encdec.config.settings import COMMAND_LINE, Conflict, Mention, Problem, Settings, raise_if_any, show, unusable
from ds_encdec.config.shares import unevenness
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.stored_model import OF_OUR_OWN, read_stored_model, untrained_rows
from ds_encdec.config.stored_tokenizer import MODE_TOKENS, tokenizer_lacks_rows
from ds_encdec.config.training_sections import (  # noqa: F401
    CROSS_ENTROPY,
    LOSS_FIGURES,
    InfraConfig,
    Schedule,
    Tracker,
    TrainingConfig,
)
from ds_encdec.config.validation import Checked, mention, mention_all, validate
from ds_encdec.config.yaml_text import file_problem, read_yaml, write_yaml
from ds_encdec.engines import load
from ds_encdec.file_patterns import named_files, no_file_matches, variable_in
from ds_encdec.optimizers import OPTIMIZERS, tried
from ds_encdec.plugins import converter_digest, load_plugin
from ds_encdec.source_kinds import PYTHON, local_kind
from ds_encdec.text_metrics import FIGURES, TEXT_METRICS, not_installed
from ds_encdec.types import CheckpointError, ConfigError

SCHEMA_ID = "urn:ds_encdec:configuration"
_JSON_FIELD = "infra.deepspeed_config"
_DEEPSPEED_KEYS = {
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "zero_optimization",
    "zero_allow_untested_optimizer",
}
_PROJECT_FIELD, _PROJECT_VARIABLE = "infra.wandb_project", "WANDB_PROJECT"


class FullConfig(Sections):
    """A run. One that exists is consistent: contradictions between its fields are errors too."""

    @model_validator(mode="before")
    @classmethod
    def _imply(cls, values: Any) -> Any:
        """Let what is set decide what is not, in a configuration built in Python too."""
        if not isinstance(values, dict):
            return values
        plain = {
            name: part.model_dump(exclude_unset=True) if isinstance(part, Section) else part
            for name, part in values.items()
        }
        imply(settings := Settings(deepcopy(plain)))
        return settings.values

    @model_validator(mode="after")
    def _reject_contradictions(self, info: ValidationInfo) -> FullConfig:
        was_judged = (info.context or {}).get("was_judged", False)  # or is not to be
        if not was_judged and (conflicts := find_conflicts(self)):
            raise ValueError("; ".join(f"{', '.join(c.fields)}: {c.message}" for c in conflicts))
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> FullConfig:
        """The configuration in a YAML file; see `load_config`. Raises ConfigError."""
        return load_config(Path(path), overrides)

    def to_yaml(self, path: str | Path) -> None:
        """Write every field to `path`; `from_yaml` reads an equal object back."""
        Path(path).write_text(self.dump_yaml(), encoding="utf-8")

    def dump_yaml(self) -> str:
        """Every field as YAML text: steps that epochs are still to be counted in as null."""
        values = self.model_dump(mode="json")
        if self.training.num_train_epochs is not None:
            counted = {"num_train_steps", "warmup_steps"} - self.training.model_fields_set
            values["training"] |= dict.fromkeys(counted)
        return write_yaml(values)


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: pydantic makes titles of the names ("Learning Rate"), which hide the descriptions in some editors."""
        return False


def editor_schema() -> str:
    """The JSON schema of the configuration for editors: every field with its description, bounds and choices."""
    schema = FullConfig.model_json_schema(schema_generator=_Untitled)
    for section in schema["$defs"].values():
        del section["title"]
    address = {"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID}
    return json.dumps({**address, **schema, "title": "ds_encdec configuration"}, indent=1) + "\n"


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    deepspeed_config: str | Path | None = None,
    *,
    hostfile: str | Path | None = None,
    looks_here: bool = False,
    unread: Sequence[str] = (),
    further: Callable[[FullConfig], Iterable[Conflict]] = lambda config: (),
    notes: list[str] | None = None,
) -> FullConfig:
    """The validated configuration of a run.

    `path`: YAML file; None leaves the schema's defaults. It and the next files may be shipped ones' names, from any
    folder. `overrides`: settings of the command line as `read_overrides` takes them, which replace the file's.
    `deepspeed_config`: a raw DeepSpeed JSON; it replaces `infra.deepspeed_config` where that is not set. What the JSON
    and the other two both set must agree. `hostfile`: hosts that a run of it must be able to start on. `looks_here`:
    what it names must be on this machine. `unread`: sections or fields whose contradictions do not matter. `further`:
    finds what only higher rooms know. `notes`: takes what was written in other tools' words (words.yaml) and how it
    was read, and warnings.

    The result stands on its own: `infra.deepspeed_config` is None, because everything the JSON says has gone
    into the fields that stand for it, the rest into `infra.deepspeed_extra`.

    Raises ConfigError that lists every problem found in all of them.
    """
    problems: list[Problem] = []
    path, deepspeed_config, hostfile = map(find_shipped, (path, deepspeed_config, hostfile))
    settings, found = read_yaml(path, problems) if path is not None else Settings(), list[str]()
    if not problems and _DEEPSPEED_KEYS & settings.values.keys():
        message = f"this is a DeepSpeed JSON, and no configuration of a run: --deepspeed_config {path} reads it"
        raise_if_any([file_problem(Path(str(path)), message)])
    read_words(settings, problems, found)
    read_overrides(settings, overrides, problems, found)
    json_path, named_by = _find_json(settings, path, deepspeed_config, problems)
    if json_path is not None:
        document = read_deepspeed_json(json_path, problems, named_by)
        settings = merge_deepspeed_json(settings, document, problems)
        settings.put(_JSON_FIELD, None, "")
    if settings.get(_PROJECT_FIELD) is None and os.environ.get(_PROJECT_VARIABLE):
        settings.put(_PROJECT_FIELD, os.environ[_PROJECT_VARIABLE], _PROJECT_VARIABLE)
    implied = imply(settings)
    checked = validate(settings, problems, unread)
    # What is valid is not validated again, which would take a schema that takes its time to build.
    config = FullConfig.model_construct(None, **dict(checked.sections))
    if hostfile is not None:
        hosts = read_hosts(hostfile, problems)
        if len(hosts) > 1:
            read_variables(problems)
        if checked.is_sound and (ranks := sum(hosts.values())) and (wrong := unevenness(config, ranks)):
            problems.append(file_problem(hostfile, wrong))
    absent = _find_absent(config, checked) if looks_here else ()
    beyond = further(config) if checked.is_sound else ()
    problems.extend(mention_all(settings, conflict) for conflict in (*absent, *beyond))
    raise_if_any(problems)
    if notes is not None:
        notes += [*found, *implied, *evaluated_and_trained_on(config.data)]
    return config


def load_saved(path: Path) -> FullConfig:
    """The configuration that a run has written beside what it saved: it is not judged again.

    Rules that have come since are no reason to lose a run. Raises ConfigError for what is no configuration.
    """
    problems: list[Problem] = []
    settings = read_yaml(path, problems)
    read_words(settings, problems, [])
    raise_if_any(problems)
    try:
        return FullConfig.model_validate(settings.values, context={"was_judged": True})
    except ValidationError as error:
        raise ConfigError(f"{path} is no configuration that a run has saved: {error}") from error


def _find_json(
    settings: Settings, yaml_path: Path | None, argument: Path | None, problems: list[Problem]
) -> tuple[Path | None, Mention | None]:
    """The DeepSpeed JSON to read, and the setting that names it.

    A relative path in the YAML file is looked up beside that file first.
    """
    named = settings.get(_JSON_FIELD)
    if not isinstance(named, str) or unusable(named):
        return argument, None
    found = Path(named)
    if yaml_path is not None and settings.place_of(_JSON_FIELD) != COMMAND_LINE:
        beside = yaml_path.parent / found
        found = beside if os.path.exists(beside) else find_shipped(found) or found
    named_by = mention(settings, _JSON_FIELD)
    if argument is not None and os.path.realpath(argument) != os.path.realpath(found):
        mentions = (named_by, Mention(COMMAND_LINE, "--deepspeed_config", show(str(argument))))
        problems.append(Problem(mentions, "two different files: name one"))
    return (found, named_by) if argument is None else (argument, None)


def _find_absent(config: FullConfig, checked: Checked) -> Iterator[Conflict]:
    """Yield what a run of `config` would not find here, or could not make, but for what its mistakes leave open."""
    yield from (conflict for conflict in _absent(config) if checked.knows(conflict.fields))
    if checked.is_sound_in("data", "model"):
        yield from unusable_rows(config.data, config.model)


def _absent(config: FullConfig) -> Iterator[Conflict]:
    """The files, folders, packages and code that `config` names and a run of it would not find, or could not make."""
    data, model, infra = config.data, config.model, config.infra
    if data.prepared_dir is not None and not os.path.isfile(
        os.path.join(os.path.expanduser(data.prepared_dir), "source-0", "index.json")
    ):
        yield Conflict(("data.prepared_dir",), "nothing is prepared there: run `ds-encdec prepare` first")
    yield from _uncounted(config)
    for field, patterns in absent_patterns(data).items():
        for pattern in patterns:
            yield Conflict((field,), no_file_matches([pattern]))
    yield from _absent_packages(config)
    yield from _lacking_rows(config)
    for field, find in _named_code(config):
        try:
            find()
        except ConfigError as error:
            yield Conflict((field,), str(error))
    named, tokenizer = "model.model_name_or_path", model.tokenizer_name_or_path or model.model_name_or_path
    is_logged = config.training.report_to and os.path.isabs(infra.logging_dir)
    for field, wrong in (
        (named, _lacking(model.model_name_or_path, "config.json") or _not_trained(model, data)),
        (
            named if model.tokenizer_name_or_path is None else "model.tokenizer_name_or_path",
            _lacking(None if tokenizer == "builtin" else tokenizer, "tokenizer.json"),
        ),
        ("infra.output_dir", _uncreatable(infra.output_dir)),
        ("infra.logging_dir", _uncreatable(infra.logging_dir) if is_logged else None),
        ("infra.nvme_path", _no_folder(infra.nvme_path) if infra.offload_optimizer == "nvme" else None),
    ):
        if wrong is not None:
            yield Conflict((field,), wrong)


def absent_patterns(data: DataConfig) -> dict[str, list[str]]:
    """The paths and patterns of files that match none here, by the field. Prepared data needs none of them."""
    if data.prepared_dir is not None:
        return {}
    named = {
        f"data.mixture.{number}.data_files" if data.mixture else "data.data_files": source.data_files
        for number, source in enumerate(data.mixture or [data])
        if source.dataset_name in LOCAL_FORMATS
    }
    named |= {"data.eval_files": data.eval_files, "data.test_files": data.test_files}
    named |= {f"data.eval_sets.{name}.eval_files": one.eval_files for name, one in data.eval_sets.items()}
    absent = {field: [one for one in patterns or () if not any(named_files(one))] for field, patterns in named.items()}
    return {field: patterns for field, patterns in absent.items() if patterns}


def _named_code(config: FullConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    """For each object of the user's own that `config` names, the field and what finds it."""
    data, training = config.data, config.training
    if data.converter is not None:
        yield "data.converter", partial(converter_digest, data.converter)
    sources = {f"data.mixture.{number}.dataset_name": one.dataset_name for number, one in enumerate(data.mixture or ())}
    sources = sources or {"data.dataset_name": data.dataset_name}
    sources["data.eval_dataset_name"] = data.eval_dataset_name or ""
    sources |= {
        f"data.eval_sets.{key}.eval_dataset_name": one.eval_dataset_name or "" for key, one in data.eval_sets.items()
    }
    for field, name in sources.items():
        if name.startswith(PYTHON):
            yield field, partial(load_plugin, field, name)
    if training.optimizer not in OPTIMIZERS:
        yield "training.optimizer", partial(tried, training.optimizer, training.optimizer_args)
    if training.loss != CROSS_ENTROPY:
        yield "training.loss", lambda: load("ds_encdec.engine.user_loss:load_loss")(training.loss)
    builtin = {*get_args(Tracker), *get_args(Schedule), *LOSS_FIGURES, *FIGURES}
    for field, names, kind in (
        ("training.report_to", training.report_to, "sinks"),
        ("training.callbacks", training.callbacks, "callbacks"),
        ("training.lr_scheduler_type", [training.lr_scheduler_type], "schedules"),
        ("training.metric_for_best_model", [training.best_figure], "metrics"),
    ):
        for name in set(names) - builtin:
            yield field, partial(load_plugin, field, name, kind)


def require_here(config: FullConfig, *, new: bool) -> None:
    """Raise ConfigError for an optional package that a run of `config` needs and that is not installed.

    `new`: also for too few rows for the tokenizer; a run that is resumed has its checkpoint's.
    """
    settings = Settings(config.model_dump(mode="json"))
    found = [*_absent_packages(config), *(_lacking_rows(config) if new else ())]
    raise_if_any([mention_all(settings, conflict) for conflict in found])


def _lacking_rows(config: Sections) -> Iterator[Conflict]:
    if (wrong := tokenizer_lacks_rows(config)) is not None:
        yield Conflict(("model.architecture.vocab_size", "model.tokenizer_name_or_path"), wrong)


def _absent_packages(config: FullConfig) -> Iterator[Conflict]:
    lora = config.model.lora
    if lora is not None and importlib.util.find_spec("peft") is None:
        yield Conflict(("model.lora",), "this needs peft, which is not installed: pip install 'ds_encdec[lora]'")
    if lora is not None and lora.quantize != "none" and importlib.util.find_spec("bitsandbytes") is None:
        message = "this needs bitsandbytes, which is not installed: pip install 'ds_encdec[qlora]'"
        yield Conflict(("model.lora.quantize",), message)
    if (url := config.infra.upload_to) is not None:
        from fsspec import get_filesystem_class
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(url)[0] or "file")
        except (ImportError, ValueError) as error:
            yield Conflict(("infra.upload_to",), f"this file system cannot be reached: {error}")
    chosen = config.training.metric_for_best_model
    for problem in not_installed(name for name, row in TEXT_METRICS.items() if chosen in row.figures):
        yield Conflict(("training.metric_for_best_model",), problem)


def _uncounted(config: FullConfig) -> Iterator[Conflict]:
    """The streamed data sets whose passes `num_train_epochs` cannot count: all but folders of parquet files."""
    data = config.data
    if config.training.num_train_epochs is None or not data.streaming or data.prepared_dir is not None:
        return
    for number, source in enumerate(data.mixture or [data]):
        field = f"data.mixture.{number}.dataset_name" if data.mixture else "data.dataset_name"
        folder = source.dataset_name
        is_counted = local_kind(folder) or os.path.isfile(os.path.join(folder, "state.json"))
        files = (path for pattern in source.data_files or ["**/*"] for path in named_files(pattern, folder))
        if not is_counted and not any(path.endswith(".parquet") for path in files):
            message = (
                "the length of a streamed data set is not known: set data.streaming=false, or give num_train_steps"
            )
            yield Conflict(("training.num_train_epochs", "data.streaming", field), message)


def _lacking(name: str | None, needed: str) -> str | None:
    """Say what a model's or a tokenizer's folder lacks. What is on the hub, or in its cache, is not looked at."""
    folder = None if name is None else _expanded(name)
    if folder is not None and folder.is_dir():
        return None if (folder / needed).is_file() else f"the folder has no {needed}"
    if name is None or (folder is not None and is_hub_name(name)):
        return None
    return variable_in(name) or "there is no such folder, and a name on the hub is `OWNER/NAME`"


def _not_trained(model: ModelConfig, data: DataConfig) -> str | None:
    """Say why a model in a local folder is refused by its config.json."""
    name = model.model_name_or_path
    folder = None if name is None else _expanded(name)
    if name is None or folder is None or not folder.is_dir():
        return None
    try:
        stored = read_stored_model(folder / "config.json")
    except CheckpointError as error:
        return str(error)
    asked = model.num_sentinel_tokens, len(MODE_TOKENS) * data.use_mode_tokens
    there = (len(stored.get(field) or ()) for field in ("sentinel_token_ids", "mode_token_ids"))
    lacks = stored["model_type"] == OF_OUR_OWN and any(wanted > has for wanted, has in zip(asked, there, strict=True))
    return untrained_rows(name, stored, asks_for_modes=data.use_mode_tokens) if lacks and model.lora else None


def _no_folder(name: str | None) -> str | None:
    """Say why a folder that a run does not make itself cannot be written into."""
    folder = None if name is None else _expanded(name)
    return _uncreatable(name) if name and folder and folder.is_dir() else "there is no such folder"


def _uncreatable(name: str) -> str | None:
    """Say why a folder is neither there, to be written into, nor can be made."""
    folder = _expanded(name)
    if folder is None:
        return "there is no such user"
    folder = folder.absolute()
    if any(len(os.fsencode(part)) > 255 for part in folder.parts) or len(os.fsencode(folder)) > 4000:
        return "the name is too long for a file system"
    if not folder.exists() and (odd := variable_in(name)):
        return odd
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    try:  # as root, or on a file system of the kernel's, nothing else tells
        os.rmdir(tempfile.mkdtemp(prefix=".ds-encdec-", dir=there))
    except OSError as error:
        return f"{there} cannot be written to ({error.strerror})"
    return None


def _expanded(name: str) -> Path | None:
    """None where `~NAME` names nobody."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return None
