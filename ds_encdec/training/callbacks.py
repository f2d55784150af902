"""Load the user's callbacks, and call them at the loop's three moments."""

import logging
from collections.abc import Sequence

from ds_encdec.base.plugins import load_plugin, whose_fault
from ds_encdec.base.types import Callback, ConfigError, DsEncDecError, TrainingState
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives

logger = logging.getLogger(__name__)


def open_callbacks(config: FullConfig, given: Sequence[Callback], collectives: HostCollectives) -> tuple[Callback, ...]:
    """Return the callbacks `given` in Python, then those of `training.callbacks`, called with the configuration. A
    collective. Raises ConfigError if one cannot be imported or is no `Callback`, or if the ranks' callbacks differ."""
    field = "training.callbacks"

    def made() -> tuple[Callback, ...]:
        callbacks = (*given, *(load_plugin(field, name, "callbacks")(config) for name in config.training.callbacks))
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{field}: {callback!r} must be a ds_encdec.Callback: its class inherits from that")
        return callbacks

    callbacks = collectives.on_every_rank(made)
    kinds = collectives.gather([type(callback).__qualname__ for callback in callbacks])
    if any(kind != kinds[0] for kind in kinds):
        raise ConfigError(f"{field}: the ranks have different ones, and would wait for each other: {kinds}")
    return callbacks


def call(callback: Callback, moment: str, state: TrainingState, fact: object) -> None:
    """Call the method `moment` with `state` and the moment's own `fact`. Raises DsEncDecError that names the method."""
    try:
        getattr(callback, moment)(state, fact)
    except DsEncDecError:
        raise
    except Exception as error:
        name = f"{type(callback).__qualname__}.{moment}"
        logger.exception("%s failed:", name)
        what = whose_fault(error, or_library=False)
        raise DsEncDecError(f"the callback {name} failed at step {state.global_step}: {what}") from error
