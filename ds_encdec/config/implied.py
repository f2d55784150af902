"""Set fields for which others leave only one possible value, if they are not set."""

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from ds_encdec.config.settings import Settings, show, unusable
from ds_encdec.config.training_sections import ENDLESS_SCHEDULES
from ds_encdec.config.validation import default_of, mention


def imply(settings: Settings) -> list[str]:
    """Set the fields that others in `settings` decide, and return notes about the unexpected ones."""
    notes = []
    for source, field, value in _decided(settings):
        if settings.get(field) is None:
            reason = f"{source.rpartition('.')[2]} = {show(settings.get(source))}"
            settings.put(field, value, f"{settings.place_of(source)} ({reason})")
            if source == "training.fp16":  # Hugging Face has neither by default
                notes.append(f"{mention(settings, source)} sets {field} = {show(value)}, which is true by default")
    return notes


def _decided(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield the deciding field, the decided field and its value. Later ones read the values that earlier ones set."""
    if settings.get("infra.distributed_type") == "ddp":
        yield "infra.distributed_type", "infra.sharding_stage", "zero0"
    if settings.get("infra.sharding_stage") == "zero0":
        yield "infra.sharding_stage", "infra.offload_optimizer", "none"
    if settings.get("infra.offload_optimizer") == "nvme":  # the host has no memory for a copy
        yield "infra.offload_optimizer", "training.async_save", False
    if settings.get("training.fp16") is True:
        yield "training.fp16", "training.bf16", False
    yield from _warmup(settings)


def _warmup(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    steps = settings.get("training.num_train_steps", default_of("training.num_train_steps"))
    ratio = settings.get("training.warmup_ratio")
    if not _is_number(steps) or settings.get("training.num_train_epochs") is not None:
        return  # counted when the run starts (data/survey.py)
    if _is_number(ratio) and 0 <= ratio < 1 and settings.get("training.warmup_steps") is None:
        yield "training.warmup_ratio", "training.warmup_steps", math.ceil(steps * ratio)
        settings.put("training.warmup_ratio", None, settings.place_of("training.warmup_ratio"))
    elif ratio is None and (shorter := shortened_warmup(steps, settings.get("training.lr_scheduler_type"))) is not None:
        yield "training.num_train_steps", "training.warmup_steps", shorter


def shortened_warmup(steps: float, schedule: str) -> int | None:
    """Return the default warm-up of a short run, a tenth of its steps, or None if the schema's default fits."""
    has_room = steps > default_of("training.warmup_steps") or schedule in ENDLESS_SCHEDULES
    return None if has_room else max(1, int(steps // 10))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and unusable(value) is None
