"""The paper's figure: epsilon of the aggregate against the cohort's size, for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from chorister.errors import InvalidInput
from chorister.privacy import Mechanism, Method

LOCAL_EPSILONS = (3, 6)
COHORTS = tuple(round(100 * 10 ** (i / 4)) for i in range(17))  # 100 to a million

_LABELS = {
    Method.EXACT: "exact (enforced)",
    Method.RENYI: "renyi",
    Method.CLONES: "clones 2022",
    Method.CLOSED_FORM: "closed form",
}
# Okabe and Ito's colours can be distinguished with any colour vision; dashes help in print.
_COLOURS = ["#0072B2", "#009E73", "#E69F00", "#CC79A7"]
_DASHES = [[1, 0], [8, 3], [4, 3], [2, 3]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of one curve."""

    local_epsilon: int
    cohort: int
    method: Method
    epsilon: float


def check_target(to: Path) -> None:
    """Raise `InvalidInput` unless a figure can be written there, before computing anything."""
    if to.suffix not in {".svg", ".png", ".html"}:
        raise InvalidInput(f"--to must end in .svg, .png or .html, not {to.suffix or 'nothing'!r}")
    if not to.parent.is_dir():
        raise InvalidInput(f"the folder {to.parent} does not exist")
    if to.is_dir():
        raise InvalidInput(f"{to} is a folder: name a file")
    try:
        with TemporaryFile(dir=to.parent):
            pass
    except OSError as error:
        raise InvalidInput(f"can't write to {to.parent}: {error.strerror}") from None
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        raise InvalidInput("drawing needs more packages: install chorister[analyst]")


def draw(points: Sequence[Point], to: Path, *, delta: str, mechanism: Mechanism) -> None:
    """Write the figure in the format of the file's suffix."""
    check_target(to)
    import altair as alt

    names = list(_LABELS.values())
    rows = [
        asdict(point)
        | {
            "method": _LABELS[point.method],
            "panel": f"local epsilon {point.local_epsilon}",
        }
        for point in points
    ]
    colour = alt.Color(
        "method:N",
        scale=alt.Scale(domain=names, range=_COLOURS),
        legend=alt.Legend(
            title=None,
            orient="bottom",
            symbolType="stroke",
            symbolSize=500,
            symbolStrokeWidth=3,
            labelFontSize=13,
        ),
    )
    dash = alt.StrokeDash("method:N", scale=alt.Scale(domain=names, range=_DASHES), legend=None)
    least = min(point.epsilon for point in points)
    cohort = alt.X(
        "cohort:Q",
        scale=alt.Scale(type="log", nice=False),
        title="cohort size",
        axis=alt.Axis(format="~s", values=[10**i for i in range(2, 7)], grid=True),
    )
    epsilon = alt.Y(
        "epsilon:Q",
        scale=alt.Scale(type="log", domain=[least * 0.8, 8.0], nice=False),
        title="epsilon of the aggregate",
        axis=alt.Axis(values=[0.01, 0.03, 0.1, 0.3, 1, 3, 6], format="~g"),
    )
    tip = [alt.Tooltip("method:N"), alt.Tooltip("cohort:Q"), alt.Tooltip("epsilon:Q", format=".4f")]
    base = alt.Chart().encode(x=cohort, y=epsilon, color=colour, tooltip=tip)
    lines = base.mark_line(strokeWidth=2.5).encode(strokeDash=dash)
    dots = base.mark_point(filled=True, size=22, opacity=1.0)
    local = (
        alt.Chart()
        .mark_rule(strokeDash=[1, 4], color="#555555")
        .encode(y=alt.Y("local_epsilon:Q", title="epsilon of the aggregate"))
    )
    chart = (
        alt.layer(lines, dots, local, data=alt.InlineData(values=rows))
        .properties(width=380, height=340)
        .facet(
            column=alt.Column(
                "panel:N", title=None, header=alt.Header(labelFontSize=14, labelFontWeight="bold")
            )
        )
        .properties(
            title=alt.TitleParams(
                text=f"What a sum over a cohort reveals ({mechanism} one-hot, delta {delta})",
                subtitle="Lower is more private. Dotted: the local guarantee, whatever the cohort.",
                fontSize=16,
                subtitleFontSize=12,
                anchor="start",
                offset=12,
            )
        )
        .configure_axis(labelFontSize=12, titleFontSize=13)
        .configure_view(stroke="#cccccc")
    )
    try:
        if to.suffix == ".html":
            chart.save(to, inline=True)
        elif to.suffix == ".png":
            chart.save(to, scale_factor=2.0)
        else:
            chart.save(to)
    except OSError as error:
        raise InvalidInput(f"can't write {to}: {error.strerror}") from None
