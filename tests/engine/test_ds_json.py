"""The rendered JSON: its content, and what DeepSpeed's own parser makes of it."""

import json
import subprocess
import sys
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
    "zero2 offload": ["infra.sharding_stage=zero2"],
    "zero3 offload all": ["infra.offload_params=cpu"],
    "zero3 hybrid": ["infra.sharding_stage=zero3_hybrid"],
    "fp16, no clipping": ["training.bf16=false", "training.fp16=true", "training.max_grad_norm=0"],
    "WarmupCosineLR": ["training.lr_scheduler_type=WarmupCosineLR"],
    "cosine": ["training.lr_scheduler_type=cosine"],
    "extra": ["infra.deepspeed_extra={zero_optimization: {sub_group_size: 1e8}, wall_clock_breakdown: true}"],
}
EIGHT_GPUS: dict[str, Any] = {"world_size": 8, "gradient_accumulation_steps": 8, "device": "cuda"}


def render(overrides: list[str], **how: Any) -> dict[str, Any]:
    return render_deepspeed_json(load_config(None, overrides), **EIGHT_GPUS | how)


def extra(block: str) -> str:
    return f"infra.deepspeed_extra={block}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_deepspeed_reads_back_what_was_meant_and_nothing_is_left_open(variant: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config, rendered = load_config(None, VARIANTS[variant]), render(VARIANTS[variant], world_size=1)
    assert '"auto"' not in json.dumps(rendered)
    assert [(path, problem) for path, _, problem in check_keys(rendered) if problem] == []
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


def test_adam_takes_the_rendered_parameters() -> None:
    params = render(["training.adam_beta2=0.95"])["optimizer"]["params"]
    assert params.pop("torch_adam") is True  # taken out by DeepSpeed, the rest goes to the class
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **params).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.9, 0.95), 1e-8, 0.01)


ZERO1, ZERO2, NO_BF16 = "infra.sharding_stage=zero1", "infra.sharding_stage=zero2", "training.bf16=false"
HYBRID, RECOMPUTED = "infra.sharding_stage=zero3_hybrid", "training.activation_checkpointing=full"
FLOAT32_SUMS = extra("{data_types: {grad_accum_dtype: fp32}}")
WHOLE_LAYERS = list(Qwen3PreTrainedModel._no_split_modules)
RENDERED: dict[str, list[tuple[list[str], dict[str, Any], Any]]] = {
    "train_batch_size": [([], {}, 4 * 8 * 8)],
    "scheduler.params.warmup_type": [([], {}, "linear")],
    "zero_optimization.offload_optimizer": [([], {}, {"device": "cpu", "pin_memory": True})],
    "zero_optimization.offload_optimizer.pin_memory": [([], {"device": "cpu"}, False)],
    # FSDP's word for everything, which DeepSpeed's own tools would ignore, offloads what takes the most.
    "zero_optimization.offload_param": [([], {}, None), (["infra.fsdp_cpu_offload=true"], {}, None)],
    "zero_optimization.overlap_comm": [([], {"device": "cpu"}, False)],
    "timers.throughput.enabled": [([], {}, False)],
    "optimizer.params.fused": [
        ([], {}, True),
        ([extra("{optimizer: {params: {foreach: true}}}")], {}, None),
    ],
    "optimizer.params.bias_correction": [([extra("{optimizer: {params: {bias_correction: true}}}")], {}, None)],
    "optimizer.params.torch_adam": [([extra("{optimizer: {params: {torch_adam: null}}}")], {}, True)],
    # Gradients are summed over ranks as over micro-batches.
    "communication_data_type": [
        ([], {}, "fp32"),
        ([], {"world_size": 1}, None),  # nothing is summed
        ([ZERO1], {}, None),  # accumulates in bfloat16
        ([ZERO1, FLOAT32_SUMS], {"world_size": 1}, "fp32"),
        ([NO_BF16], {}, None),
        ([extra("{communication_data_type: bf16}")], {}, "bf16"),
        ([extra("{zero_optimization: {zero_quantized_gradients: true}}")], {}, None),
    ],
    # Whole layers are gathered where all is trained.
    "zero_optimization.leaf_module.classes": [
        ([], {}, WHOLE_LAYERS),
        ([ZERO2], {}, None),
        (["training.freeze=[shared.*]"], {}, None),
        (["model.lora={}"], {}, None),
    ],
    # Torch's linear layers stay where whole layers are recomputed.
    "zero_optimization.memory_efficient_linear": [
        ([RECOMPUTED], {}, False),
        (["training.activation_checkpointing=every_n"], {}, True),
    ],
    # A hybrid's partition is a node; what the JSON says counts, not what it replaces.
    "zero_optimization.zero_hpz_partition_size": [
        ([HYBRID], {"world_size": 16, "ranks_per_node": 8}, 8),
        ([HYBRID, "infra.hybrid_shard_size=4"], {"world_size": 16, "ranks_per_node": 8}, 4),
        ([HYBRID, extra("{zero_optimization: {zero_hpz_partition_size: 3}}")], {"world_size": 12}, 3),
    ],
}
"""For each key of the JSON: overrides, the place of the run, and the key's value; None where there is no such key."""


@pytest.mark.parametrize(
    ("key", "overrides", "how", "expected"), [(key, *case) for key, cases in RENDERED.items() for case in cases]
)
def test_a_rendered_value(key: str, overrides: list[str], how: dict[str, Any], expected: Any) -> None:
    found: Any = render(overrides, **how)
    for part in key.split("."):
        found = found.get(part) if found is not None else None
    assert found == expected


def test_extra_keys_replace_our_choices_and_leave_the_configuration_alone() -> None:
    extra = {"zero_optimization": {"overlap_comm": False, "offload_optimizer": {"buffer_count": 5}}, "dump_state": True}
    config = FullConfig(infra=InfraConfig(deepspeed_extra=extra))
    rendered = render_deepspeed_json(config, **EIGHT_GPUS)
    zero = rendered["zero_optimization"]
    assert (zero["overlap_comm"], zero["stage"], rendered["dump_state"]) == (False, 3, True)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "buffer_count": 5}
    zero["offload_optimizer"]["buffer_count"] = 4
    assert config.infra.deepspeed_extra["zero_optimization"]["offload_optimizer"]["buffer_count"] == 5


def test_what_no_checkpoint_would_hold_is_refused_by_name() -> None:
    for block, reason in (
        ("{optimizer: {params: {amsgrad: true}}}", "amsgrad.*only false works here: checkpoints hold two moments"),
        ("{zero_optimization: {offload_optimizer: {ratio: 0.5}}}", r"ratio.*only 1\.0 works here"),
        ("{zero_optimization: {zenflow: {}}}", "zenflow.*checkpoints do not hold"),
    ):
        with pytest.raises(ConfigError, match=r"(?s)" + reason):
            load_config(None, [extra(block)])


def test_places_that_do_not_fit_and_a_json_that_was_never_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"partitions of 8 ranks .* do not divide 12 ranks"):
        render([HYBRID], world_size=12, ranks_per_node=8)
    with pytest.raises(ConfigError, match="has not been read"):
        render_deepspeed_json(FullConfig(infra=InfraConfig(deepspeed_config="ds.json")), **EIGHT_GPUS)
    config = load_config(None, ["infra.offload_optimizer=nvme", f"infra.nvme_path={tmp_path}/none"])
    with pytest.raises(ConfigError, match=r"infra\.nvme_path: .*/none' is not a folder on this machine"):
        check_deepspeed(config, World(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([ZERO1], True),
        ([], False),
        ([ZERO1, NO_BF16], False),
        ([ZERO1, FLOAT32_SUMS], False),
    ],
)
def test_which_runs_accumulate_in_bf16(overrides: list[str], expected: bool) -> None:
    assert accumulates_in_bf16(render(overrides)) is expected
    assert not accumulates_in_bf16(render(overrides, gradient_accumulation_steps=1))


def test_a_shipped_json_says_what_we_render_anyway() -> None:
    config = load_config(None, (), SHIPPED / "zero3_offload.json")
    assert render_deepspeed_json(config, **EIGHT_GPUS) == render([])


def test_rendering_needs_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ds_encdec.engine.deepspeed.json as m; from ds_encdec.config.schema import FullConfig\n"
        "m.render_deepspeed_json(FullConfig(), world_size=8, gradient_accumulation_steps=8, device='cuda')\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "set()", result.stderr
