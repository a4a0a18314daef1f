"""What a device checks about a query, an encoding and keys: before the charge, and without data.

**The query class** (the paper's section 4.2). A query is in its class if the policy lists it to the
letter (`exact`), or if it compiles on a database that has the declared and allowed fields and no
others, with the listed functions only (`fields`). It later runs on just such a database: it can
read only what it compiles against.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from chorister.dap.upload_client import check_hpke_config
from chorister.device.poll import Listed
from chorister.device.sandbox import Sandbox
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.sandbox import ResultColumns
from chorister.device.sandbox.wire import MAX_ENCODING_BYTES
from chorister.device.schema import FieldType, Schema
from chorister.device.store import Snapshot
from chorister.encoding import AnyFeature, Categories, Grid, Intervals
from chorister.errors import DecodeError, HPKEError, InvalidInput, QueryRefused
from chorister.policy import Analysis, Policy
from chorister.recipe import Check, Recipe, SignedRecipe, check

Reads: TypeAlias = Mapping[str, Iterable[str]]
# The query can be compiled only if these checks pass.
_BEFORE_THE_QUERY: Final = frozenset({"analysis", "query", "fields"})
_DENIED: Final = re.compile(r"not authorized to use function: (\w+)|no such function: (\w+)")
_COMPOUND: Final = re.compile(r"\b(?:UNION|EXCEPT|INTERSECT|VALUES)\b", re.IGNORECASE)
_NUMBERS: Final = frozenset({"integer", "real"})
_TEXTS: Final = frozenset(
    ("char", "format", "group_concat", "hex", "lower", "ltrim", "printf", "quote", "replace",
     "rtrim", "substr", "substring", "trim", "typeof", "upper")
)  # fmt: skip
_INTEGERS: Final = frozenset(("count", "instr", "length", "unicode"))
_COMPUTED: Final = re.compile(
    r"""(?:\bSELECT(?:\s+DISTINCT)?|,)\s*          # a column of the result: nothing but
        (?:(\w+)\s*\((?:[^()]|\([^()]*\))*\)       # one call of a function, or
        |('(?:[^']|'')*'))                          # one text
        \s+AS\s+"?(\w+)"?""",
    re.IGNORECASE | re.VERBOSE,
)
_SELECT: Final = re.compile(r"\bSELECT\b", re.IGNORECASE)


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
    if sandbox is None:
        _declared(policy, _in_class(policy, recipe), recipe.reads)
        return
    with verifying_query(policy, recipe, sandbox) as verify:
        verify()


@contextmanager
def verifying_query(
    policy: Policy, recipe: Recipe, sandbox: Sandbox
) -> Iterator[Callable[[], None]]:
    """Begin `verify_query`, most of which another process does; call what is provided to end it."""
    analysis = _in_class(policy, recipe)
    with _compiling(policy, analysis, recipe.query, recipe.reads, sandbox) as columns:

        def verify() -> None:
            names = {name for name, _ in columns()}
            for column in recipe.encoding.columns:
                if column not in names:
                    why = f"the features read the column {column}, which the query does not select"
                    raise QueryRefused(check="query", why=why, field="features")

        yield verify


def _in_class(policy: Policy, recipe: Recipe) -> Analysis:
    """Return the recipe's analysis, or raise `QueryRefused` if it does not list the query."""
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        why = f"policy {policy.name} has no analysis {recipe.analysis}"
        raise QueryRefused(check="analysis", why=why, field="analysis")
    if analysis.query_class == "exact" and recipe.query not in analysis.queries:
        why = "not one of the queries that the policy lists"
        raise QueryRefused(check="query", why=why, field="query")
    return analysis


def query_columns(
    policy: Policy, analysis: Analysis, query: str, reads: Reads, sandbox: Sandbox
) -> tuple[str, ...]:
    """Return the columns of a query that reads these fields; raise `QueryRefused` if it fails."""
    return tuple(name for name, _ in result_columns(policy, analysis, query, reads, sandbox))


def result_columns(
    policy: Policy, analysis: Analysis, query: str, reads: Reads, sandbox: Sandbox
) -> ResultColumns:
    """Return the same with the type of each column, where it is that of a field."""
    with _compiling(policy, analysis, query, reads, sandbox) as columns:
        return columns()


@contextmanager
def _compiling(
    policy: Policy, analysis: Analysis, query: str, reads: Reads, sandbox: Sandbox
) -> Iterator[Callable[[], ResultColumns]]:
    tables = Snapshot.empty(_declared(policy, analysis, reads))
    functions = permitted_functions(analysis)
    with sandbox.compiling(query, tables, functions=functions) as columns:

        def in_words() -> ResultColumns:
            try:
                return columns()
            except QueryRefused as error:
                why = _in_words(error.why, analysis)
                raise QueryRefused(check=error.check, why=why, field=error.field) from None

        yield in_words


# --- All checks, in words, for people who ask or review -------------------------------------------


def dry_run(
    recipe: Recipe | SignedRecipe, policy: Policy, sandbox: Sandbox, *, now: int | None = None
) -> list[Check]:
    """Make every check that a device makes without its ledger, and check the types of columns.

    A device answers a question whose features do not fit the types of their columns: with OOV, at
    full cost. Nobody learns anything from that, so here it fails.
    """
    found = check(recipe, policy, now=now)
    if all(outcome.passed for outcome in found if outcome.name in _BEFORE_THE_QUERY):
        body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
        sizes = all(outcome.passed for outcome in found if outcome.name == "bins")
        found.extend(_dry_query(body, policy, sandbox))
        if sizes:
            found.append(_dry_encoding(body))
    return found


def _dry_query(recipe: Recipe, policy: Policy, sandbox: Sandbox) -> Iterator[Check]:
    analysis = policy.analyses[recipe.analysis]
    try:
        verify_query(policy, recipe, sandbox)
        columns = result_columns(policy, analysis, recipe.query, recipe.reads, sandbox)
    except QueryRefused as error:
        yield Check(name="query-class", passed=False, why=error.why, field=error.field)
        return
    why = "compiles on the declared fields alone, and returns the columns of the features"
    yield Check(name="query-class", passed=True, why=why)
    yield check_types(recipe.query, recipe.features, columns)


def _in_words(why: str, analysis: Analysis) -> str:
    """Say which functions there are where SQLite says that one is not authorized."""
    found = _DENIED.search(why)
    if found is None:
        return why
    listed = ", ".join(sorted(permitted_functions(analysis))) or "no function"
    return f"the policy does not permit the function {found[1] or found[2]}; it permits {listed}"


def _dry_encoding(recipe: Recipe) -> Check:
    try:
        verify_encoding(recipe)
    except QueryRefused as error:
        return Check(name="encoding", passed=False, why=error.why, field=error.field)
    return Check(name="encoding", passed=True, why="devices have room for the features")


def check_types(query: str, features: Iterable[AnyFeature], columns: ResultColumns) -> Check:
    """Check that no feature reads a column in which every value would be OOV.

    What a computed column holds is known where it is a text or the value of a function that always
    returns the same type. The result of a UNION is unknown.
    """
    types: dict[str, FieldType | None] = {}
    computed_types = _computed_types(query)
    for name, kind in columns:
        known = kind or computed_types.get(name)
        types.setdefault(name, None if _COMPOUND.search(query) else known)
    for feature in features:
        for column in feature.columns_read:
            if (why := _misfit(feature, column, types.get(column))) is not None:
                return Check(name="types", passed=False, why=why, field="features")
    computed = sorted(
        {column for each in features for column in each.columns_read if types.get(column) is None}
    )
    why = "every feature fits the type of its column"
    if computed:
        why = f"nothing contradicts the features; {', '.join(computed)} is computed by the query"
    return Check(name="types", passed=True, why=why)


def _computed_types(query: str) -> dict[str, FieldType]:
    """The types of columns that a query without subqueries computes, where they are certain."""
    if len(_SELECT.findall(query)) != 1:
        return {}
    found: dict[str, FieldType] = {}
    for function, text, name in _COMPUTED.findall(query):
        if text or function.lower() in _TEXTS:
            found[name] = "text"
        elif function.lower() in _INTEGERS:
            found[name] = "integer"
    return found


def _misfit(feature: AnyFeature, column: str, kind: FieldType | None) -> str | None:
    """Say why every value of a column would be OOV, if that is so."""
    if kind is None:
        return None
    held = {"text": "text", "integer": "whole numbers", "real": "numbers"}[kind]
    if isinstance(feature, Intervals | Grid):
        if kind in _NUMBERS:
            return None
        what = (
            "intervals divide numbers" if isinstance(feature, Intervals) else "a map needs numbers"
        )
        return f"{what}, but {column} holds {held}: count its values as categories or by prefixes"
    if isinstance(feature, Categories):
        fitting = {"text": str, "integer": int}.get(kind)
        if fitting is not None and any(type(value) is fitting for value in feature.values):
            return None
        if fitting is None:
            return f"{column} holds {held}, which no listed value equals exactly: use intervals"
        return f"{column} holds {held}, and none of the listed values is one: list such values"
    if kind == "text":
        return None
    return f"prefixes are of text, but {column} holds {held}: use intervals"


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
