"""Checkpoints of adapters: exported merged and for peft, averaged, and refused beside another base."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from saved_checkpoints import KINDS, config, save_checkpoint, tokenizer
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from ds_encdec.base.types import CheckpointError
from ds_encdec.cli import main
from ds_encdec.config.schema import FullConfig
from ds_encdec.exports.adapters import base_record, export_adapter, one_base, trained_weights
from ds_encdec.exports.hugging_face import average_checkpoints, export_checkpoint, export_hf
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes, trained_shapes
from ds_encdec.model.source import base_model
from ds_encdec.model.weights import random_weights

Saved = Callable[..., Path]
LORA = {"r": 3, "lora_alpha": 6.0}


def export_base(folder: Path, seed: int = 0) -> Path:
    export_hf(random_weights(config(), seed), config(), tokenizer(), folder, dtype=torch.float32, card="a card")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    base = export_base(base_of(run))
    section = {"model_name_or_path": str(base), "lora": LORA}
    settings = FullConfig.model_validate({"model": section, "training": {"save_steps": 2}})
    for step in (2, 4):
        draw = torch.Generator().manual_seed(step)
        shapes = trained_shapes(settings, config())
        state = {kind: {name: torch.randn(s, generator=draw) * 0.1 for name, s in shapes.items()} for kind in KINDS}
        record = base_record(settings.model.model_name_or_path, base_model(settings.model, config(), seed=7))
        save_checkpoint(run / "checkpoints", step, state, config(), run=settings, base=record)
    return run


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def base_of(run: Path) -> Path:
    return run.parent / f"{run.name}-base" / "snapshots" / "r3v"  # as the hub's cache has it


def logits(model: Any) -> Tensor:
    ids = torch.tensor([[2, 3, 4, 2, 5]])
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    return found


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_the_merged_model_is_what_peft_loads_onto_the_base(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "merged", dtype=torch.float32)
    export_adapter(checkpoint, tmp_path / "adapter")
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    base = AutoModelForSeq2SeqLM.from_pretrained(base_of(run), trust_remote_code=True)
    unadapted = logits(base)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(base_of(run))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-5)
    assert (logits(merged) - unadapted).abs().max() > 0.01
    ids = torch.tensor([[2, 3, 4]])
    assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=3), merged.generate(ids, max_new_tokens=3))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f'from_pretrained("{base_of(run)}", trust_remote_code=True)' in card
    form = """'model.cross_attention="aligned"' 'model.encoder_positions="prefix"'`."""
    assert f"--seed\n7 --out FOLDER {form}" in card
    assert "base_model: " not in card  # which names one of the hub
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "adapter" / name).read_text() == (tmp_path / "merged" / name).read_text()


def test_an_average_is_the_mean_of_merged_models(run: Path, tmp_path: Path) -> None:
    assert average_checkpoints(RunFolder(str(run)), tmp_path / "mean", last=2, dtype=torch.float32) == [2, 4]
    mean = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "mean").state_dict()
    both = [trained_weights(run / "checkpoints" / f"step-{step:08d}") for step in (2, 4)]
    for name in parameter_shapes(config()):
        torch.testing.assert_close(mean[name], (both[0](name) + both[1](name)) / 2, rtol=0, atol=1e-6)
        rows = slice(1, 3)
        torch.testing.assert_close(both[0](name)[rows], both[0](name, rows))


def test_machines_with_different_bases_are_told_apart() -> None:
    mine = {"sha256": "a" * 64, "folder": "/here", "revision": "r1"}
    one_base([mine, None, dict(mine, folder="/there"), None], "model.model_name_or_path")
    with pytest.raises(CheckpointError, match=r"/here \(revision r1, .*; /there \(revision unknown, SHA-256 bbbb"):
        one_base([mine, {"sha256": "b" * 64, "folder": "/there", "revision": None}], "model.model_name_or_path")


def test_a_base_that_was_moved_is_the_same(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    moved = shutil.move(base_of(run), tmp_path / "moved")
    try:
        with pytest.raises(CheckpointError, match=r"revision r3v, sha256 [0-9a-f]{64}\), .*does not exist.*--base"):
            trained_weights(checkpoint)
        here = trained_weights(checkpoint, str(moved))("shared.weight")
        assert torch.equal(here, random_weights(config(), 0)("shared.weight"))
        export_adapter(checkpoint, tmp_path / "adapter", base=str(moved))
        assert f'"{moved}"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    finally:
        shutil.move(moved, base_of(run))


def test_another_base_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = export_base(tmp_path / "other", seed=1)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--base", str(other)]) == 5
    said = capsys.readouterr().err
    assert said.count("sha256") == 2
    assert str(other) in said
    assert not os.path.exists(tmp_path / "out")
