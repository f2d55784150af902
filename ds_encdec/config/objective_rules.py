"""Rules about fields that an objective does not read, outside `data`."""

from collections.abc import Iterator

from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import Conflict, conflicts_in
from ds_encdec.registry.objectives import OBJECTIVES

_OF_DECODERS = (
    *("model.decoder_layers", "model.cross_attention", "model.encoder_positions"),
    *("data.max_decoder_length", "training.eval_generate_samples"),
)


def objective_rules(config: Sections) -> Iterator[Conflict]:
    """Yield the fields that are set, and that the objective of `config` does not read."""
    name, chosen = config.data.objective, config.training.contrastive
    for path in _OF_DECODERS if OBJECTIVES[name].encoder_only else ():
        section, _, field = path.partition(".")
        if getattr(config, section).changed(field):
            message = f"{name} trains an encoder alone, which does not read it: remove it"
            yield conflicts_in("data")(f"{path} objective", message)
    for field in chosen.changed(*type(chosen).model_fields) if name != "contrastive" else ():
        message = f"{name} embeds no texts: set data.objective=contrastive, or remove it"
        yield conflicts_in("training")(f"training.contrastive.{field} data.objective", message)
