"""A cheap look at local files: they exist, and the first rows have the required columns."""

import io
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from ds_encdec.base.file_patterns import named_files
from ds_encdec.base.types import DataError
from ds_encdec.config.data_sections import DataConfig, Source
from ds_encdec.config.file_rows import RowError, array_rows, csv_rows, is_array, json_object, not_lines, not_utf8
from ds_encdec.config.packed_files import first_bytes
from ds_encdec.config.sections import ModelConfig
from ds_encdec.config.settings import Conflict
from ds_encdec.registry.objectives import OBJECTIVES, columns_by_field
from ds_encdec.registry.source_kinds import local_kind


def unusable_rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    """Yield the problems of each source's first file: a wrong format, unreadable rows, missing columns. Of a text file
    only the format is checked, and rows that the run may skip are not. Local files are also reported if the run would
    look for them in the repository of a data set."""
    trained = [(f"{at}.data_files", source) for at, source in data.sources_by_path().items()]
    for field, source in [*trained, *_only_evaluated(data)] if data.prepared_dir is None else ():
        if (
            local_kind(source.dataset_name) is None
            and not os.path.isdir(source.dataset_name)
            and any(map(os.path.isfile, source.data_files or ()))
        ):
            yield Conflict(
                (field, field.replace("data_files", "dataset_name")),
                "there is such a file here; did you mean dataset_name=json (csv, parquet, text)?",
            )
        try:
            rows = list(islice(_rows(source), 100))
        except DataError as error:
            yield Conflict((field,), str(error))
            continue
        if data.on_bad_row != "skip":
            first = next((row for row in rows if not isinstance(row, str)), None)
            absent = [] if first is None else [*_absent_columns(field, source, list(first), data, model)]
            bad = (Conflict((field, "data.on_bad_row"), row) for row in rows if isinstance(row, str))
            yield from absent or islice(bad, 1)


def _absent_columns(
    field: str, source: Source, columns: Sequence[str], data: DataConfig, model: ModelConfig
) -> Iterator[Conflict]:
    has = f"it has {', '.join(columns):.300}"
    if data.converter is not None:  # it makes the columns
        return
    objective = OBJECTIVES[data.objective]
    if not objective.takes_records:
        if source.text_column not in columns:
            setting = f"{field.rpartition('.')[0]}.text_column"
            yield Conflict((field, setting), f"the first row has no such column; {has}: set {setting}=COLUMN")
    elif needed := objective.needed(data, columns):
        for name, column in needed.items():
            if column not in columns and column.partition(".")[0] not in columns:
                in_templates = name in columns_by_field(data)
                yield Conflict(
                    (field,),
                    f"{'the templates need' if in_templates else 'a pair needs'} {{{name}}}, and the first row has no "
                    f"column {column}; {has}: set data.field_mapping.{name}=COLUMN, or "
                    f"{'change the template' if in_templates else 'make it by data.converter'}",
                )
    elif model.tokenizer_name_or_path == "builtin":
        yield Conflict(
            (field, "data.messages_column", "model.tokenizer_name_or_path"),
            "the rows are conversations, and the builtin tokenizer has no chat template: name one that has",
        )


def trained_and_evaluated_on(data: DataConfig) -> Iterator[str]:
    """Yield a warning for each field that names files for evaluation which are also trained on, with the first one."""
    trained = {file for source in data.sources_by_path().values() for file in _files(source)}
    for field, source in _only_evaluated(data):
        if both := sorted(trained.intersection(_files(source))):
            why = "it is also trained on, so its figures do not show how the model does on other texts"
            yield f"warning: {field}: {both[0]}: {why}"


def _files(source: Source) -> list[str]:
    is_local = local_kind(source.dataset_name) is not None
    return [os.path.realpath(file) for pattern in source.data_files or () for file in named_files(pattern) if is_local]


def _only_evaluated(data: DataConfig) -> Iterator[tuple[str, Source]]:
    """Yield the sources that are evaluated on alone, each with the field that names its files."""
    sets = [(f"data.eval_sets.{name}.eval_files", data.of_eval_set(name), "validation") for name in data.eval_sets]
    for field, section, split in [("data.eval_files", data, "validation"), ("data.test_files", data, "test"), *sets]:
        if (own := section.own_split(split)) is not None:
            yield field, own


def _rows(source: Source) -> Iterator[Mapping[str, Any] | str]:
    """Yield the first rows of a file (of a parquet file the columns only); a string reports an unreadable row. A file
    that cannot be opened has none. Raises DataError if the rows cannot be separated."""
    kind = source.dataset_name
    files = chain.from_iterable(map(named_files, source.data_files or ()))
    path = next(files, None) if kind in ("json", "csv", "parquet", "text") else None
    if path is None:
        return
    try:
        if kind == "parquet":
            from pyarrow.parquet import read_metadata  # 0.2 s

            # One without rows, which may have no columns either, is passed over.
            filled = next((found for found in map(read_metadata, chain([path], files)) if found.num_rows), None)
            if filled is None:
                raise DataError(f"{path}: none of the files has a row. Name some that have")
            yield dict.fromkeys(filled.schema.to_arrow_schema().names)
            return
        content, is_whole = first_bytes(path, 1 << 20)
    except (OSError, ValueError):
        return
    whole_lines = slice(None if is_whole else -1)
    if kind == "csv":
        lines = io.StringIO(content.removeprefix(BOM_UTF8).decode(errors="surrogateescape"), newline="").readlines()
        for number, row in enumerate(csv_rows(lines[whole_lines], path, is_whole=is_whole), start=1):
            reason = row if isinstance(row, str) else not_utf8("".join(row.values()))
            yield row if reason is None else f"{path}, row {number}: {reason}"
    elif kind == "json":
        in_array = is_array(content)
        if not in_array and (reason := not_lines(content)):
            raise DataError(f"{path}: {reason}")
        rows = array_rows(content, path, is_whole=is_whole) if in_array else content.split(b"\n")[whole_lines]
        for number, line in enumerate(rows, start=1):
            try:
                if line.strip():  # blank lines hold no row
                    yield json_object(line)
            except RowError as error:
                yield f"{path}, line {number}: {error}"
