"""Sources that need no files of the user's: text that every CPython installation has, and random ids.

The text is the language reference behind `help()` and the docstrings of the standard library, about 2 MB. Docstrings
are read from the source files, so they are there under `python -OO` too. Parts that some distributions leave out are
not used: one CPython version has one corpus. It is kept in the user's cache (launch/disk.py).
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_encdec.base.types import Document
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.launch.disk import cached

if TYPE_CHECKING:
    from ds_encdec.tokenizer.sentinels import Vocabulary

RANDOM_DOCUMENTS = 1_000_000

MIN_CHARACTERS = 200
"""Shorter texts ("Return the name.") are noise, and are left out."""

MOST_SIGNATURE_CHARACTERS = 100
"""Longer ones are left out of the task, so that an example stays below a hundred tokens."""

TASK_INSTRUCTION = "Say whether it is a method, and count its arguments."

_SKIPPED = {"__pycache__", "distutils", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "tkinter"}


@lru_cache(maxsize=1)
def builtin_documents() -> tuple[Document, ...]:
    """The corpus, in a fixed order. Takes about a second once on a machine; later calls of a process are free.

    One document is a topic of the language reference, a class with its methods, or a module with its functions.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(_source_files(library))
    pairs = json.loads(cached("corpus", _read_from(sources), lambda: json.dumps(_read_documents(library, sources))))
    return tuple(Document(key, text) for key, text in pairs)


class BuiltinCorpus:
    """The corpus as a `MapSource`."""

    def __init__(self) -> None:
        self._documents = builtin_documents()
        digest = hashlib.sha256(repr(self._documents).encode())
        self.identity = {"kind": "builtin", "documents": len(self._documents), "sha256": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._documents)

    def key(self, index: int) -> str:
        """`builtin/` and the module and class, or the topic."""
        return self._documents[index].key

    def document(self, index: int) -> Document:
        """Document `index`."""
        return self._documents[index]


class BuiltinTask:
    """A task to fine-tune on, made of every signature in the same files, as a `MapSource` of records.

    The input is a function's signature, the output says whether it is a method, and how many arguments it has. A row
    has `instruction`, `input` and `output`.
    """

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(_source_files(library))
        read_from = [*_read_from(sources), b"task"]
        text = cached("task", read_from, lambda: json.dumps(_read_signatures(library, sources)))
        self._rows: list[tuple[str, str, str]] = json.loads(text)
        digest = hashlib.sha256(text.encode())
        self.identity = {"kind": "builtin_task", "documents": len(self._rows), "sha256": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, index: int) -> str:
        """`builtin_task/` and the function's dotted name."""
        return self._rows[index][0]

    def document(self, index: int) -> Document:
        """Row `index`; as a text, its signature and what it is."""
        key, signature, answer = self._rows[index]
        record = {"instruction": TASK_INSTRUCTION, "input": signature, "output": answer}
        return Document(key, f"{signature}\n{answer}", record=record)


class BuiltinPairs(BuiltinTask):
    """The task's rows as preferences: the right answer is chosen, that of another signature rejected, so that no answer
    is more often right than wrong. A row has `prompt`, `chosen` and `rejected`."""

    def __init__(self) -> None:
        super().__init__()
        self.identity |= {"kind": "builtin_pairs"}

    def document(self, index: int) -> Document:
        """Row `index`; as a text, its signature and what it is."""
        key, signature, answer = self._rows[index]
        draw = keyed_generator(0, "wrong answer", key)
        others = (self._rows[draw.integers(len(self._rows))][2] for _ in count())
        wrong = next(other for other in others if other != answer)
        prompt = f"{TASK_INSTRUCTION}\n{signature}\n"
        record = {"prompt": prompt, "chosen": answer, "rejected": wrong}
        return Document(key, f"{signature}\n{answer}", record=record)


class RandomIds:
    """A `MapSource` of random ids, in documents of log-normal length (median 620 tokens, sigma 1, like web pages)."""

    def __init__(self, seed: int, vocabulary: Vocabulary) -> None:
        reserved = {*vocabulary.sentinel_ids, *vocabulary.mode_token_ids, vocabulary.eos_id, vocabulary.pad_id}
        self._ids = np.setdiff1d(np.arange(vocabulary.vocab_size, dtype=np.int32), sorted(reserved))
        self._seed = seed
        self.identity = {"kind": "random", "seed": seed, "vocab_size": vocabulary.vocab_size}

    def __len__(self) -> int:
        return RANDOM_DOCUMENTS

    def key(self, index: int) -> str:
        """`random/INDEX`."""
        return f"random/{index}"

    def document(self, index: int) -> Document:
        """Document `index`, drawn at every call, always the same."""
        rng = keyed_generator(self._seed, "random ids", index)
        num_tokens = int(np.clip(620 * np.exp(rng.normal()), 2, 100_000))
        return Document(self.key(index), "", self._ids[rng.integers(len(self._ids), size=num_tokens)])


def _read_from(sources: Iterable[Path]) -> Iterator[bytes]:
    """Yield all that the corpus depends on: the files, and this way of reading them."""
    yield Path(__file__).read_bytes()
    for path in sources:
        status = path.stat()
        yield f"{path} {status.st_size} {status.st_mtime_ns}".encode()


def _read_documents(library: Path, sources: Iterable[Path]) -> list[tuple[str, str]]:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    documents = [(f"topics/{name}", topics[name]) for name in sorted(topics)]
    for path in sources:
        if b'"""' in (source := path.read_bytes()):
            module, tree = ".".join(path.relative_to(library).with_suffix("").parts), ast.parse(source)
            documents.append((module, _joined(tree)))
            documents += (
                (f"{module}.{node.name}", _joined(node)) for node in tree.body if isinstance(node, ast.ClassDef)
            )
    return [(f"builtin/{key}", text) for key, text in documents if len(text) >= MIN_CHARACTERS]


def _read_signatures(library: Path, sources: Iterable[Path]) -> list[tuple[str, str, str]]:
    """Keys, signatures and answers, each signature once: no row of a test can have been learnt by heart."""
    rows: dict[str, tuple[str, str, str]] = {}
    for path in sources:
        if b'"""' in (source := path.read_bytes()):
            module, tree = ".".join(path.relative_to(library).with_suffix("").parts), ast.parse(source)
            classes = [(f"{module}.{node.name}", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
            for owner, body in [(module, tree.body), *classes]:
                for member in body:
                    if isinstance(member, ast.FunctionDef):
                        signature = f"def {member.name}({ast.unparse(member.args)})"
                        row = (f"builtin_task/{owner}.{member.name}", signature, _answer(member.args))
                        if len(signature) <= MOST_SIGNATURE_CHARACTERS:
                            rows.setdefault(signature, row)
    return list({row[0]: row for row in rows.values()}.values())  # a property has its name twice


def _answer(arguments: ast.arguments) -> str:
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    number = len(names) + (arguments.vararg is not None) + (arguments.kwarg is not None)
    kind = "method" if names[:1] in (["self"], ["cls"]) else "function"
    return f"a {kind} with {number} argument{'s' * (number != 1)}"


def _source_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in _SKIPPED and not path.name.startswith("config-"):
                yield from _source_files(path)
        elif path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path


def _joined(owner: ast.Module | ast.ClassDef) -> str:
    parts = [ast.get_docstring(owner)]
    for member in owner.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(member)):
            arguments = ", ".join(argument.arg for argument in member.args.args)
            parts.append(f"{member.name}({arguments})\n{text}")
    return "\n\n".join(filter(None, parts))
