"""The settings and sizes that decide a step's memory and a checkpoint's size, without torch and without the network."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal, Self

from ds_encdec.base.quantities import count, disk_size
from ds_encdec.base.types import CheckpointError, ConfigError, is_hidden_matrix
from ds_encdec.config.schema import DataConfig, FullConfig, TrainingConfig
from ds_encdec.config.settings import Conflict, closest
from ds_encdec.config.shares import micro_batches_per_step, token_budgets
from ds_encdec.config.stored_model import read_stored_model, teacher_place
from ds_encdec.launch.disk import free_bytes
from ds_encdec.memory.breakdown import Count
from ds_encdec.model.depth import encoder_fields, form_fields, require_stored_form
from ds_encdec.model.parameter_count import (
    EMBEDDING_ROWS_MULTIPLE,
    ModelSizes,
    model_shapes,
    num_encoder_layers,
    trained_shapes,
)
from ds_encdec.registry.engines import ENGINES, EngineName
from ds_encdec.registry.families import FAMILIES, OF_OUR_OWN
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.registry.optimizers import OPTIMIZERS, row_of
from ds_encdec.tokenizer.sentinels import MODE_TOKENS

Side = Literal["encoder", "decoder"]
QWEN3_IDS = 151_669  # Ids of Qwen3's tokenizer before sentinels are added (tokenizer/sentinels.py)


@dataclass
class Sizes:
    """Sizes of an encoder-decoder; see `config.schema.ArchitectureConfig`. `vocab_size` counts rows; the last fields
    are those of `registry.families.LAYER`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_encoder_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    cross_attention: str = "final"
    encoder_heights: list[int] | None = None  # as in model/configuration.py
    qk_norm: str = "head"
    norm_position: str = "before"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False

    @property
    def layers(self) -> list[tuple[Side, int]]:
        """Stack and place of all layers in the order of the forward pass: an encoder layer runs when the first decoder
        layer reads the states behind it. An encoder alone has only its own."""
        order: list[tuple[Side, int]] = []
        done = 0
        for index, height in enumerate(self.heights):
            order += [*(("encoder", below) for below in range(done, height)), ("decoder", index)]
            done = height
        return order or [("encoder", index) for index in range(self.num_encoder_layers)]

    @property
    def heights(self) -> list[int]:
        """The number of encoder layers behind which each decoder layer reads."""
        return self.encoder_heights or [self.num_encoder_layers] * self.num_hidden_layers

    @classmethod
    def of(cls, sizes: ModelSizes) -> Self:
        """Return the sizes of any object that has them."""
        values: dict[str, Any] = {field.name: getattr(sizes, field.name, field.default) for field in fields(cls)}
        return cls(**values | {"num_encoder_layers": num_encoder_layers(sizes)})


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a run's model, adapters included, and the `trained` ones: shape by canonical name, in order."""

    shapes: Mapping[str, tuple[int, ...]]
    trained: Mapping[str, tuple[int, ...]]
    _parts: dict[str, Count] = field(default_factory=dict, init=False)

    @cached_property
    def layers(self) -> Mapping[str, Count]:
        """Number of parameters by layer, with names such as `encoder layer 0`, stack by stack."""
        places = (name.split(".")[:3] for name in self.shapes if ".layers." in name)
        return {f"{stack} layer {index}": self.of(f"{stack}.layers.{index}.") for stack, _, index in map(tuple, places)}

    def of(self, part: str) -> Count:
        """Count the parameters whose names begin with `part`."""
        if part not in self._parts:
            self._parts[part] = Count(
                *(
                    sum(prod(shape) for name, shape in shapes.items() if name.startswith(part))
                    for shapes in (self.shapes, self.trained)
                )
            )
        return self._parts[part]

    @cached_property
    def kinds(self) -> Counter[tuple[tuple[int, ...], bool, bool]]:
        """Number of parameters by shape, by whether a layer has them, and by whether they are trained."""
        return Counter((shape, ".layers." in name, name in self.trained) for name, shape in self.shapes.items())


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's share of a training step: the configuration, the model's sizes, and the mesh. Tokens are a
    micro-batch's, padding included. `emulates_bf16`: it is multiplied in float32 (model/precision.py)."""

    config: FullConfig
    sizes: Sizes
    model: Parameters = field(compare=False, repr=False)  # of sizes and configuration
    engine: EngineName
    world_size: int
    ranks_per_node: int
    device: Literal["cuda", "cpu"]
    encoder_tokens: int
    decoder_tokens: int
    gradient_accumulation_steps: int
    emulates_bf16: bool = False
    ratio: float = 1.0  # Encoder tokens per decoder token of the data
    teacher: Sizes | None = None

    @property
    def stepped_matrices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the layers' matrices if the optimizer updates these differently, as Muon does."""
        if row_of(self.config.training.optimizer).matrix_moments is None:
            return []
        return [(name, shape) for name, shape in self.model.trained.items() if is_hidden_matrix(name)]

    @property
    def moments(self) -> tuple[int, int]:
        """Moments that the optimizer keeps for a trained parameter, and for one of `stepped_matrices`."""
        name, row = self.config.training.optimizer, row_of(self.config.training.optimizer)
        if name in OPTIMIZERS:
            return row.moments, row.moments if row.matrix_moments is None else row.matrix_moments
        from ds_encdec.engine.user_code import try_optimizer  # torch

        return (moments := len(try_optimizer(name, self.config.training.optimizer_args).moments)), moments

    @property
    def uses_flash(self) -> bool:
        """Return whether attention runs in a variable-length flash kernel (model/attention_kernels.py)."""
        return self.device == "cuda" and self.compute_bytes == 2 and self.config.model.use_flash_attention

    @property
    def nodes(self) -> int:
        """Number of machines, each with equally many ranks."""
        return self.world_size // self.ranks_per_node

    @property
    def parameters(self) -> int:
        """Number of parameters, adapters included."""
        return self.model.of("").all

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters."""
        return self.model.of("").trained

    @property
    def longest_document(self) -> tuple[int, int]:
        """Encoder and decoder tokens of the longest document that a micro-batch may hold."""
        return self.config.data.max_encoder_length, self.config.data.max_decoder_length

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the dtype of activations and of the parameters that layers compute with."""
        return 2 if self.config.training.bf16 or self.config.training.fp16 else 4

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; an untied output layer has equally many."""
        return self.sizes.vocab_size * self.sizes.hidden_size


def make_job(
    config: FullConfig,
    sizes: ModelSizes,
    engine: EngineName,
    *,
    world_size: int,
    ranks_per_node: int,
    device: Literal["cuda", "cpu"] = "cuda",
    gradient_accumulation_steps: int | None = None,
    ratio: float | None = None,
    emulates_bf16: bool = False,
) -> Job:
    """Return the job of a run. `ratio`: encoder per decoder token of its data; None: `assumed_ratio`. Raises
    ConfigError for a pattern of `training.freeze` that matches nothing."""
    steps = gradient_accumulation_steps or max(1, micro_batches_per_step(config, world_size) // world_size)
    ratio = assumed_ratio(config.data) if ratio is None else ratio
    budgets, own_sizes = token_budgets(config.data, config.training.micro_batch_size, ratio), Sizes.of(sizes)
    return Job(
        config=config,
        sizes=own_sizes,
        model=Parameters(model_shapes(own_sizes, config.model.lora), trained_shapes(config, own_sizes)),
        engine=engine,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        device=device,
        encoder_tokens=budgets.encoder_tokens,
        decoder_tokens=budgets.decoder_tokens,
        gradient_accumulation_steps=steps,
        emulates_bf16=emulates_bf16,
        ratio=ratio,
        teacher=_teacher_sizes(config),
    )


def assumed_ratio(data: DataConfig) -> float:
    """Return the encoder tokens per decoder token that are assumed before any data is read."""
    return OBJECTIVES[data.objective].expected_ratio(data)


def with_micro_batch(job: Job, micro_batch_size: int) -> Job:
    """Return the same job with micro-batches of another size, in sequences; its accumulation stays."""
    budgets = token_budgets(job.config.data, micro_batch_size, job.ratio)
    return replace(job, encoder_tokens=budgets.encoder_tokens, decoder_tokens=budgets.decoder_tokens)


def checkpoint_bytes_per_parameter(job: Job) -> float:
    """Return a checkpoint's bytes per trained parameter; under Muon the mean over matrices and the rest. They hold
    float32 weights and moments, and under ZeRO-0 to 2, if the engine `saves_compute_weights`, the weights that layers
    compute with (in float32 under ZeRO-0 these are the same)."""
    stage = job.config.infra.sharding_stage
    only_states = stage.startswith("zero3") or (stage == "zero0" and job.compute_bytes == 4)
    weights = 0 if only_states or not ENGINES[job.engine].saves_compute_weights else job.compute_bytes
    matrices, (moments, of_matrices) = sum(prod(shape) for _, shape in job.stepped_matrices), job.moments
    fewer = 4 * (moments - of_matrices) * matrices / job.trainable_parameters if matrices else 0
    return 4 * (1 + moments) + weights - fewer


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint's tensors; other files take some MB. Adapters come without frozen weights."""
    frozen = 0 if job.config.model.lora is not None else job.parameters - job.trainable_parameters
    return round(job.trainable_parameters * checkpoint_bytes_per_parameter(job)) + frozen * job.compute_bytes


def saves_at_most(training: TrainingConfig, steps: int) -> int:
    """Return how many checkpoints a run of `steps` saves, or the most if hours or its evaluations decide."""
    if training.save_interval_hours is not None or training.save_on_best:
        return steps  # any step; the last one saves in any case
    return ceil(steps / (training.save_steps if training.save_strategy == "steps" else training.eval_steps))


def checkpoints_at_once(training: TrainingConfig, saves: int) -> int:
    """Return how many of `saves` checkpoints exist at a time: kept ones, the best, and the one being written."""
    keep = saves if training.save_total_limit is None else training.save_total_limit
    # The best may be older than the newest, and a new one is complete before an old one is deleted.
    return min(saves, keep + bool(training.eval_samples) + 1)


def disk_shortage(folder: Path, committed: int, config: FullConfig, job: Job) -> str | None:
    """Return a message if `folder`, which holds `committed` checkpoints, has too little space for those to come."""
    training = config.training
    size = checkpoint_bytes(job)
    most = checkpoints_at_once(training, saves_at_most(training, training.num_train_steps))
    needed = size * max(1, most - committed)
    free = free_bytes(folder)
    if free is None or free >= needed:
        return None
    return (
        f"infra.output_dir: {folder} has {disk_size(free)} free, but {disk_size(needed)} are needed: the run has up to "
        f"{count(most, 'checkpoint')} of {disk_size(size)} at a time (training.save_total_limit="
        f"{training.save_total_limit}, the best, and the one that is written). Free space there, lower "
        "training.save_total_limit, or choose another folder."
    )


QWEN3_ROWS = 151_936
_BOTH = ("", "-Base")
# Sizes of Qwen3's decoders by hub id, from the config.json on https://huggingface.co/Qwen/<name>.
PUBLISHED = {
    f"Qwen/Qwen3-{name}{suffix}": Sizes(QWEN3_ROWS, hidden, layers, layers, heads, 8, 128, inner, tied)
    for name, suffixes, hidden, layers, heads, inner, tied in (
        ("0.6B", _BOTH, 1024, 28, 16, 3072, True),
        ("1.7B", _BOTH, 2048, 28, 16, 6144, True),
        ("4B", _BOTH, 2560, 36, 32, 9728, True),
        ("8B", _BOTH, 4096, 36, 32, 12288, False),
        ("14B", _BOTH, 5120, 40, 40, 17408, False),
        ("32B", ("",), 5120, 64, 64, 25600, False),  # its base was never published
    )
    for suffix in suffixes
}


def run_sizes(config: FullConfig) -> Sizes:
    """Return the sizes of a run's model, sentinels included. Raises ConfigError if unknown, or refused by a run."""
    return _formed(config, *_source_sizes(config))


Source = tuple[Sizes, dict[str, Any] | None]  # of what a model is made from, and an encoder-decoder's config.json


def _source_sizes(config: FullConfig) -> Source:
    section = config.model
    if section.architecture is not None:
        return Sizes.of(section.architecture), None  # its rows are fixed: a run refuses a tokenizer with more
    name = section.model_name_or_path
    assert name is not None  # the configuration has one of the two
    sizes, stored = _named_sizes(name)
    if sizes.vocab_size != QWEN3_ROWS:
        return sizes, stored  # other tokenizers are not read, and rows that they may lack are not counted
    # Qwen3's embedding grows if sentinels and mode tokens do not fit.
    ids = QWEN3_IDS + section.num_sentinel_tokens + len(MODE_TOKENS) * config.data.use_mode_tokens
    rows = max(QWEN3_ROWS, -(-ids // EMBEDDING_ROWS_MULTIPLE) * EMBEDDING_ROWS_MULTIPLE)
    return replace(sizes, vocab_size=rows), stored


def _named_sizes(name: str) -> Source:
    folder = Path(name).expanduser()
    if name in PUBLISHED and not folder.is_dir():
        return PUBLISHED[name], None
    return _stored_sizes((folder if folder.is_dir() else _cached_config(name)) / "config.json")


def _teacher_sizes(config: FullConfig) -> Sizes | None:
    """Return the sizes of the teacher, if there is one; a decoder's without encoder layers."""
    name = teacher_place(config)
    if name is None:
        return None
    sizes, stored = _named_sizes(name)
    return sizes if stored is not None else replace(sizes, num_encoder_layers=0)


def _formed(config: FullConfig, sizes: Sizes, stored: dict[str, Any] | None) -> Sizes:
    objective = OBJECTIVES[config.data.objective]
    sizes = sizes if objective.has_head else replace(sizes, tie_word_embeddings=True)
    if stored is not None:
        require_stored_form(config.model, stored, encoder_only=objective.encoder_only)
        made = encoder_fields(stored) if objective.encoder_only else {}
    else:
        made = form_fields(config.model, sizes.num_hidden_layers, encoder_only=objective.encoder_only)
    return replace(sizes, **{name: value for name, value in made.items() if hasattr(sizes, name)})


def require_possible_model(config: FullConfig) -> None:
    """Raise ConfigError if the model cannot be made, or a pattern of `training.freeze` matches nothing; if its sizes
    are not known here, a run will raise it."""
    source = None
    with suppress(ConfigError, RuntimeError):
        source = _source_sizes(config)
    if source is not None:
        trained_shapes(config, _formed(config, *source))


def impossible_model(config: FullConfig) -> Iterator[Conflict]:
    """Yield the problem that `require_possible_model` raises."""
    try:
        require_possible_model(config)
    except ConfigError as error:
        field, _, message = str(error).partition(" ")
        yield Conflict((field.removesuffix(":"),), message)


def _stored_sizes(file: Path) -> Source:
    try:
        stored = read_stored_model(file)
    except CheckpointError as error:
        raise ConfigError(f"model.model_name_or_path: {error}") from error
    given = {"num_encoder_layers": stored["num_hidden_layers"], "tie_word_embeddings": False, **stored}
    sizes = Sizes(**{field.name: given[field.name] for field in fields(Sizes) if field.name in given})
    return sizes, stored if stored["model_type"] == OF_OUR_OWN else None


def _cached_config(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache  # takes a tenth of a second
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # no name of a repository
        if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
            return Path(found).parent
    meant = f" Did you mean {closest(name, PUBLISHED)}?" if closest(name, PUBLISHED) else ""
    raise ConfigError(
        f"model.model_name_or_path: {name} is not a local folder, not in the Hugging Face cache, and not one of the "
        f"models whose sizes are known here ({', '.join(PUBLISHED)}); nothing is downloaded for an estimate.{meant} "
        f"Give a folder with the config.json of a {' or '.join(row.title for row in FAMILIES.values())}, or its sizes: "
        "model.architecture.hidden_size=… and model.tokenizer_name_or_path=builtin"
    )
