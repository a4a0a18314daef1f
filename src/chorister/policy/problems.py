"""Everything that is wrong with a policy document at once: where, why, and what to do about it.

For the author of a policy. What is malformed is found by the model, and reported with the line of
the document that it is about; where the form is right, contradictions are.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from chorister.errors import PolicyError
from chorister.policy import model
from chorister.policy.contradictions import findings
from chorister.policy.model import Policy

_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEYS: Final = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")
_HEADER: Final = re.compile(rf"\s*(\[\[?)\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]")
_TOKENS: Final = re.compile(r'"""|\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}]|\n')
_VARIANTS: Final = re.compile(r"\.(?:literal\[[^\]]*\]|Renyi|function-[a-z]+\[[^\]]*\])")
_AT_LINE: Final = re.compile(r"\(at line ([0-9]+), column [0-9]+\)")

_EXAMPLES: Final[Mapping[str, str]] = {
    "version": "1",
    "name": '"my-app"',
    "origin": '"registry.example.org/log"',
    "keys": '["…"], from `chorister keygen cosigning`',
    "cosigning_keys": '["…"], from `chorister keygen cosigning` at that operator',
    "author_keys": '["…"], from `chorister keygen cosigning` at the analyst',
    "collectors": '["…"], the digest from `chorister keygen collector`',
    "checkpoint_max_age": '"2d"',
    "retention": '"30d"',
    "type": '"integer", "real" or "text"',
    "epsilon": "1",
    "delta": "1e-6",
    "reports": "2",
    "local_epsilon": "4",
    "min_ledger_age": '"16d"',
    "purpose": '"Why this is asked, for the people who are asked"',
    "query_class": '"fields"',
    "max_bins": "10_000",
    "shortest": '"6h"',
    "longest": '"14d"',
    "longest_grace": '"14d"',
    "windows": "26",
    "answers": "2",
    "cells": "1_000",
    "smallest": "1_000",
    "largest": "10_000_000",
    "url": '"https://leader.example.org/dap/"',
}
_REHEARSAL: Final = frozenset({"log", "aggregators", "author_keys", "collectors"})
_KNOWN: Final = frozenset(
    name
    for each in vars(model).values()
    if isinstance(each, type) and issubclass(each, BaseModel)
    for name in each.model_fields
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyProblem:
    """One thing to correct, or to know."""

    kind: Literal["malformed", "contradiction", "remark"]
    field: str
    why: str
    remedy: str = ""
    line: int | None = None


def problems(data: bytes, *, rehearsal: bool = False) -> tuple[Policy | None, list[PolicyProblem]]:
    """Return the policy, if the document is one, and everything to say about it.

    With `rehearsal`, keys, log and aggregators may be missing.
    """
    read = Policy.load_rehearsal if rehearsal else Policy.load
    try:
        policy = read(data)
    except PolicyError as error:
        return None, list(_malformed(data, error))
    lines = line_numbers(data.decode())
    return policy, [
        PolicyProblem(
            kind=finding.kind,
            field=finding.field,
            why=finding.why,
            remedy=finding.remedy,
            line=_line(lines, finding.field),
        )
        for finding in findings(policy)
    ]


def _malformed(data: bytes, error: PolicyError) -> Iterator[PolicyProblem]:
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        at = _AT_LINE.search(str(error))
        line = int(at[1]) if at else None
        remedy = "correct the spelling there; strings need quotes, and tables their [brackets]"
        yield PolicyProblem(kind="malformed", field="", why=error.why, remedy=remedy, line=line)
        return
    lines = line_numbers(data.decode())
    missing = [field for field, why in error.problems if why == "this field is missing"]
    for field, why in dict.fromkeys((*error.problems, *_references(tree))):
        yield PolicyProblem(
            kind="malformed",
            field=_without_variants(field),
            why=why,
            remedy=_remedy(field, why, missing),
            line=_line(lines, field),
        )


def _remedy(field: str, why: str, missing: Sequence[str]) -> str:
    table, _, name = field.rpartition(".")
    if why == "this field is missing":
        example = _EXAMPLES.get(name)
        remedy = f"add {name} = {example}" if example else f"add {name}"
        if name in _REHEARSAL:
            remedy += "; a rehearsal does without: check with --rehearsal"
        return remedy
    if why == "unknown field":
        absent = [each.rpartition(".")[2] for each in missing if each.rpartition(".")[0] == table]
        similar = difflib.get_close_matches(name, absent, n=1, cutoff=0.3)
        similar = similar or difflib.get_close_matches(name, sorted(_KNOWN), n=1)
        return f"write {similar[0]}, or remove it" if similar else "remove it"
    if why == "no stream or profile has this field":
        return "declare it under [streams] or [profiles], or correct its name"
    return f"such as {_EXAMPLES[name]}" if name in _EXAMPLES else "correct it"


def _references(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Find fields that no table declares, even where the form of other parts is wrong."""
    declared = set()
    for kind in ("streams", "profiles"):
        for table, body in _table(tree.get(kind)).items():
            declared |= {f"{table}.{field}" for field in _table(_table(body).get("fields"))}
    for name, analysis in _table(tree.get("analyses")).items():
        for ref in _table(_table(analysis).get("fields")):
            if ref not in declared:
                yield f"analyses.{name}.fields.{ref}", "no stream or profile has this field"


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _without_variants(field: str) -> str:
    """Drop what pydantic adds to a path for each kind that a value could have been."""
    return _VARIANTS.sub("", field)


# --- Lines ----------------------------------------------------------------------------------------


def line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of every key and table of a TOML document, by their paths.

    Keys inside inline tables and arrays have no line of their own: theirs is the key's before them.
    """
    found: dict[tuple[str, ...], int] = {}
    arrays: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in _statements(text):
        if header := _HEADER.match(line):
            table = _path(header[2])
            # A table inside a table of an array belongs to the last one.
            for length in range(1, len(table)):
                if (outer := table[:length]) in arrays:
                    table = (*outer, str(arrays[outer]), *table[length:])
                    break
            if header[1] == "[[":
                arrays[table] = arrays.get(table, -1) + 1
                found.setdefault(table, number)
                table = (*table, str(arrays[table]))
            found.setdefault(table, number)
            for length in range(1, len(table)):
                found.setdefault(table[:length], number)
        elif keys := _KEYS.match(line):
            path = (*table, *_path(keys[1]))
            for length in range(len(table) + 1, len(path) + 1):
                found.setdefault(path[:length], number)
    return found


def _path(keys: str) -> tuple[str, ...]:
    """Read dotted keys as TOML does."""
    node: Any = tomllib.loads(f"{keys} = 0")
    path = []
    while isinstance(node, dict):
        key, node = next(iter(node.items()))
        path.append(key)
    return tuple(path)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that begin a statement: not those inside brackets or long strings."""
    lines = text.split("\n")
    number, depth, closing = 1, 0, ""
    header = bool(_HEADER.match(lines[0])) if lines else False
    yield 1, lines[0]
    for token in _TOKENS.finditer(text):
        found = token[0]
        if found == "\n":
            number += 1
            if not closing and (depth <= 0 or header):
                depth = 0
                header = bool(_HEADER.match(lines[number - 1]))
                yield number, lines[number - 1]
        elif closing:
            closing = "" if found == closing else closing
        elif found in ('"""', "'''"):
            closing = found
        elif found in "[{":
            depth += 1
        elif found in "]}":
            depth -= 1


def _line(lines: Mapping[tuple[str, ...], int], field: str) -> int | None:
    """The line of a dotted path, or of the deepest part of it that the document has.

    Names may have dots themselves, so the path is matched from the left, longest names first.
    """
    best: tuple[int, int] | None = None
    for path, number in lines.items():
        text = ".".join(path)
        if (field == text or field.startswith(f"{text}.")) and (
            best is None or len(text) > best[0]
        ):
            best = (len(text), number)
    return None if best is None else best[1]
