"""Makes a retrieval task of the standard library (docstring → function), and judges bags of words by it.

    python scripts/dev/stdlib_retrieval.py make output/stdlib          # train.jsonl and held_out.jsonl
    python scripts/dev/stdlib_retrieval.py words output/stdlib/held_out.jsonl

A row has `query`, the first paragraph of a docstring, `positive`, the function without its docstring, and `function`,
its name. All functions of a top-level module, such as `json`, are on one side, and no text is on both. One version of
CPython gives one pair of files, which `data.data_files` and `data.eval_files` can name. `words` prints the figures of
`ds-encdec evaluate --task retrieval` for rankings that know nothing but words: BM25 (Lucene's, k1 1.2, b 0.75) and the
cosine of TF-IDF, with the words within names (`readLine`, `read_line`) and with whole names.
"""

import ast
import hashlib
import json
import re
import sys
import sysconfig
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ds_encdec.evaluate.embedding_tasks import rank_figures, read_retrieval

HELD_OUT = 0.2  # of the modules
FEWEST_WORDS = 4  # of a query
LONGEST = 1000  # characters of a function; the rest is cut off
SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "tkinter", "turtledemo"}
WORDS = {
    "words": re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"),
    "whole names": re.compile(r"\w+"),
}

Row = dict[str, str]


def rows_of(module: str, source: str) -> Iterator[Row]:
    """Yield a row for each function of a module that has a docstring and does something."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        query = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
        if len(query.split()) < FEWEST_WORDS:
            continue
        start, docstring = node.lineno - 1, node.body[0]
        kept = [*lines[start : docstring.lineno - 1], *lines[docstring.end_lineno : node.end_lineno]]
        text = textwrap.dedent("\n".join(kept)).strip()[:LONGEST]
        yield {"query": query, "positive": text, "function": f"{module}.{node.name}"}


def is_held_out(module: str) -> bool:
    return int(hashlib.sha256(module.partition(".")[0].encode()).hexdigest()[:8], 16) / 16**8 < HELD_OUT


def split(library: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows for training, and those held out."""
    sides: tuple[list[Row], list[Row]] = ([], [])
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if not SKIPPED & {*place.parts} and not place.parts[0].startswith("config-"):
            module = ".".join(place.with_suffix("").parts)
            sides[is_held_out(module)].extend(rows_of(module, path.read_text(encoding="utf-8", errors="replace")))
    train, held_out = sides
    known = {row[side] for row in train for side in ("query", "positive")}
    return train, [row for row in held_out if not known & {row["query"], row["positive"]}]


def make(out: Path) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "held_out"), split(Path(sysconfig.get_path("stdlib"))), strict=True):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{out / name}.jsonl: {len(rows):,} functions")


def words(text: str, kind: str = "words") -> Counter[str]:
    return Counter(word.lower() for word in WORDS[kind].findall(text))


def rankings(
    queries: Mapping[str, str], documents: Mapping[str, str], kind: str = "words"
) -> dict[str, dict[str, list[str]]]:
    """Return the hundred best documents for each query, by BM25 and by TF-IDF. Of equal ones the earlier is first."""
    ids, counted = list(documents), [words(text, kind) for text in documents.values()]
    postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, counts in enumerate(counted):
        for word, count in counts.items():
            postings[word].append((number, count))
    lengths = np.array([counts.total() for counts in counted])
    places = {word: np.array(found).T for word, found in postings.items()}
    rarity = {word: np.log(1 + (len(ids) - len(found) + 0.5) / (len(found) + 0.5)) for word, found in postings.items()}
    norms = np.zeros(len(ids))
    for word, (numbers, counts) in places.items():
        norms[numbers] += ((1 + np.log(counts)) * rarity[word]) ** 2
    norms = np.sqrt(norms).clip(min=1e-12)
    found: dict[str, dict[str, list[str]]] = {"BM25": {}, "TF-IDF": {}}
    for query, text in queries.items():
        scores = {name: np.zeros(len(ids)) for name in found}
        for word, times in words(text, kind).items():
            if word in places:
                numbers, counts = places[word]
                saturated = counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * lengths[numbers] / lengths.mean()))
                scores["BM25"][numbers] += times * rarity[word] * saturated
                weights = (1 + np.log(counts)) * (1 + np.log(times)) * rarity[word] ** 2
                scores["TF-IDF"][numbers] += weights / norms[numbers]
        for name, of_documents in scores.items():
            found[name][query] = [ids[number] for number in np.argsort(-of_documents, kind="stable")[:100]]
    return found


def judge(file: Path) -> dict[str, dict[str, float]]:
    """Return the figures of each ranking on a file of rows, or a folder in BEIR's layout."""
    data = read_retrieval(file)
    ranked = {kind: rankings(data.queries, data.documents, kind) for kind in WORDS}
    return {
        f"{name}, {kind}": rank_figures(found, data.gains)
        for kind, of_kind in ranked.items()
        for name, found in of_kind.items()
    }


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("make", "words"):
        sys.exit(__doc__)
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        for name, figures in judge(Path(sys.argv[2])).items():
            print(f"{name:20}", *(f"{figure} {value:.2f}" for figure, value in figures.items()))
