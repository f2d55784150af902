"""Pairs for embeddings that need no files of the user's: descriptions of the standard library's functions, and code."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ds_encdec.base.types import Document
from ds_encdec.data.sources.builtin_corpus import BuiltinTask, _read_from, _source_files
from ds_encdec.launch.disk import cached

MIN_CHARACTERS = 15  # of a description; shorter ones ("Close.") describe many functions


class BuiltinFunctions(BuiltinTask):
    """A `MapSource` of records: `query` is the first paragraph of a docstring, `positive` its function without it."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(_source_files(library))
        read_from = [*_read_from(sources), Path(__file__).read_bytes()]
        text = cached("functions", read_from, lambda: json.dumps(_read_functions(library, sources)))
        self._rows: list[tuple[str, str, str]] = json.loads(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.identity = {"kind": "builtin_functions", "documents": len(self._rows), "sha256": digest}

    def document(self, index: int) -> Document:
        """Row `index`; as a text, the description and the code."""
        key, query, code = self._rows[index]
        return Document(key, f"{query}\n{code}", record={"query": query, "positive": code})


def _read_functions(library: Path, sources: Iterable[Path]) -> list[tuple[str, str, str]]:
    """Keys, descriptions and code, each of these once: no row of a test can have been learnt by heart."""
    rows: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    for path in sources:
        module, tree = ".".join(path.relative_to(library).with_suffix("").parts), ast.parse(path.read_bytes())
        classes = [(f"{module}.{node.name}", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner, body in [(module, tree.body), *classes]:
            for member in body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(member)):
                    query, key = " ".join(text.split("\n\n")[0].split()), f"builtin_functions/{owner}.{member.name}"
                    del member.body[0]
                    code = ast.unparse(member) if member.body else ""
                    if len(query) >= MIN_CHARACTERS and code and not {query, code} & seen and key not in rows:
                        seen |= {query, code}
                        rows[key] = query, code
    return [(key, *texts) for key, texts in rows.items()]
