"""tiktoken's ids are the tokenizer's own on any text, or are not used."""

from __future__ import annotations

import json
import logging
import pickle
import pydoc_data.topics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_vocabulary import qwen3_tokenizer
from tokenizers import AddedToken, Tokenizer

from ds_encdec.data.text_tokenizer import TextTokenizer, slow_ids, tiktoken_form
from ds_encdec.tokenizer.load import builtin_tokenizer
from ds_encdec.tokenizer.sentinels import add_sentinels

CORPUS = list(pydoc_data.topics.topics.values())[:20]


@cache
def opened(name: str) -> TextTokenizer:
    tokenizer = qwen3_tokenizer() if name == "qwen3" else builtin_tokenizer(CORPUS, 700)
    add_sentinels(tokenizer, 4, mode_tokens=True)
    # As in Qwen3's file: some added tokens are not special, and found in any text.
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return TextTokenizer(tokenizer.backend_tokenizer)


WORDS = "the |'s|'LL|ſ|1|23|\n|\r\n|  |\t|\u00a0|\u0301|\u0323|é|\u1100|\u1161|한|中|🙂|\u200d|\U00016d63|\U00016d67|()"
PIECES = st.sampled_from([*WORDS.split("|"), "<tool>", "<extra_id_0>", "<|endoftext|>", "\ud83d"])


@pytest.mark.parametrize("name", ["qwen3", "builtin"])
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.lists(PIECES, max_size=30).map("".join) | st.text(st.characters(codec="utf-8")))
def test_any_text_has_the_tokenizers_own_ids(name: str, text: str) -> None:
    tokenizer = opened(name)
    assert tokenizer.faster is not None
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == slow_ids(tokenizer.backend, text.encode(errors="replace").decode()).tolist()


def test_documents_are_left_to_the_tokenizer_only_where_they_must_be() -> None:
    fast, backend = opened("qwen3").faster, opened("qwen3").backend
    assert fast is not None
    for text in (*CORPUS, "naïve “quotes” — 日本語", "cafe\u0301", "é" * 8_000 + "\n" + "é" * 8_000, ""):
        assert np.array_equal(fast.encode(text, backend), slow_ids(backend, text))
    for text in ("a <tool> b", "x" * 20_000, "a" + " \n" * 20_000):
        assert fast.encode(text, backend) is None


@pytest.mark.parametrize("text", ["a" * 10**6, "\n\t" * 500_000])
def test_a_long_run_ends_no_process(text: str) -> None:
    assert np.array_equal(opened("builtin").encode(text), slow_ids(opened("builtin").backend, text))


def changed(**changes: Any) -> Tokenizer:
    spec = json.loads(opened("builtin").backend.to_str())
    for path, value in changes.items():
        *above, name = path.split("__")
        inner = spec
        for key in above:
            inner = inner[key]
        inner[name] = value
    return Tokenizer.from_str(json.dumps(spec))


def test_other_kinds_of_tokenizers_do_it_themselves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    merges = json.loads(opened("builtin").backend.to_str())["model"]["merges"]
    for why, changes in {
        "normalizer": {"normalizer": {"type": "Lowercase"}},
        "rules": {"pre_tokenizer__add_prefix_space": True},
        "plain BPE": {"model__dropout": 0.1},
        "another order": {"model__merges": merges[::-1]},
        "do not lead to its token": {"model__merges": [["t", "h"], ["h", "e"], ["t", "he"]]},
        "cuts off": {"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}},
    }.items():
        caplog.clear()
        assert tiktoken_form(changed(**changes)) is None, why
        assert why.strip() in caplog.text
    assert tiktoken_form(changed(model__ignore_merges=True, normalizer={"type": "NFC"})) is not None


def test_a_worker_loads_it_and_its_lane_without_torch(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_bytes(pickle.dumps(opened("qwen3")))
    code = (
        "import pickle, sys, ds_encdec.data.lane; t = pickle.load(open(sys.argv[1], 'rb')); "
        "print(t.encode('Hello <tool>').tolist(), t.faster is not None, "
        "*{'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tokenizer")], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split("]")[1].split() == ["True"]
    assert answer.stdout.startswith(str(opened("qwen3").encode("Hello <tool>").tolist()))
