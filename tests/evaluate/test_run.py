"""`ds-encdec evaluate` on a tiny export: figures, a kill in the middle, other settings, two ranks."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from disk_calls import Call, recorded
from tiny_export import WORDS, export_tiny
from transformers import T5Config, T5ForConditionalGeneration

from ds_encdec.base.types import DataError
from ds_encdec.cli import main
from ds_encdec.config.schema import load_config
from ds_encdec.data.build import Opener
from ds_encdec.data.fingerprint import source_facts
from ds_encdec.data.inspection import TextExample
from ds_encdec.launch.world import free_port
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer

HOW = ["--max-new-tokens", "6", "--batch-tokens", "60", "--device", "cpu"]
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture(scope="module")
def data(model: Path) -> list[str]:
    tokenizer, answers = pretrained_tokenizer(str(model), field=""), Qwen3ForSeq2SeqLM.from_pretrained(model).eval()
    draw, rows = random.Random(0), []
    for number in range(20):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        ids = answers.generate(torch.tensor([tokenizer.encode(text)]), max_new_tokens=6)
        said = tokenizer.decode([token for token in ids[0].tolist() if token > 1])
        right = number % 2 and "<extra_id" not in said  # in a row that is no sentinel
        rows.append({"input": text, "output": said if right else "word1 word2"})
    (file := model.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return settings_for(file)


def settings_for(file: Path) -> list[str]:
    config = file.with_suffix(".yaml")
    templates = 'input_template: "{input}", output_template: "{output}"'
    config.write_text(f"data: {{objective: sft, dataset_name: json, data_files: {file}, {templates}}}")
    return [f"--config={config}", f"data.test_files={file}"]


def judge(model: Path, out: Path, *arguments: str) -> int:
    return main(["evaluate", "--model", str(model), "--out", str(out), *HOW, *arguments])


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def predictions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]


def test_the_figures_of_a_split_and_its_predictions(
    model: Path, data: list[str], tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as watched:
        done = recorded(watched)
        assert judge(model, tmp_path / "out", *data, "--json") == 0
    assert done.count(Call("fsync", tmp_path / "out" / "predictions.jsonl")) > 1  # each batch as soon as it is made
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out" / "metrics.json").read_text())
    lines, figures = predictions(tmp_path / "out"), found["figures"]
    assert [line["number"] for line in lines] == list(range(20))
    assert found["examples"] == 20
    rows = map(json.loads, (model.parent / "rows.jsonl").read_text().splitlines())
    assert {line["input"]: line["reference"] for line in lines} == {row["input"]: row["output"] for row in rows}
    right = sum(line["prediction"] == line["reference"] != "word1 word2" for line in lines)
    assert right >= 8
    assert figures["exact_match"] == 5 * right == sum(line["exact_match"] for line in lines) / 20
    assert figures["rougeL"] == pytest.approx(sum(line["rougeL"] for line in lines) / 20)
    by_loss = ["loss", "perplexity", "token_accuracy"]
    assert list(figures) == [*by_loss, "exact_match", "rouge1", "rouge2", "rougeL", "chrf", "bleu"]
    tokenizer, loaded = pretrained_tokenizer(str(model), field=""), Qwen3ForSeq2SeqLM.from_pretrained(model).eval()
    losses, hits = [], []
    for line in lines:
        ids, labels = (torch.tensor([tokenizer.encode(line[side])]) for side in ("input", "reference"))
        labels = torch.cat([labels, torch.tensor([[1]])], dim=1)
        judged = loaded(ids, labels=labels)
        losses += [judged.loss.item()] * labels.shape[1]
        hits += (judged.logits.argmax(-1) == labels)[0, :-1].tolist()  # the end token is no text
    assert figures["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert figures["token_accuracy"] == pytest.approx(100 * sum(hits) / len(hits))

    assert judge(model, tmp_path / "likelihood", *data, "--json", "--max-new-tokens", "0") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (list(shown["figures"]), shown["cut_at_max_new_tokens"]) == (by_loss, 0)
    assert shown["figures"] == pytest.approx({name: figures[name] for name in by_loss})
    assert judge(model, tmp_path / "likelihood", *data, "--max-new-tokens", "0", "--metrics", "chrf") == 2


def test_a_metric_that_raises_is_named_and_costs_no_other_figure(
    model: Path, data: list[str], tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_metric.py").write_text("def bad(predictions, references):\n    raise RuntimeError('my bug')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert judge(model, tmp_path / "out", *data, "--metrics", "exact_match,bad_metric:bad") == 1
    printed = capsys.readouterr()
    assert "exact_match" in printed.out
    assert f"the metric bad_metric:bad has no figure: RuntimeError: my bug ({tmp_path}/bad_metric.py:2)" in printed.err


def test_one_that_was_killed_goes_on_and_leaves_the_same_files(
    model: Path, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    sampled, whole, killed = [*data, "--temperature", "1.2", "--top-p", "0.9"], tmp_path / "whole", tmp_path / "killed"
    assert judge(model, whole, *sampled) == 0
    killed.mkdir()
    lines = (whole / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("evaluation.json", ".lock"):
        shutil.copy(whole / name, killed)
    (killed / "predictions.jsonl").write_bytes(b"".join(lines[11:17]) + lines[3][:-20])
    capsys.readouterr()
    assert judge(model, killed, *sampled) == 0
    assert files(killed) == files(whole)
    first, *_, last = (line.partition(" INFO: ")[2] for line in capsys.readouterr().err.splitlines())
    assert (first, last) == ("6 of 20 predictions are there; going on", "test: 100 % of the predictions are made")
    for judged, changed, named in (
        (model, ["--temperature", "0.5"], "temperature (1.2 there, 0.5 now)"),
        (model, ["--max-samples", "7"], "7 examples of test"),
        (export_tiny(tmp_path / "other", seed=1), [], "differs in model ("),
    ):
        assert judge(judged, whole, *sampled, *changed) == 2
        assert named in capsys.readouterr().err

    # Other metrics are computed from what is there, without the model.
    monkeypatch.setattr("ds_encdec.evaluate.evaluation.open_model", None)
    assert judge(model, whole, *sampled, "--metrics", "exact_match") == 0
    assert "rougeL" not in (whole / "predictions.jsonl").read_text()


@pytest.mark.distributed
def test_ranks_share_the_batches_and_leave_the_files_of_one(
    model: Path, data: list[str], tmp_path: Path, capfd: Output
) -> None:
    assert judge(model, tmp_path / "one", *data) == 0
    capfd.readouterr()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    named = ["evaluate", f"--model={model}", f"--out={tmp_path / 'two'}"]
    second = [sys.executable, "-m", "ds_encdec.cli", *named, *HOW, *data]
    with (
        subprocess.Popen(second, env={**os.environ, **place, "RANK": "1", "LOCAL_RANK": "1"}) as rank_1,
        patch.dict(os.environ, place | {"RANK": "0", "LOCAL_RANK": "0"}),
    ):
        assert judge(model, tmp_path / "two", *data) == 0
    assert rank_1.returncode == 0
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert capfd.readouterr().out.count("20 examples of test") == 1


def test_another_encoder_decoder_that_transformers_knows(model: Path, data: list[str], tmp_path: Path) -> None:
    ids = {"vocab_size": 66, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **ids)).eval()
    t5.save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "t5")
    how = ("--max-samples=1", "--num-beams=2", "--metrics", "exact_match,chrf,bleu")
    assert judge(tmp_path / "t5", tmp_path / "out", *how, *reversed(data)) == 0
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())["figures"]
    assert list(figures) == ["loss", "perplexity", "token_accuracy", "exact_match", "chrf", "bleu"]
    (line,) = predictions(tmp_path / "out")
    tokenizer = pretrained_tokenizer(str(model), field="")
    given, wanted = (torch.tensor([tokenizer.encode(line[side])]) for side in ("input", "reference"))
    assert figures["loss"] == pytest.approx(
        t5(given, labels=torch.cat([wanted, torch.tensor([[1]])], 1)).loss.item(), rel=1e-5
    )
    said = t5.generate(given, max_new_tokens=6, num_beams=2, do_sample=False)[0].tolist()
    assert line["prediction"] == tokenizer.decode([token for token in said if token > 1])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, "--out MODEL/inside"),
        (5, "--model nowhere"),
        (4, "--config=ds_configs/quickstart.yaml data.test_files=null"),
        (2, "--metrics rogue,rouge"),
        (2, "--model BART --config=ds_configs/quickstart.yaml data.test_files=null"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    model: Path, data: list[str], tmp_path: Path, capsys: Output, golden: Callable[[object], None],
    code: int, arguments: str
) -> None:  # fmt: skip
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": true}')
    for word, place in {"MODEL": model, "BART": tmp_path / "bart"}.items():
        arguments = arguments.replace(word, str(place))
    assert judge(model, tmp_path / "out", *data, *arguments.split()) == code
    golden(capsys.readouterr().err.replace(str(model.parent), "FOLDER"))
    assert not (tmp_path / "out").exists()


def test_the_configuration_is_that_of_the_run_that_has_exported_it(tmp_path: Path, capsys: Output) -> None:
    model = export_tiny(tmp_path / "run" / "export" / "final")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "word1", "output": "word2"}))
    _, setting = settings_for(tmp_path / "rows.jsonl")
    (tmp_path / "rows.yaml").rename(tmp_path / "run" / "config.yaml")
    assert main(["evaluate", "--model", str(model), "--device", "cpu", setting, "data.max_decoder_length=8"]) == 0
    out = Path(f"{model}-test")
    assert json.loads((out / "evaluation.json").read_text())["max_new_tokens"] == 8  # no text is longer than the run's
    assert f"1 example of test; predictions and figures are in {model}-test" in capsys.readouterr().out
    model = model.rename(tmp_path / "model")
    assert main(["evaluate", "--model", str(model), *HOW, setting]) == 2
    assert "--config: " in capsys.readouterr().err


def test_no_row_that_a_run_has_trained_on_is_in_its_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    model, rows = export_tiny(tmp_path / "run" / "export" / "final"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": word, "output": word}) + "\n" for word in WORDS))
    _, own_rows = settings_for(rows)
    config = load_config(rows.with_suffix(".yaml"), ["data.train_split_ratio=0.5"])
    checkpoint = tmp_path / "run" / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    for folder in (checkpoint, tmp_path / "run"):
        config.to_yaml(folder / "config.yaml")
    maker: Any = SimpleNamespace(vocabulary=None)
    facts = {"sources": source_facts(Opener(config.data, 0, maker, {}).open_sources(4)), "mixture weights": {}}
    data = {"fingerprint": facts, "dataset_commits": {"a/b@main": "c0ffee"}}
    (checkpoint / "trainer.json").write_text(json.dumps({"data": data}))

    def judged(*settings: str) -> tuple[int, str]:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        return judge(model, out, "--max-samples", "1", *settings), capsys.readouterr().err

    assert judged()[0] == judged("--split", "train", "data.train_split_ratio=0.4")[0] == 0
    code, problem = judged("data.train_split_ratio=0.4")
    assert code == 2
    assert "0.25 of the rows were for validation, 0.3 are now" in problem
    rows.write_text(rows.read_text() + rows.read_text())
    assert "was not in the training data" in judged()[1]
    assert judged(own_rows)[0] == 0

    def given(*arguments: Any) -> list[TextExample]:
        raise DataError(str(arguments[5]))

    monkeypatch.setattr("ds_encdec.evaluate.evaluation.split_examples", given)
    assert "{'a/b@main': 'c0ffee'}" in judged("data.dataset_name=a/b", "data.data_files=null")[1]
