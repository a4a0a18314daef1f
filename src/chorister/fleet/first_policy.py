"""A first policy: from the columns of a table or a list of fields, with keys of its own.

What it declares is careful: no field forms groups, and budgets and cohorts are such that `policy
check` finds no contradiction. A table says what devices will hold. Its values are looked at to find
their types, and nothing of them goes into the policy.
"""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Final

from chorister.canonical import b64url_encode, decimal_text, sha256
from chorister.errors import InvalidInput, PolicyError
from chorister.key_files import write_collector_key, write_signing_key
from chorister.policy import Policy
from chorister.policy.bounds import Claim
from chorister.policy.contradictions import findings
from chorister.policy.values import parse_duration
from chorister.privacy import Mechanism
from chorister.privacy.decimals import DOWN

LOCAL_LEADER: Final = "http://127.0.0.1:8081/dap/"
LOCAL_HELPER: Final = "http://127.0.0.1:8082/dap/"
_TYPES: Final = ("integer", "real", "text")
_DEVICE: Final = "device"  # the column that says which device a row belongs to
_COUNT: Final = "count"  # the column that says how many devices hold a row
_MAX_ROWS: Final = 100_000  # that are looked at to find types
_MAX_COLUMNS: Final = 200
_FUNCTIONS: Final = ("length", "lower", "ngrams", "substr", "words")
_LOCAL_EPSILON: Final = Decimal(4)
_LEAST_EPSILON: Final = Decimal("0.01")  # per report
_MAX_EPSILON: Final = 20
_DELTA: Final = Decimal("1e-6")
_DAY: Final = 86_400
_WINDOW: Final = 14 * _DAY
_CHECKPOINT: Final = 2 * _DAY


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTable:
    """The table that a first policy declares."""

    table: str
    stream: bool  # many rows per device, instead of one
    columns: Mapping[str, str]  # types by name
    renamed: Mapping[str, str] = field(default_factory=dict)  # the table's names by the policy's


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTerms:
    """What else a first policy needs to know."""

    name: str
    purpose: str
    epsilon: str
    period: str
    reports: int
    leader: str
    helper: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFiles:
    """What was written."""

    policy: Path
    keys: Mapping[Path, str]  # what each key is for
    hpke_config: str  # the collector's, for the settings of both aggregators


def declared_fields(texts: Iterable[str] | None) -> FirstTable:
    """Read fields such as "age:integer"."""
    columns: list[tuple[str, str]] = []
    for text in texts or ():
        name, colon, kind = (part.strip() for part in text.partition(":"))
        if not colon or kind not in _TYPES:
            raise InvalidInput(
                f"{text[:80]!r} is not a field: write its name, a colon, and one of "
                f"{', '.join(_TYPES)}, such as age:integer"
            )
        columns.append((name, kind))
    return _table("person", stream=False, columns=columns)


def read_table(path: Path) -> FirstTable:
    """Read the columns of a .csv file, and find their types.

    With a column `device`, the rows are events, of which a device has many; otherwise a device has
    one row. A column `count` only counts devices, as in a rehearsal.
    """
    if path.suffix != ".csv":
        raise InvalidInput(f"{path}: a table is a .csv file, with names in its first line")
    types: dict[str, str | None] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            if not names or len(names) > _MAX_COLUMNS:
                raise InvalidInput(f"{path} has no columns, or more than {_MAX_COLUMNS}")
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise InvalidInput(f"{path}: several columns have the name {min(twice)!r}")
            types = dict.fromkeys(names)
            for _, row in zip(range(_MAX_ROWS), rows, strict=False):
                for name, value in zip(names, row, strict=False):
                    types[name] = _wider(types[name], value)
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"can't read {path}: save it as UTF-8") from None
    except csv.Error as error:
        raise InvalidInput(f"can't read {path}: {error}") from None
    columns = [
        (name, kind or "text") for name, kind in types.items() if name not in (_DEVICE, _COUNT)
    ]
    if not columns:
        raise InvalidInput(f"{path} has no column besides {_DEVICE} and {_COUNT}")
    return _table(field_name(path.stem), stream=_DEVICE in types, columns=columns)


def _table(table: str, *, stream: bool, columns: Iterable[tuple[str, str]]) -> FirstTable:
    found: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name, kind in columns:
        own = field_name(name)
        if own in (_DEVICE, _COUNT):
            raise InvalidInput(
                f"{name!r} can't be a field: a column {_DEVICE} says which device a row belongs "
                f"to, and a column {_COUNT} how many devices hold it: write it like that if you "
                "mean one of them, or else give it another name"
            )
        if own in found:
            raise InvalidInput(
                f"{sources[own]!r} and {name!r} would both be the field {own}: rename one of them"
            )
        found[own], sources[own] = kind, name
    renamed = {own: name for own, name in sources.items() if own != name}
    return FirstTable(table=table, stream=stream, columns=found, renamed=renamed)


def _wider(known: str | None, value: str) -> str | None:
    """The type that holds this value and those before it."""
    text = value.strip()
    if not text or known == "text":
        return known
    if known != "real" and re.fullmatch(r"[+-]?[0-9]{1,15}", text):
        return "integer"
    if re.fullmatch(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", text):
        return "real"
    return "text"


def field_name(text: str) -> str:
    """Turn a column's name into one that SQLite and policies accept, without accents."""
    plain = unicodedata.normalize("NFKD", text.strip().casefold())
    plain = "".join(each for each in plain if not unicodedata.combining(each))
    name = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")[:60]
    if not name or any(each.isalnum() and not each.isascii() for each in plain):
        raise InvalidInput(f"{text[:80]!r} can't be a name: use the letters a to z and digits")
    return name if name[0].isalpha() and not name.startswith("sqlite_") else f"f_{name}"[:63]


def write_first_policy(folder: Path, table: FirstTable, terms: FirstTerms) -> FirstFiles:
    """Write policy and keys to a new folder."""
    text = _document(table, terms, _STAND_IN)  # fails before anything is written
    _require_consistent(text)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=False)
        (folder / "keys").mkdir(mode=0o700)
    except FileExistsError:
        raise InvalidInput(f"{folder} already exists: choose a new folder") from None
    except OSError as error:
        raise InvalidInput(f"can't create {folder}: {error.strerror}") from None
    keys = folder / "keys"
    collector = write_collector_key(keys / "collector.json")
    public = {
        role: write_signing_key(keys / f"{role}.key")
        for role in ("author", "log", "leader", "helper")
    }
    public["collector"] = sha256(collector).hex()
    policy = folder / "policy.toml"
    policy.write_text(_document(table, terms, public), encoding="utf-8")
    return FirstFiles(
        policy=policy,
        hpke_config=b64url_encode(collector),
        keys={
            keys / "author.key": "signs questions; for the analyst",
            keys / "collector.json": "opens results; for the analyst",
            keys / "log.key": "signs the public log; for the operator of the registry",
            keys / "leader.key": "cosigns the log; for the operator of the leader",
            keys / "helper.key": "cosigns the log; for the operator of the helper",
        },
    )


_STAND_IN: Final = {
    "author": "A" * 43,
    "log": "A" * 42 + "E",
    "leader": "A" * 42 + "I",
    "helper": "A" * 42 + "M",
    "collector": "0" * 64,
}


def _require_consistent(text: str) -> None:
    policy = Policy.load(text.encode())
    for finding in findings(policy):
        if finding.kind == "contradiction":
            why = f"{finding.why}; {finding.remedy}"
            raise PolicyError(why, field=finding.field)


def check_period(text: str) -> int:
    """Return the seconds of a period."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidInput(f"the period: {error}", field="period") from None


def check_epsilon(text: str, reports: int | None) -> Decimal:
    """Return an epsilon that is enough for so many reports, and not more than makes sense."""
    try:
        epsilon = Decimal(text)
    except ArithmeticError:
        raise InvalidInput(f"epsilon is not a number: {text!r}", field="epsilon") from None
    least, most = _LEAST_EPSILON * (reports or 1), _MAX_EPSILON * (reports or 100)
    if not epsilon.is_finite() or not least <= epsilon <= most:
        of = "" if reports is None else f" for {reports} report{'' if reports == 1 else 's'}"
        why = f"epsilon must be from {decimal_text(least)} to {most}{of}, not {text}"
        raise InvalidInput(why, field="epsilon")
    return epsilon


def _document(table: FirstTable, terms: FirstTerms, keys: Mapping[str, str]) -> str:
    period = check_period(terms.period)
    epsilon = check_epsilon(terms.epsilon, terms.reports)
    each = DOWN.divide(epsilon, terms.reports)
    smallest = _smallest_cohort(each, terms.reports)
    local = _LOCAL_EPSILON
    fields = "\n".join(f'{name} = {{ type = "{kind}" }}' for name, kind in table.columns.items())
    limits = (
        f"{{ local_epsilon = {decimal_text(local)}, epsilon = {decimal_text(epsilon)}, "
        f"delta = {_DELTA:.0e}, reports = {terms.reports} }}"
    )
    budgets = "\n".join(f'"{table.table}.{name}" = {limits}' for name in table.columns)
    texts = "text" in table.columns.values()
    return _TEMPLATE.format(
        name=_policy_name(terms.name),
        analysis=f"{table.table}.first-look",
        keys=keys,
        leader=json.dumps(terms.leader),
        helper=json.dumps(terms.helper),
        operators="" if _two_operators(terms) else _ONE_OPERATOR,
        epsilon=decimal_text(epsilon),
        delta=f"{_DELTA:.0e}",
        reports=terms.reports,
        period=terms.period,
        age=f"{max(_WINDOW + _CHECKPOINT, _DAY) // _DAY}d",
        checkpoint="2d" if period >= _CHECKPOINT else terms.period,
        kind="streams" if table.stream else "profiles",
        table=table.table,
        what="one row per event" if table.stream else "one row per device",
        fields=fields,
        purpose=json.dumps(terms.purpose, ensure_ascii=False),
        functions=json.dumps(list(_FUNCTIONS) if texts else []),
        smallest=smallest,
        local=decimal_text(local),
        budgets=budgets,
    )


def _policy_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:60]
    return name if name[:1].isalpha() else f"policy-{name}".rstrip("-")


def _two_operators(terms: FirstTerms) -> bool:
    return (terms.leader, terms.helper) != (LOCAL_LEADER, LOCAL_HELPER)


def _smallest_cohort(epsilon: Decimal, reports: int) -> int:
    """The cohort that hides one report, rounded up to two digits."""
    claim = Claim(
        mechanism=Mechanism.ASYMMETRIC,
        local_epsilon=_LOCAL_EPSILON,
        epsilon=epsilon,
        delta=DOWN.divide(_DELTA, reports),
        crowd="noised",
        honest_fraction=None,
        report="bounded",
    )
    least = max(claim.least_cohort(), 50)
    unit = int(f"1{'0' * (len(str(least)) - 2)}")
    return -(-least // unit) * unit


_ONE_OPERATOR: Final = """\
# One operator runs both aggregators here: there is no protection against it. Give leader and helper
# to two different operators before real people are asked, and remove this line.
one_operator = true
"""

_TEMPLATE: Final = """\
# What a device allows. It ships with the app, and no server can change it.
# `chorister policy check` explains it in words; docs/reference/policy.md has every key.

version = 1
name = "{name}"

# --- Servers that a device trusts ---

[log]
origin = "{name}.example/log"   # the log's name; never changes
keys = ["{keys[log]}"]
checkpoint_max_age = "{checkpoint}"

[[aggregators]]
name = "main"
{operators}
[aggregators.leader]
url = {leader}
cosigning_keys = ["{keys[leader]}"]

[aggregators.helper]
url = {helper}
cosigning_keys = ["{keys[helper]}"]

# --- Data on the device: {what} ---

[{kind}.{table}]
retention = "30d"

[{kind}.{table}.fields]
{fields}
# A field of a profile that is not sensitive may form groups. Its values are then not hidden:
# area = {{ type = "text", group_values = ["city", "village"] }}

# --- What all analyses together may cost a device per period ---

[device]
epsilon = {epsilon}
delta = {delta}
reports = {reports}
period = "{period}"
min_ledger_age = "{age}"   # a new ledger must not mean a new budget

# --- One purpose ---

[analyses."{analysis}"]
purpose = {purpose}
author_keys = ["{keys[author]}"]
collectors = ["{keys[collector]}"]
query_class = "fields"
functions = {functions}
max_bins = 10_000

[analyses."{analysis}".window]
shortest = "1h"
longest = "14d"
longest_grace = "14d"

[analyses."{analysis}".cohort]
smallest = {smallest}   # hides one report of local epsilon {local} at its share of epsilon
largest = 100_000_000

[analyses."{analysis}".budget]
local_epsilon = {local}
epsilon = {epsilon}
delta = {delta}
reports = {reports}
period = "{period}"

[analyses."{analysis}".fields]
{budgets}
"""
