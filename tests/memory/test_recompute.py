"""The mode that `training.activation_checkpointing: auto` comes to: in an estimate, a plan, a run and its resume."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import planned

from ds_encdec import cli
from ds_encdec.base.quantities import GIB
from ds_encdec.base.types import ConfigError
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manifest import Manifest
from ds_encdec.config.schema import load_config
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.library import Capacity
from ds_encdec.memory.variants import HEADROOM, MODES, RECOMPUTATION, changed, choose_recompute, faster, variant
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.training.auto_batch import resolve

AUTO = "training.activation_checkpointing=auto"
ON_GPUS = ("infra.sharding_stage=zero2", "infra.offload_optimizer=none")


def job(*overrides: str) -> Job:
    return planned(*ON_GPUS, *overrides)


def needed(asked: Job, mode: str) -> float:
    return estimate(changed(asked, {RECOMPUTATION: mode})).peak.total


@pytest.mark.parametrize(("engine", "modes"), [("deepspeed", ("none", "full")), ("fsdp", MODES)])
def test_it_is_the_first_that_fits_of_those_that_there_are(engine: str, modes: tuple[str, ...]) -> None:
    asked = job(f"infra.distributed_type={engine}")
    sizes = [needed(asked, mode) for mode in modes]
    assert sizes == sorted(sizes, reverse=True)  # the cheaper in time, the larger
    for count, (mode, size) in enumerate(zip(modes, sizes, strict=True), start=1):
        found, why = choose_recompute(asked, size / (1 - HEADROOM) + 1)
        assert found == mode
        assert re.findall(r"(\w+) [\d.]+ GiB[,;]", why) == list(modes[:count])
    for first in (None, "full"):
        too_small, why = choose_recompute(asked, sizes[-1], first=first)
        assert too_small == "full"
        assert "is full, and even that does not fit" in why


@pytest.mark.parametrize(
    ("gigabytes", "first", "mode"),
    [
        (80, None, "none"),
        (80, "full", "full"),
        (80, "every_n", "none"),  # not one that it would have chosen
        (20, "none", "full"),
        (80, "selective", "none"),  # DeepSpeed has none
    ],
)
def test_a_run_goes_on_as_it_began_where_that_fits(gigabytes: int, first: str | None, mode: str) -> None:
    assert choose_recompute(job(), gigabytes * GIB, first=first)[0] == mode
    assert choose_recompute(job("infra.device=cpu"), 1, first=first)[0] == "none"


def test_nothing_estimates_an_open_mode() -> None:
    config = load_config(None, [*ON_GPUS, AUTO])
    assert job(AUTO).config.training.activation_checkpointing == "none"
    with pytest.raises(ConfigError, match="activation_checkpointing=auto is chosen when a run starts"):
        _ = config.training.recomputation


def test_estimate_and_plan_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*command: str) -> dict[str, Any]:
        assert cli.main([*command, *ON_GPUS, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole = f"(estimated: none {needed(job(), 'none') / GIB:.1f} GiB"
    for gpu, mode in (("h100-80gb", "none"), ("24GB", "full")):
        found = answer("estimate-memory", AUTO, "--gpu", gpu)
        assert (found["configured"]["activation_checkpointing"], found["configured"]["fits"]) == (mode, True)
        assert found["remarks"][0].startswith(f"{AUTO} is {mode} {whole}")
    # The largest micro-batch is looked for in the mode of the assumed one, as by a run.
    both = ("estimate-memory", AUTO, "training.per_device_train_batch_size=auto", "--gpu", "h100-80gb")
    found = answer(*both)["configured"]
    assert (found["activation_checkpointing"], found["per_device_train_batch_size"]) == ("none", 4)
    assert answer("plan", AUTO)["remarks"] == [f"{AUTO} is none {whole}; available: 75.2 GiB), on an a100-80gb."]
    assert answer("plan")["remarks"] == []


@pytest.mark.parametrize("began_with", [None, "none", "full"])
def test_a_run_chooses_once(
    began_with: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the least that is free on any rank; what it writes into its checkpoints is what a resume takes."""

    class TwoRanks(HostCollectives):
        def lowest(self, *values: int) -> tuple[int, ...]:
            return tuple(min(value, 70 * GIB) for value in values)

    monkeypatch.setattr(resolve, "device_capacity", lambda device: Capacity(80 * GIB, 78 * GIB))
    monkeypatch.setattr(resolve, "product_dtype", lambda tensor: tensor.dtype)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(0, dtype=options["dtype"]))
    context = RunContext(World(world_size=8, local_world_size=8), torch.device("cuda"), "deepspeed", TwoRanks())
    config = load_config(None, [*ON_GPUS, AUTO])
    model = Qwen3Seq2SeqConfig(**dataclasses.asdict(run_sizes(config)))
    found = None
    if began_with is not None:
        begun = load_config(None, [*ON_GPUS, f"training.activation_checkpointing={began_with}"])
        (tmp_path / "config.yaml").write_text(begun.dump_yaml())
        found = Checkpoint(tmp_path, Manifest(1, 2, "deepspeed", ()))
    with caplog.at_level(logging.INFO):
        chosen = resolve.resolve_checkpointing(config, context, model, found)
    assert chosen.training.activation_checkpointing == (began_with or "none")
    assert f"available: {(1 - HEADROOM) * 70:.1f} GiB)" in caplog.text
    assert resolve.resolve_checkpointing(chosen, context, model, None) is chosen


@pytest.mark.parametrize(
    ("overrides", "changed_fields"),
    [
        (("infra.sharding_stage=zero3",), {"infra.sharding_stage", RECOMPUTATION}),
        (("training.activation_checkpointing=none",), None),
        (("infra.offload_optimizer=cpu",), {"infra.offload_optimizer", RECOMPUTATION}),
    ],
)
def test_a_faster_setting_fits_and_is_the_fastest(overrides: tuple[str, ...], changed_fields: set[str] | None) -> None:
    asked = job(*overrides)
    found = faster(asked, lambda row: row.estimate.peak.total < 75 * GIB)
    assert (found and found.overrides.keys()) == changed_fields
    assert faster(asked, lambda row: False) is None
    if found is not None:
        assert found == variant(asked, found.overrides)
        assert faster(found.job, lambda row: row.estimate.peak.total < 75 * GIB) is None
