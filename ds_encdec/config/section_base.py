"""The base of all sections of a configuration, and the marks and types that their fields share. The reference in docs/
and the JSON schema are generated from the docstrings below the fields. Names follow Hugging Face and DeepSpeed."""

import ast
import inspect
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ds_encdec.base.terminal import has_url_secret, without_url_secrets


class Mark(Enum):
    """A property of fields, by which `marked` selects them."""

    ORDER = "part of the data's fingerprint: it decides which example comes when"
    TOKENS = "where it differs, the losses of two runs are over different tokens"
    TEXTS = "where it differs, two runs are evaluated on different texts"
    EXAMPLES = "where it differs, two runs are evaluated on different examples of the same texts"
    MIXTURE = "where it differs, the losses of two runs are of different mixtures of denoisers"
    FORM = "how a decoder is converted: an encoder-decoder that is stored keeps its own"
    UNTRAINED = "may change in the middle of a phase: it does not decide what the phase learns"
    TUNABLE = "may change in the middle of a phase, such as after a divergence, though the phase then learns otherwise"


def one_or_many(value: Any) -> Any:
    """Read a single string as a tuple of one, and Hugging Face's `none` as the empty tuple."""
    return (() if value == "none" else (value,)) if isinstance(value, str) else value


def words(value: Any) -> Any:
    """Read words between commas, as on command lines, or else as `one_or_many`; no name here contains a comma."""
    return tuple(map(str.strip, value.split(","))) if isinstance(value, str) and "," in value else one_or_many(value)


def _without_secrets(value: Any) -> Any:
    for text in (value,) if isinstance(value, str) else value or ():
        if has_url_secret(text):
            raise ValueError(
                f"{without_url_secrets(text)} holds a password or key, and a configuration is saved, logged and "
                "copied. Take it out of the address, and give it in the environment as FSSPEC_PROTOCOL_ARGUMENT, such "
                "as FSSPEC_FTP_PASSWORD (docs/checkpoints.md)"
            )
    return value


# The mark of every field that may hold a URL: no secret gets into a configuration, and so none into what shows one.
ADDRESS = AfterValidator(_without_secrets)

Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_many, json_schema_input_type=str | tuple[str, ...]), ADDRESS]
Names = Annotated[tuple[str, ...], BeforeValidator(words, json_schema_input_type=str | tuple[str, ...])]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are immutable and never converted from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    model_config |= ConfigDict(defer_build=True, hide_input_in_errors=True)  # which may be a secret

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain_types(cls, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        # Whole numbers may be written like 1e5.
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of the field `name`."""
        return cls.model_fields[name].get_default(call_default_factory=True)

    def changed(self, *names: str) -> list[str]:
        """Return those of the fields `names` that are not at their defaults."""
        return [name for name in names if getattr(self, name) != self.default(name)]

    @classmethod
    def docstrings(cls) -> dict[str, str]:
        """Return the docstring below each field, or its description if a table makes that. Pydantic would read the
        source of every class at every start."""
        found = {name: field.description for name, field in cls.model_fields.items() if field.description}
        for base in cls.__mro__[-3::-1]:  # without BaseModel and object
            (tree,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(tree, ast.ClassDef)
            for field, text in pairwise(tree.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(written))):
                        found[name] = inspect.cleandoc(written)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, text in cls.docstrings().items():
            properties[name]["description"] = text
        return described
