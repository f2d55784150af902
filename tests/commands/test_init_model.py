"""`ds-encdec init-model`: what it makes, prints and measures; and the sentences about models that cannot be made, which
are the same from every verb."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import qwen3_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ds_encdec import cli
from ds_encdec.evaluate.conversion import LONGEST, MOST_PASSAGES, read_passages
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer

WORDS = [f"word{number}" for number in range(90)]


def made_source(folder: Path, **sizes: Any) -> Path:
    """A Qwen3 whose tokenizer knows `WORDS`; there are three rows more than ids and the six sentinels."""
    changes = {"vocab_size": 101, "num_hidden_layers": 4, "initializer_range": 0.2, "eos_token_id": 1}
    qwen3_folder(folder, dtype=torch.float32, bos_token_id=0, **changes | sizes)
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made_source(tmp_path / "source")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    numbers = torch.randint(0, 90, (1100,), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text(" ".join(WORDS[number] for number in numbers))
    return file


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_a_source_gives_a_folder_with_its_weights_twice_and_sentinels(source: Path, tmp_path: Path) -> None:
    assert run("init-model", "--from", source, "--out", tmp_path / "out", "--num-sentinel-tokens", 6) == 0
    original, model = Qwen3ForCausalLM.from_pretrained(source), Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.config.sentinel_token_ids == list(range(92, 98))
    assert pretrained_tokenizer(str(tmp_path / "out"), field="test").encode("word1 <extra_id_5>") == [3, 97]
    assert torch.equal(model.shared.weight[:92], original.model.embed_tokens.weight[:92])
    theirs = original.model.layers[0].state_dict()
    for ours in (model.encoder.layers[0].state_dict(), model.decoder.layers[0].state_dict()):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


MADE = {
    "as it comes": [],
    "shallow": ["model.decoder_layers=2"],
    "given layers": ["encoder_layers=[0,2]", "--decoder_layers", "top 2"],
    "final": ["model.cross_attention=final", "--num-sentinel-tokens", "12"],
}


@pytest.mark.parametrize("words", MADE.values(), ids=MADE)
def test_it_prints_what_it_made(
    source: Path,
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    golden: Callable[[object], None],
) -> None:
    out = tmp_path / "out"
    assert run("init-model", "--from", source, "--out", out, "--num-sentinel-tokens", 6, *words) == 0
    golden(shown := capsys.readouterr().out)
    number = sum(parameter.numel() for parameter in Qwen3ForSeq2SeqLM.from_pretrained(out).parameters())
    assert f"parameters        {number:,}\n" in shown
    assert f"| Parameters | {number:,} |" in (out / "README.md").read_text()


def measured(shown: str) -> dict[str, list[float]]:
    rows = re.findall(r"^  (source decoder|encoder-decoder|its input hidden) +(.*)$", shown, re.M)
    return {name: [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text)] for name, text in rows}


def test_the_conversion_of_one_aligned_layer_costs_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]
) -> None:
    """It reads the input's embeddings alone, so that nothing looks ahead. Few rows are new ones."""
    source = made_source(tmp_path / "source", num_hidden_layers=1)
    arguments = ("init-model", "--from", source, "--num-sentinel-tokens", 1, "--check", text)
    assert run(*arguments, "--out", tmp_path / "aligned") == 0
    golden(re.sub(r"[-+]?\d+\.\d{4}", "N", shown := capsys.readouterr().out))
    ours = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "aligned")
    theirs = Qwen3ForCausalLM.from_pretrained(source)
    theirs.model.embed_tokens.weight.data = ours.shared.weight.data  # the sentinel's row, too
    theirs.save_pretrained(source)
    assert run(*arguments, "--out", tmp_path / "again") == 0
    again = measured(capsys.readouterr().out)
    assert abs(measured(shown)["encoder-decoder"][1]) < 0.05
    assert again["encoder-decoder"][1:] == [0, 0]
    assert abs(again["its input hidden"][1]) > 0.002
    assert run(*arguments, "--out", tmp_path / "final", "model.cross_attention=final") == 0
    assert abs(measured(capsys.readouterr().out)["encoder-decoder"][1]) > 0.002


def test_passages_are_spread_over_the_text(source: Path, tmp_path: Path) -> None:
    tokenizer = pretrained_tokenizer(str(source), field="test")
    (file := tmp_path / "long.txt").write_text(" ".join(WORDS * 1000))
    passages = read_passages(file, tokenizer)
    assert MOST_PASSAGES // 2 < len(passages) <= MOST_PASSAGES
    assert {len(passage) for passage in passages} == {LONGEST}
    file.write_text(" ".join(WORDS[:64]))
    assert [len(passage) for passage in read_passages(file, tokenizer)] == [64]


MISTAKES = """
--check TMP/nowhere.txt
--check TMP/short.txt
model.decoder_layers=5
model.decoder_layers=top
model.encoder_layers=top 4
model.encoder_layers=2,1
learning_rate=1e-3
cross_attention=merged
"""


def test_what_cannot_be_made_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]
) -> None:
    (tmp_path / "short.txt").write_text("word1 " * 63)
    assert run("init-model", "--from", source, "--out", tmp_path / "own") == 0
    for line in MISTAKES.replace("TMP", str(tmp_path)).strip().splitlines():
        words = line.split(maxsplit=1) if line.startswith("--") else [line]
        assert run("init-model", "--from", source, "--out", tmp_path / "out", *words) == 2
    arguments = ("init-model", "--from", tmp_path / "own", "--out", tmp_path / "out")
    assert run(*arguments, "--check", tmp_path / "short.txt") == 2
    assert run(*arguments, "model.encoder_positions=unrotated") == 2
    golden(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


SMALL = ["infra.device=cpu", "infra.distributed_type=auto", "infra.sharding_stage=zero2", "infra.num_gpus=1"]


@pytest.mark.parametrize(
    ("name", "setting", "sentence"),
    [
        ("source", "model.decoder_layers=5", "is 5, but the source has 4 layers: take at most 4"),
        ("source", "model.encoder_layers=[1, 3]", "read only the 3 below it: name layers from 0 to 2"),
        ("own", "model.cross_attention=final", 'is an encoder-decoder made with "aligned", which it keeps: '),
        ("own", "model.decoder_layers=[0, 3]", "is [0, 3], but "),
        ("source", "model.decoder_layers=[2, 1]", "needed are a number of layers, `top N`, or layers of the source"),
        ("source", "model.encoder_positions=own", "allowed: 'prefix' or 'unrotated'"),
    ],
)
def test_every_verb_refuses_a_model_in_the_same_words(
    source: Path, tmp_path: Path, name: str, setting: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "own":
        assert run("init-model", "--from", source, "--out", tmp_path / "own") == 0
    given = [f"model.model_name_or_path={tmp_path / name}", f"infra.output_dir={tmp_path / 'run'}", *SMALL, setting]
    for verb in ("validate", "estimate-memory", "train", "plan"):
        assert run(verb, *given) == 2, verb
        shown = capsys.readouterr().err
        assert sentence in shown, verb
        assert setting.partition("=")[0] in shown
        assert "loading torch" not in shown
