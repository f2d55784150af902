"""The JSON schema of the configuration for editors: with an address, and without titles that repeat the names."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ds_encdec.config.schema import FullConfig

SCHEMA_ID = "urn:ds_encdec:configuration"


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: pydantic makes titles of the names ("Learning Rate"), which hide the descriptions in some editors."""
        return False


def editor_schema() -> str:
    """The schema as JSON, in which every field has its description, bounds and choices."""
    schema = FullConfig.model_json_schema(schema_generator=_Untitled)
    for section in schema["$defs"].values():
        del section["title"]
    schema["title"] = "ds_encdec configuration"
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID, **schema}, indent=1) + "\n"
