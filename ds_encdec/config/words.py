"""A row of the words of other tools (`word_table.py` has the rows), and how their values are read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ds_encdec.plugins import is_dotted
from ds_encdec.source_kinds import kind_of_file

TOOLS = {
    "hf": "Hugging Face Trainer and its example scripts",
    "accelerate": "Accelerate",
    "axolotl": "axolotl",
    "llama": "LLaMA-Factory",
    "titan": "torchtitan",
    "other": "nanoGPT, Lightning, the guides this project comes from, and habit",
}

SECTIONS = (
    "fsdp_config deepspeed_config optimizer lr_scheduler scheduler lr_scheduler_kwargs checkpoint job metrics compile "
    "parallelism profiling activation_checkpoint validation trainer train training_args training_arguments args "
    "hyperparameters lora lora_config peft peft_config dataset tokenizer experiment dist"
)
"""Sections of other tools, in whose names nothing lies: their entries are read like flat ones."""

FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "zero0",
    "HYBRID_SHARD": "zero3_hybrid",
}
"""The stage that each of FSDP's words stands for, in the order of FSDP's own numbers for them."""

Meaning = Mapping[str, Any] | str
"""The fields that a word sets (none: it is left out), or why no field can stand for it."""


NOTHING: Meaning = {}


class Word(NamedTuple):
    """Names of one thing in other tools, and what becomes of it here.

    `names`: between blanks; one with dots is meant only at this place. For a name of ours it says which foreign values
    are understood. `tools`: keys of `TOOLS`. `field`: takes the value as it is. `values`: what single values mean, by
    their text in lower case. `reads`: the same for values that no table can list; None for what it does not know.
    `why`: a sentence for where there is no field, or none for this value. `is_left_out`: not an error, as nothing is
    lost.
    """

    names: str
    tools: str
    field: str = ""
    values: Mapping[str, Meaning] = {}
    reads: Callable[[Any], Meaning | None] = lambda value: None
    why: str = ""
    is_left_out: bool = False

    def meaning(self, value: Any) -> Meaning | None:
        """Return what `value` means under this name; None for a value of our own field that needs no translation."""
        read = self.reads(value)
        if read is not None:
            return read
        if not isinstance(value, dict | list) and (known := self.values.get(str(value).lower())) is not None:
            return known
        if self.field:
            return {self.field: value}
        return {} if self.is_left_out else self.why or None


def left_out(names: str, tools: str, why: str) -> Word:
    """A row of names that are accepted and do nothing, as `why` says."""
    return Word(names, tools, why=why, is_left_out=True)


def switch(on: Meaning, off: Meaning) -> dict[str, Meaning]:
    """Meanings of the words for on and off."""
    return {"true": on, "false": off, "yes": on, "no": off, "none": off, "0": off, "1": on}


def files(field: str) -> Callable[[Any], Meaning | None]:
    """Read local files; for those to train on also their kind, by the ending."""

    def read(value: Any) -> Meaning | None:
        if not isinstance(value, str):
            return None
        if field != "data.data_files":
            return {field: value}
        return {"data.dataset_name": kind, field: value} if (kind := kind_of_file(value)) else None

    read.__doc__ = f"`{field}`{', and by its ending `data.dataset_name`' if field == 'data.data_files' else ''}."
    return read


def deepspeed(value: Any) -> Meaning | None:
    """The path of a JSON is `infra.deepspeed_config`."""
    if isinstance(value, dict):
        return "write it into a JSON file of its own, and its path into infra.deepspeed_config"
    return {"infra.deepspeed_config": value} if isinstance(value, str) else None


def fsdp(value: Any) -> Meaning | None:
    """Words like full_shard, auto_wrap and offload are `infra.sharding_stage` and `infra.offload_optimizer`."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else None
    if words is None:
        return None
    meant: dict[str, Any] = {"infra.distributed_type": "fsdp"} if words else {}
    for word in map(str, words):
        stage = FSDP_STRATEGIES.get(word.upper())
        if not stage and word not in ("offload", "auto_wrap"):
            return f"`{word}` is no word of it: set infra.sharding_stage and infra.offload_optimizer"
        meant |= {"infra.sharding_stage": stage} if stage else {}
        meant |= {"infra.offload_optimizer": "cpu"} if word == "offload" else {}
    return meant


def own_optimizer(value: Any) -> Meaning | None:
    """`module:name` is `training.optimizer`."""
    return {"training.optimizer": value} if isinstance(value, str) and is_dotted(value) else None


def ratio(value: Any) -> Meaning | None:
    """A number below 1 is a share of the steps, `training.warmup_ratio`."""
    return {"training.warmup_ratio": value} if isinstance(value, float) and 0 < value < 1 else None


def seconds(value: Any) -> Meaning | None:
    """Seconds, which are `infra.distributed_timeout_minutes`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"infra.distributed_timeout_minutes": min(value, 6_000_000) / 60} if is_number else None


def targets(value: Any) -> Meaning | None:
    """A list, names between commas, or all: `model.lora.target_modules`."""
    if value in ("all", "all-linear", "all_linear"):
        return {"model.lora": {}}
    return {"model.lora.target_modules": value}
