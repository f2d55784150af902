"""A value on the command line is read whole, or refused with the form that is."""

import json
import re
import shlex
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_encdec.config.settings import Problem
from ds_encdec.config.yaml.text import parse_value, read_settings


def read(text: str) -> tuple[Any, str]:
    """The value of `data.input_template=TEXT`, and what is wrong with it."""
    problems: list[Problem] = []
    found = dict(read_settings([f"data.input_template={text}"], problems))
    return found.get("data.input_template"), "; ".join(problem.message for problem in problems)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (" 3 ", 3),
        ("", None),
        ("null", None),
        ("  ", "  "),
        ("a: b", "a: b"),
        ("- {question}", "- {question}"),
        ("*.jsonl", "*.jsonl"),
        ("&a b", "&a b"),
        ("one\n\ntwo ", "one\n\ntwo "),
        ("run#7", "run#7"),
        ("Q {question} # one word", "Q {question} # one word"),
        ("#7", "#7"),
        ("### Question\n{question}", "### Question\n{question}"),
        ("it's # so", "it's # so"),
        ('it\'s "so"', 'it\'s "so"'),
        ("[1, {a: '# b'}]", [1, {"a": "# b"}]),
        ('"Q # {question}\\n"', "Q # {question}\n"),
    ],
)
def test_what_is_read(text: str, value: Any) -> None:
    assert read(text) == (value, "")


REFUSED = ("{question}", "{{question}}", "{question} in a word", "{question}: {answer}", '"Q": {question}')
REFUSED += ("[INST] {question}", '"a" # b', "[a] # b", '"a\nb"', "[a, # b\n c]")


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_with_the_form_that_is_read(text: str) -> None:
    value, message = read(text)
    assert value is None
    (word,) = shlex.split(re.search(r"as text it is (.*)$", message)[1])
    assert read(word.removeprefix("data.input_template=")) == (text, "")


@given(st.text(st.sampled_from("ab1# :,[]{}\"'\n-\\!&*|>%~.e")) | st.text())
@example("# a")
def test_nothing_is_cut(text: str) -> None:
    value, message = read(text)
    if isinstance(value, str) and not message and text[:1] not in "\"'" and text.strip()[:1] not in "\"'":
        assert value == text
    elif not message and value is not None and not isinstance(value, str):
        assert parse_value(text) == value
        assert "#" not in re.sub(r"\"(?:\\.|[^\"])*\"|'(?:''|[^'])*'|(?<=\S)#", "", text, flags=re.DOTALL)
    if text.isprintable():
        assert read(json.dumps(text, ensure_ascii=False)) == (text, "")
