"""`chorister collect` and `publish-results`: results without a notebook or a console."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chorister.cli import JSON, QUESTIONS, app, needs_extra, print_json, say
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.analyst.publishing import Publishable
    from chorister.analyst.result import Result
    from chorister.analyst.study import Study

ProfileFile = Annotated[
    Path,
    typer.Option("--profile", help="The analyst's profile in TOML; see docs/reference/analyst.md."),
]


@app.command("collect", rich_help_panel=QUESTIONS)
def collect_command(
    profile: ProfileFile = Path("profile.toml"),
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Collect each window when it closes, until Ctrl-C."),
    ] = False,
    alerts: Annotated[
        Path | None,
        typer.Option(
            "--alerts", help="Rules and destinations in TOML; see docs/howto/watch-a-series.md."
        ),
    ] = None,
    timeout: Annotated[
        int,
        typer.Option(
            min=1, max=86_400, help="Without --watch: how long to wait for results, in seconds."
        ),
    ] = 600,
    json_: JSON = False,
) -> None:
    """Collect the results of all studies in the profile's folder, and raise alerts about them.

    Without --watch: collects every question and every window of a series that has closed, then
    exits. Run it from a timer (deploy/systemd has one); it exits with 1 if something could not be
    collected or delivered yet, and the next run resumes. Nothing is lost before a window's grace
    period ends. Paused series are left alone. A console also collects automatically; running both
    is harmless.
    """
    with needs_extra("analyst"):
        from chorister.analyst.alert_delivery import AlertSender
        from chorister.analyst.alerts import AlertSettings
        from chorister.analyst.live_fleet import connect
        from chorister.analyst.unattended import UnattendedCollector
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    fleet = connect(profile)
    sender = None if alerts is None else AlertSender(AlertSettings.load(alerts), fleet.clock)
    found: list[str] = []

    def on_result(text: str) -> None:
        found.append(text)
        if not json_:
            say(text)

    collector = UnattendedCollector(fleet, alerts=sender, on_result=on_result)
    if watch:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        say(f"collecting from {fleet.archive.folder} until stopped")
        collector.watch(stop)
        return
    left = collector.run_once(seconds=timeout)
    if json_:
        print_json({"collected": found, "left": left})
    else:
        for text in left:
            say(f"not yet: {text}")
        if not found and not left:
            say("nothing to collect")
    if left:
        raise typer.Exit(1)


@app.command("publish-results", rich_help_panel=QUESTIONS)
def publish_results_command(
    study: Annotated[str, typer.Argument(help="The name of a study in the profile's folder.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it may exist.")
    ],
    profile: ProfileFile = Path("profile.toml"),
    series: Annotated[
        int | None, typer.Option(min=1, help="The number of a series (default: the newest).")
    ] = None,
    round_: Annotated[
        int | None, typer.Option("--round", min=1, help="Instead: the number of a round.")
    ] = None,
    title: Annotated[str, typer.Option(help="The page's title.")] = "",
    note: Annotated[str, typer.Option(help="A line below the title.")] = "",
    json_: JSON = False,
) -> None:
    """Write a public page with the results of a series or a round: one HTML file without scripts.

    Next to index.html it writes results.csv, results.parquet and results.json. Any web server can
    serve the folder. Run it again after `chorister collect` to add new windows. It contains only
    what the aggregators released: noisy sums of large cohorts. Exits with 1 if there is no result.
    """
    with needs_extra("analyst"):
        from chorister.analyst.live_fleet import connect
        from chorister.analyst.publishing import publish
    fleet = connect(profile)
    analysis = fleet.archive.studies().get(study)
    if analysis is None:
        known = ", ".join(fleet.archive.studies()) or "none"
        raise InvalidInput(
            f"there is no study {study!r} in {fleet.archive.folder}; it has: {known}"
        )
    found, results, default, window = _chosen(fleet.study(study, analysis=analysis), series, round_)
    if found is None or not results:
        say(f"{default}: there is no result yet")
        raise typer.Exit(1)
    written = publish(found, results, output, title=title or default, note=note, window=window)
    if json_:
        print_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            say(str(path))


def _chosen(
    study: Study, series: int | None, number: int | None
) -> tuple[Publishable | None, list[Result], str, int]:
    """What to publish, a result that it is from, a title, and the window of that result."""
    if series is not None and number is not None:
        raise InvalidInput("give either --series or --round")
    tracks = study.tracks()
    if number is not None or not tracks:
        if series is not None:
            raise InvalidInput(f"the study {study.name} has no series: leave out --series")
        return (*_chosen_round(study, number), 0)
    chosen = [track for track in tracks if series in (None, track.number)]
    if not chosen:
        numbers = ", ".join(str(track.number) for track in tracks)
        raise InvalidInput(f"there is no series {series}; the study has: {numbers}")
    trend = chosen[-1].trend
    newest = max(trend.results, default=0)
    results = [trend.results[newest]] if trend.results else []
    return trend, results, f"{study.name}, series {chosen[-1].number}", newest


def _chosen_round(study: Study, number: int | None) -> tuple[Publishable | None, list[Result], str]:
    rounds = [each for each in study.rounds if number in (None, each.number)]
    if not rounds:
        raise InvalidInput(
            f"there is no such round; the study {study.name} has {len(study.rounds)}"
        )
    if rounds[-1].recipe.series is not None:
        raise InvalidInput(f"round {rounds[-1].number} is a series: use --series")
    result = rounds[-1].result
    title = f"{study.name}, round {rounds[-1].number}"
    return result, [] if result is None else [result], title
