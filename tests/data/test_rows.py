"""One row adds a denoiser, or a kind of data source: nothing else of the package is touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from data_parts import byte_tokenizer, make_config, make_data, texts

from ds_encdec.base.types import Document
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.inspection import inspect_data
from ds_encdec.engine.sharded_engine import split_by_denoiser
from ds_encdec.registry.denoisers import DENOISERS, Denoiser
from ds_encdec.registry.source_kinds import LOCAL_SOURCES, SourceKind


class Numbered:
    """A `MapSource` of the texts that `seed` gives."""

    def __init__(self, seed: int) -> None:
        self._texts = texts(60, seed=seed)
        self.identity = {"kind": "numbered", "seed": seed}

    def __len__(self) -> int:
        return len(self._texts)

    def key(self, index: int) -> str:
        return f"numbered/{index}"

    def document(self, index: int) -> Document:
        return Document(self.key(index), self._texts[index])


def test_the_pages_name_every_denoiser_in_the_order_of_its_weight() -> None:
    description = DataConfig.model_fields["ul2_task_weights"].description or ""
    assert f"in the order {', '.join(DENOISERS)}, or" in description
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\w ]+) \| (0\.\d+) \| ", page, re.M)
    assert rows == [(name, str(row.mean_span or "the rest"), f"{row.density:.2f}") for name, row in DENOISERS.items()]


def test_a_denoiser_and_a_kind_of_source_are_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_SOURCES, "numbered", SourceKind(f"{__name__}:Numbered", ("seed",)))
    names = list(DENOISERS)
    config = make_config(dataset_name="numbered")
    monkeypatch.setitem(DENOISERS, "R3", Denoiser(mean_span=6, density=0.3, weight=9))
    weights = tuple(row.weight for row in DENOISERS.values())
    config = config.model_copy(update={"data": config.data.model_copy(update={"ul2_task_weights": weights})})
    tokenizer, _ = byte_tokenizer()
    data = make_data(config, num_lanes=2)
    report = json.loads(inspect_data(data, tokenizer, num_examples=60, as_json=True))
    counts = report["statistics"]["denoisers"]
    assert list(counts) == [*names, "R3"]
    assert counts["R3"] > report["statistics"]["examples"] / 4  # 9 of 17 chunks

    assert data.fingerprint["sources"] == [{"number": 0, "size": 60, "kind": "numbered", "seed": 42}]
    assert data.commits == {}  # the hub was not asked for it
    batch = next(data.loader)[0]
    assert {*batch.documents} <= {f"numbered/{index}" for index in range(60)}
    losses = (batch.labels != -100).float()
    split = split_by_denoiser(losses.sum(), losses, batch)
    torch.testing.assert_close(split.tokens_by_denoiser, split.by_denoiser)
    assert split.tokens_by_denoiser[len(names)] == (batch.denoiser_ids == len(names)).sum() > 0
    assert data.saved()["fingerprint"]["data.ul2_task_weights"] == list(weights)
