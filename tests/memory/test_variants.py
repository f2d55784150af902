"""Rows of the table, changes to a job, the recommendation, and the nearest settings that fit."""

import dataclasses
import json
import logging
import re
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import planned
from jobs import planned as job

from ds_encdec import cli
from ds_encdec.base.quantities import GIB
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manifest import Manifest
from ds_encdec.config.schema import load_config
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.answer import estimate_tables
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.gpus import GPUS, Gpu
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.library import Capacity
from ds_encdec.memory.question import EstimateRequest
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    MODES,
    RECOMPUTATION,
    Fits,
    Variant,
    as_overrides,
    batches,
    changed,
    choose_recompute,
    faster,
    nearest,
    recommend,
    settings,
    variant,
    variants,
)
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.training.auto_batch import resolve

REDUCES = "infra.fsdp_reduce_every_micro_batch"
FSDP = ("infra.distributed_type=fsdp", "infra.offload_optimizer=none")


def room(device_bytes: int, host_bytes: float | None = None) -> Fits:
    """`host_bytes`: of a node."""
    return EstimateRequest(job(), Gpu("asked", device_bytes), host_bytes and int(host_bytes)).fits


A100 = room(GPUS["a100-80gb"].usable_bytes)


def fits(asked: Job, in_room: Fits = A100) -> bool:
    return in_room(Variant(asked, estimate(asked)))


def best(asked: Job, in_room: Fits = A100) -> Variant:
    found = recommend(asked, in_room)
    assert found is not None
    return found


def stage_of(asked: Job) -> str:
    return asked.config.infra.sharding_stage


def test_what_auto_and_ddp_stand_for_is_said() -> None:
    own = job("infra.distributed_type=auto", "training.activation_checkpointing=selective")
    whole = job("infra.distributed_type=ddp", "infra.sharding_stage=zero0", "infra.offload_optimizer=none")
    rows = [*variants(own)[1:], *(found for found in variants(whole) if stage_of(found.job) == "zero3")]
    assert {found.overrides["infra.distributed_type"] for found in rows} == {own.engine} == {"fsdp"}


@pytest.mark.parametrize(
    ("overrides", "batch", "expected"),
    [
        ((), 4, {}),
        ((), 8, {"training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 4}),
        (("data.num_lanes=64",), 1, {"training.per_device_train_batch_size": 1, "data.num_lanes": 256}),
        (
            ("training.global_batch_size=256",),
            2,
            {"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 16},
        ),
    ],
)
def test_micro_batches_keep_the_global_batch(overrides: tuple[str, ...], batch: int, expected: dict[str, int]) -> None:
    asked = job(*overrides)
    assert list(batches(asked)) == [1, 2, 4, 8, 16, 32]
    assert batches(asked)[batch] == expected
    other = changed(asked, expected)
    assert other.config.training.micro_batch_size * other.gradient_accumulation_steps == 32
    assert other == job(*overrides, *as_overrides(expected).split())


def test_a_changed_job_keeps_what_a_run_knows_better() -> None:
    own = dataclasses.replace(job(), ratio=2.0, gradient_accumulation_steps=3)
    other = changed(own, {"infra.sharding_stage": "zero2"})
    assert (other.ratio, other.gradient_accumulation_steps) == (2.0, 3)
    assert other.encoder_tokens == 2 * other.decoder_tokens
    assert changed(own, {"infra.distributed_type": "fsdp"}).engine == "fsdp"


@pytest.mark.parametrize(
    ("model", "gpus", "nodes", "overrides"),
    [
        ("0.6B", 8, 1, ()),
        ("8B", 8, 1, ("training.global_batch_size=256",)),
        ("4B", 8, 1, ("data.num_lanes=64",)),
        ("0.6B", 8, 1, ("infra.distributed_type=auto", "training.activation_checkpointing=selective")),
        ("0.6B", 16, 2, (*FSDP, "infra.sharding_stage=zero2_hybrid")),
    ],
)
def test_what_is_recommended_can_be_pasted(model: str, gpus: int, nodes: int, overrides: tuple[str, ...]) -> None:
    asked = job(*overrides, model=model, gpus=gpus, nodes=nodes)
    for table in estimate_tables(EstimateRequest(asked, GPUS["a100-80gb"], None)):
        best = table.recommendation
        assert best is not None
        pasted = job(*overrides, *shlex.split(as_overrides(best.overrides)), model=model, gpus=gpus, nodes=nodes)
        assert (pasted.config, pasted.engine) == (best.job.config, table.job.engine)
        steps = {each.config.training.micro_batch_size * each.gradient_accumulation_steps for each in (pasted, asked)}
        assert steps == {best.job.config.training.micro_batch_size * best.job.gradient_accumulation_steps}
        assert estimate(pasted) == best.estimate
        assert A100(best)


def test_a_step_in_one_micro_batch_may_fit_where_smaller_ones_do_not() -> None:
    asked = job(*FSDP, "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1", model="8B")
    assert fits(asked)
    assert not fits(changed(asked, batches(asked)[1]))
    found = best(asked)
    assert found.job.config.infra.offload_optimizer == "none"
    assert found.job.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("overrides", "place", "chosen"),
    [
        ((), {}, {"infra.sharding_stage": "zero2", "infra.offload_optimizer": "none", RECOMPUTATION: "none"}),
        # Sharding inside a node, and in hybrids, costs less than a second forward pass.
        ((), {"model": "8B", "gpus": 64, "nodes": 8}, {"infra.sharding_stage": "zero2", RECOMPUTATION: "none"}),
        # FSDP2 reduces every micro-batch rather than to offload, and not without need.
        (FSDP[:1], {"model": "8B"}, {"infra.offload_optimizer": "none", REDUCES: True}),
        ((FSDP[0], f"{REDUCES}=true"), {}, {REDUCES: False}),
        # On one GPU zero2 sends nothing, and zero0 would add 8 micro-batches up in bfloat16.
        ((), {"gpus": 1}, {"infra.sharding_stage": "zero2"}),
        (("training.activation_offload=true",), {}, {"training.activation_offload": False}),
    ],
)
def test_the_fastest_setting_is_recommended(
    overrides: tuple[str, ...], place: dict[str, Any], chosen: dict[str, Any]
) -> None:
    found = best(job(*overrides, **place)).job
    assert {name: attrgetter(name)(found.config) for name in chosen} == chosen
    assert not engine_memory(found).sums_in_16_bits
    larger = batches(found).get(2 * found.config.training.micro_batch_size)
    assert larger is None or not fits(changed(found, larger))


def test_fsdp2_has_one_name_for_one_setting() -> None:
    for stage, other in (("zero1", {"infra.sharding_stage": "zero2"}), ("zero3", {"infra.offload_params": "cpu"})):
        asked = job("infra.distributed_type=fsdp", f"infra.sharding_stage={stage}")
        assert estimate(asked) == estimate(changed(asked, other))
        rows = [changed(asked, change).config.infra for change in settings(asked)]
        assert {row.sharding_stage for row in rows} == {"zero0", "zero2", "zero3"}
        assert {row.offload_params for row in rows} == {"none"}


def test_the_host_decides_too() -> None:
    asked = job(model="4B", gpus=1)
    found = best(asked)
    assert found.job.config.infra.offload_optimizer == "cpu"
    device_bytes, needed = GPUS["a100-80gb"].usable_bytes, found.estimate.host.total
    assert recommend(asked, room(device_bytes, needed / (1 - HOST_HEADROOM) + 1)) == found
    assert recommend(asked, room(device_bytes, needed)) != found
    assert recommend(asked, room(device_bytes, 50 * GIB)) is None


def test_fitting_settings_disturb_little_and_differ_in_kind() -> None:
    asked = job("training.activation_checkpointing=none")
    assert not fits(asked, room(30 * GIB))
    found = nearest(asked, room(30 * GIB))
    assert len(found) == 3
    assert all(setting.estimate.peak.total <= 30 * GIB * (1 - HEADROOM) for setting in found)
    kinds = [frozenset(setting.overrides) for setting in found]
    batch = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
    assert kinds[:2] == [batch, {"training.activation_checkpointing"}]
    # Of these two kinds, and with more room than both.
    assert found[2].estimate.peak.total < 0.9 * min(setting.estimate.peak.total for setting in found[:2])


AUTO = "training.activation_checkpointing=auto"
ON_GPUS = ("infra.sharding_stage=zero2", "infra.offload_optimizer=none")


def on_gpus(*overrides: str) -> Job:
    return planned(*ON_GPUS, *overrides)


def needed(asked: Job, mode: str) -> float:
    return estimate(changed(asked, {RECOMPUTATION: mode})).peak.total


@pytest.mark.parametrize(("engine", "modes"), [("deepspeed", ("none", "full")), ("fsdp", MODES)])
def test_it_is_the_first_that_fits_of_those_that_there_are(engine: str, modes: tuple[str, ...]) -> None:
    asked = on_gpus(f"infra.distributed_type={engine}")
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
        (80, "full", "full"),
        (20, "none", "full"),
        (80, "selective", "none"),  # DeepSpeed has none
    ],
)
def test_a_run_goes_on_as_it_began_where_that_fits(gigabytes: int, first: str, mode: str) -> None:
    assert choose_recompute(on_gpus(), gigabytes * GIB, first=first)[0] == mode
    assert choose_recompute(on_gpus("infra.device=cpu"), 1, first=first)[0] == "none"


def test_estimate_and_plan_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*command: str) -> dict[str, Any]:
        assert cli.main([*command, *ON_GPUS, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole = f"(estimated: none {needed(on_gpus(), 'none') / GIB:.1f} GiB"
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
        found = Checkpoint(tmp_path, Manifest(1, 2, "deepspeed", (), True, "", None))
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
    asked = on_gpus(*overrides)
    found = faster(asked, lambda row: row.estimate.peak.total < 75 * GIB)
    assert (found and found.overrides.keys()) == changed_fields
    assert faster(asked, lambda row: False) is None
    if found is not None:
        assert found == variant(asked, found.overrides)
        assert faster(found.job, lambda row: row.estimate.peak.total < 75 * GIB) is None
