"""One way to make the jobs whose memory these tests estimate."""

from typing import Any

from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.memory.job import PUBLISHED, Job, Sizes, make_job, run_sizes
from ds_encdec.memory.question import planned_job
from ds_encdec.registry.engines import EngineName

QWEN3_0_6B = PUBLISHED["Qwen/Qwen3-0.6B"]
PARAMETERS = 1_036_517_376
"""Of the form `final`, whose encoder and decoder are both Qwen3-0.6B."""
ENCODER = 440_467_456
EMBEDDING = 151_936 * 1024


def job_of(
    engine: EngineName = "deepspeed",
    stage: str = "zero3",
    *,
    sizes: Any = QWEN3_0_6B,
    world_size: int = 8,
    accumulation: int = 8,
    sections: dict[str, dict[str, Any]] | None = None,
    make: dict[str, Any] | None = None,
    **infra: Any,
) -> Job:
    """A bf16 job on GPUs, up to 8 a node, without offload. `sections`: other fields by section; `make`: of make_job."""
    sections = sections or {}
    config = FullConfig.model_validate(
        {
            **sections,
            "infra": {"offload_optimizer": "none", "sharding_stage": stage, "distributed_type": engine, **infra},
            "training": {"gradient_accumulation_steps": accumulation, **sections.get("training", {})},
        }
    )
    place = {"world_size": world_size, "ranks_per_node": min(world_size, 8), "device": infra.get("device", "cuda")}
    return make_job(config, sizes, engine, **{**place, **(make or {})})


def small_sizes(hidden: int, inner: int, layers: int = 2, vocab: int = 1000, head_dim: int = 64) -> Sizes:
    """Sizes of a tied model with 4 heads that share 2 pairs of keys and values."""
    return Sizes(vocab, hidden, layers, layers, 4, 2, head_dim, inner, tie_word_embeddings=True)


def planned(*overrides: str, model: str = "0.6B", gpus: int = 8, nodes: int = 1) -> Job:
    """The job of a configuration with these overrides."""
    config = load_config(None, [f"infra.num_gpus={gpus}", f"model.model_name_or_path=Qwen/Qwen3-{model}", *overrides])
    return planned_job(config, run_sizes(config), nodes)
