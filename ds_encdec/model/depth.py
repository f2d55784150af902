"""The form of a new model: how its decoder reads the encoder, and which layers of a source either side copies. No
torch: runs and memory estimates agree on it."""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ds_encdec.base.types import ConfigError
from ds_encdec.config.section_base import Mark
from ds_encdec.config.sections import LayerChoice, ModelConfig, marked
from ds_encdec.config.settings import show
from ds_encdec.model.cross_attention import FORMS, CrossAttention, encoder_form

NEW_FORM = "aligned"  # where `model.cross_attention` is not set


@dataclass(frozen=True)
class Depth:
    """The source's layers, counted from 0, that `encoder` and `decoder` layers are copied from, both ascending."""

    encoder: tuple[int, ...]
    decoder: tuple[int, ...]

    @property
    def heights(self) -> list[int]:
        """Return how many encoder layers run before each decoder layer reads, in the aligned form: those below the one
        that it was copied from."""
        return [bisect_left(self.encoder, layer) for layer in self.decoder]


def depth_of(section: ModelConfig, num_layers: int, form: CrossAttention, *, encoder_only: bool = False) -> Depth:
    """Return the layers that `section` takes of a source with `num_layers`. Raises ConfigError if it has too few."""
    has = f"the source has {num_layers} layers"
    if encoder_only:
        return Depth(_taken(section.encoder_layers, num_layers, "model.encoder_layers", has), ())
    decoder = _taken(section.decoder_layers, num_layers, "model.decoder_layers", has)
    if form.is_aligned:
        num_layers = decoder[-1]
        has = f"aligned decoder layers, up to layer {num_layers} of the source, read only the {num_layers} below it"
    return Depth(_taken(section.encoder_layers, num_layers, "model.encoder_layers", has), decoder)


def _taken(choice: LayerChoice, num_layers: int, field: str, why: str) -> tuple[int, ...]:
    if choice is None:
        return tuple(range(num_layers))
    if num_layers == 0:
        raise ConfigError(f"{field} is {show(choice)}, but {why}: leave it out")
    if isinstance(choice, tuple):
        if choice[-1] >= num_layers:
            raise ConfigError(f"{field} is {list(choice)}, but {why}: name layers from 0 to {num_layers - 1}")
        return choice
    number = int(str(choice).removeprefix("top "))
    if number > num_layers:
        raise ConfigError(f"{field} is {show(choice)}, but {why}: take at most {num_layers}")
    if isinstance(choice, str):
        return tuple(range(num_layers - number, num_layers))
    # Evenly spread, the first and the last one among them; one alone is the last.
    last = num_layers - 1
    return tuple(round(index * last / (number - 1)) for index in range(number)) if number > 1 else (last,)


def form_fields(
    section: ModelConfig, num_layers: int, unrotated: Collection[int] = (), *, encoder_only: bool = False
) -> dict[str, Any]:
    """Return the fields of a new model's configuration for its form and its layers, from a source with `num_layers`, of
    which the layers `unrotated` do not rotate. Raises ConfigError if it has too few."""
    name = "final" if encoder_only else section.cross_attention or NEW_FORM
    depth = depth_of(section, num_layers, form := FORMS[name], encoder_only=encoder_only)
    return {
        "cross_attention": name,
        "encoder_positions": section.encoder_positions or form.positions,
        "encoder_heights": depth.heights if form.is_aligned else None,
        "num_encoder_layers": len(depth.encoder),
        "num_hidden_layers": len(depth.decoder),
        "unrotated_layers": {
            side: [index for index, layer in enumerate(getattr(depth, side)) if layer in unrotated]
            for side in (("encoder", "decoder") if unrotated else ())
        },
    }


def form_settings(section: ModelConfig, made: Any) -> dict[str, Any]:
    """Return the settings (`Mark.FORM`) that give the form and the depth of `made`, the configuration of a model that
    `section` began. Which layers it copied, `section` alone knows."""
    names = [path.partition(".")[2] for path in marked(Mark.FORM)]
    has_form = getattr(made, "num_hidden_layers", 1)  # an encoder alone has none
    return {name: getattr(made, name, getattr(section, name)) if has_form else getattr(section, name) for name in names}


def require_stored_form(section: ModelConfig, stored: Mapping[str, Any], *, encoder_only: bool = False) -> None:
    """Raise ConfigError if `section` wants another form or depth than a model of ours with the `stored` fields, which
    is an encoder alone if it has no decoder layers."""
    own = (
        {}
        if encoder_only
        else {
            "cross_attention": stored.get("cross_attention", "final"),
            "encoder_positions": stored.get("encoder_positions", "unrotated"),
            "decoder_layers": stored["num_hidden_layers"],
        }
    )
    own["encoder_layers"] = stored.get("num_encoder_layers", stored["num_hidden_layers"])
    if not stored["num_hidden_layers"] and not encoder_only:
        raise ConfigError(
            f"model.model_name_or_path is {section.model_name_or_path}, an encoder alone: set data.objective to "
            "contrastive or mntp, or start from a decoder or an encoder-decoder"
        )
    for name, found in own.items():
        if (wanted := getattr(section, name)) not in (None, found):
            raise ConfigError(
                f"model.{name} is {show(wanted)}, but {section.model_name_or_path} is an encoder-decoder made with "
                f"{show(found)}, which it keeps: leave the setting out, or start from a decoder"
            )


def encoder_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which the encoder of a model of ours, with the `stored` fields, differs from that model."""
    sizes = SimpleNamespace(**stored)
    layers = stored.get("num_encoder_layers", stored["num_hidden_layers"])
    form = {"cross_attention": encoder_form(sizes), "encoder_positions": "unrotated", "encoder_heights": None}
    return {**form, "num_encoder_layers": layers, "num_hidden_layers": 0}


def beyond_positions(config: Any, encoder_tokens: int, decoder_tokens: int) -> str | None:
    """Return a sentence if examples of these lengths have more positions than a model of this configuration has."""
    goes_on = getattr(config, "encoder_positions", None) == "prefix"
    needed = encoder_tokens + decoder_tokens if goes_on else max(encoder_tokens, decoder_tokens)
    if needed <= (most := getattr(config, "max_position_embeddings", needed)):
        return None
    how = "one behind the other" if goes_on else "each"
    return (
        f"Inputs of {encoder_tokens:,} and outputs of {decoder_tokens:,} tokens, {how}, take {needed:,} positions, but "
        f"the model is declared for {most:,} (max_position_embeddings): what is beyond may be poor."
    )
