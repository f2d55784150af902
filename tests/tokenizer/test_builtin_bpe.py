"""The built-in tokenizer: lossless, deterministic, cached; and how tokenizers are found."""

from __future__ import annotations

import pydoc_data.topics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import ArchitectureConfig, ModelConfig
from ds_encdec.tokenizer import load
from ds_encdec.tokenizer.load import builtin_tokenizer, load_tokenizer

CORPUS = list(pydoc_data.topics.topics.values())[:20]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_encdec"


def section(vocab_size: int = 1024) -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 8)
    architecture = ArchitectureConfig(vocab_size=vocab_size, head_dim=8, intermediate_size=8, **sizes)
    return ModelConfig(tokenizer_name_or_path="builtin", architecture=architecture, num_sentinel_tokens=32)


def test_any_text_survives() -> None:
    tokenizer = builtin_tokenizer(CORPUS, 512)
    for text in (CORPUS[3], "  naïve\t日本語 🙂\r\n\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(CORPUS[3])) < len(CORPUS[3]) / 2


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
    monkeypatch.setattr(load, "_train", lambda *_: pytest.fail("trained although cached"))
    assert builtin_tokenizer(CORPUS, 600).backend_tokenizer.to_str() == first


def test_racing_processes_leave_one_whole_file(cache_folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        tokenizers = list(pool.map(lambda _: builtin_tokenizer(CORPUS, 400), range(4)))
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in tokenizers}) == 1
    assert [file.suffix for file in cache_folder.iterdir()] == [".json"]


def test_unusable_settings_say_what_to_change(tmp_path: Path) -> None:
    def load(changed: ModelConfig) -> None:
        load_tokenizer(changed, builtin_texts=lambda: CORPUS, mode_tokens=False)

    for changes, message in (
        ({"architecture": section(vocab_size=289).architecture}, "needs at least 258"),
        ({"architecture": None}, r"builtin goes with model\.architecture only"),
        ({"tokenizer_name_or_path": None}, "needs a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(section().model_copy(update=changes))
    with pytest.raises(CheckpointError, match=r"model\.tokenizer_name_or_path: the folder .*/nowhere does not exist"):
        load(section().model_copy(update={"tokenizer_name_or_path": str(tmp_path / "nowhere")}))
    with pytest.raises(CheckpointError, match=r"model\.model_name_or_path: .* has no tokenizer\.json"):
        load(ModelConfig(model_name_or_path=str(tmp_path)))
