"""The rendered JSON: its content, and what DeepSpeed's own parser makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig, InfraConfig, load_config
from ds_encdec.config.yaml.deepspeed_keys import check_keys
from ds_encdec.engine.deepspeed.json import accumulates_in_bf16, check_deepspeed, render_deepspeed_json
from ds_encdec.launch.world import World
from ds_encdec.model.encoder import Qwen3PreTrainedModel

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"

VARIANTS: dict[str, list[str]] = {
    "zero0": ["infra.sharding_stage=zero0", "infra.offload_optimizer=none"],
    "zero1": ["infra.sharding_stage=zero1", "infra.offload_optimizer=none"],
    "zero2 offload": ["infra.sharding_stage=zero2"],
    "zero3": ["infra.offload_optimizer=none"],
    "zero3 offload": [],
    "zero3 offload all": ["infra.offload_params=cpu"],
    "zero3 hybrid": ["infra.sharding_stage=zero3_hybrid"],
    "fp16": ["training.bf16=false", "training.fp16=true"],
    "fp32": ["training.bf16=false"],
    "no clipping": ["training.max_grad_norm=0"],
    "WarmupLR": ["training.lr_scheduler_type=WarmupLR"],
    "WarmupCosineLR": ["training.lr_scheduler_type=WarmupCosineLR"],
    "log warm-up": ["training.warmup_type=log"],
    "cosine": ["training.lr_scheduler_type=cosine"],
    "wsd": ["training.lr_scheduler_type=wsd"],
    "extra": ["infra.deepspeed_extra={zero_optimization: {sub_group_size: 1e8}, wall_clock_breakdown: true}"],
}


def render(overrides: list[str], *, device: str = "cuda", world_size: int = 8) -> dict[str, Any]:
    config = load_config(None, overrides)
    return render_deepspeed_json(config, world_size=world_size, gradient_accumulation_steps=8, device=device)


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def variant(request: pytest.FixtureRequest) -> tuple[FullConfig, dict[str, Any]]:
    overrides = VARIANTS[request.param]
    return load_config(None, overrides), render(overrides, world_size=1)


def test_deepspeed_reads_back_what_was_meant(variant: tuple[FullConfig, dict[str, Any]]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config, rendered = variant
    parsed = DeepSpeedConfig(json.loads(json.dumps(rendered)))
    training, infra, zero = config.training, config.infra, parsed.zero_config
    assert parsed.zero_optimization_stage == int(infra.sharding_stage[4])
    for theirs, ours in ((zero.offload_optimizer, infra.offload_optimizer), (zero.offload_param, infra.offload_params)):
        assert (theirs.device if theirs else "none") == ours
        assert theirs is None or theirs.pin_memory
    assert (parsed.bfloat16_config.enabled, parsed.float16_config.enabled) == (training.bf16, training.fp16)
    assert parsed.gradient_clipping == training.max_grad_norm
    assert (parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (4, 8)
    assert parsed.optimizer_name == "adamw"
    assert parsed.optimizer_params["torch_adam"] is True
    native = training.lr_scheduler_type.startswith("Warmup")
    assert parsed.scheduler_name == (training.lr_scheduler_type if native else None)
    assert (zero.zero_hpz_partition_size > 1) is False  # one rank


def test_nothing_is_left_open_and_every_key_is_known(variant: tuple[FullConfig, dict[str, Any]]) -> None:
    _, rendered = variant
    assert "auto" not in set(_leaves(rendered))
    assert [(path, problem) for path, _, problem in check_keys(rendered) if problem] == []


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)
    else:
        yield value


@pytest.mark.parametrize(
    ("scheduler", "learning_rates"),
    [
        # Peak 1, 4 steps of warm-up, 10 in all: DeepSpeed's first update is made at the minimum (see lr_schedules.py).
        ("WarmupDecayLR", [0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ("WarmupLR", [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("WarmupCosineLR", [0, 0.25, 0.5, 0.75]),
    ],
)
def test_schedules_take_the_rendered_parameters(scheduler: str, learning_rates: list[float]) -> None:
    from deepspeed.runtime import lr_schedules

    steps = ["training.learning_rate=1.0", "training.warmup_steps=4", "training.num_train_steps=10"]
    block = render([*steps, f"training.lr_scheduler_type={scheduler}"])["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    rates = []
    for _ in learning_rates:
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(learning_rates, abs=1e-12)
    for _ in range(20):
        schedule.step()
    end = {"WarmupDecayLR": 0.0, "WarmupLR": 1.0, "WarmupCosineLR": 0.1}[scheduler]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(end)


def test_adam_takes_the_rendered_parameters() -> None:

    params = render(["training.adam_beta2=0.95"])["optimizer"]["params"]
    assert params.pop("torch_adam") is True  # taken out by DeepSpeed, the rest goes to the class
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **params).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.9, 0.95), 1e-8, 0.01)


def test_a_disk_that_is_not_there_is_told_before_the_ranks_meet(tmp_path: Path) -> None:
    config = load_config(None, ["infra.offload_optimizer=nvme", f"infra.nvme_path={tmp_path}/none"])
    with pytest.raises(ConfigError, match=r"infra\.nvme_path: .*/none' is no folder on this machine: make it"):
        check_deepspeed(config, World(), torch.device("cpu"))


def test_the_default_run_on_eight_ranks() -> None:
    rendered = render([])
    assert rendered["train_batch_size"] == 4 * 8 * 8
    assert rendered["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in rendered["zero_optimization"]
    assert rendered["scheduler"]["params"]["warmup_type"] == "linear"


def test_a_machine_without_accelerator_pins_nothing_and_overlaps_nothing() -> None:
    zero = render(["infra.offload_params=cpu"], device="cpu")["zero_optimization"]
    assert zero["offload_optimizer"]["pin_memory"] is zero["offload_param"]["pin_memory"] is False
    assert zero["overlap_comm"] is False


def test_extra_keys_replace_our_choices_and_leave_the_configuration_alone() -> None:
    extra = {"zero_optimization": {"overlap_comm": False, "offload_optimizer": {"buffer_count": 5}}, "dump_state": True}
    config = FullConfig(infra=InfraConfig(deepspeed_extra=extra))
    rendered = render_deepspeed_json(config, world_size=8, gradient_accumulation_steps=8, device="cuda")
    zero = rendered["zero_optimization"]
    assert (zero["overlap_comm"], zero["stage"], rendered["dump_state"]) == (False, 3, True)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "buffer_count": 5}
    zero["offload_optimizer"]["buffer_count"] = 4
    assert config.infra.deepspeed_extra["zero_optimization"]["offload_optimizer"]["buffer_count"] == 5


def extra(block: str) -> str:
    return f"infra.deepspeed_extra={block}"


def test_the_throughput_timer_runs_for_who_asks_for_it() -> None:
    assert render([])["timers"] == {"throughput": {"enabled": False}}
    asked = render([extra("{timers: {throughput: {enabled: true, synchronized: false}}}")])
    assert asked["timers"] == {"throughput": {"enabled": True, "synchronized": False}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"fused": True}),
        ([extra("{optimizer: {params: {fused: false}}}")], {"fused": False}),
        ([extra("{optimizer: {params: {foreach: true}}}")], {"foreach": True}),
        ([extra("{optimizer: {params: {torch_adam: null, bias_correction: true}}}")], {"fused": True}),
    ],
)
def test_adam_is_fused_unless_told_otherwise(overrides: list[str], expected: dict[str, bool]) -> None:
    params = render(overrides)["optimizer"]["params"]
    assert {key: params[key] for key in ("fused", "foreach", "bias_correction") if key in params} == expected
    assert params["torch_adam"] is True


FLOAT32_SUMS = "{data_types: {grad_accum_dtype: fp32}}"


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 8, "fp32"),
        (["infra.sharding_stage=zero2"], 8, "fp32"),
        ([], 1, None),  # nothing is summed
        (["infra.sharding_stage=zero1"], 8, None),  # accumulates in bfloat16
        (["infra.sharding_stage=zero1", extra(FLOAT32_SUMS)], 1, "fp32"),
        (["infra.sharding_stage=zero0", "infra.offload_optimizer=none"], 8, None),
        (["training.bf16=false"], 8, None),
        (["training.bf16=false", "training.fp16=true"], 8, None),
        ([extra("{communication_data_type: bf16}")], 8, "bf16"),
        ([extra("{data_types: {grad_accum_dtype: bf16}}")], 8, None),
        ([extra("{zero_optimization: {zero_quantized_gradients: true}}")], 8, None),
    ],
)
def test_gradients_are_summed_over_ranks_as_over_micro_batches(
    overrides: list[str], world_size: int, expected: str | None
) -> None:
    assert render(overrides, world_size=world_size).get("communication_data_type") == expected


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (
            '{"optimizer": {"params": {"amsgrad": true}}}',
            r"amsgrad.*only false works here: checkpoints hold two moments",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}',
            r"ratio.*only 1\.0 works here: DeepSpeed's check",
        ),
        ('{"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}', r"zenflow.*checkpoints do not hold"),
        ('{"zero_optimization": {"zenflow": {}}}', r"zenflow.*checkpoints do not hold"),
    ],
)
def test_what_no_checkpoint_would_hold_is_refused_by_name(tmp_path: Path, block: str, reason: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(block)
    with pytest.raises(ConfigError, match=r"(?s)" + reason):
        load_config(None, (), path)
    with pytest.raises(ConfigError, match=r"(?s)" + reason):
        load_config(None, [extra(block)])


def test_what_switches_them_off_is_accepted() -> None:
    rendered = render([extra("{optimizer: {params: {amsgrad: false}}, zero_optimization: {zenflow: null}}")])
    assert rendered["optimizer"]["params"]["amsgrad"] is False
    assert rendered["zero_optimization"]["zenflow"] is None
    rendered = render([extra("{zero_optimization: {offload_optimizer: {ratio: 1}}}")])
    assert rendered["zero_optimization"]["offload_optimizer"]["ratio"] == 1


def test_zero3_gathers_whole_layers_where_all_is_trained() -> None:
    def classes(*overrides: str) -> Any:
        return render(list(overrides))["zero_optimization"].get("leaf_module", {}).get("classes")

    assert classes() == list(Qwen3PreTrainedModel._no_split_modules)
    assert classes("infra.sharding_stage=zero2") is None
    assert classes("training.freeze=[shared.*]") is None
    assert classes("model.lora={}") is None
    assert classes(extra("{zero_optimization: {leaf_module: {classes: []}}}")) == []


def test_zero3_has_torchs_linear_layers_where_whole_layers_are_recomputed() -> None:
    def saves_no_weights(*overrides: str) -> Any:
        return render(list(overrides))["zero_optimization"].get("memory_efficient_linear", True)

    recomputed = "training.activation_checkpointing=full"
    assert not saves_no_weights(recomputed)
    assert saves_no_weights("training.activation_checkpointing=every_n")
    assert saves_no_weights(recomputed, "model.lora={}")  # gathered module by module
    assert saves_no_weights(recomputed, extra("{zero_optimization: {memory_efficient_linear: true}}"))


def test_the_hybrid_partition_is_a_node() -> None:
    config = load_config(None, ["infra.sharding_stage=zero3_hybrid"])

    def size(world_size: int, **keywords: Any) -> int:
        rendered = render_deepspeed_json(
            config, world_size=world_size, gradient_accumulation_steps=1, device="cuda", **keywords
        )
        return int(rendered["zero_optimization"]["zero_hpz_partition_size"])

    assert size(16, ranks_per_node=8) == 8
    assert size(8) == 8
    config = load_config(None, ["infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=4"])
    assert size(16, ranks_per_node=8) == 4
    config = load_config(None, ["infra.sharding_stage=zero3_hybrid"])
    with pytest.raises(ConfigError, match=r"partitions of 8 ranks .* do not divide 12 ranks"):
        size(12, ranks_per_node=8)
    config = load_config(
        None, ["infra.sharding_stage=zero3_hybrid", extra("{zero_optimization: {zero_hpz_partition_size: 3}}")]
    )
    assert size(12, ranks_per_node=8) == 3  # what the JSON says counts, not what it replaces


def test_a_hybrid_partition_given_in_json_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}')
    config = load_config(None, (), path)
    rendered = render_deepspeed_json(config, world_size=8, gradient_accumulation_steps=8, device="cuda")
    assert rendered["zero_optimization"]["zero_hpz_partition_size"] == 4


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["infra.sharding_stage=zero1"], True),
        (["infra.sharding_stage=zero0", "infra.offload_optimizer=none"], True),
        (["infra.sharding_stage=zero2"], False),
        ([], False),
        (["infra.sharding_stage=zero1", "training.bf16=false"], False),
        (["infra.sharding_stage=zero1", "infra.deepspeed_extra={data_types: {grad_accum_dtype: fp32}}"], False),
    ],
)
def test_which_runs_accumulate_in_bf16(overrides: list[str], expected: bool) -> None:
    assert accumulates_in_bf16(render(overrides)) is expected
    once = render_deepspeed_json(
        load_config(None, overrides), world_size=8, gradient_accumulation_steps=1, device="cuda"
    )
    assert not accumulates_in_bf16(once)


def test_a_json_that_was_never_read_is_refused() -> None:
    config = FullConfig(infra=InfraConfig(deepspeed_config="ds.json"))
    with pytest.raises(ConfigError, match="has not been read"):
        render_deepspeed_json(config, world_size=1, gradient_accumulation_steps=1, device="cpu")


@pytest.mark.parametrize("name", ["zero1.json", "zero2.json", "zero3_offload.json"])
def test_shipped_jsons_say_what_we_render_anyway(name: str) -> None:
    config = load_config(None, (), SHIPPED / name)
    plain = load_config(
        None,
        [
            f"infra.sharding_stage={config.infra.sharding_stage}",
            f"infra.offload_optimizer={config.infra.offload_optimizer}",
        ],
    )
    ranks = {"world_size": 8, "gradient_accumulation_steps": 8, "device": "cuda"}
    assert render_deepspeed_json(config, **ranks) == render_deepspeed_json(plain, **ranks)


def test_rendering_needs_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ds_encdec.engine.deepspeed.json as m; from ds_encdec.config.schema import FullConfig\n"
        "m.render_deepspeed_json(FullConfig(), world_size=8, gradient_accumulation_steps=8, device='cuda')\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "set()", result.stderr
