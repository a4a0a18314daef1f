"""A form filled in as an earlier question was, to be changed and asked next."""

from __future__ import annotations

from collections.abc import Iterator

from chorister.analyst.asking import simple_query
from chorister.analyst.study import Study
from chorister.canonical import decimal_text
from chorister.console.forms import FieldKind, Form, field_kinds
from chorister.encoding import AnyFeature, Categories, Grid, Intervals, PrefixTree
from chorister.errors import InvalidInput
from chorister.recipe import Recipe

__all__ = ["form_of"]


def form_of(recipe: Recipe, study: Study) -> Form:
    """The form that would ask a recipe's question again."""
    pairs: list[tuple[str, str]] = []
    fields = {field.name: field for field in field_kinds(study)}
    for feature in recipe.features:
        pairs.extend(_feature(feature, fields))
    pairs.extend(("group", ref) for ref in recipe.group_by)
    privacy = recipe.privacy
    pairs.append(("epsilon", decimal_text(privacy.epsilon)))
    pairs.append(("mechanism", privacy.mechanism.value))
    try:
        plain = simple_query(study.fleet.policy, study.terms, recipe.features, recipe.deny)
    except InvalidInput:
        plain = ""
    if recipe.query != plain:
        pairs.append(("query", recipe.query))
    return Form(pairs)


def _feature(feature: AnyFeature, fields: dict[str, FieldKind]) -> Iterator[tuple[str, str]]:
    if isinstance(feature, Grid):
        yield "use:map", "on"
        yield "map:x", feature.columns[0]
        yield "map:y", feature.columns[1]
        yield "map:box", ", ".join(decimal_text(edge) for edge in feature.box)
        yield "map:level", str(feature.level or "")
        return
    field = fields.get(feature.columns_read[0])
    if field is None:
        return  # a column that only the query knows
    yield f"use:{field.ref}", "on"
    if isinstance(feature, Intervals):
        yield f"kind:{field.ref}", "intervals"
        yield f"edges:{field.ref}", ", ".join(decimal_text(edge) for edge in feature.edges)
    elif isinstance(feature, Categories):
        yield f"kind:{field.ref}", "categories"
        yield f"values:{field.ref}", "\n".join(str(value) for value in feature.values)
    elif isinstance(feature, PrefixTree):
        yield f"kind:{field.ref}", "prefix_tree"
        yield f"words:{field.ref}", "\n".join(feature.vocabulary)
        yield f"prefixes:{field.ref}", "\n".join(feature.prefixes or ())
