"""The export of a run of embeddings: sentence-transformers embeds texts as the run did, and another run goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved_checkpoints import config, random_state, save_checkpoint, tokenizer
from test_export import without
from torch.nn import functional as F

from ds_encdec.base.types import Example
from ds_encdec.config.schema import DataConfig, FullConfig, ModelConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data.examples.contrastive import ContrastMaker
from ds_encdec.data.loader import collate
from ds_encdec.exports.hugging_face import export_checkpoint
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.source import resolve_model
from ds_encdec.objectives.contrastive import pooled
from ds_encdec.objectives.protocol import run_packed
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.sentinels import add_sentinels

MODEL = config(num_hidden_layers=0, num_encoder_layers=2, cross_attention="final", encoder_heights=None)
SENTENCES = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
cut = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu", truncate_dim=8)
queries, documents = model.encode_query(["hello", "world hello"]), model.encode_document(["world world", "hello"])
print(json.dumps({
    "queries": queries.tolist(), "documents": documents.tolist(), "prompts": model.prompts,
    "similarity": model.similarity(queries, documents).tolist(), "cut": cut.encode_query(["hello"]).shape,
    "longest": model.max_seq_length,
}))
"""


def run_of(objective: str, **contrastive: Any) -> FullConfig:
    data = {"objective": objective, "max_encoder_length": 12}
    if objective == "contrastive":
        data |= {"query_prefix": "hello : ", "document_prefix": "world : ", "on_long_row": "truncate"}
    return FullConfig.model_validate({"data": data, "training": {"contrastive": contrastive, "eval_samples": 0}})


def embedded(state: dict[str, torch.Tensor], run: FullConfig, query: str, document: str) -> torch.Tensor:
    """A query's and a document's embedding as the run computes them, of length 1."""
    words = tokenizer()
    maker = ContrastMaker(run.data, 0, words, add_sentinels(words, 4, mode_tokens=False))
    (texts,) = maker._sides({"query": query, "positive": document})
    ids = [maker._begun(maker._encode(text))[: run.data.max_encoder_length] for text in texts]
    nothing = np.empty(0, dtype=np.int32)
    batch = collate([Example(ids[0], nothing, "CONTRASTIVE", "", ((ids[1], nothing),))], Budgets(32, 0, 4), 0)
    model = Qwen3ForSeq2SeqLM(MODEL).eval()
    model.load_state_dict(state, strict=False)
    return F.normalize(pooled(run_packed(model, batch).states, batch, run.training.contrastive.pooling), dim=1)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_sentence_transformers_embeds_as_the_run_did(tmp_path: Path, pooling: str) -> None:
    import json

    run = run_of("contrastive", pooling=pooling, matryoshka_dims=[8, 16])
    state = random_state(MODEL, seed=3)
    checkpoint = save_checkpoint(tmp_path, 7, state, MODEL, run=run)
    export_checkpoint(checkpoint, tmp_path / "out")
    report = json.loads(without(["ds_encdec", "deepspeed"], SENTENCES, tmp_path / "out", cwd=tmp_path))
    assert report["prompts"] == {"query": "hello : ", "document": "world : "}
    assert (report["cut"], report["longest"]) == ([1, 8], 12)
    pairs = [("hello", "world world"), ("world hello", "hello")]
    expected = torch.stack([embedded(state["weight"], run, *pair) for pair in pairs])
    for side, name in enumerate(("queries", "documents")):
        torch.testing.assert_close(torch.tensor(report[name]), expected[:, side], rtol=1e-4, atol=1e-5)
    cosines = expected[:, 0] @ expected[:, 1].T
    torch.testing.assert_close(torch.tensor(report["similarity"]), cosines, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in ("`'hello : '`", f"| Pooling, temperature | {pooling}, 0.05 |", "| 8, 16 |", "encode_query"):
        assert fact in card
    assert "decoder" not in card.partition("```")[0]
    assert "tune it on pairs first" not in card
    assert ("transformers alone" in card) == (pooling == "mean")


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_begin_with_what_masked_prediction_exports(tmp_path: Path, tied: bool) -> None:
    model = config(num_hidden_layers=0, num_encoder_layers=2, cross_attention="final", tie_word_embeddings=tied)
    state = random_state(model, seed=3)["weight"]
    assert ("lm_head.weight" in state) is not tied
    checkpoint = save_checkpoint(tmp_path, 7, random_state(model, seed=3), model, run=run_of("mntp"))
    export_checkpoint(checkpoint, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "masked next-token prediction (`data.objective: mntp`) of 0.2 of the tokens" in card
    assert "tune it on pairs first" in card
    words = tokenizer()
    section = ModelConfig(model_name_or_path=str(tmp_path / "out"), num_sentinel_tokens=4)
    known = add_sentinels(words, 4, mode_tokens=False)
    source = resolve_model(section, known, 0, OBJECTIVES["contrastive"])
    shapes = parameter_shapes(source.config)
    assert shapes.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(source.weights(name), state[name]) for name in shapes)
    assert DataConfig().query_prefix == ""
