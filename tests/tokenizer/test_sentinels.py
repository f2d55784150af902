"""Sentinels as real tokens with explicit ids, on Qwen3's own vocabulary."""

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import pytest
from qwen3_vocabulary import oracle, qwen3_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AddedToken, PreTrainedTokenizerFast

from ds_encdec import cli
from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import ArchitectureConfig, ModelConfig, load_config
from ds_encdec.tokenizer import load
from ds_encdec.tokenizer.load import builtin_tokenizer, load_tokenizer
from ds_encdec.tokenizer.sentinels import MODE_TOKENS, add_sentinels
from ds_encdec.training.build import run_training

TEXTS = (
    "The quick brown fox doesn't jump over 12345 lazy dogs.",
    "  indented\n\n\tcode = {'a': 1}  # naïve café — 日本語テキスト 🙂\r\n",
    "İstanbul ǅ ﬁ combining: é",
)


def test_sentinels_take_qwen3s_spare_rows() -> None:
    tokenizer = qwen3_tokenizer()
    vocabulary = add_sentinels(tokenizer, 100, mode_tokens=False)
    assert vocabulary.sentinel_ids == tuple(range(151669, 151769))
    assert (vocabulary.eos_id, vocabulary.pad_id) == (151645, 151643)
    assert vocabulary.vocab_size == 151769 <= 151936
    ids = tokenizer.encode("Hello<extra_id_0> world <extra_id_99>.")
    assert [token for token in ids if token >= 151669] == [151669, 151768]
    assert tokenizer.decode(ids) == "Hello<extra_id_0> world <extra_id_99>."
    for text in TEXTS:  # without sentinels, and encoded as before
        assert tokenizer.encode(text) == oracle().encode(text)


def test_adding_twice_keeps_the_ids_and_adding_more_appends() -> None:
    tokenizer = qwen3_tokenizer()
    first = add_sentinels(tokenizer, 4, mode_tokens=True)
    assert add_sentinels(tokenizer, 4, mode_tokens=True) == first
    more = add_sentinels(tokenizer, 6, mode_tokens=False)
    assert more.sentinel_ids == (*range(151669, 151673), 151678, 151679)


def test_a_saved_tokenizer_loads_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer()
    expected = add_sentinels(tokenizer, 100, mode_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    section = ModelConfig(model_name_or_path=str(tmp_path))
    loaded, vocabulary = load_tokenizer(section, builtin_texts=tuple, mode_tokens=True)
    assert vocabulary == expected
    text = f"{MODE_TOKENS[4]}Hello <extra_id_7> 日本"
    assert loaded.encode(text) == tokenizer.encode(text)


def with_sentinels_as_words() -> PreTrainedTokenizerFast:
    tokenizer = qwen3_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_id_0>", single_word=True)], special_tokens=True)
    return tokenizer


def with_sentinels_that_are_cut() -> PreTrainedTokenizerFast:
    """They are in the vocabulary, but no text is given their ids."""
    backend = Tokenizer(WordLevel({"<eos>": 0, "<extra_id_0>": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.mark.parametrize("made", [with_sentinels_as_words, with_sentinels_that_are_cut])
def test_a_tokenizer_that_splits_sentinels_within_a_text_is_refused(
    tmp_path: Path, made: Callable[[], PreTrainedTokenizerFast]
) -> None:
    made().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path} splits <extra_id_0> within a text"):
        load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path)), builtin_texts=tuple, mode_tokens=False)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(CheckpointError, match="names no eos_token"):
        add_sentinels(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))), 1, mode_tokens=False)


MODELS = {
    "with a gap": WordLevel({"<eos>": 0, "a": 400}),
    "a list": Unigram([("<eos>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False),
}
QUICKSTART = Path(__file__).parents[2] / "ds_configs" / "quickstart.yaml"


@pytest.mark.parametrize("kind", MODELS)
def test_too_few_rows_are_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    stored = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(MODELS[kind]), eos_token="<eos>")
    stored.add_tokens([f"word{number}" for number in range(300)])
    stored.save_pretrained(tmp_path / "tokenizer")
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    needed = add_sentinels(loaded, 32, mode_tokens=True).vocab_size
    run, rows = tmp_path / "run", "model.architecture.vocab_size"
    settings = [f"model.tokenizer_name_or_path={tmp_path / 'tokenizer'}", f"infra.output_dir={run}"]
    settings += ["data.use_mode_tokens=true", "infra.device=cpu"]
    assert cli.main(["validate", str(QUICKSTART), *settings, f"{rows}={needed}"]) == 0
    short = [*settings, f"{rows}={needed - 1}"]
    capsys.readouterr()
    for verb in (["validate"], ["train"], ["train", "--resume", "auto"]):
        assert cli.main([*verb, "--config", str(QUICKSTART), *short]) == 2
        assert f"the tokenizer's ids reach {needed - 1}: set it to at least {needed}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"at least {needed}"):
        run_training(load_config(QUICKSTART, short))
    assert not run.exists()


CORPUS = list(pydoc_data.topics.topics.values())[:20]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_encdec"


def section(vocab_size: int = 1024) -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 8)
    architecture = ArchitectureConfig(vocab_size=vocab_size, head_dim=8, intermediate_size=8, **sizes)
    return ModelConfig(tokenizer_name_or_path="builtin", architecture=architecture, num_sentinel_tokens=32)


def test_the_vocabulary_has_room_for_everything_asked_for() -> None:
    tokenizer, vocabulary = load_tokenizer(section(), builtin_texts=lambda: CORPUS, mode_tokens=True)
    assert vocabulary.vocab_size == 1024
    assert len(set(vocabulary.sentinel_ids)) == 32
    assert len(set(vocabulary.mode_token_ids)) == 5
    assert {vocabulary.eos_id, vocabulary.pad_id}.isdisjoint((*vocabulary.sentinel_ids, *vocabulary.mode_token_ids))
    assert max(tokenizer.encode(" ".join(CORPUS))) < min(vocabulary.sentinel_ids)


def test_training_is_deterministic_and_happens_once(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_tokenizer(CORPUS, 600).backend_tokenizer.to_str()
    (cached,) = cache_folder.iterdir()
    cached.unlink()
    assert builtin_tokenizer(CORPUS, 600).backend_tokenizer.to_str() == first
    for corpus, size in ((CORPUS, 601), (CORPUS[1:], 600)):  # another corpus or size is another tokenizer
        builtin_tokenizer(corpus, size)
    assert len(list(cache_folder.iterdir())) == 3
    monkeypatch.setattr(load.trainers, "BpeTrainer", lambda **_: pytest.fail("trained although cached"))
    assert builtin_tokenizer(CORPUS, 600).backend_tokenizer.to_str() == first


def test_unusable_settings_say_what_to_change(tmp_path: Path) -> None:
    def load(changed: ModelConfig) -> None:
        load_tokenizer(changed, builtin_texts=lambda: CORPUS, mode_tokens=False)

    for changes, message in (
        ({"architecture": section(vocab_size=289).architecture}, "needs at least 258"),
        ({"tokenizer_name_or_path": None}, "name a folder, a hub id, or builtin"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(section().model_copy(update=changes))
    with pytest.raises(CheckpointError, match=r"model\.model_name_or_path: .* has no tokenizer\.json"):
        load(ModelConfig(model_name_or_path=str(tmp_path)))
