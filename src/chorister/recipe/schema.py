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
    schema = Recipe.model_json_schema(mode="serialization")
    for definition in [schema, *schema.get("$defs", {}).values()]:
        _as_on_the_wire(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:chorister:recipe:{VERSION}",
        **schema,
    }


def _as_on_the_wire(definition: dict[str, Any]) -> None:
    """Optional fields are left out, never null; all others are always there, defaults too."""
    required = []
    for name, field in definition.get("properties", {}).items():
        if {"type": "null"} in field.get("anyOf", []):
            (choice,) = (c for c in field.pop("anyOf") if c != {"type": "null"})
            field.update(choice)
        else:
            required.append(name)
        field.pop("default", None)
    if required:
        definition["required"] = required
