"""The sections of a configuration that say how it trains, and on which machines.

Sizes, batches and cadences are fields of `training`, folders and devices of `infra`. See sections.py for what all
sections have in common.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from ds_encdec.config.deepspeed_keys import check_extra
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.sections import Mark, Section, words
from ds_encdec.config.settings import Conflict, Rule, closest, join
from ds_encdec.engines import DistributedType
from ds_encdec.optimizers import OPTIMIZERS
from ds_encdec.plugins import is_dotted
from ds_encdec.text_metrics import FIGURES
from ds_encdec.types import ConfigError

ENDLESS_SCHEDULES = ("WarmupLR", "constant")
"""Schedules that do not depend on the length of the run."""
_SCHEDULES_WITH_ONE_END = (*ENDLESS_SCHEDULES, "WarmupDecayLR", "linear")
"""Schedules without `min_lr_ratio`: they stay at the peak, or end at 0."""
TEXT_FIGURES = {figure: row.higher_is_better for figure, row in FIGURES.items() if not row.needs_model}
"""The figures of generated texts that evaluations in training have, and whether the higher is the better."""


LOSS_FIGURES = ("loss", "perplexity")


def _evaluated(name: str) -> str:
    """The name of a figure of evaluations here; Hugging Face has `eval_loss`, and of a set `eval_NAME_loss`."""
    plain = name.removeprefix("eval_").removeprefix("eval/")
    of_set, _, figure = plain.rpartition("_")
    is_theirs = name.startswith("eval_") and of_set and figure in LOSS_FIGURES
    return f"{of_set}/{figure}" if is_theirs else plain


def _plugin_rule(field: str, names: Iterable[str], known: Iterable[str]) -> Rule:
    """Each of `names` is `known`, or `module:name`."""
    known = [*known]
    wrong = [name for name in names if name not in known and not is_dotted(name)]
    guess = closest(wrong[0], known) if wrong else None
    message = f"allowed: {', '.join([*known, '`module:name`'])}" + (f"; did you mean `{guess}`?" if guess else "")
    return Rule(field, message, wrong)


CROSS_ENTROPY = "cross_entropy"
"""The value of `training.loss` for the package's own."""
Schedule = Literal[
    "WarmupDecayLR",
    "WarmupLR",
    "WarmupCosineLR",
    "cosine",
    "linear",
    "constant",
    "wsd",
    "polynomial",
    "inverse_sqrt",
]
Tracker = Literal["wandb", "tensorboard"]
Names = Annotated[tuple[str, ...], BeforeValidator(words, json_schema_input_type=str | tuple[str, ...])]
Trackers = Annotated[
    tuple[Tracker | str, ...],
    BeforeValidator(words, json_schema_input_type=Literal[Tracker, "none"] | str | tuple[Tracker | str, ...]),
]


class TrainingConfig(Section):
    """Batch, optimizer, schedule, evaluation and checkpoint cadence."""

    per_device_train_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Micro-batch: its token budget is this times (max_encoder_length + max_decoder_length). `auto`: the largest that
    is found to fit at the first start, with the accumulation that keeps the global batch (docs/estimate-memory.md)."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks, each of max_encoder_length + max_decoder_length tokens. The
    accumulation follows from it. None: the micro-batch (with `auto`: of 4) × ranks × `gradient_accumulation_steps`."""
    per_device_eval_batch_size: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batch of an evaluation, in sequences of max_encoder_length + max_decoder_length tokens."""
    gradient_accumulation_steps: Annotated[int, Mark.UNTRAINED] = Field(default=8, ge=1)
    """Micro-batches per rank and optimizer step at the first start (see `data.num_lanes`); where
    `global_batch_size` is given, it decides instead."""
    learning_rate: Annotated[float, Mark.TUNABLE] = Field(default=2e-4, gt=0, le=1)
    """Peak learning rate."""
    weight_decay: Annotated[float, Mark.TUNABLE] = Field(default=0.01, ge=0, le=10_000)
    """Decoupled weight decay of matrices; norms and biases have none."""
    optimizer: Literal["adamw", "muon"] | str = "adamw"
    """`muon` (FSDP2 and DDP): the matrices of the layers step by their orthogonalized momentum, at AdamW's learning
    rates; embedding, output layer and norms by AdamW. `module:name`: one of your own (docs/library.md)."""
    optimizer_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments by name for an optimizer of your own, beside the groups of parameters and `lr`."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's decay of a matrix's momentum."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first-moment decay. An optimizer of your own takes it, as the next two, by `optimizer_args`."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's second-moment decay."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    max_grad_norm: Annotated[float, Mark.TUNABLE] = Field(default=1.0, ge=0)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    num_train_steps: int = Field(default=100_000, ge=1, le=1_000_000_000)
    """Optimizer steps of the run; null with `num_train_epochs`."""
    num_train_epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the training split, in the place of `num_train_steps`. They are counted in steps once, at the first
    start; the run's own config.yaml has these."""
    warmup_steps: Annotated[int, Mark.TUNABLE] = Field(default=1000, ge=0)
    """Optimizer steps over which the learning rate rises. In a run of at most 1,000 steps the default is a tenth of
    them, unless the schedule has no end."""
    warmup_ratio: Annotated[float | None, Mark.TUNABLE] = Field(default=None, ge=0, lt=1)
    """Share of the optimizer steps over which the learning rate rises, in the place of `warmup_steps`. It is read once;
    the run's own config.yaml has the steps."""
    warmup_type: Annotated[Literal["linear", "log"], Mark.TUNABLE] = "linear"
    """Shape of the warm-up of DeepSpeed's schedules (DeepSpeed's own default is log)."""
    lr_scheduler_type: Annotated[Schedule | str, Mark.TUNABLE] = "WarmupDecayLR"
    """Learning-rate schedule. The first three are DeepSpeed's own classes; `wsd` is warm-up, stable, cosine decay;
    `polynomial` and `inverse_sqrt` have Hugging Face's formulas.
    `module:function`: one of your own (docs/library.md)."""
    min_lr_ratio: Annotated[float, Mark.TUNABLE] = Field(default=0.1, ge=0, le=1)
    """Final learning rate over peak, for `cosine`, `WarmupCosineLR`, `wsd` and `polynomial`."""
    lr_scheduler_power: Annotated[float, Mark.TUNABLE] = Field(default=1.0, gt=0, le=100)
    """Power of what is left of the decay, for `polynomial`; 1 is linear, down to `min_lr_ratio`."""
    lr_scheduler_timescale: Annotated[int | None, Mark.TUNABLE] = Field(default=None, ge=1, le=1_000_000_000)
    """Updates behind the warm-up in which `inverse_sqrt` falls to 0.71 of the peak; null: `warmup_steps`, or 10,000
    without a warm-up."""
    wsd_decay_fraction: Annotated[float, Mark.TUNABLE] = Field(default=0.1, gt=0, le=1)
    """Share of the steps that `wsd` decays over, at the end."""
    residual_dropout: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of what attention and MLP of each layer add to the residual stream that is set to zero, the rest scaled up
    for it. In training alone, as the next three."""
    attention_dropout: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of the attention weights that is set to zero. `torch.nn.attention.varlen`, in which attention runs on GPUs
    in 16 bits, has none: a run that would need it there is refused when it starts."""
    loss: Annotated[str, Mark.TUNABLE] = "cross_entropy"
    """`module:name`: a function of your own that gives each target token's loss in training (docs/library.md). Reported
    losses stay plain cross-entropy."""
    label_smoothing: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread evenly over the vocabulary. Reported losses stay plain cross-entropy."""
    z_loss: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0, le=1)
    """Coefficient of the square of the logarithm of the softmax's normaliser, added to each token's loss (PaLM: 1e-4).
    Reported losses stay plain cross-entropy."""
    bf16: bool = True
    """bfloat16 compute with float32 master weights. With `fp16: true` the default is false."""
    fp16: bool = False
    """float16 compute with dynamic loss scaling; excludes bf16. Neither: float32."""
    activation_checkpointing: Annotated[Literal["none", "full", "every_n", "selective", "auto"], Mark.UNTRAINED] = (
        "full"
    )
    """Which layers recompute their activations in the backward pass (`selective`: FSDP2 only). `auto`: chosen when a
    run starts, the fastest of none, selective and full that the estimate says fits; on CPUs none."""
    activation_checkpointing_every_n: Annotated[int, Mark.UNTRAINED] = Field(default=2, ge=1)
    """Every n-th layer recomputes (`every_n` only)."""
    activation_offload: Annotated[bool, Mark.UNTRAINED] = False
    """Keep saved activations in host memory until the backward pass."""
    torch_compile: Annotated[bool | Literal["auto"], Mark.UNTRAINED] = "auto"
    """Compile each layer with torch.compile. `auto`: on GPUs, but not under DeepSpeed's ZeRO-3, where `true` has run on
    CPUs alone; layers that cannot be compiled then run as they are, with torch's warning."""
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
    files are written; FSDP2 on GPUs then still passes each rank's whole part through host memory. With
    `offload_optimizer: nvme` the default is false."""
    average_checkpoints: Annotated[int, Mark.UNTRAINED] = Field(default=0, ge=0)
    """Newest checkpoints whose weights are averaged into `export/averaged` at the end of a run that has at least 3, a
    model that the run does not evaluate (docs/checkpoints.md); 0: none."""
    eval_steps: Annotated[int, Mark.UNTRAINED] = Field(default=500, ge=1)
    """Optimizer steps between evaluations; each checkpoint of `save_steps` is evaluated too."""
    eval_samples: Annotated[int, Mark.EXAMPLES, Mark.UNTRAINED] = Field(default=1000, ge=0)
    """Examples of the held-out split in one evaluation; 0 turns evaluation off."""
    eval_generate_samples: Annotated[int, Mark.UNTRAINED] = Field(default=0, ge=0)
    """Examples of `eval_samples`, the first ones, whose outputs the model generates in each evaluation, to be compared
    with the right ones (docs/metrics.md); 0: none. Takes a second copy of the model on each rank: in bf16 2 bytes per
    parameter."""
    generation_max_new_tokens: Annotated[int, Mark.UNTRAINED] = Field(default=GenerationSettings.max_new_tokens, ge=1)
    """Most tokens of a generated text."""
    generation_num_beams: Annotated[int, Mark.UNTRAINED] = Field(default=GenerationSettings.num_beams, ge=1)
    """Beams of the search for the likeliest text; 1 takes the likeliest token each time."""
    logging_steps: Annotated[int, Mark.UNTRAINED] = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics."""
    report_to: Annotated[Trackers, Mark.UNTRAINED] = ("wandb", "tensorboard")
    """Trackers besides the console and `metrics.jsonl`, which are always written; `none` for no other. One of your
    own: `module:name` (docs/library.md)."""
    callbacks: Annotated[Names, Mark.UNTRAINED] = ()
    """Your own code after steps, evaluations and saves: `module:name` (docs/library.md)."""
    freeze: Names = ()
    """Parameters that are not trained, by patterns of their names (`encoder.*`, `shared.weight`, `*.mlp.*`). They are
    kept in the compute dtype, without gradients and optimizer states (docs/lora.md)."""
    seed: int = Field(default=42, ge=0)
    """Everything random is derived from it."""
    max_consecutive_skipped_steps: Annotated[int, Mark.TUNABLE] = Field(default=20, ge=1)
    """Steps skipped in a row (not finite, or by a `skip_step` of `monitor`) after which the run stops as diverged."""
    metric_for_best_model: Annotated[str, AfterValidator(_evaluated), Mark.TUNABLE] = "loss"
    """Figure of an evaluation (`eval/…` in its metrics) by which checkpoints are the best, and early stopping decides.
    `NAME/loss` (or `eval_NAME_loss`): that of a set of `data.eval_sets`. Of equal ones the first stays the best. Those
    of texts need `eval_generate_samples`. A metric of your own: `module:name` (docs/library.md)."""
    greater_is_better: Annotated[bool | None, Mark.TUNABLE] = None
    """A greater figure is the better one; None: not so for `loss` and `perplexity`, but for all others."""
    early_stopping_patience: Annotated[int | None, Mark.TUNABLE] = Field(default=None, ge=1)
    """Evaluations in a row without a better `metric_for_best_model` after which the run is over, complete; None trains
    all steps."""
    early_stopping_threshold: Annotated[float, Mark.TUNABLE] = Field(default=0.0, ge=0)
    """Least gain of `metric_for_best_model` that counts as better, in its unit (loss: nats per target token)."""
    save_strategy: Annotated[Literal["steps", "best"], Mark.UNTRAINED] = "steps"
    """`steps`: save every `save_steps`. `best`: only after evaluations that are better than all before, and at the
    end."""
    save_on_best: Annotated[bool, Mark.UNTRAINED] = False
    """Save after each evaluation that is better than all saved ones, too, not only every `save_steps`."""
    load_best_model_at_end: Annotated[bool, Mark.UNTRAINED] = False
    """Export the best checkpoint at the end of the run, to `export/best`, in the place of the last one."""
    export_at_end: Annotated[bool, Mark.UNTRAINED] = True
    """Write the model at the end of the run as a Hugging Face folder, `export/final` (or `export/best`)."""

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _no_clipping(cls, value: Any) -> Any:
        """0 for null, which is how other tools turn clipping off."""
        return 0.0 if value is None else value

    @field_validator("per_device_train_batch_size", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """One message, where pydantic has one for each alternative."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError("must be a whole number >= 1, or `auto`") from None

    @property
    def best_figure(self) -> str:
        """The figure of `metric_for_best_model`, without the set of `data.eval_sets` that it is of."""
        return self.metric_for_best_model.rpartition("/")[2]

    @property
    def best_is_greatest(self) -> bool:
        """True if the best evaluation is the one with the greatest `metric_for_best_model`."""
        given, name = self.greater_is_better, self.best_figure
        return TEXT_FIGURES.get(name, name not in LOSS_FIGURES) if given is None else given

    @property
    def best_by(self) -> str:
        """Which evaluation is the best: `lowest loss`, `highest exact_match`."""
        return f"{'highest' if self.best_is_greatest else 'lowest'} {self.metric_for_best_model}"

    @property
    def saves_best(self) -> bool:
        """True if every evaluation that is better than all saved ones is saved."""
        return self.save_on_best or self.save_strategy == "best"

    @property
    def micro_batch_size(self) -> int:
        """`per_device_train_batch_size` as a number. Raises ConfigError while it is `auto`."""
        if self.per_device_train_batch_size == "auto":
            raise ConfigError(
                "training.per_device_train_batch_size=auto is found when a run starts, on its machine: "
                "give a number where nothing can be tried"
            )
        return self.per_device_train_batch_size

    @property
    def recomputation(self) -> Literal["none", "full", "every_n", "selective"]:
        """`activation_checkpointing` once it is chosen. Raises ConfigError while it is `auto`."""
        if self.activation_checkpointing == "auto":
            raise ConfigError(
                "training.activation_checkpointing=auto is chosen when a run starts, for its device: give none, full, "
                "every_n or selective where there is none"
            )
        return self.activation_checkpointing

    @model_validator(mode="before")
    @classmethod
    def _without_steps(cls, values: Any) -> Any:
        """Null stands for a warm-up that is not set, and beside epochs for steps: a command line can take them away."""
        if not isinstance(values, dict):
            return values
        unset = {"warmup_steps"} if values.get("num_train_epochs") is None else {"warmup_steps", "num_train_steps"}
        return {name: value for name, value in values.items() if value is not None or name not in unset}

    def _without_effect(self) -> Iterable[Rule]:
        """Numbers that the schedule would ignore. Defaults pass: every run's own config.yaml has them.

        `min_lr_ratio` alone is refused at its default, too, where a person gave it: that is a value people choose.
        """
        schedule, end = self.lr_scheduler_type, float(self.lr_scheduler_type in ENDLESS_SCHEDULES)
        defaults = {name: info.default for name, info in type(self).model_fields.items()}
        given, of_runs = self.model_fields_set, {"min_lr_ratio", "lr_scheduler_power", "wsd_decay_fraction"}
        ends_elsewhere = self.min_lr_ratio != defaults["min_lr_ratio"] or of_runs & given == {"min_lr_ratio"}
        yield Rule(
            "lr_scheduler_type min_lr_ratio",
            f"{schedule} always ends at {end:g} times the peak: set lr_scheduler_type=cosine or wsd, or remove "
            "min_lr_ratio",
            schedule in _SCHEDULES_WITH_ONE_END and self.min_lr_ratio != end and ends_elsewhere,
        )
        yield Rule(
            "lr_scheduler_type min_lr_ratio",
            "inverse_sqrt falls on and has no lowest rate: set lr_scheduler_type=polynomial, or remove min_lr_ratio",
            schedule == "inverse_sqrt" and ends_elsewhere,
        )
        for field, owner in (("lr_scheduler_power", "polynomial"), ("lr_scheduler_timescale", "inverse_sqrt")):
            yield Rule(
                f"lr_scheduler_type {field}",
                f"{schedule} does not read it: set lr_scheduler_type={owner}, or remove {field}",
                schedule in get_args(Schedule) and schedule != owner and getattr(self, field) != defaults[field],
            )
        yield Rule(
            "lr_scheduler_type wsd_decay_fraction",
            f"{schedule} decays from the warm-up on, or never: set lr_scheduler_type=wsd, or remove wsd_decay_fraction",
            schedule in get_args(Schedule)
            and schedule != "wsd"
            and self.wsd_decay_fraction != defaults["wsd_decay_fraction"],
        )

    def _unread_by_optimizer(self) -> Iterable[Rule]:
        """Numbers that the optimizer would ignore. Defaults pass beside each other: every run's config.yaml has all."""
        readers = dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), tuple(OPTIMIZERS))
        readers["muon_momentum"] = ("muon",)
        is_of_run = readers.keys() <= self.model_fields_set
        meant = (
            "remove these, or set training.optimizer=muon"
            if self.optimizer in OPTIMIZERS
            else "name what it takes in training.optimizer_args, and remove these"
        )
        ignored = [
            name
            for name, optimizers in readers.items()
            if self.optimizer not in optimizers
            and name in self.model_fields_set
            and (not is_of_run or getattr(self, name) != type(self).model_fields[name].default)
        ]
        yield Rule(" ".join(["optimizer", *ignored]), f"{self.optimizer} does not read them: {meant}", ignored)

    def _rules(self) -> Iterable[Rule]:
        size, steps, schedule = self.per_device_train_batch_size, self.num_train_steps, self.lr_scheduler_type
        ends, decay_steps = "warmup_steps num_train_steps lr_scheduler_type", round(self.wsd_decay_fraction * steps)
        is_late = schedule not in ENDLESS_SCHEDULES and self.warmup_steps >= steps
        is_short = schedule == "wsd" and self.warmup_steps < steps < self.warmup_steps + decay_steps
        is_one = self.average_checkpoints == 1
        yield Rule(
            "global_batch_size per_device_train_batch_size",
            "global_batch_size must be a multiple of the micro-batch size",
            size != "auto" and (self.global_batch_size or 0) % size,
        )
        both = self.num_train_epochs is not None and "num_train_steps" in self.model_fields_set
        message = "the length of the run twice: remove one of the two, or set num_train_steps=null"
        yield Rule("num_train_epochs num_train_steps", message, both)
        both = self.warmup_ratio is not None and "warmup_steps" in self.model_fields_set
        yield Rule("warmup_ratio warmup_steps", "the warm-up twice: remove one of the two, or set it to null", both)
        yield _plugin_rule("lr_scheduler_type", [schedule], get_args(Schedule))
        own = self.loss != CROSS_ENTROPY
        yield _plugin_rule("loss", [self.loss], [CROSS_ENTROPY])
        yield Rule(
            "loss label_smoothing z_loss",
            "these are parts of the cross-entropy: set them to 0, and add what they do to your own loss",
            own and bool(self.label_smoothing or self.z_loss),
        )
        message = "float16 needs to know how large a loss's gradients are: set bf16=true, or loss=cross_entropy"
        yield Rule("loss fp16", message, own and self.fp16)
        yield (own_optimizer := _plugin_rule("optimizer", [self.optimizer], OPTIMIZERS))
        if not own_optimizer.is_broken:
            yield from self._unread_by_optimizer()
        yield Rule(
            "optimizer optimizer_args",
            "these are for an optimizer of your own, `module:name`: remove them, and set adam_* or muon_momentum",
            self.optimizer in OPTIMIZERS and bool(self.optimizer_args),
        )
        yield _plugin_rule("report_to", self.report_to, get_args(Tracker))
        yield _plugin_rule("callbacks", self.callbacks, ())
        figures = (*LOSS_FIGURES, *TEXT_FIGURES)
        best = self.best_figure
        yield (known := _plugin_rule("metric_for_best_model", [best], figures))
        yield Rule("bf16 fp16", "at most one may be true; both false is float32", self.bf16 and self.fp16)
        message = f"the warm-up must end before the run does: set warmup_steps={max(1, steps // 10)}, a tenth of it"
        yield Rule(ends, f"{message}; only WarmupLR and constant have no end", is_late)
        yield Rule(
            "attention_dropout activation_checkpointing",
            "selective checkpointing keeps attention's output without what it dropped out: set full, every_n or none",
            self.attention_dropout and self.activation_checkpointing == "selective",
        )
        message = f"the warm-up and the decay of {decay_steps} steps do not fit into the run"
        yield Rule(f"{ends} wsd_decay_fraction", message, is_short)
        yield from self._without_effect()
        yield Rule("average_checkpoints", "the mean of one is that one: give 2 or more, or 0 for none", is_one)
        by_evaluation = {
            name: bool(getattr(self, name))
            for name in ("early_stopping_patience", "save_on_best", "load_best_model_at_end", "eval_generate_samples")
        }
        for name, is_set in {**by_evaluation, "save_strategy": self.save_strategy == "best"}.items():
            message = "this is done in evaluations, or decided by them: set eval_samples > 0, or turn it off"
            yield Rule(f"{name} eval_samples", message, is_set and not self.eval_samples)
        yield Rule(
            "eval_generate_samples eval_samples",
            "outputs are generated for the first of the examples that are evaluated: make it eval_samples at most",
            0 < self.eval_samples < self.eval_generate_samples,
        )
        yield Rule(
            "metric_for_best_model eval_generate_samples",
            "a figure of generated texts, of which there are none: set eval_generate_samples > 0, or take loss",
            best not in LOSS_FIGURES and not known.is_broken and not self.eval_generate_samples,
        )
        yield Rule(
            "load_best_model_at_end export_at_end",
            "the best model is exported at the end: set export_at_end=true",
            self.load_best_model_at_end and not self.export_at_end,
        )


class InfraConfig(Section):
    """The folders of the run, and how it is spread over devices."""

    output_dir: str = "./output"
    """Folder of the run."""
    require_disk_space: bool = False
    """Refuse to start (exit code 5) where the disk of `output_dir` cannot hold the checkpoints that
    `training.save_total_limit` lets stand at a time, one being written; False: warn."""
    logging_dir: str = "./logs"
    """Folder of TensorBoard and W&B files; a relative path is inside `output_dir`."""
    upload_to: str | None = None
    """Folder of another file system that the run's outputs are copied to after each save, and at the end: what fsspec
    reaches, such as `s3://bucket/run` (docs/checkpoints.md). It never holds training up; None: nothing is copied."""
    distributed_type: DistributedType = "deepspeed"
    """Engine."""
    num_gpus: int = Field(default=8, ge=1)
    """Ranks the configuration was planned for. The launcher decides how many there are; a difference is reported."""
    device: Literal["cuda", "cpu", "auto"] = "cuda"
    """Device to train on; `auto` takes an accelerator where there is one; `cuda` refuses a machine
    without."""
    sharding_stage: Literal["zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"] = "zero3"
    """Sharding: zero0 nothing (DDP), zero1 optimizer, zero2 + gradients, zero3 + parameters; `_hybrid`
    shards inside a node and replicates across nodes. With `distributed_type: ddp` the default is zero0."""
    hybrid_shard_size: int | None = Field(default=None, ge=1)
    """Ranks that hold one sharded copy together, with a `_hybrid` stage; must divide the ranks. None: the ranks of a
    node."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "cpu"
    """Place of optimizer states and master weights. With zero0, where there is nothing to offload, the default is none.
    `nvme`: a local disk, under DeepSpeed's zero3 (docs/engine.md)."""
    offload_params: Literal["none", "cpu"] = "none"
    """Place of parameters between uses. zero3 only."""
    nvme_path: str | None = None
    """Folder on a fast local disk of every node, for `offload_optimizer: nvme`: 16 bytes per parameter that the node's
    ranks train."""
    pin_memory: bool = True
    """Pin host buffers of offloaded states and of saves (ignored without an accelerator)."""
    deepspeed_config: str | None = None
    """Path of a raw DeepSpeed JSON. What it and this file both set must agree."""
    deepspeed_extra: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed keys that no field here stands for; handed on unchanged. Filled from `deepspeed_config`."""
    distributed_timeout_minutes: float = Field(default=30.0, ge=0.1, le=100_000)
    """Time after which a collective that does not complete ends the run."""
    start_timeout_minutes: float = Field(default=5.0, ge=0.1, le=100_000)
    """Time that ranks wait for each other before a run begins: for all to come, to agree and to connect. Then those
    that are there name the missing ones, and end (exit code 9)."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0)
    """Time without a step after which every rank writes its stacks into the run's folder and ends (exit code 8);
    evaluations and saves count as life. None: two thirds of `distributed_timeout_minutes`; 0: never."""
    fsdp_reduce_every_micro_batch: bool = False
    """FSDP2: reduce gradients after every micro-batch instead of once per step. Costs communication, and saves the
    4 bytes per parameter that each rank accumulates unsharded gradients in."""
    wandb_project: str = "qwen3-encoder-decoder"
    """W&B project; where it is not set, the one in `WANDB_PROJECT`."""
    wandb_entity: str | None = None
    """W&B entity (team or user)."""
    wandb_run_name: str | None = None
    """W&B run name; None lets W&B choose."""

    def _rules(self) -> Iterable[Rule]:
        stage = self.sharding_stage
        is_ddp = self.distributed_type == "ddp"  # which shards nothing, and which QLoRA asks for
        named, or_shard = ("distributed_type ", "") if is_ddp else ("", ", or zero1 to zero3")
        yield Rule(
            f"{named}sharding_stage offload_optimizer",
            f"without sharding there is nothing to offload: set offload_optimizer=none{or_shard}",
            stage == "zero0" and self.offload_optimizer != "none",
        )
        yield Rule(
            "sharding_stage offload_params",
            "parameters can be offloaded only where they are sharded: set zero3, or offload_params=none",
            self.offload_params != "none" and stage not in ("zero3", "zero3_hybrid"),
        )
        swaps = self.offload_optimizer == "nvme"
        yield Rule(
            "offload_optimizer nvme_path",
            "nvme needs a folder on a disk of every node: set nvme_path",
            swaps and self.nvme_path is None,
        )
        yield Rule(
            "offload_optimizer sharding_stage",
            "only the states of sharded parameters can be on a disk: set zero3, or offload_optimizer=cpu",
            swaps and not stage.startswith("zero3"),
        )
        yield Rule("distributed_type sharding_stage", "ddp shards nothing: set zero0", is_ddp and stage != "zero0")
        yield Rule(
            "hybrid_shard_size sharding_stage",
            "only zero2_hybrid and zero3_hybrid shard over fewer ranks than all: set one of them, or null",
            self.hybrid_shard_size is not None and not stage.endswith("_hybrid"),
        )
        hang = self.hang_timeout_minutes or 0
        yield Rule(
            "hang_timeout_minutes",
            "no run makes a step so soon after its start: give 0.1 (6 seconds) or more, or 0 for never",
            0 < hang < 0.1,
        )
        yield Rule(
            "hang_timeout_minutes distributed_timeout_minutes",
            "must be smaller, or collectives time out before the watchdog writes stack traces",
            hang >= self.distributed_timeout_minutes,
        )

    def conflicts(self, at: str = "") -> Iterator[Conflict]:
        """Yield what is wrong with `deepspeed_extra`, too, whose keys may hold blanks."""
        yield from super().conflicts(at)
        for path, message in check_extra(self.deepspeed_extra):
            yield Conflict((join(at, f"deepspeed_extra.{path}"),), message)
