"""Rules about contradictions between fields of `data`."""

import re
from collections.abc import Callable, Iterable, Iterator

from ds_encdec.base.plugins import PYTHON, is_dotted
from ds_encdec.config.data_sections import LOCAL_FORMATS, DataConfig, EvalSet, Source
from ds_encdec.config.settings import Conflict, broken, unknown_key
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.objectives import OBJECTIVES, template_parts
from ds_encdec.registry.source_kinds import LOCAL_SOURCES, local_kind

_FORMAT_OF = {ending: name for name, kind in LOCAL_SOURCES.items() for ending in kind.endings}
"""Formats by the endings of local files, which are not names of data sets."""


def data_rules(data: DataConfig) -> Iterator[Conflict]:
    """Yield the contradictions within `data`."""
    for at, source in data.sources_by_path().items():
        yield from _source(source, at)
    yield from _mixture(data)
    yield from (_records if OBJECTIVES[data.objective].takes_records else _texts)(data)
    yield from _evaluation(data, lambda field: f"data.{field}")
    yield from _split(data, "test_files", "test_split", lambda field: f"data.{field}")
    for name in data.eval_sets:
        yield from _eval_set(data, name)
    names, weights = ", ".join(DENOISERS), data.ul2_task_weights
    yield from broken(
        (len(weights) != len(DENOISERS), "data.ul2_task_weights", f"must be {len(DENOISERS)} weights, of {names}"),
        (min(weights, default=0) < 0, "data.ul2_task_weights", f"weights of {names} must be >= 0"),
        (not any(weights), "data.ul2_task_weights", f"at least one of {names} must have a weight > 0"),
    )


def _source(source: Source, at: str) -> Iterator[Conflict]:
    name, kind, files = source.dataset_name, local_kind(source.dataset_name), source.data_files
    both, reads_files = f"{at}.dataset_name {at}.data_files", kind is not None and kind.reads_files
    no_reader = name.startswith(PYTHON) and not is_dotted(name.removeprefix(PYTHON))
    return broken(
        (no_reader, f"{at}.dataset_name", "write `python:module:function`"),
        (
            name in _FORMAT_OF,
            f"{at}.dataset_name",
            f"no data set; for local files of this kind write `{_FORMAT_OF.get(name)}`",
        ),
        (reads_files and not files, both, f"{name} needs data_files: paths or patterns of local files"),
        (
            kind and not reads_files and files is not None,
            both,
            f"{name} reads no files; for yours set {', '.join(LOCAL_FORMATS)}",
        ),
    )


def _mixture(data: DataConfig) -> Iterator[Conflict]:
    is_mixed, counts_tokens = data.mixture is not None, data.mixture_weights_count == "tokens"
    yield from broken(
        (data.mixture == (), "data.mixture", "a mixture needs at least one source"),
        (
            counts_tokens and not is_mixed,
            "data.mixture_weights_count data.mixture",
            "only a mixture has weights: remove it",
        ),
    )
    for name in data.changed(*Source.model_fields) if is_mixed else ():
        message = f"a mixture replaces {name}: remove it, or make it one of the mixture's sources"
        yield Conflict(("data.mixture", f"data.{name}"), message)


def _texts(data: DataConfig) -> Iterator[Conflict]:
    """Yield fields that are set although the objective does not read them."""
    mine = OBJECTIVES[data.objective].own_fields
    for other, row in OBJECTIVES.items():
        for name in data.changed(*(field for field in row.own_fields if field not in mine)):
            message = f"{data.objective} does not read it: set objective={other}, or remove it"
            yield Conflict((f"data.{name}", "data.objective"), message)


def _records(data: DataConfig) -> Iterator[Conflict]:
    objective, with_columns = OBJECTIVES[data.objective], [n for n, kind in LOCAL_SOURCES.items() if kind.has_columns]
    for at, source in data.sources_by_path().items():
        if (kind := local_kind(source.dataset_name)) and not kind.has_columns:
            message = f"its rows have no columns: take {', '.join(with_columns)}, or a data set of the hub"
            yield Conflict(("data.objective", f"{at}.dataset_name"), message)
    other_splits = {name for row in OBJECTIVES.values() for name in row.split_fields} - {*objective.split_fields}
    for name in data.changed(*other_splits):
        message = f"{data.objective} does not read it: set {' and '.join(objective.split_fields)}, or remove it"
        yield Conflict((f"data.{name}", "data.objective"), message)
    known: set[str] = set()
    for name in ("input_template", "output_template"):
        try:
            fields = {field for _, field in template_parts(getattr(data, name)) if field is not None}
        except ValueError as error:
            yield Conflict((f"data.{name}",), f"is no template ({error})")
            continue
        known |= fields
        if not fields:
            yield Conflict((f"data.{name}",), "must hold a field, `{name}`, that a row fills in")
    for field in sorted(data.field_mapping.keys() - known) if known else ():
        yield Conflict(("data.field_mapping",), f"no template has a field {field}: {unknown_key(field, known)}")
    if data.converter is not None and not is_dotted(data.converter):
        yield Conflict(("data.converter",), "write `module:function`")


def _split(data: DataConfig, files: str, split: str, at: Callable[[str], str]) -> Iterator[Conflict]:
    """Yield the problems of the split that `files` or `split` name; `at` returns the dotted path of a field."""
    name, paths = data.eval_dataset_name, getattr(data, files)
    is_files, is_split = paths is not None, getattr(data, split) is not None
    kind = None if data.mixture and name is None else local_kind(name or data.dataset_name)
    named_by = at("eval_dataset_name") if name or data.mixture else "data.dataset_name"
    field = named_by.rpartition(".")[2]
    return broken(
        (is_files and is_split, f"{at(files)} {at(split)}", "files have no splits: remove one of the two"),
        (paths == (), at(files), "no file is named: name one, or remove the field"),
        (
            (is_files or is_split) and data.mixture and name is None,
            f"data.mixture {at(files if is_files else split)} {at('eval_dataset_name')}",
            "say with eval_dataset_name what this is of: a mixture is of several",
        ),
        (
            is_files and not (kind and kind.reads_files) and not data.mixture,
            f"{at(files)} {named_by}",
            f"set {field} to the kind of these files: {', '.join(LOCAL_FORMATS)}",
        ),
        (
            is_split and not is_files and kind is not None,
            f"{at(split)} {named_by}",
            "only data sets of the hub have splits",
        ),
    )


def _evaluation(data: DataConfig, at: Callable[[str], str]) -> Iterable[Conflict]:
    yield from _split(data, "eval_files", "eval_split", at)
    name = data.eval_dataset_name
    kind = local_kind(name) if name is not None else None
    yield from broken(
        (
            kind and kind.reads_files and data.eval_files is None,
            f"{at('eval_dataset_name')} {at('eval_files')}",
            f"{name} needs eval_files: paths or patterns of local files",
        ),
        (
            data.eval_dataset_config is not None and name is None and data.eval_split is None,
            f"{at('eval_dataset_config')} {at('eval_dataset_name')}",
            "goes with eval_dataset_name or eval_split",
        ),
        (
            kind and not kind.has_columns and OBJECTIVES[data.objective].takes_records,
            f"data.objective {at('eval_dataset_name')}",
            "its rows have no columns",
        ),
    )


def _eval_set(data: DataConfig, name: str) -> Iterator[Conflict]:
    if re.fullmatch(r"[\w-]+", name, re.ASCII) is None:
        yield Conflict(("data.eval_sets",), f"{name!r}: names are of letters, digits, `_` and `-`")
        return
    alone, path = data.of_eval_set(name), f"data.eval_sets.{name}"
    if alone.own_split("validation") is None:
        yield Conflict((path,), "name what is in it: eval_files, eval_dataset_name or eval_split")
    yield from _evaluation(alone, lambda field: f"{path if field in EvalSet.model_fields else 'data'}.{field}")
