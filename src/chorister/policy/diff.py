"""What changes from one policy to the next: what became askable, and what it can cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

from chorister.policy.cost import Cost, analysis_cost, device_cost
from chorister.policy.explain import cost_text
from chorister.policy.model import Policy

__all__ = ["Change", "diff"]

# By the last part of a path: more of it lets more be asked, or lets it cost more.
_LOOSER_UP: Final = frozenset(
    {"epsilon", "delta", "reports", "local_epsilon", "max_bins", "longest", "longest_grace",
     "largest", "max_cells", "retention", "checkpoint_max_age", "honest_fraction"}
)  # fmt: skip
_LOOSER_DOWN: Final = frozenset({"smallest", "shortest", "period", "min_ledger_age"})
_LOOSER_TRUE: Final = frozenset({"hashed_prefixes", "one_operator"})
# A device obeys whoever is listed here, and answers whatever is.
_LISTS: Final = frozenset(
    {"author_keys", "collectors", "mechanisms", "queries", "functions", "group_by", "crowds",
     "report_kinds", "keys", "cosigning_keys", "group_values", "aggregators"}
)  # fmt: skip


_NEVER: Final = 2**63  # seconds; stands for a budget that does not renew


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference. `kind` says in which direction."""

    kind: Literal["more", "less", "other"]
    field: str
    what: str


def diff(old: Policy, new: Policy) -> list[Change]:
    """All differences: first what became possible, then what no longer is, then the rest."""
    before, after = _tree(old), _tree(new)
    found = [*_costs(old, new), *_compare(before, after, "")]
    order = {"more": 0, "less": 1, "other": 2}
    return sorted(found, key=lambda change: order[change.kind])


def _tree(policy: Policy) -> dict[str, Any]:
    tree: dict[str, Any] = policy.model_dump(exclude_none=True)
    # By name, so that a pair is compared with itself.
    tree["aggregators"] = {pair["name"]: pair for pair in tree["aggregators"]}
    return tree


def _costs(old: Policy, new: Policy) -> Iterator[Change]:
    """The bounds in words, wherever they moved."""
    yield from _cost("device", device_cost(old), device_cost(new))
    for name in sorted(set(old.analyses) & set(new.analyses)):
        before = analysis_cost(old, old.analyses[name])
        after = analysis_cost(new, new.analyses[name])
        yield from _cost(f"analyses.{name}", before, after)
    for name in sorted(set(new.analyses) - set(old.analyses)):
        analysis = new.analyses[name]
        what = f"new analysis ({analysis.purpose}): {cost_text(analysis_cost(new, analysis))}"
        yield Change(kind="more", field=f"analyses.{name}", what=what)
    for name in sorted(set(old.analyses) - set(new.analyses)):
        yield Change(kind="less", field=f"analyses.{name}", what="no longer answered at all")


def _cost(field: str, before: Cost, after: Cost) -> Iterator[Change]:
    if before == after:
        return
    rises = (
        after.epsilon > before.epsilon
        or after.delta > before.delta
        or after.reports > before.reports
        or after.local_total > before.local_total
        or (after.period or _NEVER) < (before.period or _NEVER)
    )
    what = f"can now cost {cost_text(after)}; before, {cost_text(before)}"
    yield Change(kind="more" if rises else "less", field=field, what=what)


def _compare(before: Any, after: Any, path: str) -> Iterator[Change]:  # noqa: ANN401
    if before == after:
        return
    name = path.rpartition(".")[2]
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if path == "analyses" and (key not in before or key not in after):
                continue  # told with its cost
            inner = f"{path}.{key}" if path else key
            yield from _compare(before.get(key), after.get(key), inner)
    elif name in _LISTS and isinstance(before or (), tuple) and isinstance(after or (), tuple):
        yield from _compare_lists(before, after, path)
    else:
        yield Change(
            kind=_direction(name, before, after),
            field=path,
            what=f"{_text(before)} -> {_text(after)}",
        )


def _compare_lists(before: Any, after: Any, path: str) -> Iterator[Change]:  # noqa: ANN401
    if path.endswith(".aggregators") and None in (before, after):
        # Left out means all of the policy's pairs.
        kind: Literal["more", "less"] = "more" if after is None else "less"
        yield Change(kind=kind, field=path, what=f"{_text(before)} -> {_text(after)}")
        return
    old, new = before or (), after or ()
    for value in new:
        if value not in old:
            yield Change(kind="more", field=path, what=f"added {_text(value)}")
    for value in old:
        if value not in new:
            yield Change(kind="less", field=path, what=f"removed {_text(value)}")


def _direction(name: str, before: Any, after: Any) -> Literal["more", "less", "other"]:  # noqa: ANN401
    if name == "period":  # no period never renews
        return "more" if (after or _NEVER) < (before or _NEVER) else "less"
    if name in _LOOSER_TRUE:
        return "more" if after else "less"
    if name == "query_class":
        return "more" if after == "fields" else "less"
    if before is None or after is None:
        if isinstance(before or after, dict):
            return "more" if before is None else "less"
        return "more" if name == "honest_fraction" and before is None else "other"
    if name in _LOOSER_UP:
        return "more" if _number(after) > _number(before) else "less"
    if name in _LOOSER_DOWN:
        return "more" if after < before else "less"
    return "other"


def _number(value: Any) -> Fraction:  # noqa: ANN401
    """Decimals and fractions are dumped as strings, which both spellings of Fraction accept."""
    return Fraction(value)


def _text(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "not given"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
