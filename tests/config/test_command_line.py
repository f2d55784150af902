"""`--word value` is a setting in every verb that takes settings; a value is read whole, or refused with the form that
is."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_encdec import cli
from ds_encdec.base.types import ConfigError
from ds_encdec.config.settings import Problem
from ds_encdec.config.words.rewording import given_fields
from ds_encdec.config.yaml.text import parse_value, read_settings


@pytest.mark.parametrize("verb", ["train", "validate", "evaluate"])
def test_verbs_read_words(verb: str) -> None:
    takes_file = "config" in cli.VERBS[verb].arguments
    words = ["--max_steps", "10", "--hf_model_id", "a/b", "--full_ft", *["a/x=1.yaml"][: 1 * takes_file]]
    words += ["--no_merge", "--output_dir=X", "lr=1e-4", "--verbose", "--training.bf16", "training.seed=3", "--fp16"]
    options, settings = cli.read_verb([verb, *(["--model", "folder"] if verb == "evaluate" else []), *words])
    assert getattr(options, "config", None) == (Path("a/x=1.yaml") if takes_file else None)
    assert options.verbose
    read = "--max_steps=10 --hf_model_id=a/b --full_ft=true --no_merge=true --output_dir=X lr=1e-4"
    assert settings == [*read.split(), "--training.bf16=true", "training.seed=3", "--fp16=true"]
    assert given_fields(settings) >= {"training.num_train_steps", "model.lora", "training.export_at_end"}
    if takes_file:
        with pytest.raises(ConfigError, match="both name a configuration"):
            cli.read_verb([verb, "quickstart", "--config", "b.yaml"])


def test_a_switch_takes_a_value_but_no_configuration() -> None:
    given = "estimate-memory --bf16 false --fp16 quickstart --torch_compile auto --gpus 4 --host_memory 1TB"
    options, settings = cli.read_verb(given.split())
    assert settings == ["--bf16=false", "--fp16=true", "--torch_compile=auto"]
    assert (options.config, options.gpus, options.host_memory) == (Path("quickstart"), 4, "1TB")


def read(text: str) -> tuple[Any, str]:
    """The value of `data.input_template=TEXT`, and what is wrong with it."""
    problems: list[Problem] = []
    found = dict(read_settings([f"data.input_template={text}"], problems))
    return found.get("data.input_template"), "; ".join(problem.message for problem in problems)


READ: dict[str, Any] = {"1e-4": 1e-4, " 3 ": 3, "": None, "[1, {a: '# b'}]": [1, {"a": "# b"}]}
READ |= {'"Q # {question}\\n"': "Q # {question}\n"}
READ |= {text: text for text in ("  ", "a: b", "*.jsonl", "one\n\ntwo ", "run#7", "Q {question} # one word", "#7")}


def test_what_is_read() -> None:
    for text, value in READ.items():
        assert read(text) == (value, "")


@pytest.mark.parametrize("text", ["{question} in a word", '"Q": {question}', '"a" # b', "[a] # b", "[a, # b\n c]"])
def test_what_is_refused_with_the_form_that_is_read(text: str) -> None:
    value, message = read(text)
    assert value is None
    (word,) = shlex.split(re.search(r"as text it is (.*)$", message)[1])
    assert read(word.removeprefix("data.input_template=")) == (text, "")


@given(st.text(st.sampled_from("ab1# :,[]{}\"'\n-\\!&*|>%~.e")) | st.text())
@example("# a")
def test_nothing_is_cut(text: str) -> None:
    value, message = read(text)
    if isinstance(value, str) and not message and text.strip()[:1] not in "\"'":
        assert value == text
    elif not message and value is not None and not isinstance(value, str):
        assert parse_value(text) == value
        assert "#" not in re.sub(r"\"(?:\\.|[^\"])*\"|'(?:''|[^'])*'|(?<=\S)#", "", text, flags=re.DOTALL)
