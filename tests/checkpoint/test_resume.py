"""Checkpoints that a run takes and refuses: models by what they are, not by their names."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from saved_checkpoints import random_state, save_checkpoint, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_encdec.base.types import CheckpointError, DsEncDecError
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manifest import read_manifest
from ds_encdec.checkpoint.saved_state import saved_weights
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.config.schema import FullConfig
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.training import resume
from ds_encdec.training.run_model import new_model, saved_model


def qwen3_folder(folder: Path, **changes: Any) -> Path:
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, **changes})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def run_config(model: Path | str, *, sentinels: int = 4, mode_tokens: bool = False, **form: Any) -> FullConfig:
    section = {"model_name_or_path": str(model), "num_sentinel_tokens": sentinels} | form
    return FullConfig.model_validate({"model": section, "data": {"use_mode_tokens": mode_tokens}})


def refused(checkpoint: Checkpoint, config: FullConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        resume.refuse_other_model(checkpoint, config)
    return str(caught.value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return qwen3_folder(tmp_path / "source")


@pytest.fixture
def checkpoint(tmp_path: Path, source: Path) -> Checkpoint:
    return saved(tmp_path / "checkpoints", run_config(source))


def test_the_same_model_elsewhere_is_the_same(
    checkpoint: Checkpoint, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(source.parent)
    with caplog.at_level("INFO"):
        resume.refuse_other_model(checkpoint, run_config("./source"))
    assert "model.model_name_or_path is" in caplog.text
    source.rename("moved")
    resume.refuse_other_model(checkpoint, run_config("moved"))
    resume.refuse_other_model(checkpoint, run_config(source))  # gone, but nobody needs it
    # An encoder-decoder with these sizes and tokenizer, such as its own export, is the same model as well.
    resume.refuse_other_model(checkpoint, run_config(exported(checkpoint)))


def saved(folder: Path, config: FullConfig) -> Checkpoint:
    """A checkpoint of the run `config`."""
    made = new_model(config)
    path = save_checkpoint(folder, 3, random_state(made.config, 0), made.config)
    made.tokenizer.save_pretrained(path / "model")
    config.to_yaml(path / "config.yaml")
    return Checkpoint(path, read_manifest(path))


def test_a_run_that_began_before_there_were_forms_goes_on_with_its_own(tmp_path: Path, source: Path) -> None:
    began = saved(tmp_path / "old", run_config(source, cross_attention="final"))
    file = began.path / "model" / "config.json"
    stored = json.loads(file.read_text())
    for name in ("cross_attention", "encoder_positions", "encoder_heights"):
        del stored[name]
    file.write_text(json.dumps(stored))
    settings = yaml.safe_load((began.path / "config.yaml").read_text())
    for name in ("cross_attention", "encoder_positions", "encoder_layers", "decoder_layers"):
        settings["model"].pop(name, None)
    (began.path / "config.yaml").write_text(yaml.safe_dump(settings))
    moved = source.rename(tmp_path / "moved")
    for name in (source, moved):
        for form in ({}, {"cross_attention": "final"}, {"encoder_positions": "unrotated"}):
            config = run_config(name, **form)
            resume.refuse_other_model(began, config)
            assert resume.of_its_form(config, began).model.cross_attention == "final"
            assert saved_model(config, began.path).config.cross_attention == "final"
    assert "\n  model.cross_attention is 'final' there and 'aligned' here\nGive the checkpoint's values" in refused(
        began, run_config(source, cross_attention="aligned")
    )
    assert "encoder_positions is 'unrotated' there" in refused(began, run_config(moved, encoder_positions="prefix"))


def test_a_run_goes_on_with_its_depth(tmp_path: Path, source: Path) -> None:
    began = saved(tmp_path / "shallow", run_config(source, decoder_layers="top 1", lora={"r": 2}))
    for form in ({}, {"decoder_layers": "top 1"}):
        config = run_config(source, lora={"r": 2}, **form)
        resume.refuse_other_model(began, config)
        assert resume.of_its_form(config, began).model.decoder_layers == "top 1"
    assert "model.decoder_layers is 'top 1' there and 2 here" in refused(
        began, run_config(source, decoder_layers=2, lora={"r": 2})
    )


def test_states_of_another_optimizer_are_warned_of(
    checkpoint: Checkpoint, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for optimizer, arguments in (("adamw", {}), ("muon", {}), ("theirs:Lion", {"momentum": 0.9})):
        training = run_config(source).training.model_copy(update={"optimizer": optimizer, "optimizer_args": arguments})
        resume._warn_of_another_optimizer(checkpoint, training)
    first, second = (record.getMessage() for record in caplog.records)
    assert "training.optimizer=adamw, but this run has muon: states of the same names are kept" in first
    assert "this run has theirs:Lion {'momentum': 0.9}" in second


def exported(checkpoint: Checkpoint) -> Path:
    model, out = saved_model(run_config(""), checkpoint.path), Path("exported")
    weights = saved_weights(open_saved_state(checkpoint.path, verified=True))
    export_hf(weights, model.config, model.tokenizer, out, dtype=torch.float32, card="")
    return out


def test_another_model_is_refused_by_what_differs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wider = qwen3_folder(tmp_path / "wider", intermediate_size=64)
    told = refused(checkpoint, run_config(wider))
    assert f"source' there and '{wider}' here\n" in told
    assert "\n  intermediate_size is 48 there and 64 here" in told
    told = refused(checkpoint, run_config(tmp_path / "missing"))
    assert re.search("missing.* does not exist", told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mode_tokens": True}, "data.use_mode_tokens is False there and True here"),
        ({"sentinels": 5}, "model.num_sentinel_tokens is 4 there and 5 here"),
    ],
)
def test_other_special_tokens_are_refused(
    checkpoint: Checkpoint, source: Path, changes: dict[str, Any], told: str
) -> None:
    assert told in refused(checkpoint, run_config(source, **changes))
    with pytest.raises(CheckpointError, match="the model lacks special tokens of this run"):
        saved_model(run_config(source, **changes), checkpoint.path)


class _SecondOfTwo(HostCollectives):
    def raise_first(self, error: Exception | None) -> None:
        raise DsEncDecError("rank 0 cannot read")


class _Untouched:
    def load(self, saved: object) -> None:
        raise AssertionError("loaded, while the other rank has left")


def test_no_rank_loads_what_another_cannot_open(checkpoint: Checkpoint) -> None:
    with pytest.raises(DsEncDecError, match="rank 0 cannot read"):
        resume.load_engine(_Untouched(), checkpoint, _SecondOfTwo(timedelta(minutes=1)))  # type: ignore[arg-type]
