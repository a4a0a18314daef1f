"""The privacy page: what a sum over a cohort reveals, by the accountant that devices use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.responses import Response

from chorister.analyst.extras import needed
from chorister.console.web import Visit
from chorister.privacy import Crowd, Mechanism, Method, OneHotRandomizer, Setting, amplification

__all__ = ["curve", "show_privacy"]

_COHORTS: Final = tuple(round(100 * 10 ** (i / 2)) for i in range(9))  # 100 to a million
_MOST_LOCAL: Final = 12.0
_MECHANISM: Final = Mechanism.ASYMMETRIC
_CROWD: Final = Crowd.NOISED


@dataclass(frozen=True, slots=True)
class Knobs:
    """Where the sliders are; whatever makes no sense is where they begin."""

    local: float = 4.0
    log_cohort: float = 4.0
    log_delta: int = -6
    mechanism: Mechanism = _MECHANISM
    crowd: Crowd = _CROWD

    @classmethod
    def of(cls, query: QueryParams) -> Knobs:
        """From the address."""
        mechanism, crowd = query.get("mechanism"), query.get("crowd")
        return cls(
            local=_slider(query.get("local"), 4.0, 0.5, _MOST_LOCAL, 0.25),
            log_cohort=_slider(query.get("cohort"), 4.0, 2.0, 6.0, 0.1),
            log_delta=round(_slider(query.get("delta"), -6, -12, -4, 1)),
            mechanism=Mechanism(mechanism) if mechanism in tuple(Mechanism) else _MECHANISM,
            crowd=Crowd(crowd) if crowd in tuple(Crowd) else _CROWD,
        )

    @property
    def cohort(self) -> int:
        """Of how many devices."""
        exact = 10**self.log_cohort
        digits = math.floor(self.log_cohort) - 1
        return int(round(exact / 10**digits) * 10**digits)

    @property
    def setting(self) -> Setting:
        """For the accountant."""
        return Setting(local_epsilon=f"{self.local:g}", mechanism=self.mechanism, crowd=self.crowd)

    @property
    def delta(self) -> str:
        """As the accountant reads it."""
        return f"1e{self.log_delta}"

    @property
    def query(self) -> str:
        """The address of the picture."""
        return (
            f"local={self.local:g}&cohort={self.log_cohort:g}&delta={self.log_delta}"
            f"&mechanism={self.mechanism.value}&crowd={self.crowd.value}"
        )


def _slider(text: str | None, default: float, low: float, high: float, step: float) -> float:
    try:
        value = float(text or default)
    except ValueError:
        return default
    if not math.isfinite(value):
        return default
    return round(min(max(value, low), high) / step) * step


@lru_cache(maxsize=4096)
def _epsilon(setting: Setting, cohort: int, delta: str, method: Method) -> float:
    found = amplification.epsilon(setting, cohort=cohort, delta=delta, method=method)
    return min(found.upper, setting.replacement)


def show_privacy(visit: Visit) -> Response:
    """The page, or its changing part."""
    knobs = Knobs.of(visit.request.query_params)
    part = visit.request.headers.get("hx-request") == "true"
    return visit.page(
        "_privacy.html" if part else "privacy.html",
        knobs=knobs,
        epsilon=_epsilon(knobs.setting, knobs.cohort, knobs.delta, Method.EXACT),
        clones=_epsilon(knobs.setting, knobs.cohort, knobs.delta, Method.CLONES),
        local=knobs.setting.replacement,
        sigma=_noise(knobs),
    )


def _noise(knobs: Knobs) -> float:
    """The standard error of a bin that nobody holds, in devices."""
    found = OneHotRandomizer(
        mechanism=knobs.mechanism, local_epsilon=Decimal(f"{knobs.local:g}"), length=2
    )
    trials = knobs.cohort - 1 if knobs.crowd is Crowd.NOISED else 0
    return float(found.std_error(knobs.cohort, 0.0, trials))


def curve(visit: Visit) -> Response:
    """Epsilon against the cohort's size."""
    knobs = Knobs.of(visit.request.query_params)
    return visit.svg(visit.web.charts.svg(("curve", knobs), visit.look, lambda: _spec(knobs)))


def _spec(knobs: Knobs) -> dict[str, Any]:
    alt = needed("altair")
    methods = {Method.EXACT: "exact (what devices enforce)", Method.CLONES: "by clones, 2022"}
    rows = [
        {
            "cohort": cohort,
            "method": name,
            "epsilon": _epsilon(knobs.setting, cohort, knobs.delta, method),
        }
        for method, name in methods.items()
        for cohort in _COHORTS
    ]
    here = _epsilon(knobs.setting, knobs.cohort, knobs.delta, Method.EXACT)
    x = alt.X(
        "cohort:Q", scale=alt.Scale(type="log", nice=False), title="devices in the cohort",
        axis=alt.Axis(format="~s", values=[10**i for i in range(2, 7)]),
    )  # fmt: skip
    y = alt.Y(
        "epsilon:Q", scale=alt.Scale(type="log", nice=False), title="epsilon of the aggregate",
        axis=alt.Axis(format="~g", values=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]),
    )  # fmt: skip
    colour = alt.Color(
        "method:N", title=None, scale=alt.Scale(domain=list(methods.values())),
        legend=alt.Legend(orient="top", direction="vertical", labelFontSize=12),
    )  # fmt: skip
    lines = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(strokeWidth=2.5, interpolate="monotone")
        .encode(x=x, y=y, color=colour)
    )
    point = alt.InlineData(values=[{"cohort": knobs.cohort, "epsilon": here}])
    mark = alt.Chart(point).mark_point(filled=True, size=110, opacity=1.0).encode(x=x, y=y)
    drop = alt.Chart(point).mark_rule(strokeDash=[3, 4]).encode(x=x)
    found: dict[str, Any] = alt.layer(lines, drop, mark).properties(height=300).to_dict()
    return found
