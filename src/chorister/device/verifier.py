"""The query class verifier (the paper's section 4.2): before a charge, and before any data.

A query is in its class if the policy lists it to the letter (`exact`), or if it compiles on a
database that has the declared and allowed fields and no others, with the listed functions only
(`fields`). It is then run on just such a database: what it compiles against is all that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from chorister.device.sandbox import Sandbox
from chorister.device.sandbox.functions import known_functions
from chorister.device.schema import FieldType, Schema
from chorister.device.store import Snapshot
from chorister.errors import QueryRefused
from chorister.policy import Analysis, Policy
from chorister.recipe import Recipe

__all__ = ["permitted_functions", "query_columns", "verify_query"]

Reads: TypeAlias = Mapping[str, Iterable[str]]


def permitted_functions(analysis: Analysis) -> frozenset[str]:
    """What a query of this analysis may call on this device.

    Listed queries were read by the policy's author, and may call everything that the device has.
    """
    known = known_functions()
    return known if analysis.query_class == "exact" else known.intersection(analysis.functions)


def verify_query(policy: Policy, recipe: Recipe, sandbox: Sandbox | None = None) -> None:
    """Raise `QueryRefused` if the recipe's query is not in its analysis' class.

    With a sandbox the query is also compiled there, on empty tables: one that is no SELECT, names
    something undeclared, or lacks a column that the recipe encodes, is refused in SQLite's words.
    """
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        why = f"policy {policy.name} has no analysis {recipe.analysis}"
        raise QueryRefused(check="analysis", why=why, field="analysis")
    if analysis.query_class == "exact" and recipe.query not in analysis.queries:
        raise QueryRefused(
            check="query", why="not one of the queries that are listed", field="query"
        )
    if sandbox is None:
        _declared(policy, analysis, recipe.reads)
        return
    names = query_columns(policy, analysis, recipe.query, recipe.reads, sandbox)
    for column in recipe.encoding.columns:
        if column not in names:
            why = f"the features read the column {column}, which the query does not select"
            raise QueryRefused(check="query", why=why, field="features")


def query_columns(
    policy: Policy, analysis: Analysis, query: str, reads: Reads, sandbox: Sandbox
) -> tuple[str, ...]:
    """What a query returns that reads these fields; raises `QueryRefused` in SQLite's words."""
    tables = Snapshot.empty(_declared(policy, analysis, reads))
    return sandbox.compile(query, tables, functions=permitted_functions(analysis))


def _declared(policy: Policy, analysis: Analysis, reads: Reads) -> dict[str, dict[str, FieldType]]:
    known = Schema.of(policy).tables
    tables: dict[str, dict[str, FieldType]] = {}
    for name, fields in reads.items():
        for field in fields:
            ref = f"{name}.{field}"
            if name not in known or field not in known[name].fields:
                raise QueryRefused(check="fields", why=f"{ref} does not exist", field="reads")
            if ref not in analysis.fields:
                why = f"{ref} is not open to this analysis"
                raise QueryRefused(check="fields", why=why, field="reads")
            tables.setdefault(name, {})[field] = known[name].fields[field]
    return tables
