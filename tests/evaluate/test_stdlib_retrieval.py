"""The task made of the standard library, and the words that it is compared with."""

import json
import math
from pathlib import Path

import pytest
import stdlib_retrieval
from stdlib_retrieval import judge, make, rankings, rows_of, words

MODULE = '''
class Reader:
    def read_line(self):
        """Return the next line of the file.

        None at its end.
        """
        # the last one has no break
        return self.file.readline() or None

    def stub(self):
        """This one has no body at all."""

    def short(self):
        """Two words"""
        return 2
'''


def test_a_row_is_a_docstring_and_its_function_without_it() -> None:
    assert list(rows_of("json.reader", MODULE)) == [
        {
            "query": "Return the next line of the file.",
            "positive": "def read_line(self):\n    # the last one has no break\n"
            "    return self.file.readline() or None",
            "function": "json.reader.read_line",
        }
    ]
    assert words("readLine2 = HTTPServer.read_line") == {
        "read": 2, "line": 2, "2": 1, "http": 1, "server": 1
    }  # fmt: skip
    assert words("readLine2 = HTTPServer.read_line", "whole names") == {"readline2": 1, "httpserver": 1, "read_line": 1}


def test_sides_share_no_module_and_no_text_and_are_made_alike(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make(tmp_path / name)
    sides = []
    for side in ("train", "held_out"):
        content = (tmp_path / "one" / f"{side}.jsonl").read_bytes()
        assert content == (tmp_path / "two" / f"{side}.jsonl").read_bytes()
        sides.append([json.loads(line) for line in content.splitlines()])
    modules = [{row["function"].partition(".")[0] for row in rows} for rows in sides]
    texts = [{row[side] for row in rows for side in ("query", "positive")} for rows in sides]
    assert not modules[0] & modules[1]
    assert not texts[0] & texts[1]
    assert len(sides[0]) > len(sides[1]) > 300
    assert not any(row["query"] in row["positive"] for rows in sides for row in rows if row["query"].endswith("."))
    figures = judge(tmp_path / "one" / "held_out.jsonl")
    documents = len({row["positive"] for row in sides[1]})
    assert list(figures) == ["BM25, words", "TF-IDF, words", "BM25, whole names", "TF-IDF, whole names"]
    for name in figures:
        assert figures[name]["recall@10"] > 10 * 100 * 10 / documents  # ten times what drawing lots would find


def test_rankings_of_words_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {"a": "read file", "b": "read read line of file", "c": "open socket", "d": "close socket"}
    found = rankings({"q": "read the line", "none": "unknown"}, documents)
    assert found["BM25"] == found["TF-IDF"] == {"q": ["b", "a", "c", "d"], "none": ["a", "b", "c", "d"]}
    scores = []
    sort = stdlib_retrieval.np.argsort
    monkeypatch.setattr(
        stdlib_retrieval.np, "argsort", lambda values, kind: (scores.append(-values), sort(values, kind=kind))[1]
    )
    rankings({"q": "read line"}, documents)
    length, mean = 5, 11 / 4
    rare, common = math.log(1 + 3.5 / 1.5), math.log(1 + 2.5 / 2.5)
    norm = 1.2 * (0.25 + 0.75 * length / mean)
    assert scores[0][1] == pytest.approx(common * 2 * 2.2 / (2 + norm) + rare * 2.2 / (1 + norm))
    weights = {"read": (1 + math.log(2)) * common, "line": rare, "of": rare, "file": common}
    size = math.sqrt(sum(weight**2 for weight in weights.values()))
    assert scores[1][1] == pytest.approx((weights["read"] * common + weights["line"] * rare) / size)
