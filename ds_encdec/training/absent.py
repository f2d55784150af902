"""Find the files, folders, packages and code that a configuration names and this machine lacks. Only `validate` and
`doctor` look for all, since a configuration may be for another machine; a new run for its model and files, before torch
is imported (`refuse_absent`)."""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from ds_encdec.base.file_patterns import named_files, no_file_matches
from ds_encdec.base.plugins import PYTHON, converter_digest, load_plugin
from ds_encdec.base.types import CheckpointError, ConfigError, DataError
from ds_encdec.config.data_sections import LOCAL_FORMATS
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import FullConfig, Loaded
from ds_encdec.config.settings import Conflict, Settings, raise_if_any
from ds_encdec.config.stored_model import (
    MODE_TOKENS,
    OF_OUR_OWN,
    is_hub_name,
    read_stored_model,
    teacher_place,
    teacher_problem,
    tokenizer_lacks_rows,
    untrained_rows,
)
from ds_encdec.config.training_sections import CROSS_ENTROPY, LOSS_FIGURES, SOURCE, Schedule, Tracker
from ds_encdec.config.validation import mention_all
from ds_encdec.memory.job import require_possible_model
from ds_encdec.registry.objectives import FIGURES as OBJECTIVE_FIGURES
from ds_encdec.registry.optimizers import OPTIMIZERS
from ds_encdec.registry.source_kinds import local_kind
from ds_encdec.registry.text_metrics import FIGURES, TEXT_METRICS, not_installed


def look_here(loaded: Loaded) -> None:
    """Add to `loaded` a problem for each thing that a run would lack here, unless its fields have other problems."""
    config = loaded.config
    for find in (_absent_files, _absent_packages, _absent_folders, _absent_code, _row_problems):
        loaded.add(found for found in find(config) if loaded.checked.knows(found.fields))
    if loaded.checked.is_sound:
        loaded.add(unusable_rows(config.data, config.model))


def require_here(config: FullConfig, *, new: bool) -> None:
    """Raise ConfigError for an optional package that a run of `config` needs and that is not installed; for a `new` run
    also for too few rows for the tokenizer: a resumed one has its checkpoint's."""
    settings = Settings(config.model_dump(mode="json"))
    conflicts = [*_absent_packages(config), *(_row_problems(config) if new else ())]
    raise_if_any([mention_all(settings, conflict) for conflict in conflicts])


def refuse_absent(config: FullConfig) -> None:
    """Raise CheckpointError for a missing model folder, DataError for a missing data file, ConfigError for a model that
    cannot be made, of a new run."""
    for conflict in (*_absent_folders(config), *_absent_files(config)):
        field = conflict.fields[0]
        if field.startswith("model."):
            raise CheckpointError(f"{field}: {conflict.message}")
        if field.startswith("data.") and field != "data.test_files":  # which training does not read
            raise DataError(f"{field}: {conflict.message}")
    require_possible_model(config)


def _absent_files(config: FullConfig) -> Iterator[Conflict]:
    data = config.data
    if data.prepared_dir is not None:  # which needs no other file
        if not os.path.isfile(_folder(data.prepared_dir) / "source-0" / "index.json"):
            yield Conflict(("data.prepared_dir",), "nothing is prepared there: run `ds-encdec prepare` first")
        return
    sources = data.sources_by_path().items()
    named = {
        **{f"{at}.data_files": source.data_files for at, source in sources if source.dataset_name in LOCAL_FORMATS},
        "data.eval_files": data.eval_files,
        "data.test_files": data.test_files,
        **{f"data.eval_sets.{name}.eval_files": one.eval_files for name, one in data.eval_sets.items()},
    }
    for field, patterns in named.items():
        yield from (Conflict((field,), no_file_matches([one])) for one in patterns or () if not any(named_files(one)))
    if config.training.num_train_epochs is None or not data.streaming:
        return
    for at, source in sources:  # only streamed parquet files have a known length
        folder = source.dataset_name
        is_counted = local_kind(folder) or os.path.isfile(os.path.join(folder, "state.json"))
        files = (path for pattern in source.data_files or ["**/*"] for path in named_files(pattern, folder))
        if not is_counted and not any(path.endswith(".parquet") for path in files):
            yield Conflict(
                ("training.num_train_epochs", "data.streaming", f"{at}.dataset_name"),
                "the length of a streamed data set is not known: set data.streaming=false, or give num_train_steps",
            )


def _absent_packages(config: FullConfig) -> Iterator[Conflict]:
    lora = config.model.lora
    for field, package, extra, is_needed in (
        ("model.lora", "peft", "lora", lora is not None),
        ("model.lora.quantize", "bitsandbytes", "qlora", lora is not None and lora.quantize != "none"),
    ):
        if is_needed and find_spec(package) is None:
            yield Conflict((field,), f"this needs {package}, which is not installed: pip install 'ds_encdec[{extra}]'")
    if (url := config.infra.upload_to) is not None:
        import fsspec

        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0] or "file")
        except (ImportError, ValueError) as error:
            yield Conflict(("infra.upload_to",), f"this file system cannot be reached: {error}")
    chosen = config.training.metric_for_best_model
    for problem in not_installed(name for name, row in TEXT_METRICS.items() if chosen in row.figures):
        yield Conflict(("training.metric_for_best_model",), problem)


def _absent_folders(config: FullConfig) -> Iterator[Conflict]:
    model, infra = config.model, config.infra
    tokenizer = model.tokenizer_name_or_path or model.model_name_or_path
    of_tokenizer = "tokenizer_name_or_path" if model.tokenizer_name_or_path else "model_name_or_path"
    is_logged = config.training.report_to and os.path.isabs(infra.logging_dir)
    flaws = {
        "model.model_name_or_path": _folder_problem(model.model_name_or_path, "config.json") or _model_problem(config),
        "infra.output_dir": _write_problem(infra.output_dir),
        "infra.logging_dir": _write_problem(infra.logging_dir) if is_logged else None,
    }
    flaws[f"model.{of_tokenizer}"] = flaws.get(f"model.{of_tokenizer}") or _folder_problem(tokenizer, "tokenizer.json")
    if (teacher := teacher_place(config)) is not None:
        named = None if config.training.teacher == SOURCE else teacher
        lacks = _folder_problem(named, "config.json") or _folder_problem(named, "tokenizer.json")
        flaws["training.teacher"] = lacks or _teacher_problem(config, teacher)
    if infra.offload_optimizer == "nvme" and infra.nvme_path:
        flaws["infra.nvme_path"] = (
            _write_problem(infra.nvme_path) if os.path.isdir(_folder(infra.nvme_path)) else "there is no such folder"
        )
    yield from (Conflict((field,), problem) for field, problem in flaws.items() if problem is not None)


def _absent_code(config: FullConfig) -> Iterator[Conflict]:
    data, training = config.data, config.training
    found: list[tuple[str, Callable[[], object]]] = []
    if data.converter is not None:
        found.append(("data.converter", partial(converter_digest, data.converter)))
    sources = {
        **{f"{at}.dataset_name": source.dataset_name for at, source in data.sources_by_path().items()},
        "data.eval_dataset_name": data.eval_dataset_name or "",
        **{f"data.eval_sets.{at}.eval_dataset_name": one.eval_dataset_name or "" for at, one in data.eval_sets.items()},
    }
    found += [(field, partial(load_plugin, field, name)) for field, name in sources.items() if name.startswith(PYTHON)]
    if training.optimizer not in OPTIMIZERS or training.loss != CROSS_ENTROPY:
        from ds_encdec.engine.user_code import load_loss, try_optimizer  # torch

        if training.optimizer not in OPTIMIZERS:
            found.append(("training.optimizer", partial(try_optimizer, training.optimizer, training.optimizer_args)))
        if training.loss != CROSS_ENTROPY:
            found.append(("training.loss", partial(load_loss, training.loss)))
    for field, names, kind in (
        ("training.report_to", training.report_to, "sinks"),
        ("training.callbacks", training.callbacks, "callbacks"),
        ("training.lr_scheduler_type", [training.lr_scheduler_type], "schedules"),
        ("training.metric_for_best_model", [training.best_figure], "metrics"),
    ):
        users = set(names) - {*get_args(Tracker), *get_args(Schedule), *LOSS_FIGURES, *FIGURES, *OBJECTIVE_FIGURES}
        found += [(field, partial(load_plugin, field, name, kind)) for name in users]
    for field, load in found:
        try:
            load()
        except ConfigError as error:
            yield Conflict((field,), str(error))


def _row_problems(config: FullConfig) -> Iterator[Conflict]:
    if (wrong := tokenizer_lacks_rows(config)) is not None:
        yield Conflict(("model.architecture.vocab_size", "model.tokenizer_name_or_path"), wrong)


def _folder_problem(name: str | None, needed: str) -> str | None:
    if name is None or name == "builtin":
        return None
    folder = _folder(name)
    if os.path.isdir(folder):
        return None if os.path.isfile(folder / needed) else f"the folder has no {needed}"
    if is_hub_name(name):  # the hub and its cache are not queried
        return None
    return "there is no such folder, and a name on the hub is `OWNER/NAME`"


def _model_problem(config: FullConfig) -> str | None:
    model, name = config.model, config.model.model_name_or_path
    if name is None or not os.path.isdir(folder := _folder(name)):
        return None
    try:
        stored = read_stored_model(folder / "config.json")
    except CheckpointError as error:
        return str(error)
    needs = model.num_sentinel_tokens, len(MODE_TOKENS) * config.data.use_mode_tokens
    owned = (len(stored.get(field) or ()) for field in ("sentinel_token_ids", "mode_token_ids"))
    lacks = stored["model_type"] == OF_OUR_OWN and any(wanted > has for wanted, has in zip(needs, owned, strict=True))
    return untrained_rows(name, stored, asks_for_modes=config.data.use_mode_tokens) if lacks and model.lora else None


def _teacher_problem(config: FullConfig, name: str) -> str | None:
    if not os.path.isfile(file := _folder(name) / "config.json"):
        return None  # on the hub, or not there, which is said elsewhere
    try:
        return teacher_problem(config, read_stored_model(file))
    except CheckpointError as error:
        return str(error)


def _write_problem(name: str) -> str | None:
    if name.startswith("~") and not _folder(name).is_absolute():
        return "there is no such user"
    folder = _folder(name).absolute()
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        return f"{there} is not a folder"
    try:  # permissions prove nothing for root, or on a file system of the kernel's
        os.rmdir(tempfile.mkdtemp(prefix=".ds-encdec-", dir=there))
    except OSError as error:
        return f"{there} cannot be written to ({error.strerror})"
    return None


def _folder(name: str) -> Path:
    return Path(os.path.expanduser(name))
