"""A chart of discovered words: their shares of the reports, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chorister.analyst.tables import drawable, needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.words import Words


def bars(found: Words, *, top: int) -> altair.LayerChart:
    """Draw the `top` words with the largest shares."""
    alt = needed("altair")
    columns = found.columns()
    rows: list[dict[str, Any]] = []
    for i, word in enumerate(columns["word"][:top]):
        number = int(columns["round"][i])
        reports = found.results[number - 1].n_reports
        rows.append({
            "word": drawable(word), "round": str(number),
            "percent": 100.0 * float(columns["share"][i]),
            "low": 100.0 * float(columns["ci_low"][i]) / reports,
            "high": 100.0 * float(columns["ci_high"][i]) / reports,
        })  # fmt: skip
    total = len(columns["word"])
    title = f"{len(rows):,} of {total:,} words" if total else "Nothing was found above the noise"
    last = found.results[-1]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("word:N", sort=None, title=None, axis=alt.Axis(labelLimit=260))
    )
    shares = base.mark_bar(color="#3b6fb6").encode(
        x=alt.X("percent:Q", title="% of the reports of the word's round"),
        tooltip=[alt.Tooltip("word:N"), alt.Tooltip("percent:Q", format=".3f"),
                 alt.Tooltip("round:N")],
    )  # fmt: skip
    intervals = base.mark_rule(color="#1c2430").encode(
        x=alt.X("low:Q", title="% of the reports of the word's round"), x2="high:Q"
    )
    chart: altair.LayerChart = alt.layer(shares, intervals).properties(
        width=380,
        height=max(19 * len(rows), 60),
        title=alt.TitleParams(
            text=title,
            subtitle=[
                f"{last.n_reports:,} reports in the last round, epsilon {last.epsilon:.3g}",
                "a device reports one of its words that were still asked about",
            ],
            anchor="start",
        ),
    )
    return chart
