"""Fine-tuning data: what becomes of a record, of rows that nothing can be made of, of conversations; and the splits."""

import gzip
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_parts import (
    SFT_ROWS,
    byte_tokenizer,
    chat_tokenizer,
    make_data,
    plain_batches,
    read_until,
    sft_config,
    write_rows,
)
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.base.types import CheckpointError, ConfigError, DataError, Document
from ds_encdec.config.schema import FullConfig, read_config
from ds_encdec.data.examples.sft import ChatTemplate, PairMaker
from ds_encdec.data.fingerprint import usable_records
from ds_encdec.data.inspection import split_examples
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.training.absent import look_here

QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"
EOS = "<|im_end|>"
TOKENIZER, VOCABULARY = chat_tokenizer()
ALL_TRAIN: dict[str, Any] = {"train_split_ratio": 1.0, "training": {"eval_samples": 0}}
data_of = partial(make_data, parts=(TOKENIZER, VOCABULARY))


def maker_of(**fields: Any) -> PairMaker:
    return PairMaker(sft_config("", **fields).data, 0, TOKENIZER, VOCABULARY)


def texts_of(maker: PairMaker, record: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = maker.read(Document("row", "", record=record))
    assert not isinstance(pairs, BadRow), pairs.problem
    return [(TOKENIZER.decode(given), TOKENIZER.decode(wanted)) for given, wanted in pairs]


def test_a_bos_alone_is_an_empty_input() -> None:
    target = np.array([7, VOCABULARY.eos_id])
    for bos, empty, full in ((None, [], [7]), (5, [5], [5, 7])):
        maker = PairMaker(sft_config("").data, 0, TOKENIZER, replace(VOCABULARY, bos_id=bos))
        pairs = [(np.array(source, dtype=int), target) for source in (empty, full)]
        assert [holds for _, holds in maker.checked(pairs, "row")] == [False, True]


fragments = st.lists(
    st.sampled_from([EOS, "<|endoftext|>", "<extra_id_0>", "<|im_", "end|>", "é😀", " a\n", "{", "}}"])
)


@given(fragments.map("".join), fragments.map("".join))
def test_ids_decode_to_the_rendered_texts_and_only_templates_make_special_ones(given_text: str, text: str) -> None:
    maker = maker_of(input_template="<extra_id_3>{a}|{b}{{}}<|endoftext|>", output_template="{b}")
    ((encoder_ids, decoder_ids),) = maker.read(Document("", "", record={"a": given_text, "b": text + "."}))  # type: ignore[misc]
    assert TOKENIZER.decode(encoder_ids) == f"<extra_id_3>{given_text}|{text}.{{}}<|endoftext|>"
    assert TOKENIZER.decode(decoder_ids) == f"{text}.{EOS}"
    assert encoder_ids.dtype == decoder_ids.dtype == np.int32
    assert [i for i in encoder_ids if i >= 256] == [VOCABULARY.sentinel_ids[3], VOCABULARY.pad_id]
    assert [i for i in decoder_ids if i >= 256] == [VOCABULARY.eos_id]


def test_a_field_may_have_another_column_be_nested_and_be_a_number() -> None:
    mapping = {"q": "data.question", "a": "answers.1"}
    maker = maker_of(input_template="{q}?", output_template="{a} {n}<|im_end|>", field_mapping=mapping)
    record = {"data": {"question": "why"}, "answers": ["no", "yes"], "n": 1.5}
    assert texts_of(maker, record) == [("why?", f"yes 1.5{EOS}")]  # one EOS, whoever writes it


def fields(output: Any, **more: Any) -> dict[str, Any]:
    return {"instruction": "a", "input": "b", "output": output, **more}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def said(*turns: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [turn("user", "u"), *turns], **row}


UNUSABLE: list[dict[str, Any]] = [
    {"instruction": "a", "input": "b"},
    *(fields(output) for output in (["c"], 10**5000, " \n", "c \ud83d")),
    *({"messages": messages} for messages in ([], "[" * 100_000, {"role": "user"}, [{"content": "hi"}])),
    said(turn("Assistant", "x")),
    said(turn("assistant", "a"), tools=3),
    said(turn("assistant", "A", weight=0.5)),
    said(turn("assistant", "A", loss_mask=0)),
    {"messages": [turn("system", "s"), turn("assistant", "A")], "system": "t"},
    said(turn("assistant", "A"), system=3),
    said(turn("assistant", "A"), weight=2),
    {"conversations": [{"from": "narrator", "value": "u"}]},
]


def test_a_row_of_which_nothing_can_be_made_is_bad_and_says_why(golden: Callable[[object], None]) -> None:
    rows = [maker_of().read(Document("data.jsonl:7", "", record=record)) for record in UNUSABLE]
    problems = "\n".join(row.problem if isinstance(row, BadRow) else "no bad row" for row in rows)
    golden(re.sub(r"\((Exceeds|Expecting|maximum) .*\)", "(PYTHON)", problems))


def test_bad_rows_stop_the_run_or_are_counted(tmp_path: Path) -> None:
    rows = [row if i % 10 else {**row, "output": None} for i, row in enumerate(SFT_ROWS)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: its field \{output\} has no value.*on_bad_row=skip"):
        data_of(sft_config(path))
    data = data_of(sft_config(path, on_bad_row="skip", **ALL_TRAIN))
    read_until(data, 1)
    assert count_rows(data.loader.state()).bad[0] == 12
    with pytest.raises(DataError, match=r"the data set is empty.*\{nothing\}"):
        data_of(sft_config(path, on_bad_row="skip", input_template="{nothing}"))


def converter_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_rows.py").write_text(
        "def both(row):\n    return [{'instruction': 'i', 'input': row['n'], 'output': o} for o in row['os']]\n"
        "def breaks(row):\n    return row['not there']\n"
        "def text(row):\n    return 'text'\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)


def test_a_converter_from_the_working_folder_in_data_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter_module(tmp_path, monkeypatch)
    maker = maker_of(converter="my_rows:both", input_template="{input}", output_template="{output}")
    assert texts_of(maker, {"n": 3, "os": ["a", "b"]}) == [("3", "a" + EOS), ("3", "b" + EOS)]
    assert texts_of(maker, {"n": 3, "os": []}) == []
    for name, problem in (("breaks", "raised KeyError: 'not there'"), ("text", "returned str, and must return a dict")):
        row = maker_of(converter=f"my_rows:{name}").read(Document("k", "", record={}))
        assert isinstance(row, BadRow)
        assert f"k: data.converter=my_rows:{name} {problem}" in row.problem
    with pytest.raises(ConfigError, match=r"data\.converter=my_rows:none\b.*AttributeError"):
        maker_of(converter="my_rows:none")

    path = write_rows(tmp_path / "a.jsonl", [{"n": i, "os": [f"{i}a", f"{i}b"]} for i in range(60)])
    config = sft_config(path, converter="my_rows:both", preprocessing_num_workers=1)
    there, here = data_of(config), data_of(sft_config(path, converter="my_rows:both"))
    try:
        assert plain_batches(next(there.loader)) == plain_batches(next(here.loader))
    finally:
        there.loader.close()
    (tmp_path / "my_rows.py").write_text((tmp_path / "my_rows.py").read_text() + "# changed\n")
    assert data_of(config).fingerprint["converter"] != here.fingerprint["converter"]


def test_a_conversation_goes_through_the_chat_template() -> None:
    call = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": f"one {EOS} two"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "assistant", "content": "three\n"},
    ]
    record = {"messages": messages, "tools": json.dumps([{"type": "function"}])}
    (last,) = texts_of(maker_of(), record)
    start = f'Tools: [{{"type": "function"}}]\n# user\none {EOS} two{EOS}\n# assistant\n'
    called = f"<call>{json.dumps(call)}"
    assert last == (f"{start}{called}{EOS}\n# tool\n3{EOS}\n# assistant\n", f"three\n{EOS}")
    assert texts_of(maker_of(chat_targets="every"), record) == [(start, called + EOS), last]

    ((encoder_ids, _),) = maker_of().read(Document("", "", record=record))  # type: ignore[misc]
    assert (encoder_ids == VOCABULARY.eos_id).sum() == 3  # those of the template, not the user's
    bare, _ = byte_tokenizer()
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        PairMaker(sft_config("").data, 0, bare, VOCABULARY).read(Document("k", "", record=record))


def test_of_every_turn_those_that_nothing_can_be_learnt_from_are_passed_over() -> None:
    def spoken(*texts: str) -> dict[str, Any]:
        return {"messages": [turn("assistant" if text in ("A", "B", "") else "user", text) for text in texts]}

    maker = maker_of(chat_targets="every")
    maker.chat = ChatTemplate({"default": "{{ messages[0].role }}" + TOKENIZER.chat_template}, {})
    assert [wanted for _, wanted in texts_of(maker, spoken("A", "u", "", "v", "B"))] == ["B" + EOS]
    for turns, problem in ((["A"], "the chat template fails"), (["u", ""], "its output is empty")):
        row = maker.read(Document("k", "", record=spoken(*turns)))
        assert isinstance(row, BadRow)
        assert problem in row.problem


def test_turns_and_rows_of_weight_0_are_not_learnt() -> None:
    def learnt(*messages: dict[str, Any], every: bool = True, **row: Any) -> list[str]:
        maker = maker_of(chat_targets="every" if every else "last")
        return [wanted for _, wanted in texts_of(maker, {"messages": [*messages], **row})]

    user, first, last = turn("user", "u", weight=1), turn("assistant", "A"), turn("assistant", "B")
    assert learnt(user, first, user, last) == ["A" + EOS, "B" + EOS]
    for no in ({"weight": 0}, {"train": False}, {"loss_scale": 0.0}, {"weight": 1, "trainable": "false"}):
        assert learnt(user, first, user, last | no) == learnt(user, first, user, last | no, every=False) == ["A" + EOS]
        assert learnt(user, first | no, user, last) == ["B" + EOS]
        assert learnt(user, first | no, user, last | no) == []
    assert learnt(user, first, user, last | {"weight": None}, every=False) == ["B" + EOS]
    assert [learnt(user, first, weight=weight) for weight in ("0", False, None, 1.0)] == [[], [], *[["A" + EOS]] * 2]
    (whole,) = texts_of(maker_of(), {"messages": [user, first | {"weight": 0}, user, last]})
    assert "A" in whole[0]  # it is read

    assert texts_of(maker_of(), fields("c", weight=0)) == []
    assert texts_of(maker_of(weight_column=None), fields("c", weight=0)) != []
    assert texts_of(maker_of(weight_column="keep"), fields("c", keep=0, weight=0.3)) == []
    assert texts_of(maker_of(input_template="{weight}"), fields("c", weight=70.5)) != []  # a field like any other


def test_a_checkpoint_records_whether_rows_were_conversations(tmp_path: Path) -> None:
    chats = [{"messages": [turn("user", f"u{i}"), turn("assistant", "A")]} for i in range(400)]
    unlearnt = [{**row, "weight": 0} for row in SFT_ROWS]
    for rows, forms in ((unlearnt + chats, ["chat template"]), (SFT_ROWS + chats, ["chat template", "templates"])):
        saved = data_of(sft_config(write_rows(tmp_path / "a.jsonl", rows), on_long_row="skip")).saved()
        assert saved["input_forms"] == forms


def test_sharegpt_rows_are_read_as_they_are(tmp_path: Path) -> None:
    spoken = [("system", "be kind"), ("human", "u"), ("gpt", "A"), ("human", "v"), ("gpt", "B")]
    theirs = {"conversations": [{"from": speaker, "value": text} for speaker, text in spoken], "id": "x"}
    roles = {"human": "user", "gpt": "assistant"}
    every = maker_of(chat_targets="every")
    expected = texts_of(every, {"messages": [turn(roles.get(speaker, speaker), text) for speaker, text in spoken]})
    beside = {"conversations": theirs["conversations"][1:], "system": "be kind"}
    for record in (theirs, beside, theirs | {"system": None}):
        assert texts_of(every, record) == expected
    theirs["conversations"][2]["weight"] = 0
    assert texts_of(every, theirs) == expected[1:]
    call = {"name": "add", "arguments": {"a": 1}}
    tools = [("human", "u"), ("function_call", json.dumps(call)), ("observation", "3"), ("gpt", "three")]
    (last,) = texts_of(maker_of(), {"conversations": [{"from": one, "value": text} for one, text in tools]})
    assert f"<call>{json.dumps([{'type': 'function', 'function': call}])}{EOS}\n# tool\n3" in last[0]
    # Rows that fill the templates are none of a conversation.
    assert texts_of(maker_of(), {**theirs, **fields("c")}) == texts_of(maker_of(), fields("c"))


def test_a_set_that_cannot_be_evaluated_on_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", SFT_ROWS)
    (tmp_path / "empty.jsonl").touch()
    sets = {"hard": {"eval_files": str(tmp_path / "empty.jsonl")}}
    with pytest.raises(DataError, match=r"data\.eval_sets\.hard: the files or the split"):
        data_of(sft_config(path, on_long_row="skip", eval_sets=sets), evaluation_cache=tmp_path)


def test_long_rows_stop_the_run_are_left_out_or_cut_off_and_are_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", SFT_ROWS)
    long = {f"a.jsonl:{i}" for i, row in enumerate(SFT_ROWS) if len(f"### Response:\n{row['output']}") + 1 > 40}
    data = data_of(sft_config(path, max_decoder_length=40, **ALL_TRAIN))
    told = r"a\.jsonl:\d+: the output has \d+, EOS included, above data.max_decoder_length=40\. Raise"
    with pytest.raises(DataError, match=told):
        read_until(data, 1)
    seen: dict[str, list[Any]] = {}
    for word in ("skip", "truncate"):
        data = data_of(sft_config(path, max_decoder_length=40, on_long_row=word, **ALL_TRAIN))
        while data.loader.epoch < 1:
            for batch in next(data.loader):
                seen.setdefault(word, []).extend(zip(batch.documents, batch.decoder_lengths, strict=True))
        assert count_rows(data.loader.state()).long[0] == len(long)
    assert not {key for key, _ in seen["skip"]} & long
    assert {length for key, length in seen["truncate"] if key in long} == {40}


def test_a_run_that_a_long_row_has_stopped_goes_on_without_it(tmp_path: Path) -> None:
    """It has met none before, so nothing that it has read would be otherwise."""
    path = write_rows(tmp_path / "a.jsonl", [*SFT_ROWS, *SFT_ROWS, *SFT_ROWS, {**SFT_ROWS[0], "output": "x" * 70}])
    stopped, skipping = (sft_config(path, on_long_row=word, **ALL_TRAIN) for word in ("stop", "skip"))
    first, whole = data_of(stopped), data_of(skipping)
    next(first.loader), next(whole.loader)
    saved, records = (json.loads(json.dumps(one)) for one in (first.saved(), first.loader.state()))
    resumed = data_of(skipping, saved=saved)
    assert usable_records(records, saved["fingerprint"], resumed.fingerprint) == records
    resumed.loader.load_state(records)
    for _ in range(20):
        assert plain_batches(next(resumed.loader)) == plain_batches(next(whole.loader))
    assert count_rows(resumed.loader.state()).long[0]
    with pytest.raises(CheckpointError, match=r"on_long_row: skip there, stop now"):
        data_of(stopped, saved=whole.saved())


WEIGHED = [{**row, "weight": i % 2} for i, row in enumerate(SFT_ROWS)]


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "a.parquet", row_group_size=30)
    return {"dataset_name": "parquet", "data_files": str(path / "a.parquet")}


def streamed(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (path / "rows").mkdir()
    write_rows(path / "rows/a.jsonl", rows)
    return {"dataset_name": str(path / "rows"), "data_files": None, "streaming": True}


Writer = Callable[[Path, list[dict[str, Any]]], dict[str, Any]]


@pytest.mark.parametrize("source", [as_parquet, streamed])
def test_every_kind_of_source_gives_whole_rows_without_those_of_weight_0(source: Writer, tmp_path: Path) -> None:
    config = sft_config("", **{**source(tmp_path, WEIGHED), **ALL_TRAIN})
    texts = {TOKENIZER.decode(one.decoder_ids[:-1]) for one in split_examples(config, TOKENIZER, VOCABULARY, "train")}
    assert texts == {f"### Response:\n{row['output']}" for row in WEIGHED if row["weight"]}
    data = data_of(config, num_lanes=1)
    assert len(read_until(data, 2)) == len(texts) == 60
    assert data.loader.state()[0]["skipped_documents"] >= 60


def test_splits_are_apart_and_own_files_take_their_place(tmp_path: Path) -> None:
    path, own = write_rows(tmp_path / "a.jsonl", SFT_ROWS), write_rows(tmp_path / "own.jsonl", SFT_ROWS[:7])

    def keys(config: FullConfig) -> dict[str, list[str]]:
        splits: Any = ("train", "validation", "test")
        return {split: [one.key for one in split_examples(config, TOKENIZER, VOCABULARY, split)] for split in splits}

    config = sft_config(path, train_split_ratio=0.7)
    found = keys(config)
    assert sorted(chain(*found.values())) == sorted(f"a.jsonl:{i}" for i in range(120))
    assert 60 < len(found["train"]) < 105
    assert min(len(found["validation"]), len(found["test"])) > 5
    data = data_of(config)
    assert read_until(data, 1) <= set(found["train"])
    first = split_examples(config, TOKENIZER, VOCABULARY, "validation", 3)
    assert [one.key for one in first] == found["validation"][:3] == [one.document for one in data.eval_examples()][:3]

    mine = keys(sft_config(path, eval_files=own, train_split_ratio=0.7))
    assert mine["validation"] != found["validation"]
    assert sorted(mine["validation"]) == [f"own.jsonl:{i}" for i in range(7)]
    assert set(mine["train"]) > set(found["train"])
    alone = keys(sft_config(path, eval_files=own, test_files=own))
    assert (len(alone["train"]), len(alone["test"])) == (120, 7)
    other = data_of(sft_config(path, eval_files=own))
    assert {one.document for one in other.eval_examples()} == {f"own.jsonl:{i}" for i in range(7)}
    assert set(other.fingerprint) - set(data.fingerprint) == {"evaluation sources"}
    with pytest.raises(DataError, match=r"the split test is empty; .*val_test_split_ratio, data\.test_files"):
        split_examples(sft_config(path, val_test_split_ratio=1.0), TOKENIZER, VOCABULARY, "test")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_template": "{a"}, "is no template"),
        ({"field_mapping": {"intruction": "a"}}, "no template has a field intruction: .*did you mean `instruction`"),
        ({"objective": "ul2", "chat_targets": "every"}, "ul2 does not read it: set objective=sft"),
        ({"train_split_ratio": 1.0, "training": {"eval_samples": 5}}, "train_split_ratio < 1 and"),
        ({"dataset_name": "some/set", "data_files": None, "eval_files": "a"}, "to the kind of these files"),
    ],
)
def test_settings_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sft_config("a", **fields)


WRONG = {"input_template": '"{wrong}"'}
LOOKED_FOR: list[dict[str, str]] = [
    {"eval_files": "nowhere*.json", "converter": "my_rows:none"},
    WRONG | {"on_bad_row": "skip"},
    WRONG | {"data_files": "c.jsonl.gz"},
    *(
        WRONG | {"dataset_name": file.split(".")[1], "data_files": file, "eval_files": file}
        for file in ("b.json", "a.parquet")
    ),
    {"data_files": "chat.jsonl"},
    {"objective": "ul2", "text_column": "body"},
    {"dataset_name": "some/set"},
]


def test_validate_looks_for_what_the_data_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[object], None]
) -> None:
    converter_module(tmp_path, monkeypatch)
    write_rows(tmp_path / "a.jsonl", SFT_ROWS[:2])
    write_rows(tmp_path / "chat.jsonl", [{"messages": [{"role": "assistant", "content": "a"}]}])
    (tmp_path / "b.json").write_text(json.dumps(SFT_ROWS[:2], indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    as_parquet(tmp_path, SFT_ROWS)
    found = []
    for changed in LOOKED_FOR:
        fields = {"objective": "sft", "dataset_name": "json", "data_files": "a.jsonl"} | changed
        loaded = read_config(QUICKSTART, ["data.eval_fraction=0.005", *(f"data.{key}={fields[key]}" for key in fields)])
        look_here(loaded)
        try:
            loaded.valid()
            found.append(f"{changed}: no problem")
        except ConfigError as error:
            found.append(f"{changed}: {error}".replace(str(QUICKSTART.parent), "ds_configs"))
    golden("\n\n".join(found))


def test_values_are_written_as_json_spells_them_and_what_is_not_finite_is_bad() -> None:
    for value, text in ((True, "true"), (-0.0, "-0.0"), (10**30, str(10**30))):
        ((_, output),) = texts_of(maker_of(output_template="{output}"), fields(value))
        assert output == text + EOS
    bad = maker_of().read(Document("k", "", record=fields(math.nan)))
    assert isinstance(bad, BadRow)
    assert "its field {output} has no value" in bad.problem
