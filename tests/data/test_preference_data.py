"""Preference data: what becomes of a row with two answers, of rows that nothing can be made of, of long pairs."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parts import byte_tokenizer, chat_tokenizer, make_config, make_data, read_until, write_rows
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_encdec.base.types import ConfigError, DataError, Document
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.data.build import prepare_data
from ds_encdec.data.examples.preferences import PreferenceMaker
from ds_encdec.data.examples.protocol import Made
from ds_encdec.data.inspection import inspect_data
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.registry.objectives import OBJECTIVES

QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"
EOS = "<|im_end|>"
TOKENIZER, VOCABULARY = chat_tokenizer()
data_of = partial(make_data, parts=(TOKENIZER, VOCABULARY))
TEXTS = {"input_template": "{prompt}", "output_template": "{output}", "eval_fraction": 0.005}


def dpo_config(path: str = "", **fields: Any) -> FullConfig:
    defaults = {"objective": "dpo", "dataset_name": "json", "data_files": path} | TEXTS
    return make_config(**{**defaults, **fields})


def maker_of(**fields: Any) -> PreferenceMaker:
    return PreferenceMaker(dpo_config(**fields).data, 0, TOKENIZER, VOCABULARY)


def texts_of(record: dict[str, Any], maker: PreferenceMaker | None = None) -> list[tuple[str, ...]]:
    read = (maker or maker_of()).read(Document("row", "", record=record))
    assert not isinstance(read, BadRow), read.problem
    return [tuple(map(TOKENIZER.decode, sides)) for sides in read]


def problem_of(record: dict[str, Any], **fields: Any) -> str:
    read = maker_of(**fields).read(Document("data.jsonl:7", "", record=record))
    assert isinstance(read, BadRow)
    return read.problem


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, YES, NO = says("user", "why"), says("assistant", "yes"), says("assistant", "no")
CHAT = [(f"# user\nwhy{EOS}\n# assistant\n", f"yes{EOS}", f"no{EOS}")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},  # TRL's explicit prompt
        {"chosen": [USER, YES], "rejected": [USER, NO]},  # and its implicit one
        {"prompt": "why", "chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, YES], "score_chosen": 9.0},
        {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "why", "chosen": [YES], "rejected": [NO]},
        {"instruction": "why", "chosen": [YES], "rejected": [NO], "generations": []},
        {
            "conversations": [{"from": "human", "value": "why"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
    ],
    ids=lambda row: "-".join(row),
)
def test_every_form_of_conversations_is_one_pair(row: dict[str, Any]) -> None:
    assert texts_of(row) == CHAT
    assert maker_of().form(Document("", "", record=row)) == "chat template"


def test_longer_conversations_share_their_system_turn_and_tools() -> None:
    before = [USER, says("assistant", "so"), says("user", "and?")]
    tools = {"tools": json.dumps([{"type": "function"}]), "system": "be kind"}
    ((prompt, chosen, rejected),) = texts_of({"chosen": [*before, YES], "rejected": [*before, NO], **tools})
    assert prompt.startswith('Tools: [{"type": "function"}]\n# system\nbe kind')
    assert prompt.endswith(f"# assistant\nso{EOS}\n# user\nand?{EOS}\n# assistant\n")
    assert (chosen, rejected) == (f"yes{EOS}", f"no{EOS}")


TEXT = {"chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize("column", ["prompt", "question", "instruction", "input"])
def test_texts_go_through_the_templates(column: str) -> None:
    fields = {"input_template": "Q: {prompt}\n", "output_template": "A: {output}<|im_end|>"}
    assert texts_of({column: "why", **TEXT}, maker_of(**fields)) == [("Q: why\n", f"A: yes{EOS}", f"A: no{EOS}")]
    renamed = {"q": {"text": "why"}, "chosen_response": "yes", "rejected_response": "no", "system": "be"}
    own = maker_of(input_template="{system}|{prompt}", field_mapping={"prompt": "q.text"})
    assert texts_of(renamed, own) == [("be|why", f"yes{EOS}", f"no{EOS}")]


def test_texts_without_a_prompt_begin_with_it() -> None:
    rows = {
        ("The sky is blue.", "The sky is black."): ("The sky is", " blue.", " black."),
        ("H: a\n\nA: b c", "H: a\n\nA: b c d"): ("H: a\n\nA: b", " c", " c d"),
    }
    for (chosen, rejected), expected in rows.items():
        ((prompt, *answers),) = texts_of({"chosen": chosen, "rejected": rejected})
        assert (prompt, *(answer.removesuffix(EOS) for answer in answers)) == expected


UNUSABLE: list[dict[str, Any]] = [
    {"prompt": "why", "chosen": "yes"},
    {"prompt": "why", "rejected": "yes", "answer": "x"},
    {"prompt": "why", "chosen": "yes", "rejected": "yes"},
    {"prompt": "why", "chosen": "yes", "rejected": " \n"},
    {"prompt": "why", "chosen": "", "rejected": "no"},
    {"prompt": " ", **TEXT},
    TEXT,
    {"prompt": "why", "chosen": 3, "rejected": ["no"]},
    {"question": "why", "input": "x", **TEXT},
    {"prompt": "why", "chosen": [YES], "rejected": "no"},
    {"chosen": [USER, YES], "rejected": [says("user", "who"), NO]},
    {"chosen": [YES], "rejected": [NO]},
    {"chosen": [USER], "rejected": [USER, NO]},
    {"chosen": [], "rejected": []},
    {"prompt": [USER], "chosen": [USER], "rejected": [NO]},
    {"prompt": [USER], "chosen": [YES], "rejected": [says("assistant", "")]},
    {"prompt": [USER], "chosen": [YES], "rejected": [YES]},
    {"prompt": [USER], "chosen": [YES], "rejected": [NO], "weight": 2},
    {"prompt": [USER], "chosen": [says("user", "who"), YES], "rejected": [NO]},
    {"prompt": None, "chosen": "The sky is blue", "rejected": "The sky is black"},
]


def test_a_row_that_prefers_nothing_is_bad_and_says_why(golden: Callable[[object], None]) -> None:
    golden("\n".join(map(problem_of, UNUSABLE)))


words = st.text("ab <|im_end|>\n", min_size=1, max_size=12)


@given(words, words, words, st.booleans())
def test_ids_decode_to_the_texts_and_a_pair_keeps_its_order(
    prompt: str, chosen: str, rejected: str, as_chat: bool
) -> None:
    assume(prompt.strip() and chosen.strip() and rejected.strip() and chosen != rejected)
    row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if as_chat:
        answers = {name: [says("assistant", row[name])] for name in ("chosen", "rejected")}
        row = {"prompt": [says("user", prompt)], **answers}
    expected = f"# user\n{prompt}{EOS}\n# assistant\n" if as_chat else prompt
    read = maker_of().read(Document("row", "", record=row))
    assert not isinstance(read, BadRow)
    ((source, *targets),) = read
    assert TOKENIZER.decode(source) == expected
    assert [TOKENIZER.decode(target) for target in targets] == [chosen + EOS, rejected + EOS]
    for ids, specials in ((source, 1 if as_chat else 0), *((target, 1) for target in targets)):
        assert (ids == VOCABULARY.eos_id).sum() == specials  # what users write is ordinary text
        assert ids.dtype == np.int32
    (made,) = maker_of(max_encoder_length=999, max_decoder_length=999).examples(read, "row", 0)
    assert made.example is not None
    (given_ids, taken), (again, left) = made.example.segments
    assert given_ids is again is source or np.array_equal(given_ids, again)
    assert np.array_equal(taken, targets[0])
    assert np.array_equal(left, targets[1])


def made_of(row: dict[str, Any], **fields: Any) -> Made:
    maker = maker_of(max_encoder_length=8, max_decoder_length=6, **fields)
    read = maker.read(Document("row", "", record=row))
    assert not isinstance(read, BadRow)
    (made,) = maker.examples(read, "row", 0)
    return made


def test_long_pairs_are_left_out_cut_or_refused_as_a_whole() -> None:
    long_answer = {"prompt": "why", "chosen": "yes", "rejected": "no, never"}
    with pytest.raises(DataError, match=r"row: the output has 10, EOS included, above data\.max_decoder_length=6"):
        made_of(long_answer)
    with pytest.raises(DataError, match=r"the input has 9 tokens, above data\.max_encoder_length=8"):
        made_of({**TEXT, "prompt": "why, then"})
    assert made_of(long_answer, on_long_row="skip")[1:] == (None, True, True)
    cut = made_of(long_answer, on_long_row="truncate")
    assert cut.example is not None
    assert [TOKENIZER.decode(target) for _, target in cut.example.segments] == ["yes" + EOS, "no, ne"]
    # What the cut has made equal prefers nothing.
    same = {"prompt": "why", "chosen": "because of", "rejected": "because not"}
    assert made_of(same, on_long_row="truncate")[1:] == (None, True, True)


ROWS = [
    {"prompt": f"add {i}", "chosen": "x" * (i % 30) + f" is {i}", "rejected": "y" * (i % 23) + " no"} for i in range(80)
]
ALL_TRAIN: dict[str, Any] = {"train_split_ratio": 1.0, "training": {"eval_samples": 0}}


def test_both_answers_of_a_pair_are_in_one_micro_batch(tmp_path: Path) -> None:
    data = data_of(dpo_config(write_rows(tmp_path / "a.jsonl", ROWS), **ALL_TRAIN))
    seen: set[str] = set()
    for _ in range(20):
        for batch in next(data.loader):
            assert batch.group_sizes == (2,) * len(batch.documents)
            assert batch.num_losses == len(batch.documents)
            starts = batch.decoder_cu_seqlens.tolist()
            for number, document in enumerate(batch.documents):
                row = ROWS[int(document.rpartition(":")[2])] if ":" in document else None
                seen.add(document)
                for side, name in enumerate(("chosen", "rejected")):
                    first, end = starts[2 * number + side], starts[2 * number + side + 1]
                    if row is not None:
                        assert TOKENIZER.decode(batch.labels[first:end]) == row[name] + EOS
    assert len(seen) == len(ROWS)


def test_bad_pairs_are_counted_like_other_rows(tmp_path: Path) -> None:
    rows = [row if i % 10 else {**row, "rejected": row["chosen"]} for i, row in enumerate(ROWS)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"its chosen and its rejected answer are equal.*on_bad_row=skip"):
        data_of(dpo_config(path))
    data = data_of(dpo_config(path, on_bad_row="skip", **ALL_TRAIN))
    read_until(data, 1)
    assert count_rows(data.loader.state()).bad[0] == 8


def test_prepared_pairs_are_the_pairs(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    config = dpo_config(path, prepared_dir=str(tmp_path / "prepared"), **ALL_TRAIN)
    (line,) = prepare_data(config, TOKENIZER, VOCABULARY, 1)
    assert "80 rows" in line
    prepared, read = data_of(config), data_of(dpo_config(path, **ALL_TRAIN))
    for _ in range(3):
        for ours, theirs in zip(next(prepared.loader), next(read.loader), strict=True):
            assert ours.documents == theirs.documents
            assert ours.encoder_ids.equal(theirs.encoder_ids)
            assert ours.labels.equal(theirs.labels)


def test_a_look_at_the_data_shows_both_answers(tmp_path: Path) -> None:
    data = data_of(dpo_config(write_rows(tmp_path / "a.jsonl", ROWS[:9]), **ALL_TRAIN))
    shown = inspect_data(data, TOKENIZER, num_examples=1, as_json=False)
    number = re.search(r"encoder, \d+ tokens: add (\d)", shown)
    assert number is not None
    row = ROWS[int(number[1])]
    assert f"tokens: {row['chosen']}{EOS}" in shown
    assert f"tokens: {row['rejected']}{EOS}" in shown
    assert re.search(r"DPO +\d+ +100\.0% +100\.0%", shown)


def test_rows_for_the_maker_are_read_of_a_table() -> None:
    data = dpo_config().data
    columns = OBJECTIVES["dpo"].columns
    assert columns is not None
    had = ["prompt", "chosen", "rejected", "messages", "score_chosen", "weight", "tools", "id"]
    assert columns(data, had) == ["prompt", "chosen", "rejected", "weight", "tools"]
    assert columns(data, ["a", "b"]) == ["a", "b"]  # the error names what there is


def test_the_configuration_implies_templates_and_refuses_what_pairs_do_not_read(tmp_path: Path) -> None:
    base = {"data.objective": "dpo", "data.dataset_name": "json", "data.data_files": "a.jsonl"}

    def read(**more: Any) -> FullConfig:
        given = [f"{name}={json.dumps(value)}" for name, value in (base | more).items()]
        return load_config(QUICKSTART, [*given, "data.eval_fraction=0.005"])

    data = read().data
    assert (data.input_template, data.output_template) == ("{prompt}", "{output}")
    assert read(**{"data.input_template": "{prompt}!"}).data.input_template == "{prompt}!"
    for fields, message in (
        ({"data.output_template": "{answer}"}, r"must hold `\{output\}`"),
        ({"data.chat_targets": "every"}, "dpo does not read it"),
        ({"data.messages_column": "chat"}, "dpo does not read it"),
        ({"data.field_mapping": {"output": "x"}}, "no template has a field output"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**fields)
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "better": "a", "worse": "b"}])
    config = dpo_config(path)
    messages = [conflict.message for conflict in unusable_rows(config.data, config.model)]
    assert any(
        "a pair needs {chosen}" in message and "data.field_mapping.chosen=COLUMN" in message for message in messages
    )


def test_conversations_need_a_chat_template() -> None:
    bare, vocabulary = byte_tokenizer()
    maker = PreferenceMaker(dpo_config().data, 0, bare, vocabulary)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        maker.read(Document("k", "", record={"chosen": [USER, YES], "rejected": [USER, NO]}))
