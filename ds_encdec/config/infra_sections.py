"""The section about the folders of a run, and how it is spread over devices."""

from typing import Any, Literal

from pydantic import Field

from ds_encdec.config.section_base import Section
from ds_encdec.registry.engines import DistributedType


class InfraConfig(Section):
    """The folders of the run, and how it is spread over devices."""

    output_dir: str = "./output"
    """Folder of the run."""
    require_disk_space: bool = False
    """Refuse to start (exit code 5) where the disk of `output_dir` cannot hold the kept checkpoints and one more;
    False: warn."""
    logging_dir: str = "./logs"
    """Folder of TensorBoard and W&B files; a relative path is inside `output_dir`."""
    upload_to: str | None = None
    """Folder of another file system, such as `s3://bucket/run`, that fsspec copies the outputs to after saves and at
    the end (docs/checkpoints.md), while training goes on. None: nothing is copied."""
    distributed_type: DistributedType = "deepspeed"
    """Engine."""
    num_gpus: int = Field(default=8, ge=1)
    """Ranks that the configuration was planned for; the launcher decides their number, and a difference is reported."""
    device: Literal["cuda", "cpu", "auto"] = "cuda"
    """Device to train on; `auto`: an accelerator where there is one; `cuda` refuses a machine without."""
    sharding_stage: Literal["zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"] = "zero3"
    """Sharding: zero0 nothing (DDP, its default), zero1 optimizer, zero2 + gradients, zero3 + parameters; `_hybrid`
    shards inside a node and replicates across nodes."""
    hybrid_shard_size: int | None = Field(default=None, ge=1)
    """Ranks that hold one sharded copy together, with a `_hybrid` stage; a divisor of the ranks. None: a node's
    ranks."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "cpu"
    """Place of optimizer states and master weights; with zero0 the default is none. `nvme`: a local disk
    (docs/engine.md)."""
    offload_params: Literal["none", "cpu"] = "none"
    """Place of parameters between uses. zero3 only."""
    nvme_path: str | None = None
    """Folder on a fast disk of every node, for `offload_optimizer: nvme`: 16 bytes per parameter that its ranks
    train."""
    pin_memory: bool = True
    """Pin host buffers of offloaded states and of saves (ignored without an accelerator)."""
    deepspeed_config: str | None = None
    """Path of a raw DeepSpeed JSON. What it and this file both set must agree."""
    deepspeed_extra: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed keys that no field here stands for, handed on unchanged. Filled from `deepspeed_config`."""
    distributed_timeout_minutes: float = Field(default=30.0, ge=0.1, le=100_000)
    """Time after which a collective that does not complete ends the run."""
    start_timeout_minutes: float = Field(default=5.0, ge=0.1, le=100_000)
    """Time that ranks wait for each other before a run begins; those that are there then name the others and end (exit
    code 9)."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0)
    """Time without a step, evaluation or save after which every rank writes its stacks into the run's folder and ends
    (exit code 8). None: two thirds of `distributed_timeout_minutes`; 0: never."""
    fsdp_reduce_every_micro_batch: bool = False
    """FSDP2: reduce gradients after every micro-batch instead of once per step: more communication, 4 bytes per
    parameter of each rank less."""
    wandb_project: str = "qwen3-encoder-decoder"
    """W&B project; where it is not set, that of `WANDB_PROJECT`."""
    wandb_entity: str | None = None
    """W&B entity (team or user)."""
    wandb_run_name: str | None = None
    """W&B run name; None lets W&B choose."""
