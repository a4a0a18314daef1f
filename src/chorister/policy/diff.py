"""What changes from one policy to the next: what can now be asked, and what it can cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

from chorister.policy.bounds import CostBound, analysis_cost, device_cost, series_cost
from chorister.policy.explain import cost_text, series_cost_text
from chorister.policy.model import DURATION_FIELDS, Policy
from chorister.policy.values import duration_text
from chorister.policy.witnesses import (
    NO_QUORUM,
    Strictness,
    compare_witnesses,
    parse_witness_policy,
)

_Path: TypeAlias = tuple[str, ...]
_Rule: TypeAlias = Literal[
    "up", "down", "true", "period", "composition", "query_class", "list", "pairs", "witnesses"
]

_BUDGET: Final[dict[str, _Rule]] = {
    "epsilon": "up",
    "delta": "up",
    "reports": "up",
    "local_epsilon": "up",
    "period": "period",
    "composition": "composition",
}
# The direction in which more can be asked, or can cost more. Keys are whole paths, because a field
# of a stream may have any name; `*` is any name. Lists name whom a device obeys or what it answers.
_RULES: Final[dict[_Path, _Rule]] = {
    ("log", "keys"): "list",
    ("log", "checkpoint_max_age"): "up",
    ("log", "witnesses"): "witnesses",
    ("aggregators", "*", "one_operator"): "true",
    ("aggregators", "*", "leader", "cosigning_keys"): "list",
    ("aggregators", "*", "helper", "cosigning_keys"): "list",
    ("device", "min_ledger_age"): "down",
    ("streams", "*", "retention"): "up",
    ("profiles", "*", "retention"): "up",
    ("profiles", "*", "fields", "*", "group_values"): "list",
    ("analyses", "*", "author_keys"): "list",
    ("analyses", "*", "collectors"): "list",
    ("analyses", "*", "aggregators"): "pairs",
    ("analyses", "*", "query_class"): "query_class",
    ("analyses", "*", "queries"): "list",
    ("analyses", "*", "functions"): "list",
    ("analyses", "*", "max_bins"): "up",
    ("analyses", "*", "window", "shortest"): "down",
    ("analyses", "*", "window", "longest"): "up",
    ("analyses", "*", "window", "longest_grace"): "up",
    ("analyses", "*", "series", "windows"): "up",
    ("analyses", "*", "series", "longest"): "up",
    ("analyses", "*", "series", "answers"): "up",
    ("analyses", "*", "series", "cells"): "up",
    ("analyses", "*", "cohort", "smallest"): "down",
    ("analyses", "*", "cohort", "largest"): "up",
    ("analyses", "*", "mechanisms"): "list",
    ("analyses", "*", "report_kinds"): "list",
    ("analyses", "*", "crowds"): "list",
    ("analyses", "*", "honest_fraction"): "up",
    ("analyses", "*", "group_by"): "list",
    ("analyses", "*", "max_cells"): "up",
    ("analyses", "*", "hashed_prefixes"): "true",
    **{("device", name): rule for name, rule in _BUDGET.items()},
    **{("analyses", "*", "budget", name): rule for name, rule in _BUDGET.items()},
    **{("analyses", "*", "fields", "*", name): rule for name, rule in _BUDGET.items()},
}


_STRICTNESS: Final[dict[Strictness, tuple[Literal["more", "less", "other"], str]]] = {
    "looser": ("more", "fewer cosignatures suffice"),
    "stricter": ("less", "more cosignatures are needed"),
    "same": ("other", "other lines with the same meaning"),
    "unclear": ("other", "look at it: other cosignatures are needed"),
}
_NEVER: Final = 2**63  # seconds; stands for a budget that does not renew


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference: `kind` is its direction."""

    kind: Literal["more", "less", "other"]
    field: str
    what: str


def diff(old: Policy, new: Policy) -> list[Change]:
    """Return all differences: first what became possible, then what no longer is, then the rest."""
    before, after = _tree(old), _tree(new)
    found = [*_costs(old, new), *_compare(before, after, ())]
    order = {"more": 0, "less": 1, "other": 2}
    return sorted(found, key=lambda change: order[change.kind])


def _tree(policy: Policy) -> dict[str, Any]:
    tree: dict[str, Any] = policy.model_dump(exclude_none=True)
    # By name, so that each pair is compared with itself.
    tree["aggregators"] = {pair["name"]: pair for pair in tree["aggregators"]}
    return tree


def _costs(old: Policy, new: Policy) -> Iterator[Change]:
    """Yield the bounds that changed, in words."""
    yield from _cost("device", device_cost(old), device_cost(new))
    for name in sorted(set(old.analyses) & set(new.analyses)):
        before = analysis_cost(old, old.analyses[name])
        after = analysis_cost(new, new.analyses[name])
        yield from _cost(f"analyses.{name}", before, after)
        yield from _series_cost(name, old, new)
    for name in sorted(set(new.analyses) - set(old.analyses)):
        analysis = new.analyses[name]
        what = f"new analysis ({analysis.purpose}): {cost_text(analysis_cost(new, analysis))}"
        yield Change(kind="more", field=f"analyses.{name}", what=what)
    for name in sorted(set(old.analyses) - set(new.analyses)):
        yield Change(kind="less", field=f"analyses.{name}", what="no longer answered at all")


def _cost(field: str, before: CostBound, after: CostBound) -> Iterator[Change]:
    if before != after:
        what = f"can now cost {cost_text(after)}; before, {cost_text(before)}"
        yield Change(kind="more" if _rises(before, after) else "less", field=field, what=what)


def _series_cost(name: str, old: Policy, new: Policy) -> Iterator[Change]:
    before, after = (series_cost(policy, policy.analyses[name]) for policy in (old, new))
    if after is None or before == after:
        return  # without any series, `_compare` says it all
    rises = before is None or _rises(before, after)
    then = "" if before is None else f"; before, {series_cost_text(before)}"
    what = f"a whole series can now cost a device {series_cost_text(after)}{then}"
    yield Change(kind="more" if rises else "less", field=f"analyses.{name}.series", what=what)


def _rises(before: CostBound, after: CostBound) -> bool:
    return (
        after.epsilon > before.epsilon
        or after.delta > before.delta
        or after.reports > before.reports
        or after.local_total > before.local_total
        or (after.period or _NEVER) < (before.period or _NEVER)
    )


def _rule(path: _Path) -> _Rule | None:
    if len(path) > 1 and path[0] in ("aggregators", "streams", "profiles", "analyses"):
        path = (path[0], "*", *path[2:])
        if len(path) > 3 and path[2] == "fields":
            path = (*path[:3], "*", *path[4:])
    return _RULES.get(path)


def _compare(before: Any, after: Any, path: _Path) -> Iterator[Change]:  # noqa: ANN401
    if before == after:
        return
    rule = _rule(path)
    if rule is None and isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if path == ("analyses",) and (key not in before or key not in after):
                continue  # `_costs` has it
            yield from _compare(before.get(key), after.get(key), (*path, key))
    elif rule == "list" or (rule == "pairs" and None not in (before, after)):
        yield from _compare_lists(before or (), after or (), path)
    elif rule == "witnesses":
        yield _compare_quorums(before, after, ".".join(path))
    else:
        what = f"{_text(before, path[-1])} -> {_text(after, path[-1])}"
        if rule == "composition":
            what += "; the bound stays the same, but a charge that was refused may now fit"
        yield Change(kind=_direction(rule, before, after), field=".".join(path), what=what)


def _compare_lists(
    before: tuple[Any, ...], after: tuple[Any, ...], path: _Path
) -> Iterator[Change]:
    for value in after:
        if value not in before:
            yield Change(kind="more", field=".".join(path), what=f"added {_text(value)}")
    for value in before:
        if value not in after:
            yield Change(kind="less", field=".".join(path), what=f"removed {_text(value)}")


def _compare_quorums(before: str | None, after: str | None, field: str) -> Change:
    old, new = (parse_witness_policy(text or f"quorum {NO_QUORUM}") for text in (before, after))
    found = compare_witnesses(old, new)
    kind, words = _STRICTNESS[found]
    what = f"{words}: {old}" if found == "same" else f"{words}: {old} -> {new}"
    return Change(kind=kind, field=field, what=what)


def _direction(rule: _Rule | None, before: Any, after: Any) -> Literal["more", "less", "other"]:  # noqa: ANN401
    match rule:
        case "composition":
            # Each accepts some charges that another refuses.
            return "more"
        case "period":  # without a period, a budget never renews
            more = (after or _NEVER) < (before or _NEVER)
        case "true":
            more = bool(after)
        case "query_class":
            more = after == "fields"
        case "pairs":  # None means all of the policy's pairs
            more = after is None
        case "up":  # None permits nothing
            more = _number(after or 0) > _number(before or 0)
        case "down":
            more = _number(after or 0) < _number(before or 0)
        case _:
            if not isinstance(before or after, dict):
                return "other"
            more = before is None  # a new table, field or pair
    return "more" if more else "less"


def _number(value: Any) -> Fraction:  # noqa: ANN401
    """Parse decimals and fractions, which are dumped as strings."""
    return Fraction(value)


def _text(value: Any, name: str = "") -> str:  # noqa: ANN401
    if value is None:
        return "not given"
    if name in DURATION_FIELDS and isinstance(value, int):
        return duration_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item, key)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
