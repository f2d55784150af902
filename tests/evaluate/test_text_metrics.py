"""Figures against values computed by hand; BERTScore by a tiny local model."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from ds_encdec.base.types import ConfigError
from ds_encdec.evaluate.metrics import bertscore_layer, check_metrics, score_texts
from ds_encdec.registry.text_metrics import usable

PREDICTIONS = ["the cats sat on a mat", " Paris\n is  big "]
REFERENCES = ["the cat sat on the mat", "Paris is big"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "cats", "sat", "on", "a", "mat", "Paris", "is", "big"]


def test_figures_are_those_computed_by_hand_from_0_to_100() -> None:
    names = ["exact_match", "rouge", "chrf", "bleu"]
    figures = score_texts(names, PREDICTIONS, REFERENCES)[0]
    assert 60 < figures.pop("chrf") < 100
    assert figures == pytest.approx(
        {
            "exact_match": 50,  # white space does not count
            # cats is stemmed: 5 of 6 words in common; of 5 pairs the cat, cat sat, sat on; all in order
            "rouge1": (100 * 5 / 6 + 100) / 2,
            "rouge2": (100 * 3 / 5 + 100) / 2,
            "rougeL": (100 * 5 / 6 + 100) / 2,
            # of 9 words 7 match, of 7 pairs sat on, Paris is, is big, of 5 triples one, of 3 quadruples none (1/2)
            "bleu": 100 * (7 / 9 * 3 / 7 * 1 / 5 * 1 / 6) ** 0.25,
        }
    )
    assert score_texts(names, REFERENCES, REFERENCES)[0] == pytest.approx(dict.fromkeys([*figures, "chrf"], 100))
    assert score_texts(["rouge", "bleu", "chrf"], ["", ""], REFERENCES)[0]["chrf"] == 0


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **names).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes))
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_bertscore_compares_states_of_a_local_models_layer(bert: Path) -> None:
    def f1(predictions: list[str]) -> float:
        return score_texts(["bertscore"], predictions, REFERENCES, bertscore_model=bert)[0]["bertscore_f1"]

    assert f1(REFERENCES) == pytest.approx(100, abs=1e-4)
    assert bertscore_layer(bert) == 2  # the last one, where none is known
    assert f1([REFERENCES[0], " "]) == pytest.approx(50, abs=1e-4)

    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1] for text in ("a cat", "the mat")]
    cosines = torch.nn.functional.cosine_similarity(states[0][:, None], states[1][None], dim=-1)
    found = score_texts(["bertscore"], ["a cat"], ["the mat"], bertscore_model=bert)[0]
    assert found["bertscore_precision"] == pytest.approx(100 * cosines.amax(1).mean().item(), rel=1e-4)
    assert found["bertscore_recall"] == pytest.approx(100 * cosines.amax(0).mean().item(), rel=1e-4)


def test_what_a_metric_lacks_is_said_with_the_command_that_brings_it(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names, folder, problem in (
        (["bertscore"], None, "name its folder in --bertscore-model"),
        (["rogue"], None, "unknown metric rogue; known: exact_match, rouge, chrf, bleu, bertscore"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_metrics(names, folder)
    config = bert / "tokenizer_config.json"
    config.write_text(config.read_text().replace("16", "1" + 30 * "0"))
    with pytest.raises(ConfigError, match="model_max_length"):
        score_texts(["bertscore"], REFERENCES, REFERENCES, bertscore_model=bert)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    one_line = "rouge, bleu: pip install 'ds_encdec[eval]' adds them"
    assert usable(["rouge", "exact_match", "bleu"]) == (["exact_match"], one_line)
    with pytest.raises(ConfigError, match=r"rouge needs rouge_score, .*: pip install 'ds_encdec\[eval\]'"):
        check_metrics(["exact_match", "rouge"])
