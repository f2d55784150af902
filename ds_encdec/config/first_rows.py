"""A cheap look at local files: they exist, and the first rows have the required columns."""

import io
import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from ds_encdec.base.file_patterns import named_files
from ds_encdec.base.types import DataError
from ds_encdec.config.data_sections import DataConfig, Source
from ds_encdec.config.file_rows import (
    RowError,
    array_rows,
    csv_rows,
    field_value,
    is_array,
    json_object,
    not_lines,
    not_utf8,
    present,
)
from ds_encdec.config.packed_files import first_bytes
from ds_encdec.config.sections import ModelConfig
from ds_encdec.config.settings import Conflict
from ds_encdec.registry.objectives import OBJECTIVES, columns_by_field, conversation_column
from ds_encdec.registry.source_kinds import local_kind


def unusable_rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    """Yield the problems of each source's first file: a wrong format, unreadable rows, missing columns. Of a text file
    only the format is checked, and rows that the run may skip are not. Local files are also reported if the run would
    look for them in the repository of a data set."""
    for field, source in [] if data.prepared_dir is not None else [*_trained_on(data), *_only_evaluated(data)]:
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
            bad = (why for number, row in enumerate(rows, start=1) if (why := _wrong(number, row, source, data)))
            yield from absent or (Conflict((field, "data.on_bad_row"), why) for why in islice(bad, 1))


def _wrong(number: int, row: Mapping[str, Any] | str, source: Source, data: DataConfig) -> str | None:
    """Return why a row is unusable (it cannot be read, or a field that a template needs is empty), or None. A row that
    is a conversation, or has a weight that may exclude it from training, needs no template."""
    if isinstance(row, str):
        return row
    column = conversation_column(data, row)
    if (
        not OBJECTIVES[data.objective].takes_records
        or data.converter is not None
        or source.dataset_name == "parquet"
        or (column is not None and present(row[column]) is not None)
        or (data.weight_column is not None and present(row.get(data.weight_column)) not in (None, 1, "1", True))
    ):
        return None
    return next(
        (
            f"row {number} has nothing in its field {column}, which a template needs ({{{name}}})"
            for name, column in columns_by_field(data).items()
            if field_value(row, column) is None
        ),
        None,
    )


def _absent_columns(
    field: str, source: Source, columns: Sequence[str], data: DataConfig, model: ModelConfig
) -> Iterator[Conflict]:
    has = f"it has {', '.join(columns):.300}"
    if data.converter is not None:  # it makes the columns
        return
    if not OBJECTIVES[data.objective].takes_records:
        if source.text_column not in columns:
            setting = f"{field.rpartition('.')[0]}.text_column"
            yield Conflict((field, setting), f"the first row has no such column; {has}: set {setting}=COLUMN")
    elif conversation_column(data, columns) is None:
        for name, column in columns_by_field(data).items():
            if column not in columns and column.partition(".")[0] not in columns:
                yield Conflict(
                    (field,),
                    f"the templates need {{{name}}}, and the first row has no column {column}; {has}: "
                    f"set data.field_mapping.{name}=COLUMN, or change the template",
                )
    elif model.tokenizer_name_or_path == "builtin":
        yield Conflict(
            (field, "data.messages_column", "model.tokenizer_name_or_path"),
            "the rows are conversations, and the builtin tokenizer has no chat template: name one that has",
        )


def evaluated_and_trained_on(data: DataConfig) -> Iterator[str]:
    """Yield a warning for each field whose files or split are also trained on, with the first of them."""
    own = [*_only_evaluated(data)]
    trained = {text for _, source in _trained_on(data) for text in _texts(source)} if own else set()
    for field, source in own:
        if (both := next((text for text in _texts(source) if text in trained), None)) is not None:
            yield (
                f"warning: {field if source.data_files else field.replace('_files', '_split')}: {both}: it is also "
                "trained on, so its figures do not show how the model does on other texts"
            )


def _texts(source: Source) -> Iterator[str]:
    """Yield the identity of a source's texts: the real paths of local files, or the split of a data set."""
    if local_kind(source.dataset_name) is not None:
        yield from sorted(map(os.path.realpath, _files(source)))
    elif source.data_files is None:
        config = "" if source.dataset_config is None else f" ({source.dataset_config})"
        yield f"the split {source.dataset_split} of {source.dataset_name}{config}"


def _trained_on(data: DataConfig) -> Iterator[tuple[str, Source]]:
    yield from ((f"{at}.data_files", source) for at, source in data.sources_by_path().items())


def _only_evaluated(data: DataConfig) -> Iterator[tuple[str, Source]]:
    sets = [(f"data.eval_sets.{name}.eval_files", data.of_eval_set(name), "validation") for name in data.eval_sets]
    for field, section, split in [("data.eval_files", data, "validation"), ("data.test_files", data, "test"), *sets]:
        if (own := section.own_split(split)) is not None:
            yield field, own


def _files(source: Source) -> Iterator[str]:
    return chain.from_iterable(map(named_files, source.data_files or ()))


def _rows(source: Source) -> Iterator[Mapping[str, Any] | str]:
    """Yield the first rows of a file (of a parquet file the columns only); a string reports an unreadable row. A file
    that cannot be opened has none. Raises DataError if the rows cannot be separated, or columns are repeated."""
    kind = source.dataset_name
    path = next(_files(source), None) if kind in ("json", "csv", "parquet", "text") else None
    if path is None:
        return
    try:
        if kind == "parquet":
            from pyarrow.parquet import read_metadata  # 0.2 s

            filled = next((found for found in map(read_metadata, _files(source)) if found.num_rows), None)
            if filled is None:
                raise DataError(f"{path}: none of the files has a row. Name some that have")
            names = filled.schema.to_arrow_schema().names
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise DataError(
                    f"the first file has the column {', '.join(twice):.300} more than once: rename the others"
                )
            yield dict.fromkeys(names)
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
        if not in_array and (reason := not_lines(content, is_whole=is_whole)):
            raise DataError(f"{path}: {reason}")
        rows = array_rows(content, path, is_whole=is_whole) if in_array else content.split(b"\n")[whole_lines]
        for number, line in enumerate(rows, start=1):
            try:
                if line.strip():  # blank lines hold no row
                    yield json_object(line)
            except RowError as error:
                yield f"{path}, line {number}: {error}"
