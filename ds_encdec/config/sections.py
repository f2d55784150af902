"""The sections about the model, the machines, alerts and phases; all sections together, and their fields by path."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from ds_encdec.config.data_sections import DataConfig
from ds_encdec.config.section_base import ADDRESS, Mark, Section, words
from ds_encdec.config.settings import join
from ds_encdec.config.training_sections import TrainingConfig
from ds_encdec.registry.engines import DistributedType

# The matrices of a layer that can have adapters.
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _layers(value: Any) -> Any:
    """Read a choice of a source's layers. Raises ValueError for a list that is not ascending, or anything else."""
    if value is None or re.fullmatch(r"top [1-9]\d*", str(value)):
        return value
    taken = words(value) if isinstance(value, str) and "," in value else value
    is_list = isinstance(taken, tuple)
    numbers = [int(one) if isinstance(one, str) and one.isdecimal() else one for one in (taken if is_list else [taken])]
    least = 0 if is_list else 1
    if numbers and all(type(one) is int and one >= least for one in numbers) and numbers == sorted({*numbers}):
        return tuple(numbers) if is_list else numbers[0]
    raise ValueError("needed are a number of layers, `top N`, or layers of the source in their order, from 0")


# A number of layers, evenly spread over the source's; "top N"; or the source's layers themselves, counted from 0.
LayerChoice = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^top [1-9]\d*$")] | tuple[int, ...] | None


class ArchitectureConfig(Section):
    """A Qwen3 architecture written out in the YAML: weights are drawn at random instead of copied."""

    vocab_size: Annotated[int, Mark.TOKENS] = Field(gt=0)
    """Rows of the embedding, sentinels included."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(gt=0)
    """Layers of the decoder; the encoder has one fewer, or with `cross_attention` `final` or `renormed` as many."""
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
    """Standard deviation of the matrices' normal distribution."""
    max_position_embeddings: int = Field(default=40960, gt=0)
    """Longest sequence the model is declared for, in tokens."""


class LoraConfig(Section):
    """Adapters of low rank beside frozen matrices (LoRA, arXiv 2106.09685), which peft makes; `{}` takes the defaults.

    A product with the matrix W becomes one with W + lora_alpha / r · B A. Nothing but A and B is trained.
    """

    r: int = Field(default=32, ge=1, le=65_536)
    """Rank: rows of A and columns of B."""
    lora_alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Weight of the adapters: their product is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: Annotated[
        tuple[LoraTarget, ...], BeforeValidator(words, json_schema_input_type=LoraTarget | tuple[LoraTarget, ...])
    ] = get_args(LoraTarget)
    """The matrices of each layer that have an adapter."""
    quantize: Literal["none", "nf4"] = "none"
    """Form of the frozen matrices of the layers: the compute dtype, or 4 bits (QLoRA by bitsandbytes; FSDP2 or DDP with
    zero0)."""


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    model_name_or_path: Annotated[str | None, ADDRESS] = "Qwen/Qwen3-0.6B"
    """Hub id or folder of a decoder of a family in docs/model.md (converted on the fly) or of an encoder-decoder made
    by `ds-encdec init-model` or an export. None with `architecture`."""
    architecture: ArchitectureConfig | None = None
    """Train from scratch with these sizes."""
    cross_attention: Annotated[Literal["aligned", "renormed", "final"] | None, Mark.FORM] = None
    """What a decoder layer reads of the encoder: `aligned` the states at its own height, `renormed` the last ones, both
    through its own input norm; `final` the last ones through the encoder's norm (T5Gemma 2). None: a stored
    encoder-decoder's own, otherwise `aligned` (docs/model.md)."""
    encoder_positions: Annotated[Literal["prefix", "unrotated"] | None, Mark.FORM] = None
    """Positions of the encoder's keys: `prefix` rotates them, and the decoder's go on behind the input; `unrotated`
    counts the decoder's from 0. None: a stored encoder-decoder's own, otherwise `unrotated` with `final`, else
    `prefix`."""
    encoder_layers: Annotated[LayerChoice, BeforeValidator(_layers), Mark.FORM] = None
    """Source layers that the encoder copies: a number, evenly spread; `top 8`; or a list, counted from 0. None: all
    that the decoder reads."""
    decoder_layers: Annotated[LayerChoice, BeforeValidator(_layers), Mark.FORM] = None
    """Source layers that the decoder copies, as in `encoder_layers`; None: all."""
    lora: LoraConfig | None = None
    """Train adapters of low rank and freeze everything else (docs/lora.md)."""
    tokenizer_name_or_path: Annotated[str | None, Mark.TOKENS] = None
    """Hub id or folder of the tokenizer; None: the model's own. `builtin` trains a byte-level BPE on the built-in
    corpus once and caches it."""
    num_sentinel_tokens: Annotated[int, Mark.TOKENS] = Field(default=100, ge=1, le=4096)
    """Number of sentinel tokens `<extra_id_0>`…: the most corrupted spans of an example, which limits its raw
    length."""
    use_flash_attention: Annotated[bool, Mark.UNTRAINED] = True
    """Use variable-length flash attention on devices that have it."""
    loss_chunk_tokens: Annotated[int, Mark.UNTRAINED] = Field(default=1024, gt=0)
    """Chunk size of the loss in tokens. Smaller chunks need less memory, larger ones fewer kernel launches."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_scratch(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("architecture") is not None:
            return {"model_name_or_path": None, **values}  # the default is gone, but not a checkpoint that is named
        return values


class InfraConfig(Section):
    """The folders of the run, and how it is spread over devices."""

    output_dir: str = "./output"
    """Folder of the run."""
    require_disk_space: bool = False
    """Refuse to start (exit code 5) where the disk of `output_dir` cannot hold the kept checkpoints and one more;
    False: warn."""
    logging_dir: str = "./logs"
    """Folder of TensorBoard and W&B files; a relative path is inside `output_dir`."""
    upload_to: Annotated[str | None, ADDRESS] = None
    """Folder of another file system, such as `s3://bucket/run`, that fsspec copies the outputs to after saves and at
    the end (docs/checkpoints.md), while training goes on; without a password or key. None: nothing is copied."""
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
    """Place of optimizer states and master weights; with zero0 the default is `none`. `nvme`: a local disk
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
    replica_check_steps: int = Field(default=100, ge=0)
    """Steps between two comparisons of what ranks hold alike (docs/monitor.md); each save compares as well. 0: only
    saves do."""
    fsdp_reduce_every_micro_batch: bool = False
    """FSDP2: reduce gradients after every micro-batch instead of once per step: more communication, 4 bytes per
    parameter of each rank less."""
    wandb_project: str = "qwen3-encoder-decoder"
    """W&B project; where it is not set, that of `WANDB_PROJECT`."""
    wandb_entity: str | None = None
    """W&B entity (team or user)."""
    wandb_run_name: str | None = None
    """W&B run name; None lets W&B choose."""


# Nats per target token, above the first loss of any model: a guess among the 151,936 ids of Qwen3 costs 11.9.
LARGEST_LOSS = 20.0


class MonitorConfig(Section):
    """Thresholds of alerts, and how the run answers them (docs/monitor.md).

    An alert is answered with `warn` (report it and go on), `skip_step` (leave the step out), `rollback` (go back to an
    earlier checkpoint, past the data since) or `stop`.
    """

    window_size: int = Field(default=100, ge=2)
    """Optimizer steps in the window of losses and gradient norms; logging intervals in that of throughput."""
    loss_spike_threshold: float = Field(default=2.0, gt=1)
    """`loss_spike`: the step's loss over the mean of its window."""
    loss_spike_min_values: int = Field(default=10, ge=1)
    """Losses that must be in the window before one can be a spike."""
    grad_norm_threshold: float = Field(default=10.0, gt=0)
    """`grad_explosion`: global gradient norm of a step before clipping."""
    loss_plateau_steps: int | None = Field(default=10_000, ge=1)
    """`loss_plateau`: optimizer steps without a fall of the window's mean loss; None: never."""
    loss_plateau_min_decrease: float = Field(default=0.005, ge=0)
    """Least decrease of that mean that is no plateau, in nats per target token."""
    learning_rate_tolerance: float = Field(default=1e-3, gt=0, lt=1)
    """`learning_rate_off`: relative difference between the rate of a step and its schedule's."""
    throughput_drop_threshold: float = Field(default=0.5, gt=0, lt=1)
    """`throughput_drop`: tokens per second of a logging interval over the mean of its window."""
    straggler_threshold: float = Field(default=1.5, gt=1)
    """`straggler`: a rank's time for a fixed computation over the median rank's."""
    straggler_late_threshold: float = Field(default=0.1, gt=0, lt=1)
    """`straggler`: share of the step time that one rank keeps the others waiting."""
    memory_growth_threshold: float = Field(default=0.25, gt=0)
    """`memory_growth`: growth of a rank's memory since its first logging intervals, as a share."""
    data_wait_threshold: float = Field(default=0.2, gt=0, lt=1)
    """`data_wait`: share of the time that a rank waits for its next batch."""
    on_non_finite: Literal["skip_step", "rollback", "stop"] = "skip_step"
    """Answer to a loss or gradient norm that is not finite; such a step is always skipped. Also to a state that is not
    finite, which is never saved, and to such an evaluation (`skip_step`: training goes on)."""
    on_loss_spike: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `loss_spike`. `skip_step` reads every step's loss before it is made, which waits for the device."""
    on_grad_explosion: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `grad_explosion`. `skip_step` waits for the device, too."""
    on_loss_plateau: Literal["warn", "stop"] = "warn"
    """Answer to `loss_plateau`."""
    on_learning_rate_off: Literal["warn", "stop"] = "warn"
    """Answer to `learning_rate_off`."""
    on_throughput_drop: Literal["warn", "stop"] = "warn"
    """Answer to `throughput_drop`. `stop` saves first, so the run can be resumed (exit code 75)."""
    on_straggler: Literal["warn", "stop"] = "warn"
    """Answer to `straggler`; `stop` as for `on_throughput_drop`."""
    on_memory_growth: Literal["warn", "stop"] = "warn"
    """Answer to `memory_growth`; `stop` as for `on_throughput_drop`."""
    on_data_wait: Literal["warn", "stop"] = "warn"
    """Answer to `data_wait`; `stop` as for `on_throughput_drop`."""
    on_replicas_differ: Literal["rollback", "stop"] = "stop"
    """Answer to `replicas_differ`. `stop` saves nothing (exit code 11); `rollback` takes the newest checkpoint."""
    rollback_min_steps: int = Field(default=50, ge=1)
    """Least age in optimizer steps of a checkpoint to go back to: trouble begins before it shows. It does not
    apply to `non_finite_state` and `replicas_differ`, since every saved state was judged."""
    max_rollbacks: int = Field(default=5, ge=1)
    """Rollbacks of a run; one more alert stops it (exit code 7, or 11 for `replicas_differ`)."""


class PhaseOverrides(Section):
    """Settings of a phase that replace its defaults (`PHASE_CONFIGS`); None keeps these."""

    num_tokens: int | None = Field(default=None, gt=0)
    """Tokens of both sides to train on. A phase ends with these or with its steps, whichever comes first."""
    description: str | None = None
    """Purpose of the phase, in the log and the report."""
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
    max_loss_after_warmup: float | None = Field(default=None, gt=0, le=LARGEST_LOSS)
    """Gate: largest loss allowed in the first step after the warm-up, in nats per target token."""
    min_loss_decrease: float | None = Field(default=None, ge=0, lt=LARGEST_LOSS)
    """Gate: least fall of the loss since the first step of the first phase, in nats per target token."""


class PhasesConfig(Section):
    """The phases of `ds-encdec phases`; the next one starts when the one before has passed its gate."""

    sanity_check: PhaseOverrides = PhaseOverrides()
    """The first phase, which shows that the run trains at all."""
    validation: PhaseOverrides = PhaseOverrides()
    """The second phase, which shows that the run learns."""
    medium: PhaseOverrides = PhaseOverrides()
    """The third phase, which shows that the run goes on learning."""
    full: PhaseOverrides = PhaseOverrides()
    """The run itself."""


class Sections(Section):
    """All sections of a run, each valid by itself; those of a `schema.FullConfig` also agree with each other."""

    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    training: TrainingConfig = TrainingConfig()
    """The optimization."""
    infra: InfraConfig = InfraConfig()
    """The machines."""
    monitor: MonitorConfig = MonitorConfig()
    """Alerts, and how they are answered."""
    phases: PhasesConfig = PhasesConfig()
    """The phases of `ds-encdec phases`, and their gates."""

    @field_validator("*", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        return {} if value is None else value  # where all lines of a section are commented out


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a field of type `annotation` holds, alone, in a union or in a tuple; else None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def _fields(section: type[Section], at: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield (path := join(at, name)), info
        if inner := section_in(info.annotation):
            yield from _fields(inner, f"{path}.0" if "tuple" in str(info.annotation) else path)


@cache
def fields() -> dict[str, FieldInfo]:
    """Return every field by its dotted path, those of nested sections too; items of a list are called `0`."""
    return dict(_fields(Sections, ""))


def marked(*marks: Mark) -> list[str]:
    """Return the dotted paths of the fields with one of `marks`, in the schema's order; of a list, only its own."""
    return [path for path, info in fields().items() if set(marks) & set(info.metadata) and ".0." not in path]
