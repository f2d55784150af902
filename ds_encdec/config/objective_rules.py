"""Rules about fields that an objective does not read, outside `data`."""

from collections.abc import Iterator

from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import Conflict, conflicts_in
from ds_encdec.registry.objectives import OBJECTIVES

# Fields of a decoder, and of the loss of tokens.
_OF_DECODERS = ("model.decoder_layers", "model.cross_attention", "model.encoder_positions", "data.max_decoder_length")
_OF_TOKENS = ("training.loss", "training.label_smoothing", "training.z_loss")


def objective_rules(config: Sections) -> Iterator[Conflict]:
    """Yield the fields that are set, and that the objective of `config` does not read."""
    name, objective = config.data.objective, OBJECTIVES[config.data.objective]
    decoders = (*_OF_DECODERS, "training.eval_generate_samples") if objective.encoder_only else ()
    for path in (*decoders, *(() if objective.has_head else _OF_TOKENS)):
        section, _, field = path.partition(".")
        if getattr(config, section).changed(field):
            why = "trains an encoder alone" if path in decoders else "has no loss of tokens"
            yield conflicts_in("data")(f"{path} objective", f"{name} {why}, which does not read it: remove it")
    for field in config.training.contrastive.changed(*type(config.training.contrastive).model_fields):
        if name != "contrastive":
            at = f"training.contrastive.{field} data.objective"
            yield conflicts_in("training")(at, f"{name} embeds no texts: set data.objective=contrastive, or remove it")
