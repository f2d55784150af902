"""The text of the study of quality, from this machine: docstrings and documentation, and code with its docstrings.

Files are divided by a hash of their path among four roles: `source`, `ul2`, `eval` and `task`. So no arm is trained on
text that the source or the evaluation has, and code of a task has its docstrings in no other role.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from ds_encdec.data.sources.builtin_corpus import builtin_documents
from ds_encdec.tokenizer.load import builtin_tokenizer

ROLES = {"source": 0.6, "ul2": 0.22, "eval": 0.03, "task": 0.15}
SPARE_ROWS = 40  # of the vocabulary: sentinels, which the source never sees
TOKENIZER_TEXTS = 2000
_TEXT = re.compile(r"(\.rst|\.md|\.txt|README|METADATA|NEWS|changelog)(\.gz)?$")
_FOLDERS = ("stdlib", "purelib")
_MORE_FOLDERS = ("/usr/lib/python3", "/usr/share/doc")
_CHARACTERS = (400, 4000)  # of a document: longer texts are cut
_CODE, _SENTENCE = (60, 500), (20, 120)  # characters


@dataclass
class _Found:
    """What has been read so far, each text once."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {role: [] for role in ROLES})
    pairs: list[dict[str, str]] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)

    def is_new(self, text: str) -> bool:
        digest = hashlib.md5(re.sub(r"\W+", "", text[:300]).encode()).digest()
        is_new = digest not in self.seen
        self.seen.add(digest)
        return is_new

    def add(self, text: str, role: str) -> None:
        least, most = _CHARACTERS
        for start in range(0, len(text), most):
            piece = text[start : start + most].strip()
            is_prose = sum(c.isalpha() or c.isspace() for c in piece) >= 0.75 * len(piece)
            if len(piece) >= least and is_prose and self.is_new(piece):
                self.texts[role].append(piece)


def make_texts(folder: Path, documents: int) -> None:
    """Write `ROLE.jsonl` and `pairs.jsonl` to `folder`, once: at most `documents` texts, or for 0 the built-in ones."""
    if (folder / "pairs.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = _Found()
    if documents:
        for path in sorted(_files(), key=lambda path: _share(str(path) + "order")):
            if sum(map(len, found.texts.values())) >= documents:
                break
            _read(path, found)
    else:
        for document in builtin_documents():
            found.add(document.text, _role(document.key))
    for role, texts in found.texts.items():
        _write(folder / f"{role}.jsonl", ({"text": text} for text in texts))
    _write(folder / "pairs.jsonl", found.pairs)


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_tokenizer(folder: Path, texts: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the source's texts, or load it from `folder`."""
    if not (folder / "tokenizer.json").exists():
        corpus = [row["text"] for row in rows(texts / "source.jsonl")[:TOKENIZER_TEXTS]]
        builtin_tokenizer(corpus, vocab_size - SPARE_ROWS).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def stream(path: Path, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """The ids of all texts of a file, int64, `<|endoftext|>` behind each; kept beside it."""
    kept = path.with_suffix(".npy")
    if not kept.exists():
        ids = tokenizer([row["text"] for row in rows(path)])["input_ids"]
        np.save(kept, np.concatenate([[*one, tokenizer.pad_token_id] for one in ids]).astype(np.int32))
    return np.load(kept).astype(np.int64)


def _share(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def _role(key: str) -> str:
    at = _share(key)
    for role, share in ROLES.items():
        if (at := at - share) < 0:
            break
    return role


def _files() -> Iterator[Path]:
    for root in {*map(sysconfig.get_path, _FOLDERS), *_MORE_FOLDERS}:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("test", "tests", "node_modules", "__pycache__")]
            yield from (Path(folder, name) for name in names)


def _read(path: Path, found: _Found) -> None:
    """Add what a file has. Files that are unreadable, or no Python of this version, are passed over."""
    try:
        if path.suffix == ".py":
            if path.stat().st_size < 400_000:
                _read_code(path.read_text("utf8"), _role(str(path)), found)
        elif _TEXT.search(path.name) and path.name not in ("top_level.txt", "RECORD"):
            content = path.read_bytes()[:2_000_000]
            found.add((gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf8"), _role(str(path)))
    except (OSError, EOFError, ValueError, SyntaxError, RecursionError):
        return


def _read_code(code: str, role: str, found: _Found) -> None:
    docstrings = []
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            docstrings.append(text)
            if role == "task" and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                _add_pair(node, text, found)
    found.add("\n\n".join(docstrings), role)


def _add_pair(node: ast.FunctionDef, docstring: str, found: _Found) -> None:
    sentence = re.split(r"(?<=[.])\s|\n\n", docstring)[0].replace("\n", " ")
    code = ast.unparse(ast.FunctionDef(node.name, node.args, node.body[1:], [], lineno=1))
    fits = _SENTENCE[0] < len(sentence) < _SENTENCE[1] and _CODE[0] < len(code) < _CODE[1]
    if fits and sentence.isascii() and found.is_new(sentence):
        found.pairs.append({"input": code, "output": sentence})


def _write(path: Path, lines: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
