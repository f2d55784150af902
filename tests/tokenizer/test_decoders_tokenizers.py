"""Sentinels, beginnings and ends on the kinds of tokenizers that decoders have."""

from pathlib import Path
from typing import Any

import pytest
from decoders_tokenizers import KINDS, decoders_tokenizer

from ds_encdec.base.types import Document
from ds_encdec.config.schema import load_config
from ds_encdec.data.build import example_maker
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.evaluate.generation import text_of
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.tokenizer.load import pretrained_tokenizer, write_tokenizer
from ds_encdec.tokenizer.sentinels import add_sentinels

TEXTS = (
    "The quick brown fox doesn't jump over 12345 lazy dogs.",
    "if 1:\n\n\tcode = {'a': 1}  # naïve café — 日本語テキスト 🙂\r\n",
    "İstanbul ǅ ﬁ combining: é",
)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_sentinels_go_through_each_kind_and_its_files(tmp_path: Path, kind: str) -> None:
    tokenizer = decoders_tokenizer(kind)
    rows = len(tokenizer)
    vocabulary = add_sentinels(tokenizer, 5, mode_tokens=True)
    assert vocabulary.sentinel_ids == tuple(range(rows, rows + 5))
    assert vocabulary.eos_id == vocabulary.pad_id == tokenizer.eos_token_id != tokenizer.bos_token_id
    assert vocabulary.beginning() == ([] if kind == "qwen" else [tokenizer.bos_token_id])
    assert vocabulary.start_id == (vocabulary.pad_id if kind == "qwen" else tokenizer.bos_token_id)
    encode = TextTokenizer(tokenizer.backend_tokenizer)
    for text in TEXTS:
        assert text_of(tokenizer, encode.encode(text)) == text
        assert tokenizer.encode(text) == [*vocabulary.beginning(), *encode.encode(text).tolist()]
    write_tokenizer(tokenizer, tmp_path)
    again = pretrained_tokenizer(str(tmp_path), field="test")
    assert add_sentinels(again, 5, mode_tokens=True) == vocabulary
    marked = "Hello<extra_id_0> world <extra_id_4>."
    ids = again.encode(marked)
    assert ids == tokenizer.encode(marked)
    assert [one for one in ids if one >= rows] == [rows, rows + 4]


def maker_of(kind: str, **settings: Any) -> Any:
    lines = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    config = load_config(None, ["model.model_name_or_path=nowhere", *lines])
    tokenizer = decoders_tokenizer(kind)
    modes = config.data.use_mode_tokens
    vocabulary = add_sentinels(tokenizer, 20, mode_tokens=modes)
    return tokenizer, vocabulary, example_maker(config.data, 0, tokenizer, vocabulary)


@pytest.mark.parametrize("modes", ["true", "false"])
@pytest.mark.parametrize("kind", KINDS)
def test_denoised_inputs_begin_as_the_tokenizers_texts_do(kind: str, modes: str) -> None:
    tokenizer, vocabulary, maker = maker_of(
        kind, data__use_mode_tokens=modes, data__max_encoder_length=60, data__max_decoder_length=60
    )
    ids = maker.read(Document("one", " ".join(TEXTS) * 9))
    assert all(same for _, same in maker.checked(ids, "one"))
    made = [one.example for one in maker.examples(ids, "one", 0)]
    assert len(made) > 5
    for example in made:
        expected = vocabulary.beginning(example.denoiser)
        assert example.encoder_ids[: len(expected)].tolist() == expected
        assert len(expected) == (kind != "qwen") + (modes == "true")
        assert len(example.encoder_ids) <= 60
        assert tokenizer.bos_token_id not in example.encoder_ids[1:]
    for chunk in maker.chunker.chunks(len(ids), "one", 0):
        example = maker.chunker.example(chunk, ids, "one")
        ends = chunk.start + chunk.length == len(ids)
        lengths = maker.chunker.example_lengths(chunk.length, chunk.denoiser, document_ends=ends)
        assert lengths == (len(example.encoder_ids), len(example.decoder_ids))
    assert set(DENOISERS) >= {example.denoiser for example in made}


CHAT = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_pairs_begin_once(kind: str) -> None:
    tokenizer, vocabulary, maker = maker_of(
        kind, data__objective="sft", data__input_template='"{q}"', data__output_template='"{a}"'
    )
    ((source, target),) = maker.read(Document("one", "", record={"q": TEXTS[0], "a": "fox"}))
    assert source.tolist() == tokenizer.encode(TEXTS[0])
    assert target.tolist() == [*tokenizer.encode("fox", add_special_tokens=False), vocabulary.eos_id]
    if kind != "qwen":
        tokenizer.chat_template = CHAT
        config = load_config(None, ["model.model_name_or_path=nowhere", "data.objective=sft"])
        chat = example_maker(config.data, 0, tokenizer, vocabulary)
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fox"}]
        ((source, _),) = chat.read(Document("one", "", record={"messages": turns}))
        assert (source == tokenizer.bos_token_id).sum() == 1
        assert source[0] == tokenizer.bos_token_id
