"""What a device checks about a query, an encoding and keys: before the charge, and without data.

**The query class** (the paper's section 4.2). A query is in its class if the policy lists it to the
letter (`exact`), or if it compiles on a database that has the declared and allowed fields and no
others, with the listed functions only (`fields`). It later runs on just such a database: it can
read only what it compiles against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from chorister.dap.upload_client import check_hpke_config
from chorister.device.poll import Listed
from chorister.device.sandbox import Sandbox
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.wire import MAX_ENCODING_BYTES
from chorister.device.schema import FieldType, Schema
from chorister.device.store import Snapshot
from chorister.errors import DecodeError, HPKEError, InvalidInput, QueryRefused
from chorister.policy import Analysis, Policy
from chorister.recipe import Recipe

Reads: TypeAlias = Mapping[str, Iterable[str]]


def permitted_functions(analysis: Analysis) -> frozenset[str]:
    """Return what a query of this analysis may call on this device.

    The policy's author has read the queries that it lists, so they may call every function that the
    device has.
    """
    known = known_functions()
    return known if analysis.query_class == "exact" else known.intersection(analysis.functions)


def verify_query(policy: Policy, recipe: Recipe, sandbox: Sandbox | None = None) -> None:
    """Raise `QueryRefused` unless the recipe's query is in its analysis' class.

    With a sandbox the query is also compiled there, on empty tables. It is refused, in SQLite's
    words, if it is not a SELECT, names something undeclared, or lacks a column that the recipe
    encodes.
    """
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        why = f"policy {policy.name} has no analysis {recipe.analysis}"
        raise QueryRefused(check="analysis", why=why, field="analysis")
    if analysis.query_class == "exact" and recipe.query not in analysis.queries:
        why = "not one of the queries that the policy lists"
        raise QueryRefused(check="query", why=why, field="query")
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
    """Return the columns of a query that reads these fields; raise `QueryRefused` if it fails."""
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


def verify_encoding(recipe: Recipe) -> None:
    """Prepare what encoding and noise need, without any data; raise `QueryRefused` if it fails.

    Whatever can fail without data fails here, before the charge; and the less is left to do after
    the charge, the less a crash can cost.
    """
    try:
        size = len(recipe.encoding.canonical)
    except (InvalidInput, MemoryError) as error:
        why = str(error) or "its tables need more memory than there is"
        raise QueryRefused(check="encoding", why=why, field="features") from None
    if size > MAX_ENCODING_BYTES:
        why = f"{size:,} bytes of features and deny lists, but at most {MAX_ENCODING_BYTES:,}"
        raise QueryRefused(check="encoding", why=f"{why} are read", field="features")
    _ = recipe.randomizer.max_weight


def verify_keys(listed: Listed) -> tuple[bytes, bytes]:
    """Return the leader's and the helper's HPKE keys; raise `QueryRefused` if one is unusable.

    A key that nothing can be sealed to is found before the charge, not after it.
    """
    leader, helper = listed.leader_config, listed.helper_config
    if leader is None or helper is None:
        raise QueryRefused(check="keys", why="no accepted checkpoint lists this pair's keys")
    for config in (leader, helper):
        try:
            check_hpke_config(config)
        except (DecodeError, HPKEError) as error:
            raise QueryRefused(check="keys", why=f"an aggregator's HPKE key: {error}") from None
    return leader, helper
