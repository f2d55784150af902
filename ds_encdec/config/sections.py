"""All sections of a configuration together, and their fields by dotted path."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import field_validator
from pydantic.fields import FieldInfo

from ds_encdec.config.data_sections import DataConfig
from ds_encdec.config.infra_sections import InfraConfig
from ds_encdec.config.model_sections import ModelConfig
from ds_encdec.config.monitor_sections import MonitorConfig, PhasesConfig
from ds_encdec.config.section_base import Mark, Section
from ds_encdec.config.settings import join
from ds_encdec.config.training_sections import TrainingConfig


class Sections(Section):
    """All sections of a run, each valid by itself; those of a `schema.FullConfig` also agree with each other."""

    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    training: TrainingConfig = TrainingConfig()
    """The optimization."""
    infra: InfraConfig = InfraConfig()
    """The machines."""
    monitor: MonitorConfig = MonitorConfig()
    """Alerts, and how they are answered."""
    phases: PhasesConfig = PhasesConfig()
    """The phases of `ds-encdec phases`, and their gates."""

    @field_validator("*", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        """Leave a section at its defaults if all its lines are commented out."""
        return {} if value is None else value


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a field of type `annotation` holds, alone, in a union or in a tuple; else None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def _fields(section: type[Section], at: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield (path := join(at, name)), info
        if inner := section_in(info.annotation):
            yield from _fields(inner, f"{path}.0" if "tuple" in str(info.annotation) else path)


@cache
def fields() -> dict[str, FieldInfo]:
    """Return every field by its dotted path, those of nested sections too; items of a list are called `0`."""
    return dict(_fields(Sections, ""))


def marked(*marks: Mark) -> list[str]:
    """Return the dotted paths of the fields with one of `marks`, in the schema's order; of a list, only its own."""
    return [path for path, info in fields().items() if set(marks) & set(info.metadata) and ".0." not in path]
