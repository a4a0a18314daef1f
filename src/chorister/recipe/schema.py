"""The JSON Schema of recipes, published as docs/reference/recipe.schema.json.

It describes the shape for tools and other implementations. What it can't say (canonical form,
order of edges, leaves of a prefix tree, times in order) `Recipe.parse` checks.
"""

from __future__ import annotations

from typing import Any

from chorister.recipe.model import VERSION, Recipe

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """The schema of the payload of a signed recipe, draft 2020-12."""
    # As it is written, not as it may be built in Python: defaults are spelled out on the wire.
    schema = Recipe.model_json_schema(mode="serialization")
    for definition in [schema, *schema.get("$defs", {}).values()]:
        _drop_null(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:chorister:recipe:{VERSION}",
        **schema,
    }


def _drop_null(definition: dict[str, Any]) -> None:
    """Optional fields are left out, never null."""
    for name, field in definition.get("properties", {}).items():
        choices = [choice for choice in field.get("anyOf", []) if choice != {"type": "null"}]
        if len(choices) == 1 != len(field["anyOf"]):
            del field["anyOf"], field["default"]
            field.update(choices[0])
            definition["required"].remove(name)
