"""Lists the kinds of data sources, a row each. A new one is a class (data/sources/sources.py has the protocols) and a
row. The configuration's rules read the rows, so nothing of data/ is imported here."""

import re
from dataclasses import dataclass

from ds_encdec.base.plugins import PYTHON


@dataclass(frozen=True, slots=True)
class SourceKind:
    """The reader of one kind of data sets. `reader`: the dotted name of a function that returns a source. `needs`: its
    keyword arguments, of those of `data.build.Opener.open` (`limit`: most bytes of a row). `endings`: of such files,
    mistaken for the kind's name. `has_columns`: its rows can be read whole, column by column."""

    reader: str
    needs: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    has_columns: bool = True

    @property
    def reads_files(self) -> bool:
        """True for local files, which `data.data_files` names."""
        return "files" in self.needs


_ROWS = ("files", "text_column", "limit")
# The rows by the value of `data.dataset_name`.
LOCAL_SOURCES: dict[str, SourceKind] = {
    "builtin": SourceKind("ds_encdec.data.sources.builtin_corpus:BuiltinCorpus", has_columns=False),
    "builtin_task": SourceKind("ds_encdec.data.sources.builtin_corpus:BuiltinTask"),
    "builtin_pairs": SourceKind("ds_encdec.data.sources.builtin_corpus:BuiltinPairs"),
    "builtin_functions": SourceKind("ds_encdec.data.sources.builtin_functions:BuiltinFunctions"),
    "random": SourceKind("ds_encdec.data.sources.builtin_corpus:RandomIds", ("seed", "vocabulary"), has_columns=False),
    "text": SourceKind("ds_encdec.data.sources.local_files:TextFiles", ("files",), ("txt",), has_columns=False),
    "json": SourceKind("ds_encdec.data.sources.local_files:JsonLines", _ROWS, ("jsonl", "ndjson")),
    "csv": SourceKind("ds_encdec.data.sources.local_files:CsvFiles", _ROWS, ("tsv",)),
    "parquet": SourceKind("ds_encdec.data.sources.tables:ParquetFiles", (*_ROWS, "num_lanes", "columns")),
}


# The ending of a file's name, and that of a compression behind it.
ENDING = re.compile(r"\.(\w+)(\.(gz|bz2|xz|lzma|zst|lz4))?$", re.IGNORECASE)


def kind_of_file(name: str) -> str | None:
    """Return the kind of local files by the ending of a file's name; None for other endings."""
    ending = found[1].lower() if (found := ENDING.search(name)) else ""
    return next(
        (kind for kind, row in LOCAL_SOURCES.items() if row.reads_files and ending in (kind, *row.endings)), None
    )


def is_remote(path: str) -> bool:
    """Return whether the path is a URL."""
    return "://" in path


# The kind of all other names: a data set of the hub, or of a folder laid out like one.
HUB = SourceKind("ds_encdec.data.sources.tables:open_hub_data", ("entry", "num_lanes", "streaming", "columns", "limit"))

OWN = SourceKind("ds_encdec.data.sources.sources:UserReader", ("entry", "text_column"))


def local_kind(name: str) -> SourceKind | None:
    """Return the row of a data set's name; None for one of the hub, or of a folder laid out like one."""
    return OWN if name.startswith(PYTHON) else LOCAL_SOURCES.get(name)
