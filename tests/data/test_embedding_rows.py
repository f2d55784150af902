"""Texts for an encoder alone: queries with what answers them, and texts with masked tokens."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parts import byte_tokenizer, write_rows

from ds_encdec.base.types import ConfigError, DataError, Document, Example
from ds_encdec.config.schema import DataConfig, FullConfig, read_config
from ds_encdec.data.build import build_data, example_maker, prepare_data
from ds_encdec.data.examples.protocol import ExampleMaker
from ds_encdec.data.inspection import inspect_run_data
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.training.absent import look_here
from ds_encdec.training.auto_batch.probe import full_batch

TOKENIZER, VOCABULARY = byte_tokenizer()


def maker_of(objective: str = "contrastive", **fields: Any) -> ExampleMaker:
    return example_maker(DataConfig(objective=objective, **fields), 3, TOKENIZER, VOCABULARY)


def made_of(record: dict[str, Any], **fields: Any) -> list[Example]:
    maker = maker_of(**fields)
    ids = maker.read(Document("row", "", record=record))
    assert not isinstance(ids, BadRow), ids.problem
    return [made.example for made in maker.examples(ids, "row", 0) if made.example is not None]


def texts_of(record: dict[str, Any], **fields: Any) -> list[list[str]]:
    return [[TOKENIZER.decode(ids) for ids, _ in one.segments] for one in made_of(record, **fields)]


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"anchor": "q", "positive": "p", "negative": "n"}, id="sentence-transformers"),
        pytest.param({"query": "q", "positive": "p", "negative_2": "m", "negative_1": "n"}, id="with numbers"),
        pytest.param({"query": "q", "pos": ["p"], "neg": ["n", "m"], "prompt": "x"}, id="FlagEmbedding"),
        pytest.param({"sentence1": "q", "sentence2": "p", "sentence3": "n", "label": 1}, id="sentences"),
        pytest.param({"sent0": "q", "sent1": "p", "hard_neg": "n"}, id="SimCSE"),
        pytest.param(
            {
                "query_id": 3,
                "query": "q",
                "positive_passages": [{"docid": "1", "title": "", "text": "p"}],
                "negative_passages": [{"docid": "2", "text": "n"}, {"docid": "3", "title": "m", "text": "m"}],
            },
            id="Tevatron",
        ),
        pytest.param({"question": "q", "answer": "p", "negatives": ["n"]}, id="questions"),
    ],
)
def test_the_columns_of_known_data_sets_are_found(record: dict[str, Any]) -> None:
    assert texts_of(record, num_negatives=1) == [["q", "p", "n"]]
    assert texts_of(record) == [["q", "p"]]


def test_fields_have_prefixes_and_may_be_named() -> None:
    record = {"q": {"text": "a"}, "docs": ["b", "c"], "others": [{"title": "t", "text": "d"}, "e"]}
    named = {"query": "q.text", "positive": "docs", "negative": "others"}
    prefixes = {"query_prefix": "Q: ", "document_prefix": "<|im_end|>"}
    found = made_of(record, field_mapping=named, num_negatives=2, **prefixes)
    shown = [[TOKENIZER.decode(ids) for ids, _ in one.segments] for one in found]
    assert shown == [["Q: a", *(f"<|im_end|>{text}" for text in (one, "t d", "e"))] for one in ("b", "c")]
    assert found[0].others[0][0][0] == VOCABULARY.eos_id  # of a prefix; in a field it is text
    assert len(made_of({"query": "<|im_end|>", "positive": "p"})[0].encoder_ids) == len("<|im_end|>")
    assert all(len(target) == 0 for one in found for _, target in one.segments)


@pytest.mark.parametrize(
    ("record", "fields", "problem"),
    [
        (
            {"query": "q"},
            {},
            "it has no positive text (column positive); it has query; set data.field_mapping.positive=",
        ),
        ({"text": "q"}, {}, "it has no query text (column query); it has text; set data.field_mapping.query=COLUMN"),
        ({"query": " ", "positive": "p"}, {}, "its query is empty"),
        ({"query": "q", "positive": ["p", ""]}, {}, "its positive is empty"),
        ({"query": "q", "positive": "q"}, {}, "its positive and its query are equal, so it teaches nothing"),
        (
            {"query": "q", "positive": "p", "negative": "p"},
            {"num_negatives": 1},
            "its positive and its negative are equal, so it teaches nothing",
        ),
        (
            {"query": "q", "positive": "p", "negatives": ["n"]},
            {"num_negatives": 2},
            "it has 1 negatives (column negatives), and data.num_negatives=2 needs as many; set data.num_negatives=1, "
            "or data.field_mapping.negative=COLUMN",
        ),
        ({"query": [[1]], "positive": "p"}, {}, "its field query is of type list, and must be text or a list of texts"),
    ],
)
def test_rows_that_teach_nothing_are_bad(record: dict[str, Any], fields: dict[str, Any], problem: str) -> None:
    found = maker_of(**fields).read(Document("row", "", record=record))
    assert isinstance(found, BadRow)
    assert found.problem.startswith(f"row: {problem}")


def test_long_texts_stop_are_left_out_or_cut() -> None:
    record = {"query": "query", "positive": "a longer text"}
    with pytest.raises(DataError, match=r"^row: a text has 13 tokens, above data\.max_encoder_length=8\. Raise that"):
        made_of(record, max_encoder_length=8)
    assert made_of(record, max_encoder_length=8, on_long_row="skip") == []
    assert texts_of(record, max_encoder_length=8, on_long_row="truncate") == [["query", "a longer"]]
    same = {"query": "same beginning", "positive": "same beginning!"}
    assert texts_of(same, max_encoder_length=8, on_long_row="truncate") == []  # what is left of them is equal


def config_of(folder: Path, objective: str, **data: Any) -> FullConfig:
    rows = [{"query": f"what is {n}", "positive": f"the number {n}", "negative": "x" * (1 + n % 7)} for n in range(60)]
    source = write_rows(folder / "rows.jsonl", rows)
    fields = {"dataset_name": "json", "data_files": source, "objective": objective, "preprocessing_num_workers": 0}
    limits = {"max_encoder_length": 32, "num_lanes": 2}
    return FullConfig.model_validate({"data": {**fields, **limits, **data}, "training": {"eval_samples": 4}})


def test_examples_stay_whole_in_batches_and_are_shown(tmp_path: Path) -> None:
    config = config_of(tmp_path, "contrastive", num_negatives=1, query_prefix="Q: ")
    data = build_data(config, TOKENIZER, VOCABULARY, rank=0, world_size=1, num_lanes=2)
    for batch in next(data.loader):
        assert set(batch.group_sizes) == {3}
        assert batch.num_losses == len(batch.group_sizes) == len(batch.documents)
        assert len(batch.encoder_ids) == config.training.micro_batch_size * 3 * 32
        assert len(batch.labels) == len(batch.decoder_input_ids) == 0
    shown = inspect_run_data(config, TOKENIZER, VOCABULARY, num_examples=1, as_json=False)
    assert "tokens: Q: what is" in shown
    assert "tokens: the number" in shown
    assert "tokens: x" in shown
    evaluated = [one for batch in data.eval_batches() for one in batch.documents]
    assert len(evaluated) == 4


def test_prepared_texts_give_the_same_batches(tmp_path: Path) -> None:
    config = config_of(tmp_path, "contrastive", num_negatives=1)
    prepared = config.model_copy(
        update={"data": config.data.model_copy(update={"prepared_dir": str(tmp_path / "prepared")})}
    )
    list(prepare_data(prepared, TOKENIZER, VOCABULARY, 1))
    first, second = (
        next(build_data(one, TOKENIZER, VOCABULARY, rank=0, world_size=1, num_lanes=2).loader)
        for one in (config, prepared)
    )
    assert [batch.digest for batch in first] == [batch.digest for batch in second]


def test_columns_that_are_missing_are_named_before_a_run(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"title": "a", "body": "b"}])
    settings = ["data.objective=contrastive", "data.dataset_name=json", f"data.data_files={source}"]
    loaded = read_config(None, settings)
    look_here(loaded)
    with pytest.raises(ConfigError, match=r"set data\.field_mapping\.query=COLUMN"):
        loaded.valid()


@pytest.mark.parametrize("bos", [None, 5])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_masked_tokens_are_predicted_from_the_state_before(share: float, bos: int | None) -> None:
    import dataclasses

    maker: Any = maker_of("mntp", mask_share=share, max_encoder_length=24)
    maker = dataclasses.replace(maker, vocabulary=dataclasses.replace(maker.vocabulary, bos_id=bos))
    ids = np.arange(100, 200, dtype=np.int32)
    made = [one.example for one in maker.examples(ids, "a text", 0)]
    begun, mask = 0 if bos is None else 1, maker.vocabulary.sentinel_ids[0]
    assert len(made) == -(-100 // (24 - begun))
    restored = []
    for one in made:
        assert len(one.encoder_ids) <= 24
        assert one.encoder_ids[0] != mask
        assert (
            len(one.decoder_ids) == (one.encoder_ids == mask).sum() == max(1, round(share * (len(one.encoder_ids) - 1)))
        )
        text = one.encoder_ids.copy()
        text[text == mask] = one.decoder_ids
        restored.append(text[begun:])
    assert np.array_equal(np.concatenate(restored), ids)
    assert np.array_equal(np.concatenate([np.arange(100, 200)]), ids)  # a maker leaves its input as it is


def test_masks_are_drawn_by_seed_epoch_document_and_chunk() -> None:
    maker: Any = maker_of("mntp", max_encoder_length=64)
    ids = np.arange(10, 170, dtype=np.int32)

    def drawn(maker: Any, document: str, epoch: int) -> list[list[int]]:
        return [one.example.decoder_ids.tolist() for one in maker.examples(ids, document, epoch)]

    first = drawn(maker, "a", 0)
    assert first == drawn(maker, "a", 0)
    (alone,) = (one.example.decoder_ids.tolist() for one in maker.examples(ids, "a", 0, [1]))
    assert alone == first[1]
    assert first not in (drawn(maker, "b", 0), drawn(maker, "a", 1))
    assert drawn(maker.of_evaluation(), "a", 0) == drawn(
        maker_of("mntp", max_encoder_length=64).of_evaluation(), "a", 0
    )


def test_labels_stand_before_the_masks(tmp_path: Path) -> None:
    config = config_of(tmp_path, "mntp", text_column="positive", eval_fraction=0.1)
    data = build_data(config, TOKENIZER, VOCABULARY, rank=0, world_size=1, num_lanes=2)
    (batch, *_) = next(data.loader)
    mask, labels = VOCABULARY.sentinel_ids[0], batch.labels
    places = (batch.encoder_ids == mask).nonzero().flatten()
    assert (labels != -100).nonzero().flatten().tolist() == (places - 1).tolist()
    assert batch.num_losses == len(places) > 0
    text = batch.encoder_ids.clone()
    text[places] = labels[places - 1]
    assert TOKENIZER.decode(text[: batch.encoder_lengths[0]]).startswith("the number ")
    assert len(batch.decoder_input_ids) == 0


def test_the_builtin_pairs_are_distinct_functions_without_their_docstrings() -> None:
    from ds_encdec.data.sources.builtin_functions import BuiltinFunctions

    source = BuiltinFunctions()
    rows = [source.document(index) for index in range(len(source))]
    assert len(rows) > 3000
    assert len({row.key for row in rows}) == len(rows)
    both = list(chain.from_iterable((row.record or {}).values() for row in rows))
    assert len(set(both)) == 2 * len(rows)
    (found,) = (row.record for row in rows if row.key == "builtin_functions/textwrap.dedent")
    assert found is not None
    assert found["query"] == "Remove any common leading whitespace from every line in `text`."
    assert found["positive"].startswith("def dedent(text):\n")
    assert found["query"] not in json.dumps(found["positive"])


@pytest.mark.parametrize("objective", ["contrastive", "mntp"])
def test_a_trial_of_a_micro_batch_has_the_losses_of_its_objective(tmp_path: Path, objective: str) -> None:
    config = config_of(tmp_path, objective, **({"num_negatives": 1} if objective == "contrastive" else {}))
    batch = full_batch(config, 3, 250)
    assert batch.encoder_tokens == len(batch.encoder_ids) == 3 * 32 * (3 if objective == "contrastive" else 1)
    assert batch.num_losses == len(batch.documents) == 3
    assert (batch.labels != -100).sum() == (3 if objective == "mntp" else 0)
