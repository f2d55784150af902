"""A phase amounts to numbers, and to the configuration of its run. No run is started here."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_runs import CONFIGS, QUICKSTART, finish_run

from ds_encdec.base.types import ConfigError
from ds_encdec.cli import main
from ds_encdec.commands.phases.plan import (
    PHASES,
    PlannedPhase,
    TrainingPhase,
    estimate_steps_for_tokens,
    estimate_training_time,
    plan_phase,
    with_given,
)
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.words.rewording import given_fields

FULL_RUN = CONFIGS / "qwen3_0.6b_ul2.yaml"
SANITY, VALIDATION, MEDIUM, FULL = PHASES


def plan(phase: TrainingPhase, *overrides: str, path: Path = QUICKSTART, max_steps: int | None = None) -> PlannedPhase:
    return plan_phase(load_config(path, overrides), phase, max_steps)


def steps(planned: PlannedPhase) -> int:
    return planned.config.training.num_train_steps


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["phases", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_steps_and_time() -> None:
    assert estimate_steps_for_tokens(4096 * 10, 2, 512, 2, 2) == 10
    assert estimate_steps_for_tokens(4096 * 10 + 1, 2, 512, 2, 2) == 11
    assert estimate_training_time(1000, 86.4) == {"seconds": 86400.0, "minutes": 1440.0, "hours": 24.0, "days": 1.0}


def test_tokens_or_steps_whichever_comes_first() -> None:
    first, _, third, _ = (plan(phase, path=FULL_RUN) for phase in PHASES)
    assert first.tokens_per_step == 8 * 8 * 4 * 6144
    assert (steps(first), first.steps_for_tokens) == (7, 7)  # 10 M tokens, before its 100 steps
    assert (steps(third), third.steps_for_tokens) == (50_000, 63_579)


def test_a_phase_is_laid_over_the_configuration() -> None:
    where = ("infra.wandb_run_name=run", "infra.output_dir=/o", "infra.upload_to=s3://bucket/run/")
    form = ("model.cross_attention=final", "model.decoder_layers=[0, 1]")  # the export's own by then
    planned = plan(VALIDATION, "phases.validation.num_train_steps=90", *where, *form)
    training, infra, model = planned.config.training, planned.config.infra, planned.config.model
    assert (training.num_train_steps, training.eval_steps, training.save_steps) == (90, 90, 90)
    assert (training.logging_steps, training.warmup_steps, training.seed) == (10, 9, 43)
    assert (infra.output_dir, infra.logging_dir) == ("/o/phases/validation", "./logs")
    assert (infra.wandb_run_name, infra.upload_to) == ("run-validation", "s3://bucket/run/phases/validation")
    assert model.model_name_or_path == "/o/phases/sanity_check/export/final"
    assert (model.architecture, model.tokenizer_name_or_path, model.num_sentinel_tokens) == (None, None, 32)
    assert (model.cross_attention, model.decoder_layers) == (None, None)
    assert plan(SANITY).config.model == load_config(QUICKSTART).model
    assert planned.config.data.num_lanes == 4
    assert FullConfig.model_validate(planned.config.model_dump()) == planned.config  # as strict as any other


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shortened_phase_evaluates_saves_and_logs_within_its_steps(path: Path) -> None:
    config = plan(MEDIUM, "infra.logging_dir=/logs", path=path, max_steps=8).config
    steps = ("num_train_steps", "eval_steps", "save_steps", "logging_steps")
    assert {name: getattr(config.training, name) for name in steps} == dict.fromkeys(steps, 8)
    assert config.infra.logging_dir == "/logs/medium"  # outside of the run, and so split


def test_the_command_line_goes_before_a_phases_defaults_and_phases_before_both() -> None:
    arguments = ["logging_steps=1", "training.save_steps=3", "phases.medium.save_steps=70", "max_steps=60"]
    arguments += ["monitor.on_loss_spike=warn", "training.warmup_steps=5"]
    given = given_fields(arguments)
    assert {"training.logging_steps", "training.num_train_steps", "phases.medium.save_steps"} < given
    config = with_given(load_config(FULL_RUN, arguments), given)
    sanity, medium = plan_phase(config, SANITY), plan_phase(config, MEDIUM)
    assert [(steps(one), one.config.training.logging_steps) for one in (sanity, medium)] == [(7, 1), (60, 1)]
    assert (sanity.settings.save_steps, medium.settings.save_steps) == (3, 70)
    assert steps(plan_phase(with_given(load_config(FULL_RUN), ()), MEDIUM)) == 50_000
    assert "num_train_steps=7 (not 60)" in sanity.differences(config)


def test_variables_before_the_script_are_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text((CONFIGS.parent / "scripts" / "run_full_training.sh").read_text())
    (tmp_path / "venv.sh").write_text(f"ROOT={tmp_path}; PATH={tmp_path}:$PATH\n")  # the environment is there
    (tmp_path / "ds-encdec").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ds-encdec").chmod(0o755)

    def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tmp_path / "run.sh"), *arguments]
        return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)

    named = {"PHASE": "validation", "MODEL_PATH": "a b", "DATASET": "builtin", "OUTPUT_DIR": "/data/run"}
    own = ["--from", "medium", "model_name_or_path=c", "--data.dataset_name", "d", "--output_dir=e"]
    paths = ["model.model_name_or_path=a b", "data.dataset_name=builtin", "infra.output_dir=/data/run"]
    for arguments, wanted in ((["x=1"], ["--only", "validation", *paths, "x=1"]), (own, own)):
        assert script(*arguments, **named).stdout.split("\n")[3:-1] == wanted
    (hosts := tmp_path / "hosts").write_text("# mine\nlocalhost slots=8\n")
    alone = " --no_ssh_check --master_addr 127.0.0.1"
    assert script(str(hosts), "x=1").stdout.endswith(f"deepspeed --hostfile {hosts}{alone}\nx=1\n")


@pytest.mark.parametrize(
    ("overrides", "max_steps", "warmup_steps"),
    [
        ((), 40, 4),  # a tenth
        ((), 5, 1),  # DeepSpeed's schedules need one
        (("training.warmup_steps=0", "training.lr_scheduler_type=cosine"), 40, 0),
        (("phases.sanity_check.warmup_steps=70",), None, 70),  # as it says
        (("phases.sanity_check.warmup_steps=70",), 40, 4),  # shortened
    ],
)
def test_warmup(overrides: tuple[str, ...], max_steps: int | None, warmup_steps: int) -> None:
    assert plan(SANITY, *overrides, max_steps=max_steps).config.training.warmup_steps == warmup_steps


def test_a_phase_that_contradicts_itself_is_named() -> None:
    with pytest.raises(ConfigError, match=r"phase validation of 200 steps(.|\n)*training.warmup_steps"):
        plan(VALIDATION, "phases.validation.warmup_steps=200")


def test_only_a_phase_that_is_too_short_goes_back_to_nothing() -> None:
    config = load_config(FULL_RUN)
    for phase, save_steps, answer in ((SANITY, 7, "warn"), (VALIDATION, 200, "rollback"), (MEDIUM, 5000, "rollback")):
        planned = plan(phase, path=FULL_RUN)
        assert (planned.config.training.save_steps, planned.config.monitor.on_loss_spike) == (save_steps, answer)
        assert ("monitor.on_loss_spike=warn (not rollback)" in planned.differences(config)) == (answer == "warn")


def test_lanes_are_those_of_the_planned_ranks_unless_the_micro_batch_is_still_to_be_found() -> None:
    planned = plan(SANITY, "data.num_lanes=null", "infra.num_gpus=3", "training.gradient_accumulation_steps=2")
    assert (planned.config.data.num_lanes, planned.tokens_per_step) == (6, 6 * 2 * 512)
    auto = ("training.per_device_train_batch_size=auto", "data.num_lanes=null", "training.global_batch_size=8")
    planned, usual = plan(FULL, *auto), plan(FULL)
    assert planned.tokens_per_step == usual.tokens_per_step == 8 * 512
    assert planned.steps_for_tokens == usual.steps_for_tokens
    assert (planned.config.training.global_batch_size, planned.config.data.num_lanes) == (8, None)
    assert planned.config.training.per_device_train_batch_size == "auto"
    assert (usual.config.training.global_batch_size, usual.config.data.num_lanes) == (None, 4)


def test_days_and_money(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = dry_run(capsys, "--tokens-per-second", "400000", "--price-per-gpu-hour", "3")
    medium = estimate["phases"][2]
    assert medium["tokens"] == 50_000 * 1_572_864
    assert medium["time"]["days"] == pytest.approx(medium["tokens"] / 400_000 / 86400)
    assert medium["usd"] == pytest.approx(medium["time"]["hours"] * 8 * 3)
    assert [phase["ends_with"] for phase in estimate["phases"]] == ["tokens", "tokens", "steps", "steps"]
    assert estimate["total"]["usd"] == pytest.approx(sum(phase["usd"] for phase in estimate["phases"]))
    only = dry_run(capsys, "--price-per-gpu-hour", "3", "--from", "medium")
    assert ([phase["phase"] for phase in only["phases"]], only["total"]["time"]) == (["medium", "full"], None)


def test_the_tables(capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]) -> None:
    short = ("--config", str(QUICKSTART), "--steps-per-phase", "40")
    for options in ((), ("--tokens-per-second", "4000", "--price-per-gpu-hour", "300"), short):
        assert main(["phases", "--dry-run", *options]) == 0
        golden(text := capsys.readouterr().out)
        assert max(map(len, text.splitlines())) <= 80


def test_a_measured_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    phase = plan(SANITY, f"infra.output_dir={tmp_path}", max_steps=40)
    finish_run(phase, [8.0, 7.0, 6.0])  # at 100, 200 and 300 tokens/s
    status = {"state": "completed", "reason": "", "exit_code": 0, "world_size": 2, "device": "cpu"}
    (phase.folder / "run.json").write_text(json.dumps(status))
    assert main(["phases", "--dry-run", "--json", "--measured", str(phase.folder)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens_per_second"] == 200
    assert f"200 tokens/s were measured in {phase.folder} (ranks: 2; device: cpu)" in printed.err
    assert main(["phases", "--dry-run", "--measured", str(tmp_path)]) == 4
    assert "no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "medium", "--from", "full"],
        ["--from", "full", "--to", "medium"],
        ["--steps-per-phase", "1"],
        ["--json"],
    ],
)
def test_mistakes_are_refused(
    capsys: pytest.CaptureFixture[str], golden: Callable[[object], None], arguments: list[str]
) -> None:
    assert main(["phases", *["--dry-run"] * (arguments != ["--json"]), *arguments]) == 2
    golden(capsys.readouterr().err)
