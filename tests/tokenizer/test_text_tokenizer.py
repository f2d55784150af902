"""The ids of texts: special tokens are only text there, whatever the text holds."""

import pickle
import pydoc_data.topics
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_vocabulary import oracle, qwen3_tokenizer

from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.tokenizer.load import builtin_tokenizer
from ds_encdec.tokenizer.sentinels import add_sentinels

CORPUS = list(pydoc_data.topics.topics.values())[:20]


@cache
def opened(name: str) -> TextTokenizer:
    tokenizer = qwen3_tokenizer() if name == "qwen3" else builtin_tokenizer(CORPUS, 700)
    add_sentinels(tokenizer, 4, mode_tokens=True)
    return TextTokenizer(tokenizer.backend_tokenizer)


WORDS = "the |'s|1|\n|  |\t|é|한|中|🙂|<extra_id_0>|<|endoftext|>|\ud83d"


@pytest.mark.parametrize("name", ["qwen3", "builtin"])
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(WORDS.split("|")), max_size=30).map("".join))
def test_special_tokens_are_text_and_half_a_pair_is_a_question_mark(name: str, text: str) -> None:
    ids = opened(name).encode(text)
    assert ids.dtype == np.int32
    backend = opened(name).backend
    assert backend.decode(ids.tolist(), skip_special_tokens=True) == text.replace("\ud83d", "?")
    assert backend.encode("<extra_id_0>").tokens == ["<extra_id_0>"]  # the tokenizer itself is as it was
    if name == "qwen3":
        assert ids.tolist() == oracle().encode_ordinary(text.replace("\ud83d", "?"))


def test_a_worker_loads_it_and_its_lane_without_torch(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_bytes(pickle.dumps(opened("qwen3")))
    code = (
        "import pickle, sys, ds_encdec.data.lane; t = pickle.load(open(sys.argv[1], 'rb')); "
        "print(t.encode('Hello').tolist(), *{'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tokenizer")], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == str(opened("qwen3").encode("Hello").tolist())
