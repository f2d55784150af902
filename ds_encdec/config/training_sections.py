"""The section about how a model is trained: sizes, batches, schedules and cadences."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from ds_encdec.base.types import ConfigError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.objective_sections import ContrastiveConfig, PreferenceConfig
from ds_encdec.config.section_base import ADDRESS, Mark, Names, Section, words
from ds_encdec.registry.objectives import FIGURES as OBJECTIVE_FIGURES
from ds_encdec.registry.text_metrics import FIGURES

ENDLESS_SCHEDULES = ("WarmupLR", "constant")  # those that do not depend on the length of the run
# Figures of generated texts that evaluations in training have, and whether the higher one is better.
TEXT_FIGURES = {figure: row.higher_is_better for figure, row in FIGURES.items() if not row.needs_model}
LOSS_FIGURES = ("loss", "perplexity")  # figures that every evaluation has
CROSS_ENTROPY = "cross_entropy"  # the value of `training.loss` for the built-in loss
SOURCE = "source"  # the value of `training.teacher` for the model that is converted
Schedule = Literal[
    "WarmupDecayLR", "WarmupLR", "WarmupCosineLR", "cosine", "linear", "constant", "wsd", "polynomial", "inverse_sqrt"
]
Tracker = Literal["wandb", "tensorboard"]
Trackers = Annotated[
    tuple[Tracker | str, ...],
    BeforeValidator(words, json_schema_input_type=Literal[Tracker, "none"] | str | tuple[Tracker | str, ...]),
]


def _evaluated(name: str) -> str:
    """Return our name of a figure: `loss` for Hugging Face's `eval_loss`, `NAME/loss` for `eval_NAME_loss`."""
    plain = name.removeprefix("eval_").removeprefix("eval/")
    of_set, _, figure = plain.rpartition("_")
    return f"{of_set}/{figure}" if name.startswith("eval_") and of_set and figure in LOSS_FIGURES else plain


class TrainingConfig(Section):
    """Batch, optimizer, schedule, evaluation and checkpoint cadence."""

    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Micro-batch, in sequences of max_encoder_length + max_decoder_length tokens. `auto`: the largest that fits at the
    first start, with the accumulation that keeps the global batch (docs/estimate-memory.md)."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks; decides the accumulation. None: the micro-batch (with `auto`: 4) ×
    ranks × `gradient_accumulation_steps`."""
    per_device_eval_batch_size: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batch of an evaluation, in such sequences."""
    gradient_accumulation_steps: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batches per rank and optimizer step at the first start, unless `global_batch_size` or `data.num_lanes` is
    set."""
    learning_rate: Annotated[float, Mark.TUNABLE] = Field(default=2e-4, gt=0, le=1)
    """Peak learning rate."""
    weight_decay: Annotated[float, Mark.TUNABLE] = Field(default=0.01, ge=0, le=10_000)
    """Decoupled weight decay of matrices; norms and biases have none."""
    optimizer: Literal["adamw", "muon"] | str = "adamw"
    """`muon` (FSDP2 and DDP): the layers' matrices step by their orthogonalized momentum at AdamW's learning rates, the
    rest by AdamW. `module:name`: your own (docs/library.md)."""
    optimizer_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments by name for your own optimizer, beside parameters and `lr`."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's decay of a matrix's momentum."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's second-moment decay."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    max_grad_norm: Annotated[float, Mark.TUNABLE] = Field(default=1.0, ge=0)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    num_train_steps: int = Field(default=100_000, ge=1, le=1_000_000_000)
    """Optimizer steps of the run; null with `num_train_epochs`."""
    num_train_epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the training split, instead of `num_train_steps`. The first start converts them to steps."""
    warmup_steps: Annotated[int, Mark.TUNABLE] = Field(default=1000, ge=0)
    """Optimizer steps over which the learning rate rises; in a run of at most 1,000 steps by default a tenth of them,
    unless the schedule has no end."""
    warmup_ratio: Annotated[float | None, Mark.TUNABLE] = Field(default=None, ge=0, lt=1)
    """Share of the optimizer steps over which the learning rate rises, instead of `warmup_steps`."""
    warmup_type: Annotated[Literal["linear", "log"], Mark.TUNABLE] = "linear"
    """Shape of the warm-up of DeepSpeed's schedules (DeepSpeed's own default is log)."""
    lr_scheduler_type: Annotated[Schedule | str, Mark.TUNABLE] = "WarmupDecayLR"
    """Learning-rate schedule. The first three are DeepSpeed's own classes; `wsd` is warm-up, stable, cosine decay;
    `polynomial` and `inverse_sqrt` are Hugging Face's. `module:function`: your own (docs/library.md)."""
    min_lr_ratio: Annotated[float, Mark.TUNABLE] = Field(default=0.1, ge=0, le=1)
    """Final learning rate over peak, for `cosine`, `WarmupCosineLR`, `wsd` and `polynomial`."""
    lr_scheduler_power: Annotated[float, Mark.TUNABLE] = Field(default=1.0, gt=0, le=100)
    """Power of the remaining share of the decay, for `polynomial`; 1 is linear."""
    lr_scheduler_timescale: Annotated[int | None, Mark.TUNABLE] = Field(default=None, ge=1, le=1_000_000_000)
    """Updates after the warm-up in which `inverse_sqrt` falls to 0.71 of the peak; null: `warmup_steps`, or 10,000
    without."""
    wsd_decay_fraction: Annotated[float, Mark.TUNABLE] = Field(default=0.1, gt=0, le=1)
    """Share of the steps that `wsd` decays over, at the end."""
    residual_dropout: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of each layer's attention and MLP outputs that is set to zero in training, the rest scaled up."""
    attention_dropout: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of the attention weights that is set to zero in training; refused where only the 16-bit GPU kernel
    `torch.nn.attention.varlen`, which has none, would run."""
    contrastive: ContrastiveConfig = ContrastiveConfig()
    """The loss of embeddings (`data.objective: contrastive`)."""
    dpo: Annotated[PreferenceConfig, Mark.TUNABLE] = PreferenceConfig()
    """How answers are preferred, with `data.objective: dpo`."""
    loss: Annotated[str, Mark.TUNABLE] = "cross_entropy"
    """`module:name`: your own function, which returns each target token's loss in training (docs/library.md). Reported
    losses stay plain cross-entropy, here and with the next two."""
    label_smoothing: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, le=1)
    """Coefficient of the square of the logarithm of the softmax's normaliser, added to each token's loss (PaLM:
    1e-4)."""
    teacher: Annotated[str | None, ADDRESS, Mark.TUNABLE] = None
    """Model to learn from besides the text, frozen (docs/distillation.md): `source` (the decoder that
    `model.model_name_or_path` names), or a hub id or folder of a decoder or of an encoder-decoder made here, with the
    same tokenizer."""
    teacher_weight: Annotated[float, Mark.TUNABLE] = Field(default=0.5, ge=0, le=1)
    """Share of the loss that is the divergence from the teacher, where there is one; the rest is cross-entropy."""
    teacher_temperature: Annotated[float, Mark.TUNABLE] = Field(default=1.0, gt=0, le=100)
    """Temperature of both softmaxes in that divergence, which is multiplied by its square."""
    bf16: bool = True
    """bfloat16 compute with float32 master weights. With `fp16: true` the default is false."""
    fp16: bool = False
    """float16 compute with dynamic loss scaling; excludes bf16. Neither: float32."""
    activation_checkpointing: Annotated[Literal["none", "full", "every_n", "selective", "auto"], Mark.UNTRAINED] = (
        "full"
    )
    """Which layers recompute their activations in the backward pass (`selective`: FSDP2 only). `auto`: the fastest of
    none, selective and full that fits by the estimate at a start; on CPUs none."""
    activation_checkpointing_every_n: Annotated[int, Mark.UNTRAINED] = Field(default=2, ge=1)
    """Every n-th layer recomputes (`every_n` only)."""
    activation_offload: Annotated[bool, Mark.UNTRAINED] = False
    """Keep saved activations in host memory until the backward pass."""
    torch_compile: Annotated[bool | Literal["auto"], Mark.UNTRAINED] = "auto"
    """Compile each layer with torch.compile, except those that cannot be, with torch's warning. `auto`: on GPUs, but
    not under DeepSpeed's ZeRO-3, where `true` has run on CPUs only."""
    save_steps: Annotated[int, Mark.UNTRAINED] = Field(default=1000, ge=1)
    """Optimizer steps between checkpoints."""
    save_interval_hours: Annotated[float | None, Mark.UNTRAINED] = Field(default=None, gt=0)
    """Hours between checkpoints, in addition to `save_steps`."""
    save_total_limit: Annotated[int | None, Mark.UNTRAINED] = Field(default=5, ge=1)
    """Step checkpoints kept (the best and the final one always are); None keeps all."""
    async_save: Annotated[bool, Mark.UNTRAINED] = True
    """Copy a checkpoint's contents to host memory and write them while training goes on. The copy is kept: over all
    ranks about 14 bytes per parameter (bf16; FSDP2: 12), on GPUs up to twice that, as pinned buffers are powers of two
    (infra.pin_memory=false avoids it). False: training waits for the files. With `offload_optimizer: nvme` the default
    is false."""
    average_checkpoints: Annotated[int, Mark.UNTRAINED] = Field(default=0, ge=0)
    """Newest checkpoints whose weights are averaged into `export/averaged` at the end of a run that has at least 3,
    without an evaluation (docs/checkpoints.md). 0: none."""
    eval_steps: Annotated[int, Mark.UNTRAINED] = Field(default=500, ge=1)
    """Optimizer steps between evaluations; each checkpoint of `save_steps` is evaluated too."""
    eval_samples: Annotated[int, Mark.EXAMPLES, Mark.UNTRAINED] = Field(default=1000, ge=0)
    """Examples of the held-out split in one evaluation; 0 turns evaluation off."""
    eval_generate_samples: Annotated[int, Mark.UNTRAINED] = Field(default=0, ge=0)
    """First examples of `eval_samples` for which each evaluation generates outputs and compares them with the right
    ones (docs/metrics.md); takes a second copy of the model on each rank (bf16: 2 bytes per parameter)."""
    generation_max_new_tokens: Annotated[int, Mark.UNTRAINED] = Field(default=GenerationSettings.max_new_tokens, ge=1)
    """Most tokens of a generated text."""
    generation_num_beams: Annotated[int, Mark.UNTRAINED] = Field(default=GenerationSettings.num_beams, ge=1)
    """Beams of the search for the likeliest text; 1: the likeliest token each time."""
    logging_steps: Annotated[int, Mark.UNTRAINED] = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics."""
    report_to: Annotated[Trackers, Mark.UNTRAINED] = ("wandb", "tensorboard")
    """Trackers besides the console and `metrics.jsonl`; `none` for no other. `module:name`: your own
    (docs/library.md)."""
    callbacks: Annotated[Names, Mark.UNTRAINED] = ()
    """Your own code after steps, evaluations and saves: `module:name` (docs/library.md)."""
    freeze: Names = ()
    """Parameters that are not trained, by patterns of their names (`encoder.*`, `shared.weight`, `*.mlp.*`), kept in
    the compute dtype without gradients and optimizer states (docs/lora.md)."""
    seed: int = Field(default=42, ge=0)
    """Everything random is derived from it."""
    max_consecutive_skipped_steps: Annotated[int, Mark.TUNABLE] = Field(default=20, ge=1)
    """Steps skipped in a row (not finite, or by `skip_step`) after which the run stops as diverged."""
    metric_for_best_model: Annotated[str, AfterValidator(_evaluated), Mark.TUNABLE] = "loss"
    """Figure of an evaluation (`eval/…` in its metrics) that decides the best checkpoint (of equal ones the first) and
    early stopping; `NAME/loss` (or `eval_NAME_loss`) of a set of `data.eval_sets`. Figures of texts need
    `eval_generate_samples`. `module:name`: your own metric (docs/library.md)."""
    greater_is_better: Annotated[bool | None, Mark.TUNABLE] = None
    """A greater figure is the better one; None: of all but `loss` and `perplexity`, and as the objective has it."""
    early_stopping_patience: Annotated[int | None, Mark.TUNABLE] = Field(default=None, ge=1)
    """Evaluations in a row without a better `metric_for_best_model` after which the run is complete; None: all
    steps."""
    early_stopping_threshold: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0)
    """Least gain of `metric_for_best_model` that counts as better, in its unit."""
    save_strategy: Annotated[Literal["steps", "best"], Mark.UNTRAINED] = "steps"
    """`steps`: save every `save_steps`. `best`: only after a better evaluation than all before, and at the end."""
    save_on_best: Annotated[bool, Mark.UNTRAINED] = False
    """Save also after each evaluation that is better than all saved ones."""
    load_best_model_at_end: Annotated[bool, Mark.UNTRAINED] = False
    """Export the best checkpoint at the end, to `export/best`, instead of the last one."""
    export_at_end: Annotated[bool, Mark.UNTRAINED] = True
    """Write the model at the end as a Hugging Face folder, `export/final` (or `export/best`)."""

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _no_clipping(cls, value: Any) -> Any:
        return 0.0 if value is None else value  # other tools turn clipping off by null

    @field_validator("per_device_train_batch_size", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:  # which has a message for each alternative
            raise ValueError("must be a whole number >= 1, or `auto`") from None

    @property
    def best_figure(self) -> str:
        """Return the figure of `metric_for_best_model`, without its set of `data.eval_sets`."""
        return self.metric_for_best_model.rpartition("/")[2]

    @property
    def best_is_greatest(self) -> bool:
        """Return whether the best evaluation is the one with the greatest `metric_for_best_model`."""
        choice, name = self.greater_is_better, self.best_figure
        if choice is None and name in OBJECTIVE_FIGURES:
            return OBJECTIVE_FIGURES[name].higher_is_better
        return TEXT_FIGURES.get(name, name not in LOSS_FIGURES) if choice is None else choice

    @property
    def best_by(self) -> str:
        """Return how the best evaluation is chosen: `lowest loss`, `highest exact_match`."""
        return f"{'highest' if self.best_is_greatest else 'lowest'} {self.metric_for_best_model}"

    @property
    def micro_batch_size(self) -> int:
        """Return `per_device_train_batch_size` as a number. Raises ConfigError while it is `auto`."""
        if self.per_device_train_batch_size == "auto":
            raise ConfigError("training.per_device_train_batch_size=auto is found at a start: give a number here")
        return self.per_device_train_batch_size

    @property
    def recomputation(self) -> Literal["none", "full", "every_n", "selective"]:
        """Return `activation_checkpointing` once it is chosen. Raises ConfigError while it is `auto`."""
        if self.activation_checkpointing == "auto":
            raise ConfigError("training.activation_checkpointing=auto is chosen at a start: give another value here")
        return self.activation_checkpointing

    @model_validator(mode="before")
    @classmethod
    def _without_steps(cls, values: Any) -> Any:
        """Read null as unset for the warm-up and, beside epochs, for the steps: so a command line removes them."""
        if not isinstance(values, dict):
            return values
        unset = {"warmup_steps"} if values.get("num_train_epochs") is None else {"warmup_steps", "num_train_steps"}
        return {name: value for name, value in values.items() if value is not None or name not in unset}
