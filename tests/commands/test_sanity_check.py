"""The sanity check: all of it on a sound configuration, and each check on what it is there to find."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished_runs import QUICKSTART
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_encdec import cli
from ds_encdec.base.findings import Finding
from ds_encdec.base.types import GateError
from ds_encdec.commands import sanity_check
from ds_encdec.commands.runs import config_for_model
from ds_encdec.commands.sanity_check import CHECKS, Subject, check_config
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.data.examples import chunks
from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.training.run_model import RunModel, new_model

pytestmark = pytest.mark.distributed

NAMES = [name for name, _, _ in CHECKS]
LOOKS = {name: function for name, function, _ in CHECKS}
WITHOUT_ENGINE = CHECKS[: NAMES.index("gradient_norm") + 1]
SIZES = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
SHORT = ("data.max_encoder_length=64", "data.max_decoder_length=64")
ON_CPU = ("data.preprocessing_num_workers=0", "training.bf16=false", "infra.device=cpu", *SHORT)
TINY = (*(f"model.architecture.{name}={size}" for name, size in SIZES.items()), *ON_CPU)
FSDP = "infra.distributed_type=fsdp"


def tiny(*overrides: str) -> FullConfig:
    return load_config(QUICKSTART, [*TINY, FSDP, *overrides])


def message(findings: list[Finding], name: str) -> str:
    return findings[NAMES.index(name)].message


def failed(findings: list[Finding]) -> list[str]:
    return [check.check for check in findings if not check.passed and not check.skipped]


def test_the_quickstart_passes_under_deepspeed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_encdec.cli", "sanity-check", "--config", str(QUICKSTART), *TINY, "--json"]
    plan = ["infra.num_gpus=8", "data.num_lanes=8", f"infra.output_dir={tmp_path / 'run'}", "training.bf16=true"]
    (temporary := tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    result = subprocess.run([*command, *plan], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    assert answer["passed"] is True
    assert [check["name"] for check in answer["checks"] if check["passed"]] == NAMES
    values = {check["name"]: check["values"] for check in answer["checks"]}
    assert "deepspeed" in answer["checks"][NAMES.index("overfits_one_batch")]["message"]
    assert values["overfits_one_batch"]["last_loss"] < 0.9 * values["overfits_one_batch"]["first_loss"]
    assert values["initial_loss"]["loss"] == pytest.approx(np.log(1024), abs=0.1)
    assert values["throughput"]["peak_memory_bytes"] > 10**8
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert not list(temporary.glob("ds-encdec-*"))


def test_pairs_of_answers_pass_with_the_untrained_model_as_their_reference() -> None:
    pairs = (
        "data.objective=dpo",
        "data.dataset_name=builtin_pairs",
        "data.on_long_row=skip",
        "data.eval_fraction=0.005",
    )
    wanted = [check for check in CHECKS if check[0] not in ("checkpoint_resumes", "throughput", "generation")]
    findings, error = check_config(tiny(*pairs), checks=wanted)
    assert error is None, [finding.message for finding in findings]
    values = {finding.check: finding.values for finding in findings}
    assert values["initial_loss"]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert values["overfits_one_batch"]["first_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert values["overfits_one_batch"]["last_loss"] < 0.5


def test_the_list_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    no_step_moves_anything = "training.adam_epsilon=1000"
    assert cli.main(["sanity-check", "--config", str(QUICKSTART), *TINY, FSDP, no_step_moves_anything]) == 10
    output = capsys.readouterr()
    marks = {line.split()[1]: line[0] for line in output.out.splitlines()}
    assert marks == dict.fromkeys(NAMES, "✓") | {
        "overfits_one_batch": "✗",
        "checkpoint_resumes": "-",
        "throughput": "-",
    }
    assert list(marks) == NAMES
    assert "overfits_one_batch" in output.err.splitlines()[-1]


def without_attention_in_the_decoder(name: str, weight: Tensor) -> Tensor:
    return weight * (not (name.startswith("decoder") and "o_proj" in name))


@pytest.mark.parametrize(
    ("change", "finds", "goes_on"),
    [
        (
            lambda name, weight: weight * torch.nan if name == "encoder.layers.0.input_layernorm.weight" else weight,
            "forward",
            False,
        ),
        (without_attention_in_the_decoder, "gradients_reach_both_sides", True),
        (lambda name, weight: weight * 30 if name == "shared.weight" else weight, "initial_loss", True),
    ],
)
def test_broken_weights_are_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[str, Tensor], Tensor],
    finds: str,
    goes_on: bool,
) -> None:
    def broken_model(config: FullConfig) -> RunModel:
        model = new_model(config)
        sound = model.weights
        assert sound is not None
        return replace(model, weights=lambda name, rows=slice(None), /: change(name, sound(name, rows)))

    monkeypatch.setattr(sanity_check, "new_model", broken_model)
    findings, error = check_config(tiny(), checks=WITHOUT_ENGINE)
    assert failed(findings)[0] == finds
    assert isinstance(error, GateError)
    assert findings[NAMES.index("backward")].skipped != goes_on
    if not goes_on:
        assert cli.main(["sanity-check", "--config", str(QUICKSTART), *TINY, FSDP, "--json"]) == 10
        answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is no JSON
        assert answer["checks"][NAMES.index("forward")]["values"]["loss"] == "nan"


def test_what_cannot_be_read_keeps_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "documents.jsonl"
    lines.write_text('{"body": "some text"}\n' * 500)
    data = ["data.dataset_name=json", f"data.data_files={lines}"]
    assert cli.main(["sanity-check", "--config", str(QUICKSTART), *TINY, FSDP, *data, "--json"]) == 4
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "text" in checks["data_reconstructs"]["message"]
    assert checks["forward"]["skipped"]
    assert not checks["forward"]["passed"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert cli.main(["sanity-check", "--model", str(tmp_path), "infra.device=cpu", FSDP]) == 5
    assert cli.main(["sanity-check", "--config", str(QUICKSTART), "training.learning_rat=1"]) == 2


def test_a_denoiser_that_loses_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    denoise = chunks.denoise

    def loses_one(tokens: np.ndarray, denoiser: str, *others: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
        encoder_ids, decoder_ids = denoise(tokens, denoiser, *others, **named)
        return (encoder_ids[:-1] if denoiser == "X2" else encoder_ids), decoder_ids

    monkeypatch.setattr(chunks, "denoise", loses_one)
    findings, _ = check_config(tiny(), checks=WITHOUT_ENGINE)
    assert failed(findings) == ["data_reconstructs"]
    assert "X2" in message(findings, "data_reconstructs")


def test_a_checkpoint_that_is_not_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDP2Engine, "load", lambda self, saved: None)
    findings, _ = check_config(tiny())
    assert failed(findings) == ["checkpoint_resumes"]
    assert not any(finding.skipped for finding in findings)


def test_an_unforeseen_error_fails_its_check_and_memory_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_: object) -> None:
        raise torch.OutOfMemoryError("no 3 GB left")

    monkeypatch.setattr(sanity_check, "run_packed", runs_out)
    monkeypatch.setattr(sanity_check, "PROMPT", None)
    findings, error = check_config(tiny())
    assert failed(findings) == ["forward", "generation"]
    assert "no 3 GB left" in message(findings, "forward")
    assert error is not None
    assert error.exit_code == 6


def test_a_parameter_without_a_gradient_is_found() -> None:
    subject = Subject(tiny(), RunContext(discover({}), torch.device("cpu"), "fsdp", HostCollectives()))
    for name in ("model_loads", "data_reconstructs", "forward", "backward"):
        assert LOOKS[name](subject)[0]
    subject.model.encoder.layers[0].mlp.up_proj.weight.requires_grad_(False).grad = None
    assert LOOKS["forward"](subject)[0]
    passed, problem, _ = LOOKS["backward"](subject)
    assert not passed
    assert "encoder.layers.0.mlp.up_proj.weight" in problem


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = new_model(tiny())
    out = tmp_path_factory.mktemp("models") / "export"
    assert model.weights is not None
    export_hf(model.weights, model.config, model.tokenizer, out, dtype=torch.float32, card="")
    return out


def test_model_folders_need_no_configuration(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SIZES)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((export / name).read_bytes())
    assert cli.main(["sanity-check", "--model", str(tmp_path), *ON_CPU, FSDP]) == 0, capsys.readouterr().out
    assert "to be between 0 and 100" in capsys.readouterr().out  # nobody knows what a trained model's loss should be
    for path in (None, QUICKSTART):
        config = config_for_model(export, path, [*ON_CPU, FSDP])
        assert check_config(config, checks=WITHOUT_ENGINE)[1] is None
