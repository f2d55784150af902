"""A look at the first row of local files, as far as that is cheap: it must have the columns that settings ask for."""

import codecs
import csv
import json
import os
from collections.abc import Iterator, Sequence
from glob import iglob

from ds_encdec.config.model_sections import ModelConfig
from ds_encdec.config.sections import DataConfig, Source
from ds_encdec.config.settings import Conflict
from ds_encdec.objectives import OBJECTIVES, columns_by_field
from ds_encdec.source_kinds import local_kind

_LOOKED_AT_BYTES = 1 << 20


def unusable_rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    """Find what the first rows of local files lack for the templates or a conversation, unless such rows are skipped.

    Files that are compressed, damaged or empty are left to the run. Also finds files that are mistaken for those in the
    repository of a data set.
    """
    sources: dict[str, Source] = {
        f"data.mixture.{number}.data_files" if data.mixture else "data.data_files": source
        for number, source in enumerate(data.mixture or [data])
    }
    own = {field: data.own_split(split) for field, split in (("eval_files", "validation"), ("test_files", "test"))}
    sources |= {f"data.{field}": source for field, source in own.items() if source is not None}
    is_made_here = data.prepared_dir is None and data.converter is None
    for field, source in sources.items() if is_made_here else ():
        columns, is_local = _columns(source), local_kind(source.dataset_name) is not None
        if not (is_local or os.path.isdir(source.dataset_name)) and any(map(os.path.isfile, source.data_files or ())):
            message = (
                "there is such a file here, but these are files in the repository of the data set; did you mean "
                "dataset_name=json (csv, parquet, text)?"
            )
            yield Conflict((field, field.replace("data_files", "dataset_name")), message)
        if columns is None or data.on_bad_row == "skip" or not OBJECTIVES[data.objective].takes_records:
            continue
        if data.messages_column not in columns:
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


def _columns(source: Source) -> Sequence[str] | None:
    """The columns of the first row of a file; None where there is none that can be read at once."""
    paths = (path for pattern in source.data_files or () for path in iglob(os.path.expanduser(pattern), recursive=True))
    path = next(filter(os.path.isfile, paths), None)
    kind = source.dataset_name
    if path is None or kind not in ("json", "csv", "parquet"):
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
