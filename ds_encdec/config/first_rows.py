"""A look at local files, as far as that is cheap: they are there, and the first row has the columns asked for."""

import codecs
import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from ds_encdec.config.model_sections import ModelConfig
from ds_encdec.config.sections import DataConfig, Source
from ds_encdec.config.settings import Conflict
from ds_encdec.file_patterns import named_files
from ds_encdec.objectives import OBJECTIVES, columns_by_field, conversation_column
from ds_encdec.source_kinds import kind_of_file, local_kind

_LOOKED_AT_BYTES = 1 << 20


def unusable_rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    """Find what the first rows of local files lack for the text, the templates or a conversation.

    Rows that are skipped lack nothing.
    Files that are compressed, damaged or empty are left to the run. Also finds files that are mistaken for those in the
    repository of a data set.
    """
    for field, source in _sources(data) if data.converter is None else ():
        columns, is_local = _columns(source), local_kind(source.dataset_name) is not None
        if not (is_local or os.path.isdir(source.dataset_name)) and any(map(os.path.isfile, source.data_files or ())):
            message = (
                "there is such a file here, but these are files in the repository of the data set; did you mean "
                "dataset_name=json (csv, parquet, text)?"
            )
            yield Conflict((field, field.replace("data_files", "dataset_name")), message)
        if columns is not None and len({*columns}) < len(columns):
            twice = [name for name, count in Counter(columns).items() if count > 1]
            message = (
                f"the first file has the column {', '.join(twice):.300} more than once: give each a name of its own"
            )
            yield Conflict((field,), message)
            continue
        if columns is None or data.on_bad_row == "skip":
            continue
        if not OBJECTIVES[data.objective].takes_records:
            if source.text_column not in columns:
                setting = f"{field.rpartition('.')[0]}.text_column"
                message = f"the first row has no such column; it has {', '.join(columns):.300}: set {setting}=COLUMN"
                yield Conflict((field, setting), message)
        elif conversation_column(data, columns) is None:
            for name, column in columns_by_field(data).items():
                if column not in columns and column.partition(".")[0] not in columns:
                    message = (
                        f"the templates ask for {{{name}}}, and the first row has no column {column}; it has "
                        f"{', '.join(columns):.300}: set data.field_mapping.{name}=COLUMN, or change the template"
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


def _sources(data: DataConfig) -> Iterator[tuple[str, Source]]:
    """Every source of a run that reads them, and the field that names its files."""
    if data.prepared_dir is not None:
        return
    for number, source in enumerate(data.mixture or [data]):
        yield (f"data.mixture.{number}.data_files" if data.mixture else "data.data_files"), source
    for field, split in (("data.eval_files", "validation"), ("data.test_files", "test")):
        if (own := data.own_split(split)) is not None:
            yield field, own


def _files(source: Source) -> Iterator[str]:
    return chain.from_iterable(map(named_files, source.data_files or ()))


def _columns(source: Source) -> Sequence[str] | None:
    """The columns of the first row of a file; None where there is none that can be read at once."""
    kind = source.dataset_name
    path = next(_files(source), None) if kind in ("json", "csv", "parquet") else None
    if path is None:
        return None
    try:
        if kind == "parquet":
            from pyarrow.parquet import read_schema  # 0.2 s

            return list(read_schema(path).names)
        with open(path, "rb") as file:
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(file.read(_LOOKED_AT_BYTES))
        if kind == "csv":
            return next(csv.reader(text.splitlines(keepends=True)), None)
        row, _ = json.JSONDecoder().raw_decode(text.lstrip(" \t\r\n["))
    except (OSError, ValueError, RecursionError, csv.Error):
        return None
    return list(row) if isinstance(row, dict) else None
