"""The policy of a local deployment: something to try out everything with, and to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PolicyKeys", "PolicyTerms", "sample_policy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerms:
    """What differs between the demo, which ends by itself, and a deployment that goes on."""

    reports: int
    """Reports of a device, for each analysis."""
    epsilon: str
    """What they may cost in all, for each analysis."""
    device_epsilon: str
    device_reports: int
    longest_window: str
    period: str | None = None
    """After which budgets renew; None for never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyKeys:
    """Who takes part, in base64url and hex as policies spell them."""

    log: str
    leader: str
    helper: str
    author: str
    collector: str
    leader_url: str
    helper_url: str


_HEAD = """\
# What the devices of this machine allow. It ships with each of them; no server can change it.
#
# One person runs both aggregators here: there is NO protection against whoever runs this machine.
# In the field leader and helper belong to two different operators.

version = 1
name = "local"

[log]
keys = ["{keys.log}"]
origin = "chorister.local/log"
checkpoint_max_age = "1h"

[[aggregators]]
name = "local"
one_operator = true

[aggregators.leader]
url = "{keys.leader_url}"
cosigning_keys = ["{keys.leader}"]

[aggregators.helper]
url = "{keys.helper_url}"
cosigning_keys = ["{keys.helper}"]

# What all analyses together may cost one device.
[device]
epsilon = {terms.device_epsilon}
delta = 1e-4
reports = {terms.device_reports}
{period}# In the field this is days: a new ledger must not be a new budget.
min_ledger_age = "1s"

[streams.keyboard]
retention = "30d"

[streams.keyboard.fields]
text = {{ type = "text" }}
recipient = {{ type = "text" }}   # open to no analysis

[streams.visits]
retention = "30d"

[streams.visits.fields]
latitude = {{ type = "real" }}
longitude = {{ type = "real" }}

[profiles.user]
retention = "400d"

[profiles.user.fields]
age = {{ type = "integer" }}
score = {{ type = "real" }}
area = {{ type = "text", group_values = ["city", "suburb", "village"] }}
commute = {{ type = "text" }}
"""

_ANALYSIS = """
[analyses."{name}"]
purpose = "{purpose}"
author_keys = ["{keys.author}"]
collectors = ["{keys.collector}"]
query_class = "fields"
functions = [{functions}]
max_bins = 20_000
{groups}
[analyses."{name}".window]
shortest = "5s"
longest = "{terms.longest_window}"
longest_grace = "1d"

[analyses."{name}".cohort]
smallest = 20
largest = 1_000_000

[analyses."{name}".budget]
local_epsilon = 8
epsilon = {terms.epsilon}
delta = 1e-5
reports = {terms.reports}
{period}
[analyses."{name}".fields]
"""

_FIELD = (
    '"{field}" = {{ local_epsilon = 8, epsilon = {epsilon}, delta = 1e-5, reports = {reports} }}\n'
)

_ANALYSES: Sequence[tuple[str, str, tuple[str, ...], tuple[str, ...], bool]] = (
    (
        "keyboard.phrases",
        "Find phrases that many people type, to suggest the next word",
        ("keyboard.text",),
        ("length", "lower", "ngrams", "random"),
        False,
    ),
    (
        "visits.map",
        "See where many people are, to plan where a service is needed",
        ("visits.latitude", "visits.longitude"),
        ("random",),
        False,
    ),
    (
        "user.profile",
        "Learn how scores, ages and ways to work are distributed",
        ("user.age", "user.score", "user.area", "user.commute"),
        ("lower",),
        True,
    ),
)


def sample_policy(keys: PolicyKeys, terms: PolicyTerms) -> str:
    """The policy document, with comments for whoever opens it."""
    period = "" if terms.period is None else f'period = "{terms.period}"\n'
    text = _HEAD.format(keys=keys, terms=terms, period=period)
    for name, purpose, fields, functions, grouped in _ANALYSES:
        text += _ANALYSIS.format(
            name=name,
            purpose=purpose,
            keys=keys,
            terms=terms,
            period=period,
            functions=", ".join(f'"{function}"' for function in functions),
            groups='group_by = ["user.area"]\nmax_cells = 4\n' if grouped else "",
        )
        text += "".join(
            _FIELD.format(field=field, epsilon=terms.epsilon, reports=terms.reports)
            for field in fields
        )
    return text
