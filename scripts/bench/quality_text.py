"""The text of the study of quality, from this machine: prose of documentation and docstrings, and two tasks made of it.

Files are divided by a hash of their path among four roles, so that no arm trains on text of the source or of the
evaluation. `docstring`: a function's code, and its docstring's first sentence. `lookup`: lines `name = value` and one
of the names, and its value, which nobody can know without the input.
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
from pathlib import Path
from typing import Any

import numpy as np

from ds_encdec.data.sources.builtin_corpus import builtin_documents

ROLES = {"source": 0.6, "ul2": 0.22, "eval": 0.03, "task": 0.15}
_TEXT = re.compile(r"(\.rst|\.md|\.txt|README|METADATA|NEWS|changelog)(\.gz)?$")
_FOLDERS = (*map(sysconfig.get_path, ("stdlib", "purelib")), "/usr/lib/python3", "/usr/share/doc")
_TEXT_CHARACTERS, _CODE, _SENTENCE = (400, 4000), (60, 500), (20, 120)  # longer texts are cut

Pair = tuple[list[int], list[int]]
TASKS = ("docstring", "lookup")
TASK_BATCH = 16  # examples
_LINES, _VALUE_WORDS = 8, 2  # of a list to look up in
_MOST_TOKENS = (200, 50)  # of an input and of an answer


class _Found:
    """Holds what has been read so far, each text once."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {role: [] for role in ROLES}
        self.pairs: list[dict[str, str]] = []
        self._seen: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        digest = hashlib.md5(re.sub(r"\W+", "", text[:300]).encode()).digest()
        is_new = digest not in self._seen
        self._seen.add(digest)
        return is_new

    def add(self, text: str, role: str) -> None:
        least, most = _TEXT_CHARACTERS
        for start in range(0, len(text), most):
            piece = text[start : start + most].strip()
            is_prose = sum(c.isalpha() or c.isspace() for c in piece) >= 0.75 * len(piece)
            if len(piece) >= least and is_prose and self.is_new(piece):
                self.texts[role].append(piece)

    def add_code(self, code: str, role: str) -> None:
        docstrings = []
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                docstrings.append(text)
                if role == "task" and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                    self._add_pair(node, text)
        self.add("\n\n".join(docstrings), role)

    def _add_pair(self, node: ast.FunctionDef, docstring: str) -> None:
        sentence = re.split(r"(?<=[.])\s|\n\n", docstring)[0].replace("\n", " ")
        code = ast.unparse(ast.FunctionDef(node.name, node.args, node.body[1:], [], lineno=1))
        fits = _SENTENCE[0] < len(sentence) < _SENTENCE[1] and _CODE[0] < len(code) < _CODE[1]
        if fits and sentence.isascii() and self.is_new(sentence):
            self.pairs.append({"input": code, "output": sentence})


def make_texts(folder: Path, documents: int) -> None:
    """Write `ROLE.jsonl` and `pairs.jsonl` to `folder`, once: at most `documents` texts, or for 0 the built-in ones,
    which each Python installation has."""
    if (folder / "pairs.jsonl").exists():
        return
    found = _Found()
    if documents:
        for path in sorted(_files(), key=lambda path: _share(f"{path}order")):
            if sum(map(len, found.texts.values())) >= documents:
                break
            _read(path, found)
    else:
        for document in builtin_documents():
            found.add(document.text, _role(document.key))
    folder.mkdir(parents=True, exist_ok=True)
    for role, texts in found.texts.items():
        _write(folder / f"{role}.jsonl", ({"text": text} for text in texts))
    _write(folder / "pairs.jsonl", found.pairs)


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, lines: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _share(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def _role(key: str) -> str:
    return list(ROLES)[np.searchsorted(np.cumsum(list(ROLES.values()))[:-1], _share(key), side="right")]


def _files() -> Iterator[Path]:
    for root in {*_FOLDERS}:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("test", "tests", "node_modules", "__pycache__")]
            yield from (Path(folder, name) for name in names)


def _read(path: Path, found: _Found) -> None:
    """Add what a file has. Files that are unreadable, or no Python of this version, are passed over."""
    try:
        if path.suffix == ".py":
            if path.stat().st_size < 400_000:
                found.add_code(path.read_text("utf8"), _role(str(path)))
        elif _TEXT.search(path.name) and path.name not in ("top_level.txt", "RECORD"):
            content = path.read_bytes()[:2_000_000]
            found.add((gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf8"), _role(str(path)))
    except (OSError, EOFError, ValueError, SyntaxError, RecursionError):
        return


def word_list(texts: Path) -> np.ndarray:
    """The words of which `lookup` makes its lists."""
    found = (re.findall(r"\b[a-z]{4,9}\b", row["text"]) for row in rows(texts / "task.jsonl")[:500])
    return np.array(sorted({word for words in found for word in words}))


class Task:
    """The examples of a task, in micro-batches: the first `tests` to test on, all others to train on."""

    def __init__(self, name: str, texts: Path, tokenizer: Any, eos_id: int, tests: int) -> None:
        self._tokenizer, self._eos, self._tests = tokenizer, eos_id, tests
        self._functions = rows(texts / "pairs.jsonl") if name == "docstring" else []
        self._words = word_list(texts)

    def test(self) -> Iterator[list[Pair]]:
        """The examples to test on."""
        for start in range(0, self._tests, TASK_BATCH):
            yield [self._pair(number) for number in range(start, min(start + TASK_BATCH, self._tests))]

    def train(self, seed: int) -> Iterator[list[Pair]]:
        """Examples without end, in the order of this seed."""
        rng = np.random.default_rng(seed)
        while True:
            yield [
                self._pair(int(at)) for at in rng.integers(self._tests, len(self._functions) or 10**9, size=TASK_BATCH)
            ]

    def _pair(self, number: int) -> Pair:
        given, target = self._functions[number].values() if self._functions else self._list(number)
        ids, targets = (self._tokenizer(text)["input_ids"] for text in (given, target))
        return ids[: _MOST_TOKENS[0]], [*targets[: _MOST_TOKENS[1]], self._eos]

    def _list(self, number: int) -> tuple[str, str]:
        rng = np.random.default_rng([number, 1])
        names, *values = rng.choice(self._words, size=(1 + _VALUE_WORDS, _LINES), replace=False)
        values = [" ".join(words) for words in zip(*values, strict=True)]
        lines = [f"{name} = {value}\n" for name, value in zip(names, values, strict=True)]
        asked = int(rng.integers(_LINES))
        return f"{''.join(lines)}\n{names[asked]} =", f" {values[asked]}"
