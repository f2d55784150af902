"""A look at local files, as far as that is cheap: they are there, and the first row has the columns asked for."""

import io
import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from ds_encdec.config.csv_rows import csv_rows
from ds_encdec.config.json_rows import RowError, array_rows, is_array, json_object, not_lines
from ds_encdec.config.model_sections import ModelConfig
from ds_encdec.config.packed_files import first_bytes
from ds_encdec.config.row_values import field_value, present
from ds_encdec.config.sections import DataConfig, Source
from ds_encdec.config.settings import Conflict
from ds_encdec.file_patterns import named_files
from ds_encdec.objectives import OBJECTIVES, columns_by_field, conversation_column
from ds_encdec.source_kinds import kind_of_file, local_kind
from ds_encdec.types import DataError

_LOOKED_AT_BYTES = 1 << 20
_LOOKED_AT_ROWS = 100


def unusable_rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    """Find what the first file of each source is instead of rows, and what its first rows lack.

    They are read as a run reads them; of a text file only its format is looked at. Rows that may be skipped lack
    nothing. Also finds files that are mistaken for those in the repository of a data set.
    """
    for field, source in _sources(data):
        is_local = local_kind(source.dataset_name) is not None
        if not (is_local or os.path.isdir(source.dataset_name)) and any(map(os.path.isfile, source.data_files or ())):
            message = (
                "there is such a file here, but these are files in the repository of the data set; did you mean "
                "dataset_name=json (csv, parquet, text)?"
            )
            yield Conflict((field, field.replace("data_files", "dataset_name")), message)
        try:
            rows = list(islice(_rows(source), _LOOKED_AT_ROWS))
        except DataError as error:
            yield Conflict((field,), str(error))
            continue
        if data.on_bad_row != "skip":
            first = next((row for row in rows if not isinstance(row, str)), None)
            absent = [] if first is None else [*_absent_columns(field, source, list(first), data, model)]
            yield from absent or islice(_bad_rows(field, source, rows, data), 1)


def _bad_rows(
    field: str, source: Source, rows: Sequence[Mapping[str, Any] | str], data: DataConfig
) -> Iterator[Conflict]:
    """The rows that cannot be read, and those with nothing in a field that a template asks for."""
    has_templates = OBJECTIVES[data.objective].takes_records and data.converter is None
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):
            yield Conflict((field, "data.on_bad_row"), row)
        elif has_templates and source.dataset_name != "parquet" and not _has_no_template(row, data):
            for name, column in columns_by_field(data).items():
                if field_value(row, column) is None:
                    message = f"row {number} has nothing in its field {column}, which a template asks for ({{{name}}})"
                    yield Conflict((field, "data.on_bad_row"), message)


def _has_no_template(row: Mapping[str, Any], data: DataConfig) -> bool:
    """True for a conversation, and for a row whose weight may say that it is not learnt."""
    column = conversation_column(data, row)
    weight = None if data.weight_column is None else present(row.get(data.weight_column))
    return (column is not None and present(row[column]) is not None) or weight not in (None, 1, "1", True)


def _absent_columns(
    field: str, source: Source, columns: Sequence[str], data: DataConfig, model: ModelConfig
) -> Iterator[Conflict]:
    """Find what the first row lacks of columns; a converter's rows lack nothing."""
    if data.converter is not None:
        return
    has = f"it has {', '.join(columns):.300}"
    if not OBJECTIVES[data.objective].takes_records:
        if source.text_column not in columns:
            setting = f"{field.rpartition('.')[0]}.text_column"
            message = f"the first row has no such column; {has}: set {setting}=COLUMN"
            yield Conflict((field, setting), message)
    elif conversation_column(data, columns) is None:
        for name, column in columns_by_field(data).items():
            if column not in columns and column.partition(".")[0] not in columns:
                message = (
                    f"the templates ask for {{{name}}}, and the first row has no column {column}; {has}: "
                    f"set data.field_mapping.{name}=COLUMN, or change the template"
                )
                yield Conflict((field,), message)
    elif model.tokenizer_name_or_path == "builtin":
        message = "the rows are conversations, and the builtin tokenizer has no chat template: name one that has"
        yield Conflict((field, "data.messages_column", "model.tokenizer_name_or_path"), message)


def misread_files(data: DataConfig) -> Iterator[str]:
    """Warn of files whose endings are those of rows, and which are read as plain text."""
    for field, source in _sources(data):
        paths = _files(source) if source.dataset_name == "text" else ()
        kinds = ((path, kind) for path in paths if (kind := kind_of_file(path)) not in ("text", None))
        for path, kind in islice(kinds, 1):
            name = field.rpartition(".")[0] + ".dataset_name"
            yield f"warning: {field}: {path} is read as plain text, as {name}=text says; its rows are read by {kind}"


def evaluated_and_trained_on(data: DataConfig) -> Iterator[str]:
    """Warn of each field whose files, or whose split of a data set, are also trained on, and name the first of them."""
    own = [*_own_sources(data)]
    trained = {text for _, source in _training_sources(data) for text in _texts(source)} if own else set()
    for field, source in own:
        if (both := next((text for text in _texts(source) if text in trained), None)) is not None:
            named = field if source.data_files else field.replace("_files", "_split")
            told = "it is also trained on, so its figures do not show how the model does on other texts"
            yield f"warning: {named}: {both}: {told}"


def _texts(source: Source) -> Iterator[str]:
    """Yield what identifies the texts of a source: the real paths of local files, or a split of a data set."""
    if local_kind(source.dataset_name) is not None:
        yield from sorted(map(os.path.realpath, _files(source)))
    elif source.data_files is None:
        config = "" if source.dataset_config is None else f" ({source.dataset_config})"
        yield f"the split {source.dataset_split} of {source.dataset_name}{config}"


def _sources(data: DataConfig) -> Iterator[tuple[str, Source]]:
    """Every source of a run that reads them, and the field that names its files."""
    if data.prepared_dir is None:
        yield from _training_sources(data)
        yield from _own_sources(data)


def _training_sources(data: DataConfig) -> Iterator[tuple[str, Source]]:
    for number, source in enumerate(data.mixture or [data]):
        yield (f"data.mixture.{number}.data_files" if data.mixture else "data.data_files"), source


def _own_sources(data: DataConfig) -> Iterator[tuple[str, Source]]:
    """The sources that are evaluated or tested on alone."""
    for field, split in (("data.eval_files", "validation"), ("data.test_files", "test")):
        if (own := data.own_split(split)) is not None:
            yield field, own
    for name in data.eval_sets:
        if (own := data.of_eval_set(name).own_split("validation")) is not None:
            yield f"data.eval_sets.{name}.eval_files", own


def _files(source: Source) -> Iterator[str]:
    return chain.from_iterable(map(named_files, source.data_files or ()))


def _rows(source: Source) -> Iterator[Mapping[str, Any] | str]:
    """The first rows of a file, of a parquet file the columns alone; a text says what is wrong with one.

    None of a file that cannot be opened. Raises DataError for a file whose rows cannot be told from each other.
    """
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
                has = f"the first file has the column {', '.join(twice):.300} more than once"
                raise DataError(f"{has}: give each a name of its own")
            yield dict.fromkeys(names)
            return
        content, is_whole = first_bytes(path, _LOOKED_AT_BYTES)
    except (OSError, ValueError):
        return
    if kind == "csv":
        yield from _rows_of_csv(content, path, is_whole=is_whole)
    elif kind == "json":
        yield from _rows_of_json(content, path, is_whole=is_whole)


def _rows_of_csv(content: bytes, path: str, *, is_whole: bool) -> Iterator[Mapping[str, Any] | str]:
    text = content.removeprefix(BOM_UTF8).decode(errors="surrogateescape")
    lines = io.StringIO(text, newline="").readlines()
    for number, row in enumerate(csv_rows(lines[: None if is_whole else -1], path, is_whole=is_whole), start=1):
        if not isinstance(row, str):
            try:
                "".join(row.values()).encode()
            except UnicodeEncodeError:
                row = "not UTF-8 text. Convert the file, for example with `iconv -f latin1 -t utf-8`"
        yield f"{path}, row {number}: {row}" if isinstance(row, str) else row


def _rows_of_json(content: bytes, path: str, *, is_whole: bool) -> Iterator[Mapping[str, Any] | str]:
    if is_array(content):
        lines: Iterable[bytes] = array_rows(content, path, is_whole=is_whole)
    elif reason := not_lines(content, is_whole=is_whole):
        raise DataError(f"{path}: {reason}")
    else:
        lines = content.split(b"\n")[: None if is_whole else -1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():  # an empty text
            continue
        try:
            yield json_object(line)
        except RowError as error:
            yield f"{path}, line {number}: {error}"
