"""The privacy page: what a sum over a cohort reveals, computed by the devices' accountant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.responses import Response

from chorister.analyst.tables import needed
from chorister.console.web import Visit
from chorister.privacy import Crowd, Mechanism, Method, OneHotRandomizer, Setting, amplification

_COHORTS: Final = tuple(round(100 * 10 ** (i / 2)) for i in range(9))  # 100 to a million
_MAX_LOCAL_EPSILON: Final = 12.0
_MECHANISM: Final = Mechanism.ASYMMETRIC
_CROWD: Final = Crowd.NOISED


@dataclass(frozen=True, slots=True)
class PrivacyControls:
    """The positions of the sliders; invalid values become defaults."""

    local: float = 4.0
    log_cohort: float = 4.0
    log_delta: int = -6
    mechanism: Mechanism = _MECHANISM
    crowd: Crowd = _CROWD

    @classmethod
    def of(cls, query: QueryParams) -> PrivacyControls:
        mechanism, crowd = query.get("mechanism"), query.get("crowd")
        return cls(
            local=_slider(query.get("local"), 4.0, 0.5, _MAX_LOCAL_EPSILON, 0.25),
            log_cohort=_slider(query.get("cohort"), 4.0, 2.0, 6.0, 0.1),
            log_delta=round(_slider(query.get("delta"), -6, -12, -4, 1)),
            mechanism=Mechanism(mechanism) if mechanism in tuple(Mechanism) else _MECHANISM,
            crowd=Crowd(crowd) if crowd in tuple(Crowd) else _CROWD,
        )

    @property
    def cohort(self) -> int:
        exact = 10**self.log_cohort
        digits = math.floor(self.log_cohort) - 1
        return int(round(exact / 10**digits) * 10**digits)

    @property
    def setting(self) -> Setting:
        return Setting(local_epsilon=f"{self.local:g}", mechanism=self.mechanism, crowd=self.crowd)

    @property
    def delta(self) -> str:
        return f"1e{self.log_delta}"

    @property
    def query(self) -> str:
        """The query string of the chart."""
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
    """Show the page, or only its changing part for htmx."""
    controls = PrivacyControls.of(visit.request.query_params)
    return visit.page(
        "_privacy.html" if visit.by_htmx else "privacy.html",
        controls=controls,
        mechanisms=tuple(Mechanism),
        epsilon=_epsilon(controls.setting, controls.cohort, controls.delta, Method.EXACT),
        clones=_epsilon(controls.setting, controls.cohort, controls.delta, Method.CLONES),
        local=controls.setting.replacement,
        sigma=_noise(controls),
    )


def _noise(controls: PrivacyControls) -> float:
    """The standard error of a bin that nobody holds, in devices."""
    found = OneHotRandomizer(
        mechanism=controls.mechanism, local_epsilon=Decimal(f"{controls.local:g}"), length=2
    )
    trials = controls.setting.noise_trials(controls.cohort)
    return float(found.std_error(controls.cohort, 0.0, trials))


def curve(visit: Visit) -> Response:
    """A chart of epsilon against the size of the cohort."""
    controls = PrivacyControls.of(visit.request.query_params)
    return visit.svg(
        visit.web.charts.svg(("curve", controls), visit.chart_style, lambda: _spec(controls))
    )


def _spec(controls: PrivacyControls) -> dict[str, Any]:
    alt = needed("altair")
    methods = {Method.EXACT: "exact (what devices enforce)", Method.CLONES: "by clones (2022)"}
    rows = [
        {
            "cohort": cohort,
            "method": name,
            "epsilon": _epsilon(controls.setting, cohort, controls.delta, method),
        }
        for method, name in methods.items()
        for cohort in _COHORTS
    ]
    here = _epsilon(controls.setting, controls.cohort, controls.delta, Method.EXACT)
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
    point = alt.InlineData(values=[{"cohort": controls.cohort, "epsilon": here}])
    mark = alt.Chart(point).mark_point(filled=True, size=110, opacity=1.0).encode(x=x, y=y)
    drop = alt.Chart(point).mark_rule(strokeDash=[3, 4]).encode(x=x)
    found: dict[str, Any] = alt.layer(lines, drop, mark).properties(height=300).to_dict()
    return found
