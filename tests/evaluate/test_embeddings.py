"""`ds-encdec evaluate --task`: figures against scipy's and trec_eval's, embeddings against sentence-transformers'."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
from safetensors.torch import load_file, save_file
from saved_checkpoints import FORMED, config, random_state, save_checkpoint
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize

from ds_encdec.cli import main
from ds_encdec.evaluate import embeddings
from ds_encdec.evaluate.embedding_tasks import correlations, rank_figures, read_retrieval
from ds_encdec.evaluate.embeddings import Embedder
from ds_encdec.exports.hugging_face import export_checkpoint
from ds_encdec.launch.world import free_port
from ds_encdec.model.encoder import Qwen3EncoderModel

CPU = torch.device("cpu")
FORMS = FORMED | {"raw": {"norm_position": "after"}}
TREC = {"ndcg_cut_10": "ndcg@10", "recall_1": "recall@1", "recall_10": "recall@10", "recall_100": "recall@100"}
Output = pytest.CaptureFixture[str]


def text(draw: random.Random) -> str:
    words = ["hello", "world", *(f"<extra_id_{number}>" for number in range(8))]
    return " ".join(draw.choices(words, k=draw.randint(1, 12)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings")
    for form, changes in FORMS.items():
        checkpoint = save_checkpoint(root / f"of {form}", 7, random_state(config(**changes), seed=3), config(**changes))
        for kind in ("whole", "encoder"):
            export_checkpoint(checkpoint, root / f"{kind}-{form}", encoder_only=kind == "encoder")
    draw = random.Random(0)
    rows = [{"sentence1": text(draw), "sentence2": text(draw), "score": draw.randint(0, 5)} for _ in range(40)]
    (root / "sts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "sts.tsv").write_text(
        "score\tsentence1\tsentence2\n"
        + "".join(f"{row['score']}\t{row['sentence1']}\t{row['sentence2']}\n" for row in rows)
    )
    write_beir(root / "beir", draw, times=2)
    write_beir(root / "different", draw)
    return root


def write_beir(folder: Path, draw: random.Random, times: int = 1) -> None:
    """Gains of 0 to 2, several answers, unjudged documents, and queries without an answer. `times`: of each text."""
    (folder / "qrels").mkdir(parents=True)
    texts = list(dict.fromkeys(text(draw) for _ in range(400)))[:300]
    # Of equal similarities trec_eval takes the higher name first, and `evaluate` the earlier document.
    corpus = [
        {"_id": f"d{999 - number}", "title": "hello" if number % 3 else "", "text": texts[number // times * times]}
        for number in range(300)
    ]
    queries = [{"_id": f"q{number}", "text": text(draw)} for number in range(30)]
    judged = [
        (f"q{number}", f"d{draw.randint(700, 999)}", draw.choice([0, 1, 2]) if number % 10 else 0)
        for number in range(25)
        for _ in range(number % 4 * 4 + 1)
    ]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ("\t".join(map(str, row)) + "\n" for row in dict.fromkeys(judged))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def judge(model: Path, task: str, file: Path, out: Path, *arguments: str) -> dict[str, Any]:
    how = ["--out", str(out), "--device", "cpu", "--batch-tokens", "60"]
    assert main(["evaluate", "--model", str(model), "--task", task, str(file), *how, *arguments]) == 0
    return json.loads((out / "metrics.json").read_text())


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def changed(folder: Path, model: Path, **files: dict[str, Any]) -> Path:
    """A copy of the model's folder in which files for sentence-transformers have other contents."""
    shutil.copytree(model, folder)
    for name, content in files.items():
        file = next(folder.rglob(f"{name}.json")) if name != "pooling" else folder / "1_Pooling" / "config.json"
        file.write_text(json.dumps(content))
    return folder


def by_sentence_transformers(model: SentenceTransformer, kind: str, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(getattr(model, kind)(texts))


@pytest.mark.parametrize("with_ties", [False, True])
def test_correlations_are_scipys(with_ties: bool) -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=(2, 50))
    if with_ties:
        one, other = one.round(), (10 * one + other).round(-1)
    found = correlations(one.tolist(), other.tolist())
    assert found["spearman"] == pytest.approx(100 * spearmanr(one, other).statistic)
    assert found["pearson"] == pytest.approx(100 * pearsonr(one, other).statistic)
    assert correlations([0.5, 0.5], [1, 2]) == {"spearman": 0, "pearson": 0}


def test_figures_of_ranks_by_hand() -> None:
    found = {"a": ["x", "unjudged", "y"], "b": [f"n{number}" for number in range(10)] + ["x"]}
    figures = rank_figures(found, {"a": {"x": 1, "y": 2, "never found": 1}, "b": {"x": 3}})
    ideal = 2 + 1 / np.log2(3) + 1 / np.log2(4)
    assert figures == pytest.approx(
        {
            "ndcg@10": 100 * (1 + 2 / np.log2(4)) / ideal / 2,
            "mrr@10": 50,  # rank 11 counts nothing
            "recall@1": 100 / 3 / 2,
            "recall@10": 100 * 2 / 3 / 2,
            "recall@100": 100 * (2 / 3 + 1) / 2,
        }
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_model_is_judged_by_the_encoder_that_its_export_has(root: Path, tmp_path: Path, form: str) -> None:
    figures = [
        judge(root / f"{kind}-{form}", "sts", root / "sts.jsonl", tmp_path / kind, "--dimensions", "8", "16")["figures"]
        for kind in ("whole", "encoder")
    ]
    assert figures[0] == pytest.approx(figures[1])
    assert list(figures[0]) == [f"{name}{of}" for of in ("", "_dim8", "_dim16") for name in ("spearman", "pearson")]


def test_figures_of_pairs_are_those_of_sentence_transformers(root: Path, tmp_path: Path, capsys: Output) -> None:
    found = judge(root / "encoder-aligned", "sts", root / "sts.jsonl", tmp_path / "out", "--dimensions", "8", "--json")
    assert json.loads(capsys.readouterr().out) == found
    rows, model = lines(root / "sts.jsonl"), SentenceTransformer(str(root / "encoder-aligned"), trust_remote_code=True)
    for size, name in ((32, ""), (8, "_dim8")):
        one, other = (
            by_sentence_transformers(model, "encode", [row[side] for row in rows])[:, :size]
            for side in ("sentence1", "sentence2")
        )
        similarities = torch.cosine_similarity(one, other).tolist()
        scores = [row["score"] for row in rows]
        assert found["figures"][f"spearman{name}"] == pytest.approx(100 * spearmanr(similarities, scores).statistic)
        assert found["figures"][f"pearson{name}"] == pytest.approx(
            100 * pearsonr(similarities, scores).statistic, rel=1e-4
        )
        if size == 32:
            records = lines(tmp_path / "out" / "predictions.jsonl")
            assert [record["similarity"] for record in records] == pytest.approx(similarities, abs=1e-5)
            assert [record["score"] for record in records] == scores
    assert found["examples"] == 40
    (tmp_path / "sts.tsv.gz").write_bytes(gzip.compress((root / "sts.tsv").read_bytes()))
    for number, file in enumerate((root / "sts.tsv", tmp_path / "sts.tsv.gz")):
        as_table = judge(root / "encoder-aligned", "sts", file, tmp_path / f"table-{number}")
        assert as_table["figures"].items() <= found["figures"].items()
    assert "40 examples of" in (shown := capsys.readouterr().out)
    assert f"spearman             {found['figures']['spearman']:10.4f}\n" in shown


PROMPTS = {"query": "hello world ", "document": "<extra_id_1> ", "own": "world "}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config_sentence_transformers": {"prompts": PROMPTS, "default_prompt_name": "own", "truncate_dim": 24}},
        {"config_sentence_transformers": {"prompts": {"query": "hello "}}},
        {"sentence_bert_config": {"max_seq_length": 5}},
        {"config_sentence_transformers": {"prompts": {"own": "world "}, "default_prompt_name": "own"}},
        {"pooling": {"embedding_dimension": 32, "pooling_mode_max_tokens": False, "pooling_mode_lasttoken": True}},
        {"pooling": {"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True}},
    ],
)  # fmt: skip
def test_embeddings_are_those_of_sentence_transformers(root: Path, tmp_path: Path, files: dict[str, Any]) -> None:
    folder = changed(tmp_path / "model", root / "encoder-aligned", **files)
    draw, model = random.Random(1), SentenceTransformer(str(folder), trust_remote_code=True)
    texts, embed = [text(draw) for _ in range(20)], Embedder(folder, CPU, None, batch_tokens=40)
    for how, kind in (("encode", None), ("encode_query", "query"), ("encode_document", "document")):
        expected = by_sentence_transformers(model, how, texts)
        torch.testing.assert_close(normalize(embed(texts, kind)), normalize(expected), rtol=1e-4, atol=1e-5)


def test_keys_are_in_the_order_of_similarities_and_then_of_documents() -> None:
    values = [[-1.0, 0.5, -0.0, 0.0, 0.5, -0.25, 1.0, 5e-8, -5e-8]]
    similarities, numbers = embeddings._read_keys(embeddings._best(embeddings._keys(torch.tensor(values), 3)))
    assert numbers.tolist() == [[9, 4, 7, 10, 5, 6, 11, 8, 3]]
    torch.testing.assert_close(similarities, torch.tensor(values).sort(descending=True).values, rtol=0, atol=0)
    both = torch.cat([embeddings._keys(torch.full((1, 2), 0.5), first) for first in (2**31 - 2, 5)], 1)
    assert embeddings._read_keys(embeddings._best(both))[1].tolist() == [[5, 6, 2**31 - 2, 2**31 - 1]]


@pytest.mark.parametrize("block", [2**14, 7])
def test_figures_of_documents_are_those_of_trec_eval(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    widths, best = list[int](), embeddings._best

    def watched(*keys: torch.Tensor) -> torch.Tensor:
        widths.extend(one.shape[1] for one in keys[1:])  # beside the best ones so far
        return best(*keys)

    monkeypatch.setattr(embeddings, "_best", watched)
    monkeypatch.setattr(embeddings, "_BLOCK_DOCUMENTS", block)
    found = judge(root / "encoder-final", "retrieval", root / "beir", tmp_path / "out", "--dimensions", "8")
    data, records = read_retrieval(root / "beir"), lines(tmp_path / "out" / "predictions.jsonl")
    answered = {f"q{number}" for number in range(25) if number % 10}
    assert data.queries.keys() <= answered  # queries without a judgement, or without an answer, are no examples
    assert found["examples"] == len(records) == len(data.gains) > 15
    assert any(2 in gains.values() and len(gains) > 1 for gains in data.gains.values())
    run = {record["query"]: record["found"] for record in records}
    assert {len(documents) for documents in run.values()} == {100}
    judged = pytrec_eval.RelevanceEvaluator(data.gains, {"ndcg_cut_10", "recall_1,10,100"}).evaluate(run)
    first = {query: dict(list(documents.items())[:10]) for query, documents in run.items()}
    reciprocal = pytrec_eval.RelevanceEvaluator(data.gains, {"recip_rank"}).evaluate(first)
    for theirs, ours in TREC.items():
        assert found["figures"][ours] == pytest.approx(100 * np.mean([of[theirs] for of in judged.values()])), ours
    assert found["figures"]["mrr@10"] == pytest.approx(100 * np.mean([of["recip_rank"] for of in reciprocal.values()]))
    # Documents with the same text have the same similarity; the earlier one stands first.
    for documents in run.values():
        assert list(documents.items()) == sorted(documents.items(), key=lambda item: (-item[1], -int(item[0][1:])))
    assert max(widths) == min(block, 300)

    model, embed = (
        SentenceTransformer(str(root / "encoder-final"), trust_remote_code=True),
        list(data.documents.values()),
    )
    queries = by_sentence_transformers(model, "encode_query", list(data.queries.values()))[:, :8]
    documents = by_sentence_transformers(model, "encode_document", embed)[:, :8]
    similarities = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
    whole = {
        query: dict(zip(data.documents, row, strict=True))
        for query, row in zip(data.queries, similarities.tolist(), strict=True)
    }
    theirs = pytrec_eval.RelevanceEvaluator(data.gains, {"ndcg_cut_10"}).evaluate(whole)
    expected = 100 * np.mean([of["ndcg_cut_10"] for of in theirs.values()])
    assert found["figures"]["ndcg@10_dim8"] == pytest.approx(expected, rel=0.02)  # ties within rounding


def test_rows_of_queries_positives_and_negatives(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "positive": "one", "negative": ["two", "three"]},
        {"anchor": "b", "positives": ["two", "four"], "negative_1": None, "negative_2": "five"},
        {"query": "a", "positive": ["one", {"title": "fo", "text": "ur"}, {"title": "", "text": "four"}], "comment": 1},
    ]
    (file := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    data = read_retrieval(file)
    assert data.queries == {"1": "a", "2": "b"}
    assert data.documents == {
        "1.positive.0": "one",
        "1.negative.0": "two",
        "1.negative.1": "three",
        "2.positives.1": "four",
        "2.negative_2.0": "five",
        "3.positive.1": "fo ur",
    }
    assert data.gains == {
        "1": {"1.positive.0": 1, "2.positives.1": 1, "3.positive.1": 1},
        "2": {"1.negative.0": 1, "2.positives.1": 1},
    }


@pytest.mark.distributed
def test_ranks_share_the_documents_and_leave_the_files_of_one(root: Path, tmp_path: Path) -> None:
    found = judge(root / "encoder-final", "retrieval", root / "different", tmp_path / "one")
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    named = ["evaluate", f"--model={root / 'encoder-final'}", f"--out={tmp_path / 'two'}", "--batch-tokens=60"]
    command = [sys.executable, "-m", "ds_encdec.cli", *named, "--device=cpu", "--task=retrieval", root / "different"]
    ranks = [
        subprocess.Popen(command, env={**place, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    by_two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert by_two == found
    one, two = (lines(tmp_path / name / "predictions.jsonl") for name in ("one", "two"))
    for ours, theirs in zip(one, two, strict=True):
        assert list(ours["found"]) == list(theirs["found"])
        assert ours["found"] == pytest.approx(theirs["found"], abs=1e-5)
    assert "examples of" in printed[0]
    assert printed[1] == ""


GOOD = {"sentence1": "hello", "sentence2": "world", "score": 1}
BAD_ROWS: dict[str, list[Any]] = {
    "sts no score": [GOOD, {**GOOD, "score": "high"}],
    "sts not finite": [GOOD, {**GOOD, "score": float("nan")}],
    "sts no text": [GOOD, {**GOOD, "sentence2": " "}],
    "sts other columns": [{"a": 1, "b": 2}],
    "sts equal scores": [GOOD, GOOD],
    "sts empty": [],
    "sts half a character": [{**GOOD, "sentence1": "\ud83d"}],
    "retrieval no positive": [{"query": "hello", "positive": "a"}, {"query": "world", "negative": "b"}],
    "retrieval no list of texts": [{"query": "hello", "positive": ["a", {}]}],
    "retrieval no rows": ["query"],
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named(
    root: Path, tmp_path: Path, capsys: Output, golden: Callable[[object], None], case: str
) -> None:
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in BAD_ROWS[case]))
    how = ["--model", str(root / "encoder-final"), "--out", str(tmp_path / "out")]
    assert main(["evaluate", *how, "--task", case.split()[0], str(file)]) == 4
    golden(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qrels/test.tsv", "q1\td", "q99\td"),
        ("qrels/test.tsv", "\td", "\tno "),
        ("qrels/test.tsv", "\t2\n", "\t2.5\n"),
        ("qrels/test.tsv", "query-id", "query"),
        ("qrels/test.tsv", "\t2\n", "\t0\n"),
        ("qrels/test.tsv", None, None),
        ("queries.jsonl", '"q1"', '"q0"'),
        ("corpus.jsonl", '"text": "', '"words": "'),
    ],
)
def test_a_folder_with_mistakes_is_refused(
    root: Path, tmp_path: Path, capsys: Output, golden: Callable[[object], None],
    name: str, old: str | None, new: str,
) -> None:  # fmt: skip
    shutil.copytree(root / "beir", tmp_path / "beir")
    file = tmp_path / "beir" / name
    if old is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace(old, new).replace("\t1\n", "\t0\n" if new == "\t0\n" else "\t1\n"))
    how = ["--model", str(root / "encoder-final"), "--out", str(tmp_path / "out")]
    assert main(["evaluate", *how, "--task", "retrieval", str(tmp_path / "beir")]) == 4
    golden(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, "--task sts"),
        (2, "--task stss FILE"),
        (2, "FILE"),
        (2, "--dimensions 8"),
        (2, "--task sts FILE --split validation"),
        (2, "--task sts FILE --num-beams 2"),
        (2, "--task sts FILE data.seed=1"),
        (2, "--task sts FILE --dimensions 8 33"),
        (2, "--task sts FILE --dimensions 0"),
        (2, "--task sts FILE --out MODEL/inside"),
        (4, "--task sts nowhere.jsonl"),
        (4, "--task retrieval README.md"),
        (5, "--task sts FILE --model nowhere"),
        (5, "--task sts FILE --model BART"),
        (5, "--task sts FILE --model POOLED"),
        (5, "--task sts FILE --model NAN"),
        (5, "--task sts FILE --model CUT"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    root: Path, tmp_path: Path, capsys: Output, golden: Callable[[object], None], code: int, arguments: str
) -> None:
    model = root / "encoder-final"
    (bart := tmp_path / "bart").mkdir()
    (bart / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": true}')
    pooled = changed(tmp_path / "pooled", model, pooling={"pooling_mode": ["mean", "max"]})
    spoilt = changed(tmp_path / "spoilt", model)
    weights = load_file(spoilt / "model.safetensors")
    weights["encoder.norm.weight"][0] = torch.nan
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    cut = changed(tmp_path / "cut", model)
    (cut / "1_Pooling" / "config.json").write_text('{"pooling')
    places = {"CUT": cut, "MODEL": model, "FILE": root / "sts.jsonl", "BART": bart, "POOLED": pooled, "NAN": spoilt}
    for word, place in places.items():
        arguments = arguments.replace(word, str(place))
    how = ["--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["evaluate", *how, *arguments.split()]) == code
    golden(capsys.readouterr().err.replace(str(root), "ROOT"))
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_a_batch_that_is_too_large_names_its_option(
    root: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Qwen3EncoderModel, "forward", refuse)
    how = ["--model", str(root / "encoder-final"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["evaluate", *how, "--task", "sts", str(root / "sts.jsonl"), "--batch-tokens", "50"]) == 6
    assert "does not fit into memory (CUDA out of memory. Tried to allocate 2 GiB). Lower --batch-tokens (50 now)" in (
        capsys.readouterr().err
    )


def test_another_evaluation_is_not_overwritten(root: Path, tmp_path: Path, capsys: Output) -> None:
    arguments = ["--task", "sts", str(root / "sts.jsonl"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["evaluate", "--model", str(root / "encoder-final"), *arguments]) == 0
    assert main(["evaluate", "--model", str(root / "encoder-final"), *arguments, "--dimensions", "4"]) == 0
    assert main(["evaluate", "--model", str(root / "encoder-aligned"), *arguments]) == 2
    assert "which differs in model (" in capsys.readouterr().err
