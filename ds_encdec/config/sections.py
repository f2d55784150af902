"""The sections of a configuration: every field with its bounds and marks, and the rules of each section.

Each field is followed by its docstring; the reference in docs/ and the JSON schema for editors are
generated from them. Names follow Hugging Face's and DeepSpeed's own. A configuration is frozen: it is
never changed after loading, and run state lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from ds_encdec.config.deepspeed_keys import check_extra
from ds_encdec.config.errors import Conflict, Rules, broken, unknown_key
from ds_encdec.config.settings import join
from ds_encdec.denoisers import DENOISERS
from ds_encdec.source_kinds import LOCAL_SOURCES
from ds_encdec.types import ConfigError

LOCAL_FORMATS = [name for name, kind in LOCAL_SOURCES.items() if kind.reads_files]
"""Data set names that stand for local files."""
_FORMAT_OF = {ending: name for name, kind in LOCAL_SOURCES.items() for ending in kind.endings}
"""Endings of such files, which are no names of data sets."""
LARGEST_LOSS = 20.0
"""Nats per target token, above what any model starts with: a guess among the 151,936 ids of Qwen3 costs 11.9."""
_FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "zero0",
    "HYBRID_SHARD": "zero3_hybrid",
}


class Mark(Enum):
    """A fact about a field that others ask for by `marked`."""

    ORDER = "part of the data's fingerprint: it decides which example comes when"
    TOKENS = "where it differs, the losses of two runs are over different tokens"
    TEXTS = "where it differs, two runs are evaluated on different texts"
    EXAMPLES = "where it differs, two runs are evaluated on different examples of the same texts"
    MIXTURE = "where it differs, the losses of two runs are of different mixtures of denoisers"
    UNTRAINED = "may change in the middle of a phase: it does not decide what the phase learns"
    TUNABLE = (
        "may change in the middle of a phase although it decides what it learns: what one turns after a divergence"
    )


def _one_or_many(value: Any) -> Any:
    """A single string stands for a tuple of one; Hugging Face's `none` for the empty one."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


def _by_denoiser(value: Any) -> Any:
    """A mapping stands for the list of its weights in the order of `DENOISERS`; what it does not name has weight 0."""
    if isinstance(value, tuple) and len(value) != len(DENOISERS):
        raise ValueError(f"must be {len(DENOISERS)} weights, of {', '.join(DENOISERS)}")
    if not isinstance(value, dict):
        return value
    for name in value:
        if name not in DENOISERS:
            raise ValueError(f"{name}: {unknown_key(str(name), DENOISERS)}")
    return tuple(value.get(name, 0.0) for name in DENOISERS)


DataFiles = Annotated[tuple[str, ...], BeforeValidator(_one_or_many, json_schema_input_type=str | tuple[str, ...])]
Tracker = Literal["wandb", "tensorboard"]
Trackers = Annotated[
    tuple[Tracker, ...],
    BeforeValidator(_one_or_many, json_schema_input_type=Literal[Tracker, "none"] | tuple[Tracker, ...]),
]
_DEFAULT_WEIGHTS = tuple(float(row.weight) for row in DENOISERS.values())
_WeightList = Annotated[tuple[float, ...], Field(min_length=len(DENOISERS), max_length=len(DENOISERS))]
Weights = Annotated[
    tuple[float, ...], BeforeValidator(_by_denoiser, json_schema_input_type=_WeightList | dict[str, float])
]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are immutable and never converted from other types.

    Its rules are not validators of pydantic's, which end at the first mistake: a report names all.
    """

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

    def _rules(self) -> Rules:
        """Yield every way in which values of this section that are valid by themselves may contradict each other."""
        return iter(())

    def conflicts(self, at: str = "") -> Iterator[Conflict]:
        """Yield what breaks a rule of this section, or of one inside of it. `at`: the dotted path of this section."""
        yield from broken(self._rules(), at)
        for name, value in self:
            for index, inner in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
                if isinstance(inner, Section):
                    path = join(at, name)
                    yield from inner.conflicts(path if index is None else join(path, index))


class ArchitectureConfig(Section):
    """A Qwen3 architecture written out in the YAML: weights are drawn at random instead of copied."""

    vocab_size: Annotated[int, Mark.TOKENS] = Field(gt=0)
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

    def _rules(self) -> Rules:
        message = "every key/value head must serve equally many query heads: one must divide the other"
        yield self.num_attention_heads % self.num_key_value_heads, "num_attention_heads num_key_value_heads", message
        yield self.head_dim % 2, "head_dim", "must be even: rotary embeddings turn pairs of dimensions"


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    model_name_or_path: str | None = "Qwen/Qwen3-0.6B"
    """Hub id or folder of a decoder-only Qwen3 (converted on the fly) or of an encoder-decoder made by
    `ds-encdec init-model` or an export. None when `architecture` is given."""
    architecture: ArchitectureConfig | None = None
    """Train from scratch with these sizes instead of starting from a checkpoint."""
    tokenizer_name_or_path: Annotated[str | None, Mark.TOKENS] = None
    """Hub id or folder of the tokenizer; None means the model's own. `builtin` trains a byte-level BPE on
    the built-in corpus once and caches it (no download)."""
    num_sentinel_tokens: Annotated[int, Mark.TOKENS] = Field(default=100, ge=1, le=4096)
    """Number of sentinel tokens `<extra_id_0>`…. An example cannot have more corrupted spans, which limits its raw
    length."""
    use_flash_attention: Annotated[bool, Mark.UNTRAINED] = True
    """Use variable-length flash attention where the device has it. CPU attention is not affected."""
    loss_chunk_tokens: Annotated[int, Mark.UNTRAINED] = Field(default=1024, gt=0)
    """Chunk size of the loss in tokens. Smaller chunks need less memory, larger ones fewer kernel launches."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_scratch(cls, values: Any) -> Any:
        """An `architecture` displaces the default checkpoint, but not one that is named."""
        if isinstance(values, dict) and values.get("architecture") is not None:
            return {"model_name_or_path": None, **values}
        return values

    def _rules(self) -> Rules:
        named, from_scratch = self.model_name_or_path is not None, self.architecture is not None
        sources, tokenizer = "model_name_or_path architecture", self.tokenizer_name_or_path
        message = "give one of the two: a checkpoint to start from, or an architecture to start from scratch"
        yield named and from_scratch, sources, message
        message = "one of the two is needed: a checkpoint to start from, or an architecture"
        yield not named and not from_scratch, sources, message
        message = "a model from scratch brings no tokenizer: name one, or `builtin`"
        yield from_scratch and tokenizer is None, "tokenizer_name_or_path", message
        message = "builtin goes with an architecture: a pretrained model needs the tokenizer it was trained with"
        yield not from_scratch and tokenizer == "builtin", "tokenizer_name_or_path model_name_or_path", message


class Source(Section):
    """A source of documents."""

    dataset_name: Annotated[str, Mark.TEXTS] = "HuggingFaceFW/fineweb-edu"
    """Hub id of a data set; or `builtin` (text that every CPython installation has), `random` (random ids,
    to try a cluster without data), or `text`, `json`, `csv`, `parquet` (local files, see `data_files`)."""
    dataset_config: Annotated[str | None, Mark.TEXTS] = None
    """Configuration (subset) of a Hugging Face data set."""
    dataset_split: Annotated[str, Mark.TEXTS] = "train"
    """Split of a Hugging Face data set."""
    dataset_revision: Annotated[str | None, Mark.TEXTS] = None
    """Branch, tag or commit of a data set on the hub; None: its main branch. A run keeps the commit that it found
    at its first start, so later pushes change nothing."""
    data_files: Annotated[DataFiles | None, Mark.TEXTS] = None
    """Paths or glob patterns of local files, for `text` (one document per file; files above 64 KiB are cut at
    blank lines into documents of at most that size), `json` (JSON lines, or one array), `csv` and `parquet`. `.gz`,
    `.bz2`, `.xz` and `.zst` are unpacked once into the cache folder."""
    text_column: Annotated[str, Mark.TEXTS] = "text"
    """Column that holds the text."""

    def _rules(self) -> Rules:
        name, kind, fields = self.dataset_name, LOCAL_SOURCES.get(self.dataset_name), "dataset_name data_files"
        message = f"no data set; for local files of this kind write `{_FORMAT_OF.get(name)}`"
        yield name in _FORMAT_OF, "dataset_name", message
        message = f"{name} needs data_files: paths or patterns of local files"
        yield kind and kind.reads_files and not self.data_files, fields, message
        message = f"{name} reads no files; for yours set {', '.join(LOCAL_FORMATS)}"
        yield kind and not kind.reads_files and self.data_files is not None, fields, message


class MixtureSource(Source):
    """One source of a weighted mixture. Fields mean what they mean in `data`."""

    weight: float = Field(gt=0)
    """Relative share of the documents drawn from this source."""
    dataset_name: str
    """See `data.dataset_name`."""


class DataConfig(Source):
    """The documents that are read, how they are denoised, and how they are packed."""

    mixture: Annotated[tuple[MixtureSource, ...] | None, Mark.TEXTS] = None
    """Weighted mixture of sources; replaces `dataset_name`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row that cannot be read (not UTF-8, no JSON, cut short, without the column, of a damaged row group): end the
    run, or pass over it."""
    max_bad_rows: int = Field(default=1000, ge=1)
    """Most rows that `on_bad_row: skip` passes over in one pass over the data, of all lanes together; with more the run
    ends. A damaged row group counts with all its rows."""
    streaming: bool = True
    """Read a Hugging Face data set from the hub as it is needed instead of downloading it first."""
    max_seq_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=8192, ge=8)
    """Longest raw chunk before denoising, in tokens. Other bounds may be tighter."""
    max_encoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=4096, ge=4)
    """Longest encoder sequence of one example, in tokens."""
    max_decoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=2048, ge=4)
    """Longest decoder sequence of one example, in tokens."""
    ul2_task_weights: Annotated[Weights, Mark.ORDER, Mark.MIXTURE] = _DEFAULT_WEIGHTS
    """Sampling weights of the denoisers R1, R2, X1, X2, S, per chunk: a list in this order, or a mapping by name, in
    which those that are left out have weight 0."""
    use_mode_tokens: Annotated[bool, Mark.ORDER, Mark.EXAMPLES] = False
    """Put a token that names the denoiser in front of the encoder sequence."""
    preprocessing_num_workers: Annotated[int, Mark.UNTRAINED] = Field(default=4, ge=0)
    """Worker processes per rank that tokenize and pack; 0 works in the training process. They never change
    what is read: the largest count that divides the rank's lanes is used."""
    shuffle_buffer_size: Annotated[int, Mark.ORDER] = Field(default=10000, ge=1)
    """Documents in one shuffling window of a streamed source. A resume rereads at most one per lane."""
    num_lanes: int | None = Field(default=None, ge=1)
    """Micro-batches of one optimizer step over all ranks, fixed for a run. None: world size × gradient
    accumulation at the first start."""
    max_examples_per_micro_batch: Annotated[int, Mark.ORDER] = Field(default=512, ge=1)
    """Most examples packed into one micro-batch."""
    packing_pool_examples: Annotated[int, Mark.ORDER] = Field(default=64, ge=1)
    """Examples that wait at one time for a micro-batch they fit into, per lane."""
    packing_max_wait_batches: Annotated[int, Mark.ORDER] = Field(default=8, ge=2)
    """Micro-batches after which a waiting example is packed first, whatever the fill."""
    eval_fraction: Annotated[float, Mark.ORDER, Mark.EXAMPLES] = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of the documents held out for evaluation, chosen by a hash of the document's key."""

    def _rules(self) -> Rules:
        if self.mixture is None:
            yield from super()._rules()
        yield self.mixture == (), "mixture", "a mixture needs at least one source"
        for name in Source.model_fields:
            is_set = getattr(self, name) != type(self).model_fields[name].default
            message = f"a mixture replaces {name}: remove it, or make it one of the mixture's sources"
            yield self.mixture is not None and is_set, f"mixture {name}", message
        weights, names = self.ul2_task_weights, ", ".join(DENOISERS)
        yield min(weights) < 0, "ul2_task_weights", f"weights of {names} must be >= 0"
        yield not any(weights), "ul2_task_weights", f"at least one of {names} must have a weight > 0"


class TrainingConfig(Section):
    """Batch, optimizer, schedule, evaluation and checkpoint cadence."""

    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Micro-batch: its token budget is this times (max_encoder_length + max_decoder_length). `auto`: the largest that
    is found to fit at the first start, with the accumulation that keeps the global batch (docs/auto-batch-size.md)."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks, each of max_encoder_length + max_decoder_length tokens. The
    accumulation follows from it. None: the micro-batch (with `auto`: of 4) × ranks × `gradient_accumulation_steps`."""
    per_device_eval_batch_size: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batch of an evaluation, in sequences of max_encoder_length + max_decoder_length tokens."""
    gradient_accumulation_steps: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batches per rank and optimizer step at the first start (see `data.num_lanes`); where
    `global_batch_size` is given, it decides instead."""
    learning_rate: Annotated[float, Mark.TUNABLE] = Field(default=2e-4, gt=0, le=10_000)
    """Peak learning rate."""
    weight_decay: Annotated[float, Mark.TUNABLE] = Field(default=0.01, ge=0, le=10_000)
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
    max_grad_norm: Annotated[float, Mark.TUNABLE] = Field(default=1.0, ge=0)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    num_train_steps: int = Field(default=100_000, ge=1, le=1_000_000_000)
    """Optimizer steps of the run."""
    warmup_steps: Annotated[int, Mark.TUNABLE] = Field(default=1000, ge=0)
    """Optimizer steps over which the learning rate rises."""
    warmup_type: Annotated[Literal["linear", "log"], Mark.TUNABLE] = "linear"
    """Shape of the warm-up of DeepSpeed's schedules (DeepSpeed's own default is log)."""
    lr_scheduler_type: Annotated[
        Literal["WarmupDecayLR", "WarmupLR", "WarmupCosineLR", "cosine", "linear", "constant", "wsd"], Mark.TUNABLE
    ] = "WarmupDecayLR"
    """Learning-rate schedule. The first three are DeepSpeed's own classes; `wsd` is warm-up, stable, cosine decay."""
    min_lr_ratio: Annotated[float, Mark.TUNABLE] = Field(default=0.1, ge=0, le=1)
    """Final learning rate over peak, for `cosine`, `WarmupCosineLR` and `wsd`."""
    wsd_decay_fraction: Annotated[float, Mark.TUNABLE] = Field(default=0.1, gt=0, le=1)
    """Share of the steps that `wsd` decays over, at the end."""
    bf16: bool = True
    """bfloat16 compute with float32 master weights."""
    fp16: bool = False
    """float16 compute with dynamic loss scaling; excludes bf16. Neither: float32."""
    activation_checkpointing: Annotated[Literal["none", "full", "every_n", "selective"], Mark.UNTRAINED] = "full"
    """Which layers recompute their activations in the backward pass (`selective`: FSDP2 only)."""
    activation_checkpointing_every_n: Annotated[int, Mark.UNTRAINED] = Field(default=2, ge=1)
    """Every n-th layer recomputes (`every_n` only)."""
    activation_offload: Annotated[bool, Mark.UNTRAINED] = False
    """Keep saved activations in host memory until the backward pass."""
    torch_compile: Annotated[bool, Mark.UNTRAINED] = False
    """Compile each layer with torch.compile (FSDP2 and DDP)."""
    save_steps: Annotated[int, Mark.UNTRAINED] = Field(default=1000, ge=1)
    """Optimizer steps between checkpoints."""
    save_interval_hours: Annotated[float | None, Mark.UNTRAINED] = Field(default=None, gt=0)
    """Hours between checkpoints, in addition to `save_steps`."""
    save_total_limit: Annotated[int | None, Mark.UNTRAINED] = Field(default=5, ge=1)
    """Step checkpoints kept (the best and the final one always are); None keeps all."""
    async_save: Annotated[bool, Mark.UNTRAINED] = True
    """Copy what a checkpoint holds to host memory and write it while training goes on. Needs host memory for the copy,
    kept from save to save: over all ranks about 14 bytes per parameter (bf16; FSDP2: 12), on GPUs up to twice that, as
    torch rounds pinned buffers up to powers of two (infra.pin_memory=false avoids it). False: training waits until the
    files are written; FSDP2 on GPUs then still passes each rank's whole part through host memory."""
    average_checkpoints: Annotated[int, Mark.UNTRAINED] = Field(default=5, ge=0)
    """Newest checkpoints whose weights are averaged into `export/averaged` at the end of a run that has at least 3;
    0: none."""
    eval_steps: Annotated[int, Mark.UNTRAINED] = Field(default=500, ge=1)
    """Optimizer steps between evaluations; each checkpoint of `save_steps` is evaluated too."""
    eval_samples: Annotated[int, Mark.EXAMPLES, Mark.UNTRAINED] = Field(default=1000, ge=0)
    """Examples of the held-out split in one evaluation; 0 turns evaluation off."""
    logging_steps: Annotated[int, Mark.UNTRAINED] = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics."""
    report_to: Annotated[Trackers, Mark.UNTRAINED] = ("wandb", "tensorboard")
    """Trackers besides the console and `metrics.jsonl`, which are always written; `none` for no other."""
    seed: int = Field(default=42, ge=0)
    """Everything random is derived from it."""
    max_consecutive_skipped_steps: Annotated[int, Mark.TUNABLE] = Field(default=20, ge=1)
    """Steps skipped in a row (not finite, or by a `skip_step` of `monitor`) after which the run stops as diverged."""
    early_stopping_patience: Annotated[int | None, Mark.TUNABLE] = Field(default=None, ge=1)
    """Evaluations in a row without a lower loss after which the run is over, complete; None trains all steps."""
    early_stopping_threshold: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0)
    """Least decrease of an evaluation's loss that counts as lower, in nats per target token."""
    save_on_best: Annotated[bool, Mark.UNTRAINED] = False
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

    def _rules(self) -> Rules:
        size, steps = self.per_device_train_batch_size, self.num_train_steps
        message = "global_batch_size must be a multiple of the micro-batch size"
        yield (
            size != "auto" and (self.global_batch_size or 0) % size,
            "global_batch_size per_device_train_batch_size",
            message,
        )
        yield self.bf16 and self.fp16, "bf16 fp16", "at most one may be true; both false is float32"
        compiles_choices = self.torch_compile and self.activation_checkpointing == "selective"
        message = "inside compiled layers nothing can be selected: set full, every_n or none, or torch_compile=false"
        yield compiles_choices, "torch_compile activation_checkpointing", message
        fields, schedule = "warmup_steps num_train_steps lr_scheduler_type", self.lr_scheduler_type
        message = "the warm-up must end before the run does; only WarmupLR and constant have no end"
        yield schedule not in ("WarmupLR", "constant") and self.warmup_steps >= steps, fields, message
        decay_steps = round(self.wsd_decay_fraction * steps)
        message = f"the warm-up and the decay of {decay_steps} steps do not fit into the run"
        is_short = schedule == "wsd" and self.warmup_steps < steps < self.warmup_steps + decay_steps
        yield is_short, f"{fields} wsd_decay_fraction", message
        message = "the mean of one is that one: give 2 or more, or 0 for none"
        yield self.average_checkpoints == 1, "average_checkpoints", message
        for field in ("early_stopping_patience", "save_on_best"):
            message = "this is decided on the evaluation's loss: set eval_samples > 0, or turn it off"
            yield getattr(self, field) and not self.eval_samples, f"{field} eval_samples", message


class InfraConfig(Section):
    """The folders of the run, and how it is spread over devices."""

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
    sharding_stage: Literal["zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"] = "zero3"
    """Sharding: zero0 nothing (DDP), zero1 optimizer, zero2 + gradients, zero3 + parameters; `_hybrid`
    shards inside a node and replicates across nodes."""
    hybrid_shard_size: int | None = Field(default=None, ge=1)
    """Ranks that hold one sharded copy together, with a `_hybrid` stage; must divide the ranks. None: the ranks of a
    node."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "cpu"
    """Place of optimizer states and master weights. Not with zero0. `nvme` does not work yet and is refused."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Place of parameters between uses. zero3 only. `nvme` does not work yet and is refused."""
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

    def _rules(self) -> Rules:
        stage, alias, offloads = self.sharding_stage, self.fsdp_sharding_strategy, self.fsdp_cpu_offload
        message = "without sharding there is nothing to offload: set offload_optimizer=none, or zero1 to zero3"
        yield stage == "zero0" and self.offload_optimizer != "none", "sharding_stage offload_optimizer", message
        is_whole = self.offload_params != "none" and stage not in ("zero3", "zero3_hybrid")
        message = "parameters can be offloaded only where they are sharded: set zero3, or offload_params=none"
        yield is_whole, "sharding_stage offload_params", message
        is_sharded_ddp = self.distributed_type == "ddp" and stage != "zero0"
        yield is_sharded_ddp, "distributed_type sharding_stage", "ddp shards nothing: set zero0"
        is_not_hybrid = self.hybrid_shard_size is not None and not stage.endswith("_hybrid")
        message = "only zero2_hybrid and zero3_hybrid shard over fewer ranks than all: set one of them, or null"
        yield is_not_hybrid, "hybrid_shard_size sharding_stage", message
        for field in ("offload_optimizer", "offload_params"):
            place = getattr(self, field)
            message = "nvme does not work yet: checkpoints would lack what is there; use cpu"
            yield place == "nvme", field, message
            message = f"the alias must agree: this is {field}={'cpu' if offloads else 'none'}"
            yield offloads is not None and (place == "cpu") is not offloads, f"fsdp_cpu_offload {field}", message
        meant = _FSDP_STRATEGIES.get(alias or "", stage)
        message = f"the alias must agree: {alias} is sharding_stage={meant}"
        yield meant != stage, "fsdp_sharding_strategy sharding_stage", message
        hang, timeout = self.hang_timeout_minutes or 0, self.distributed_timeout_minutes
        message = "no run makes a step so soon after its start: give 0.1 (6 seconds) or more, or 0 for never"
        yield 0 < hang < 0.1, "hang_timeout_minutes", message
        message = "must be smaller, or collectives time out before the watchdog writes stack traces"
        yield hang >= timeout, "hang_timeout_minutes distributed_timeout_minutes", message
        for path, message in check_extra(self.deepspeed_extra):
            yield True, (f"deepspeed_extra.{path}",), message  # a key may hold blanks


class MonitorConfig(Section):
    """Thresholds of alerts, and how the run answers them (docs/monitor.md).

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
    """Least decrease of the window's mean loss that is no plateau, in nats per target token."""
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

    def _rules(self) -> Rules:
        message = "must be <= window_size, or spikes are never detected"
        yield self.loss_spike_min_values > self.window_size, "loss_spike_min_values window_size", message


class PhaseOverrides(Section):
    """Settings of a phase that replace its defaults (`PHASE_CONFIGS` in `ds_encdec/phases.py`); None keeps these."""

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
    max_loss_after_warmup: float | None = Field(default=None, gt=0)
    """Gate: largest loss allowed in the first step after the warm-up, in nats per target token."""
    min_loss_decrease: float | None = None
    """Gate: least that the loss must have fallen since the first step of the first phase, in nats per target token."""

    def _rules(self) -> Rules:
        message = f"must be <= {LARGEST_LOSS:.0f} nats: every run would pass a higher limit"
        yield (self.max_loss_after_warmup or 0) > LARGEST_LOSS, "max_loss_after_warmup", message


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
        """A section whose lines are all commented out is left at its defaults."""
        return {} if value is None else value


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field of type `annotation` holds: itself, in a union, or in a tuple."""
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
    """Every field by its dotted path, those of nested sections too; the items of a list are called `0`."""
    return dict(_fields(Sections, ""))


def marked(*marks: Mark) -> list[str]:
    """The dotted paths of the fields that have one of `marks`, in the order of the schema; of a list, only itself."""
    return [path for path, info in fields().items() if set(marks) & set(info.metadata) and ".0." not in path]
