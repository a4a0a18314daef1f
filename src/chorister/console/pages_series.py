"""The page of a series: its chart, its windows and its alerts; pausing and ending it."""

from __future__ import annotations

from starlette.responses import Response

from chorister.analyst.series import Track
from chorister.analyst.unattended import pause, resume
from chorister.console.access import NotFound
from chorister.console.charts import PIXELS
from chorister.console.pages_results import exported
from chorister.console.pages_studies import find_study
from chorister.console.series_view import SeriesView
from chorister.console.web import Visit
from chorister.console.workspace import StudyView
from chorister.errors import InvalidInput


def find_track(visit: Visit, view: StudyView) -> Track:
    """Find the series that the path names."""
    try:
        return Track(view.study, visit.number())
    except InvalidInput:
        raise NotFound from None


def show_series(visit: Visit) -> Response:
    view = find_study(visit)
    series = SeriesView.of(visit.workspace, view, find_track(visit, view))
    template = "_series.html" if visit.by_htmx else "series.html"
    words = _explained(visit, view, series) if series.collected else []
    return visit.page(template, view=view, series=series, words=words)


def _explained(visit: Visit, view: StudyView, series: SeriesView) -> list[str]:
    """The trend in words. Comparing all windows may take seconds, and the page asks often."""
    cache, key = visit.workspace.explained, (*view.key, series.track.number)
    state = (series.trend.windows, tuple(series.trend.failed))
    known = cache.get(key)
    if known is None or known[0] != state:
        known = cache[key] = state, series.trend.explain().split("\n")
    return known[1]


def series_chart(visit: Visit) -> Response:
    view = find_study(visit)
    trend = find_track(visit, view).trend
    if not trend.results:
        raise NotFound
    # A window's outcome never changes, so the numbers of those with one identify the chart.
    key = (view.key, "series", visit.number(), trend.windows)
    style = visit.chart_style
    return visit.svg(
        visit.web.charts.svg(key, style, lambda: trend.plot(width=PIXELS[style.width]).to_dict())
    )


def export_series(visit: Visit) -> Response:
    """All windows that have a result, as a file."""
    view = find_study(visit)
    trend = find_track(visit, view).trend
    if not trend.results:
        raise NotFound
    return exported(visit, trend, f"series-{visit.number()}")


def pause_series(visit: Visit) -> Response:
    """Stop collecting a series, and alerts about it."""
    view, track = _to_change(visit)
    pause(track, by=visit.analyst)
    return visit.go_to(_path(view, track))


def resume_series(visit: Visit) -> Response:
    view, track = _to_change(visit)
    resume(track)
    return visit.go_to(_path(view, track))


def end_series(visit: Visit) -> Response:
    """Withdraw all remaining windows, permanently."""
    view, track = _to_change(visit)
    if visit.form.get("sure") != "yes":
        raise InvalidInput("tick the box to end the series: it can't be undone")
    track.end()
    return visit.go_to(_path(view, track))


def _to_change(visit: Visit) -> tuple[StudyView, Track]:
    view = find_study(visit, to_ask=True)
    return view, find_track(visit, view)


def _path(view: StudyView, track: Track) -> str:
    return f"{view.path}/series/{track.number}"
