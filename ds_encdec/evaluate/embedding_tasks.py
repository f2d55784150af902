"""Read the files that embeddings are judged by, and compute the figures: of pairs of sentences with scores (`sts`), and
of queries with the documents that answer them (`retrieval`). Figures are from 0 to 100, correlations from -100."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_encdec.base.types import DataError
from ds_encdec.config.file_rows import as_text, not_unicode
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.sources.local_files import CsvFiles, JsonLines
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.registry.objectives import text_columns
from ds_encdec.registry.source_kinds import kind_of_file

BEIR_FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")
Pairs = list[tuple[str, str, float]]  # two sentences, and how alike they are


class Retrieval(NamedTuple):
    """Texts by id, and for each query the documents that answer it, with whole numbers above 0: how well they do."""

    queries: dict[str, str]
    documents: dict[str, str]
    gains: dict[str, dict[str, int]]


def read_pairs(path: Path) -> Pairs:
    """Read rows of sentence1, sentence2 and score. Raises DataError."""
    names = {"sentence1": str, "sentence2": str, "score": float}
    pairs: Pairs = [tuple(_field(*row, name, kind) for name, kind in names.items()) for row in _rows(path)]
    if len({score for *_, score in pairs}) < 2:
        raise DataError(f"{path}: {len(pairs)} pairs without two different scores have no correlation; give others")
    return pairs


def read_retrieval(path: Path) -> Retrieval:
    """Read a folder in BEIR's layout, whose queries without an answer are left out; or rows as `data.objective:
    contrastive` reads them, where the documents are the different positives and negatives of all. Raises DataError."""
    if path.is_dir():
        return _read_folder(path)
    queries, documents, gains = dict[str, str](), dict[str, str](), dict[str, dict[str, int]]()  # first ids by text
    unmapped = DataConfig()
    for number, (place, row) in enumerate(_rows(path), 1):
        columns = text_columns(unmapped, row)
        answers = gains.setdefault(queries.setdefault(_field(place, row, columns["query"][0]), str(number)), {})
        for name in (*columns["positive"], *columns["negative"]):
            items = [] if row.get(name) in (None, "") else row[name]
            for index, item in enumerate(items if isinstance(items, list) else [items]):
                text = _field(place, {**row, name: _whole(item) if isinstance(item, dict) else item}, name)
                document = documents.setdefault(text, f"{number}.{name}.{index}")
                answers |= {document: 1} if name in columns["positive"] else {}
        if not answers:
            _field(place, row, columns["positive"][0])  # raises
    texts, corpus = ({id_: text for text, id_ in ids.items()} for ids in (queries, documents))
    return Retrieval(texts, corpus, gains)


def _read_folder(folder: Path) -> Retrieval:
    corpus, asked, judged = (folder / name for name in BEIR_FILES)
    documents, queries, gains = _texts(corpus), _texts(asked), dict[str, dict[str, int]]()
    for place, row in _rows(judged):
        query, document = _field(place, row, "query-id"), _field(place, row, "corpus-id")
        for file, known, id_ in ((asked, queries, query), (corpus, documents, document)):
            if id_ not in known:
                raise DataError(f"{place}: {file} has no _id {id_!a:.80}; mend it there or here, or remove the row")
        if (gain := _field(place, row, "score", int)) > 0:
            gains.setdefault(query, {})[document] = gain
    if not gains:
        raise DataError(f"{judged}: no query has a document with a score above 0; add such rows")
    return Retrieval({query: queries[query] for query in gains}, documents, gains)


def _texts(path: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for place, row in _rows(path):
        if (id_ := _field(place, row, "_id")) in texts:
            raise DataError(f"{place}: the _id {id_!a:.80} is not the first; mend or remove one of the rows")
        texts[id_] = _field(place, {**row, "text": _whole(row)}, "text")
    return texts


def _whole(document: Mapping[str, Any]) -> str:
    parts = (document.get(part) for part in ("title", "text"))
    return " ".join(str(part) for part in parts if part not in (None, "")).strip()


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row's place in words, and its fields."""
    reader = {"json": JsonLines, "csv": CsvFiles}.get(kind_of_file(path.name) or "")
    if reader is None or not path.is_file():
        is_there = "is no file of rows" if path.exists() else "does not exist"
        folder = f"retrieval also reads a folder with {', '.join(BEIR_FILES)}"
        raise DataError(f"{path} {is_there}; give a file of .jsonl, .csv or .tsv ({folder})")
    source, last = reader([str(path)], None), 0
    for number in range(len(source)):
        if isinstance(row := source.document(number), BadRow):
            raise DataError(f"{path.parent}/{row.problem}; mend or remove it")
        if row.record is not None:  # it is no blank line
            yield f"{path}, {source.row_word} {(last := number + 1)}", row.record
    if not last:
        raise DataError(f"{path} has no rows; give a file that has some")


def _field(place: str, row: Mapping[str, Any], name: str, kind: type = str) -> Any:
    with suppress(TypeError, ValueError):
        value = kind(text := as_text(row.get(name)))
        if text.strip() and not not_unicode(text) and (kind is str or math.isfinite(value)):
            return value
    what = {str: "text", int: "whole number", float: "number"}[kind]
    has = ", ".join(row)
    raise DataError(
        f"{place}: {name} is {row.get(name)!a:.80}, no {what}; mend it, or remove the row (it has {has:.200})"
    )


def correlations(similarities: Sequence[float], scores: Sequence[float]) -> dict[str, float]:
    """Return Spearman's and Pearson's correlation; 0 where all similarities are equal, and so say nothing."""

    def ranks(values: np.ndarray) -> np.ndarray:  # equal values have the mean of theirs
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (counts.cumsum() - (counts - 1) / 2)[places]

    one, other = np.array(similarities), np.array(scores)
    figures = {"spearman": (ranks(one), ranks(other)), "pearson": (one, other)}
    return {name: 100 * float(np.corrcoef(*both)[0, 1]) if np.ptp(one) else 0.0 for name, both in figures.items()}


def rank_figures(found: Mapping[str, Iterable[str]], gains: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return means over the queries of `gains` of nDCG@10 (as trec_eval has it: gains over the logarithm of the rank),
    MRR@10, and the shares of the answers within the first 1, 10 and 100 documents `found` for the query."""
    rows, discounts = list[list[float]](), 1 / np.log2(np.arange(2, 12))
    for query, answers in gains.items():
        got = np.array([answers.get(document, 0) for document in found[query]] + [0] * 10)
        ideal = np.array(sorted(answers.values(), reverse=True)[:10])
        first = next((rank for rank, gain in enumerate(got[:10], 1) if gain), math.inf)
        shares = (np.count_nonzero(got[:depth]) / len(answers) for depth in (1, 10, 100))
        ndcg = float(got[:10] @ discounts / (ideal @ discounts[: len(ideal)]))
        rows.append([ndcg, 1 / first, *shares])
    names = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
    return dict(zip(names, (100 * np.mean(rows, axis=0)).tolist(), strict=True))
