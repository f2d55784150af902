"""The whole configuration of a run: one pydantic schema, read by every engine.

Each field is followed by its docstring; the reference in docs/ and the JSON schema for editors are
generated from them. Names follow Hugging Face's and DeepSpeed's own. A configuration is frozen: it is
never changed after loading, and run state lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from ds_encdec.config.resolve import resolve
from ds_encdec.config.rules import ConflictingFields, find_conflicts
from ds_encdec.config.yaml_text import write_yaml
from ds_encdec.types import ConfigError

ShardingStage = Literal["zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"]


def _one_or_many(value: Any) -> Any:
    """A single string stands for a tuple of one; Hugging Face's `none` for the empty one."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


DataFiles = Annotated[tuple[str, ...], BeforeValidator(_one_or_many, json_schema_input_type=str | tuple[str, ...])]
Trackers = Annotated[
    tuple[Literal["wandb", "tensorboard"], ...],
    BeforeValidator(
        _one_or_many,
        json_schema_input_type=Literal["wandb", "tensorboard", "none"] | tuple[Literal["wandb", "tensorboard"], ...],
    ),
]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are immutable and never converted from other types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain_types(cls, value: Any) -> Any:
        """YAML has lists, not tuples, and writes large integers as 1e5."""
        if isinstance(value, list):
            return tuple(value)
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


class ArchitectureConfig(Section):
    """A Qwen3 architecture written out in the YAML: weights are drawn at random instead of copied."""

    vocab_size: int = Field(gt=0)
    """Rows of the embedding, sentinels included."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(gt=0)
    """Layers of the encoder, and again of the decoder."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Key/value heads (grouped-query attention); divides `num_attention_heads`."""
    head_dim: int = Field(gt=0)
    """Width of one head; even, and not necessarily hidden_size / num_attention_heads."""
    intermediate_size: int = Field(gt=0)
    """Width of the SwiGLU layer."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: float = Field(default=1e6, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution that matrices are drawn from."""
    max_position_embeddings: int = Field(default=40960, gt=0)
    """Longest sequence the model is declared for, in tokens."""


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    model_name_or_path: str | None = "Qwen/Qwen3-0.6B"
    """Hub id or folder of a decoder-only Qwen3 (converted on the fly) or of an encoder-decoder made by
    `ds-encdec init-model` or an export. None when `architecture` is given."""
    architecture: ArchitectureConfig | None = None
    """Train from scratch with these sizes instead of starting from a checkpoint."""
    tokenizer_name_or_path: str | None = None
    """Hub id or folder of the tokenizer; None means the model's own. `builtin` trains a byte-level BPE on
    the built-in corpus once and caches it (no download)."""
    num_sentinel_tokens: int = Field(default=100, ge=1, le=4096)
    """Sentinels `<extra_id_0>`…; they bound the spans, and so the raw length, of one example."""
    use_flash_attention: bool = True
    """Use variable-length flash attention where the device has it. CPU attention is not affected."""
    loss_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose logits exist at one time, in tokens. Smaller saves memory, larger saves launches."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_scratch(cls, values: Any) -> Any:
        """An `architecture` displaces the default checkpoint, but not one that is named."""
        if isinstance(values, dict) and values.get("architecture") is not None:
            return {"model_name_or_path": None, **values}
        return values


class MixtureSource(Section):
    """One source of a weighted mixture. Fields mean what they mean in `data`."""

    weight: float = Field(gt=0)
    """Relative share of the documents drawn from this source."""
    dataset_name: str
    """See `data.dataset_name`."""
    dataset_config: str | None = None
    """See `data.dataset_config`."""
    dataset_split: str = "train"
    """See `data.dataset_split`."""
    dataset_revision: str | None = None
    """See `data.dataset_revision`."""
    data_files: DataFiles | None = None
    """See `data.data_files`."""
    text_column: str = "text"
    """See `data.text_column`."""


class DataConfig(Section):
    """What is read, how it is denoised, and how it is packed."""

    dataset_name: str = "HuggingFaceFW/fineweb-edu"
    """Hub id of a data set; or `builtin` (text that every CPython installation has), `random` (random ids,
    to try a cluster without data), or `text`, `json`, `csv`, `parquet` (local files, see `data_files`)."""
    dataset_config: str | None = None
    """Configuration (subset) of a Hugging Face data set."""
    dataset_split: str = "train"
    """Split of a Hugging Face data set."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a data set on the hub; None: its main branch. A run keeps the commit that it found
    at its first start, so later pushes change nothing."""
    data_files: DataFiles | None = None
    """Paths or glob patterns of local files, for `text` (one document per file; files above 64 KiB are cut at
    blank lines into documents of at most that size), `json` (JSON lines, or one array), `csv` and `parquet`. `.gz`,
    `.bz2`, `.xz` and `.zst` are unpacked once into the cache folder."""
    mixture: tuple[MixtureSource, ...] | None = None
    """Weighted mixture of sources; replaces `dataset_name`."""
    text_column: str = "text"
    """Column that holds the text."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row that cannot be read (not UTF-8, no JSON, cut short, without the column, of a damaged row group): end the
    run, or pass over it."""
    max_bad_rows: int = Field(default=1000, ge=1)
    """Most rows that `on_bad_row: skip` passes over in one pass over the data, of all lanes together; with more the run
    ends. A damaged row group counts with all its rows."""
    streaming: bool = True
    """Read a Hugging Face data set from the hub as it is needed instead of downloading it first."""
    max_seq_length: int = Field(default=8192, ge=8)
    """Longest raw chunk before denoising, in tokens. Other bounds may be tighter."""
    max_encoder_length: int = Field(default=4096, ge=4)
    """Longest encoder sequence of one example, in tokens."""
    max_decoder_length: int = Field(default=2048, ge=4)
    """Longest decoder sequence of one example, in tokens."""
    ul2_task_weights: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 4.0)
    """Sampling weights of the denoisers R1, R2, X1, X2, S, per chunk."""
    use_mode_tokens: bool = False
    """Put a token that names the denoiser in front of the encoder sequence."""
    preprocessing_num_workers: int = Field(default=4, ge=0)
    """Worker processes per rank that tokenize and pack; 0 works in the training process. They never change
    what is read: the largest count that divides the rank's lanes is used."""
    shuffle_buffer_size: int = Field(default=10000, ge=1)
    """Documents in one shuffling window of a streamed source. A resume rereads at most one per lane."""
    num_lanes: int | None = Field(default=None, ge=1)
    """Micro-batches of one optimizer step over all ranks, fixed for a run. None: world size × gradient
    accumulation at the first start."""
    max_examples_per_micro_batch: int = Field(default=512, ge=1)
    """Most examples packed into one micro-batch."""
    packing_pool_examples: int = Field(default=64, ge=1)
    """Examples that wait at one time for a micro-batch they fit into, per lane."""
    packing_max_wait_batches: int = Field(default=8, ge=2)
    """Micro-batches after which a waiting example is packed first, whatever the fill."""
    eval_fraction: float = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of the documents held out for evaluation, chosen by a hash of the document's key."""


class TrainingConfig(Section):
    """Batch, optimizer, schedule, evaluation and checkpoint cadence."""

    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Micro-batch: its token budget is this times (max_encoder_length + max_decoder_length). `auto`: the largest that
    is found to fit at the first start, with the accumulation that keeps the global batch (docs/auto-batch-size.md)."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks, each of max_encoder_length + max_decoder_length tokens. The
    accumulation follows from it. None: the micro-batch (with `auto`: of 4) × ranks × `gradient_accumulation_steps`."""
    per_device_eval_batch_size: int = Field(default=8, ge=1)
    """The same for evaluation."""
    gradient_accumulation_steps: int = Field(default=8, ge=1)
    """Micro-batches per rank and optimizer step at the first start (see `data.num_lanes`); where
    `global_batch_size` is given, it decides instead."""
    learning_rate: float = Field(default=2e-4, gt=0, le=10_000)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0, le=10_000)
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's second-moment decay."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    torch_adam: bool = False
    """Use torch's AdamW instead of DeepSpeed's compiled CPUAdam/FusedAdam: no compilation at the first start,
    and a resume is exact to the bit."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    num_train_steps: int = Field(default=100_000, ge=1, le=1_000_000_000)
    """Optimizer steps of the run."""
    warmup_steps: int = Field(default=1000, ge=0)
    """Optimizer steps over which the learning rate rises."""
    warmup_type: Literal["linear", "log"] = "linear"
    """Shape of the warm-up of DeepSpeed's schedules (DeepSpeed's own default is log)."""
    lr_scheduler_type: Literal["WarmupDecayLR", "WarmupLR", "WarmupCosineLR", "cosine", "linear", "constant", "wsd"] = (
        "WarmupDecayLR"
    )
    """Learning-rate schedule. The first three are DeepSpeed's own classes; `wsd` is warm-up, stable, cosine decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate over peak, for `cosine`, `WarmupCosineLR` and `wsd`."""
    wsd_decay_fraction: float = Field(default=0.1, gt=0, le=1)
    """Share of the steps that `wsd` decays over, at the end."""
    bf16: bool = True
    """bfloat16 compute with float32 master weights."""
    fp16: bool = False
    """float16 compute with dynamic loss scaling; excludes bf16. Neither: float32."""
    activation_checkpointing: Literal["none", "full", "every_n", "selective"] = "full"
    """Which layers recompute their activations in the backward pass (`selective`: FSDP2 only)."""
    activation_checkpointing_every_n: int = Field(default=2, ge=1)
    """With `every_n`: every n-th layer recomputes."""
    activation_offload: bool = False
    """Keep saved activations in host memory until the backward pass."""
    torch_compile: bool = False
    """Compile each layer with torch.compile (FSDP2 and DDP)."""
    save_steps: int = Field(default=1000, ge=1)
    """Optimizer steps between checkpoints."""
    save_interval_hours: float | None = Field(default=None, gt=0)
    """Hours between checkpoints, in addition to `save_steps`."""
    save_total_limit: int | None = Field(default=5, ge=1)
    """Step checkpoints kept (the best and the final one always are); None keeps all."""
    async_save: bool = True
    """Copy what a checkpoint holds to host memory and write it while training goes on. Needs host memory for the copy,
    kept from save to save: over all ranks about 14 bytes per parameter (bf16; FSDP2: 12), on GPUs up to twice that, as
    torch rounds pinned buffers up to powers of two (infra.pin_memory=false avoids it). False: training waits until the
    files are written; FSDP2 on GPUs then still passes each rank's whole part through host memory."""
    average_checkpoints: int = Field(default=5, ge=0)
    """Newest checkpoints whose weights are averaged into `export/averaged` at the end of a run that has at least 3;
    0: none."""
    eval_steps: int = Field(default=500, ge=1)
    """Optimizer steps between evaluations; each checkpoint of `save_steps` is evaluated too."""
    eval_samples: int = Field(default=1000, ge=0)
    """Examples of the held-out split in one evaluation; 0 turns evaluation off."""
    logging_steps: int = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics."""
    report_to: Trackers = ("wandb", "tensorboard")
    """Trackers besides the console and `metrics.jsonl`, which are always written; `none` for no other."""
    seed: int = Field(default=42, ge=0)
    """Everything random is derived from it."""
    max_consecutive_skipped_steps: int = Field(default=20, ge=1)
    """Steps skipped in a row (not finite, or by a `skip_step` of `monitor`) after which the run stops as diverged."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Evaluations in a row without a lower loss after which the run is over, complete; None trains all steps."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """What an evaluation's loss must fall by to count as lower, in nats per target token."""
    save_on_best: bool = False
    """Save after each evaluation with the lowest loss so far, not only every `save_steps`."""

    @field_validator("per_device_train_batch_size", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """One message, where pydantic has one for each alternative."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError("must be a whole number >= 1, or `auto`") from None

    @property
    def micro_batch_size(self) -> int:
        """`per_device_train_batch_size` as a number. Raises ConfigError while it is `auto`."""
        if self.per_device_train_batch_size == "auto":
            raise ConfigError(
                "training.per_device_train_batch_size=auto is found when a run starts, on its machine: "
                "give a number where nothing can be tried"
            )
        return self.per_device_train_batch_size


class InfraConfig(Section):
    """Where the run lives and how it is spread over devices."""

    output_dir: str = "./output"
    """Folder of the run."""
    require_disk_space: bool = False
    """Refuse to start (exit code 5) where the disk of `output_dir` cannot hold the checkpoints that
    `training.save_total_limit` lets stand at a time, one being written; False: warn."""
    logging_dir: str = "./logs"
    """Folder of TensorBoard and W&B files; a relative path is inside `output_dir`."""
    distributed_type: Literal["deepspeed", "fsdp", "ddp", "auto"] = "deepspeed"
    """Engine."""
    num_gpus: int = Field(default=8, ge=1)
    """Ranks the configuration was planned for. The launcher decides how many there are; a difference is reported."""
    device: Literal["cuda", "cpu", "auto"] = "cuda"
    """Device to train on; `auto` takes an accelerator where there is one; `cuda` refuses a machine
    without."""
    sharding_stage: ShardingStage = "zero3"
    """What is sharded: zero0 nothing (DDP), zero1 optimizer, zero2 + gradients, zero3 + parameters; `_hybrid`
    shards inside a node and replicates across nodes."""
    hybrid_shard_size: int | None = Field(default=None, ge=1)
    """Ranks that hold one sharded copy together, with a `_hybrid` stage; must divide the ranks. None: the ranks of a
    node."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "cpu"
    """Where optimizer states and master weights live. Not with zero0. `nvme` does not work yet and is refused."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters live between uses. zero3 only. `nvme` does not work yet and is refused."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for `nvme` offload, which does not work yet."""
    pin_memory: bool = True
    """Pin host buffers of offloaded states and of saves (ignored without an accelerator)."""
    deepspeed_config: str | None = None
    """Path of a raw DeepSpeed JSON. What it and this file both set must agree."""
    deepspeed_extra: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed keys that no field here stands for; handed on unchanged. Filled from `deepspeed_config`."""
    distributed_timeout_minutes: float = Field(default=30.0, ge=0.1, le=100_000)
    """Time after which a collective that does not complete ends the run."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0)
    """Time without a step after which every rank writes its stacks into the run's folder and ends (exit code 8);
    evaluations and saves count as life. None: two thirds of `distributed_timeout_minutes`; 0: never."""
    fsdp_sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None = None
    """Alias of `sharding_stage` in FSDP's words; must agree with it."""
    fsdp_activation_checkpointing: bool | None = None
    """Alias of `training.activation_checkpointing` (true: full, false: none); must agree with it."""
    fsdp_cpu_offload: bool | None = None
    """Alias of `offload_params` = cpu and `offload_optimizer` = cpu under FSDP; must agree with them."""
    fsdp_reduce_every_micro_batch: bool = False
    """FSDP2: reduce gradients after every micro-batch instead of once per step. Costs communication, and saves the
    4 bytes per parameter that each rank accumulates unsharded gradients in."""
    wandb_project: str = "qwen3-encoder-decoder"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B entity (team or user)."""
    wandb_run_name: str | None = None
    """W&B run name; None lets W&B choose."""


class MonitorConfig(Section):
    """What counts as trouble, and what the run does about it (docs/monitor.md).

    An alert is answered with `warn` (say so and go on), `skip_step` (as if the step had not been), `rollback` (back to
    an earlier checkpoint, past the data since) or `stop`.
    """

    window_size: int = Field(default=100, ge=2)
    """Optimizer steps whose losses and gradient norms are compared with; logging intervals for throughput."""
    loss_spike_threshold: float = Field(default=2.0, gt=1)
    """`loss_spike`: the step's loss over the mean of its window."""
    loss_spike_min_values: int = Field(default=10, ge=1)
    """Losses that must be in the window before one can be a spike."""
    grad_norm_threshold: float = Field(default=10.0, gt=0)
    """`grad_explosion`: global gradient norm of a step before clipping."""
    loss_plateau_steps: int | None = Field(default=10_000, ge=1)
    """`loss_plateau`: optimizer steps in which the window's mean loss has not fallen; None: never."""
    loss_plateau_min_decrease: float = Field(default=0.005, ge=0)
    """What the window's mean loss must fall by to be no plateau, in nats per target token."""
    learning_rate_tolerance: float = Field(default=1e-3, gt=0, lt=1)
    """`learning_rate_off`: relative difference between the rate of a step and its schedule's."""
    throughput_drop_threshold: float = Field(default=0.5, gt=0, lt=1)
    """`throughput_drop`: tokens per second of a logging interval over the mean of its window."""
    straggler_threshold: float = Field(default=1.5, gt=1)
    """`straggler`: a rank's time for a fixed piece of arithmetic over that of the median rank."""
    straggler_late_threshold: float = Field(default=0.1, gt=0, lt=1)
    """`straggler`: share of the step time that one rank keeps the others waiting before a step."""
    memory_growth_threshold: float = Field(default=0.25, gt=0)
    """`memory_growth`: growth of a rank's memory since its first logging intervals, as a share."""
    data_wait_threshold: float = Field(default=0.2, gt=0, lt=1)
    """`data_wait`: share of the time that a rank waits for its next batch."""
    on_non_finite: Literal["skip_step", "rollback", "stop"] = "skip_step"
    """Answer to a loss or gradient norm that is not finite. Such a step is always skipped."""
    on_loss_spike: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `loss_spike`. `skip_step` looks at every step's loss before it is made, which waits for the device."""
    on_grad_explosion: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `grad_explosion`. `skip_step` waits for the device like the above."""
    on_loss_plateau: Literal["warn", "stop"] = "warn"
    """Answer to `loss_plateau`."""
    on_learning_rate_off: Literal["warn", "stop"] = "warn"
    """Answer to `learning_rate_off`."""
    on_throughput_drop: Literal["warn", "stop"] = "warn"
    """Answer to `throughput_drop`. A `stop` for the machine's sake saves first and can be resumed (exit code 75)."""
    on_straggler: Literal["warn", "stop"] = "warn"
    """Answer to `straggler`; `stop` as for `on_throughput_drop`."""
    on_memory_growth: Literal["warn", "stop"] = "warn"
    """Answer to `memory_growth`; `stop` as for `on_throughput_drop`."""
    on_data_wait: Literal["warn", "stop"] = "warn"
    """Answer to `data_wait`; `stop` as for `on_throughput_drop`."""
    rollback_min_steps: int = Field(default=50, ge=1)
    """Optimizer steps that a checkpoint must be older than the alert to be gone back to: trouble begins before it
    shows."""
    max_rollbacks: int = Field(default=5, ge=1)
    """Rollbacks of a run; the alert that asks for one more stops it as diverged (exit code 7)."""


class PhaseOverrides(Section):
    """What a phase has other than its default (`PHASE_CONFIGS` in `ds_encdec/phases.py`); None: as there."""

    num_tokens: int | None = Field(default=None, gt=0)
    """Tokens of both sides to train on. A phase ends with these or with its steps, whichever comes first."""
    description: str | None = None
    """What the phase is for, in the log and the report."""
    num_train_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of warm-up; None: `training.warmup_steps`, but at most a tenth of the phase."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations."""
    save_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints."""
    logging_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between two lines of metrics."""
    max_loss_after_warmup: float | None = Field(default=None, gt=0)
    """Gate: largest loss allowed in the first step after the warm-up, in nats per target token."""
    min_loss_decrease: float | None = None
    """Gate: least that the loss must have fallen since the first step of the first phase, in nats per target token."""


class PhasesConfig(Section):
    """The phases of `ds-encdec phases`; the next one starts when the one before has passed its gate."""

    sanity_check: PhaseOverrides = PhaseOverrides()
    """The first phase: whether it trains at all."""
    validation: PhaseOverrides = PhaseOverrides()
    """The second phase: whether it learns."""
    medium: PhaseOverrides = PhaseOverrides()
    """The third phase: whether it goes on learning."""
    full: PhaseOverrides = PhaseOverrides()
    """The run itself."""


class FullConfig(Section):
    """A run. One that exists is consistent: contradictions between its fields are errors too."""

    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    training: TrainingConfig = TrainingConfig()
    """The optimization."""
    infra: InfraConfig = InfraConfig()
    """The machines."""
    monitor: MonitorConfig = MonitorConfig()
    """What counts as trouble, and what is done about it."""
    phases: PhasesConfig = PhasesConfig()
    """The phases of `ds-encdec phases`, and their gates."""

    @field_validator("*", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        """A section whose lines are all commented out is left at its defaults."""
        return {} if value is None else value

    @model_validator(mode="after")
    def _reject_contradictions(self, info: ValidationInfo) -> FullConfig:
        was_judged = (info.context or {}).get("was_judged", False)  # load.load_saved
        if not was_judged and (conflicts := find_conflicts(self)):
            raise ConflictingFields(conflicts)
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> FullConfig:
        """The configuration in a YAML file; see `ds_encdec.config.load.load_config`. Raises ConfigError."""
        return resolve(cls, Path(path), overrides)

    def to_yaml(self, path: str | Path) -> None:
        """Write every field to `path`; `from_yaml` reads an equal object back."""
        Path(path).write_text(self.dump_yaml(), encoding="utf-8")

    def dump_yaml(self) -> str:
        """Every field as YAML text."""
        return write_yaml(self.model_dump(mode="json"))
