"""The parameters that a run trains and those that it freezes, by canonical name (parameter_count.py), without torch.

A matrix with an adapter keeps its name, although peft calls it `….q_proj.base_layer.weight`; its adapter's are
`….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from math import prod

from ds_encdec.base.types import ConfigError
from ds_encdec.config.model_sections import LoraConfig
from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import closest
from ds_encdec.model.parameter_count import ModelSizes, parameter_shapes

ADAPTER = "default"
"""peft's name of the one adapter, which is part of the names of modules, and not of the files it saves."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Endings of the names of an adapter's two matrices."""

Shapes = dict[str, tuple[int, ...]]


def canonical_name(name: str) -> str:
    """Return the canonical name of a parameter that `named_parameters()` calls `name`."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def is_adapter(name: str) -> bool:
    """Return whether `name` is one of an adapter's matrices."""
    return name.endswith((LORA_A, LORA_B))


def has_adapter(name: str, lora: LoraConfig) -> bool:
    """Return whether the parameter `name` is a matrix that has an adapter."""
    return name.startswith(("encoder.layers.", "decoder.layers.")) and name.split(".")[-2] in lora.target_modules


def model_shapes(sizes: ModelSizes, lora: LoraConfig | None) -> Shapes:
    """Return all parameters' shapes, with adapters, by canonical name in the order of `named_parameters()`."""
    shapes: Shapes = {}
    for name, shape in parameter_shapes(sizes).items():
        shapes[name] = shape
        if lora is not None and has_adapter(name, lora):
            module, (rows, columns) = name.removesuffix(".weight"), shape
            shapes |= {module + LORA_A: (lora.r, columns), module + LORA_B: (rows, lora.r)}
    return shapes


def trained_shapes(config: Sections, sizes: ModelSizes) -> Shapes:
    """Return the shape of every parameter that `config` trains. Raises ConfigError as `frozen_names` does."""
    shapes = model_shapes(sizes, config.model.lora)
    frozen = frozen_names(config, shapes)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def trained_share(config: Sections, sizes: ModelSizes) -> float:
    """Return the parameters that `config` trains, as a share of all."""
    trained, shapes = trained_shapes(config, sizes), model_shapes(sizes, config.model.lora)
    return sum(map(prod, trained.values())) / sum(map(prod, shapes.values()))


def frozen_names(config: Sections, names: Collection[str]) -> frozenset[str]:
    """Return the `names` that `config` freezes. ConfigError for an unmatched pattern, or if nothing is trained."""
    if config.model.lora is not None:
        return frozenset(name for name in names if not is_adapter(name))
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in config.training.freeze}
    for pattern, matching in matches.items():
        if not matching:
            raise ConfigError(f"training.freeze: no parameter is called {pattern!r}; {_alike(pattern, names)}")
    frozen = frozenset(name for matching in matches.values() for name in matching)
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"training.freeze: {', '.join(map(repr, matches))} match all {len(names)} parameters, and nothing would be "
            "trained"
        )
    return frozen


def _alike(pattern: str, names: Collection[str]) -> str:
    """Return a hint: a pattern that may have been meant or, if none is alike, one for each kind of parameter."""
    parts = [name.split(".") for name in names]
    beginnings = (f"{'.'.join(part[:length])}.*" for part in parts for length in range(1, len(part)))
    if guess := closest(pattern, dict.fromkeys([*names, *beginnings])):
        return f"did you mean {guess!r}?"
    kinds = (".".join("*" if one.isdigit() or one in ("encoder", "decoder") else one for one in part) for part in parts)
    return f"there are {', '.join(dict.fromkeys(kinds))}"


def trained_summary(trained: int, parameters: int) -> str:
    """Return a line for logs with the numbers of trained parameters and of all."""
    return f"trainable parameters: {trained:,} of {parameters:,} ({trained / parameters:.2%})".replace("%", " %")
