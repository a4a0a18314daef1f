"""The list of studies; the page of a study with its rounds, budgets, sharing and live updates."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.study_status import Progress
from chorister.console.access import Forbidden, NotFound, Session, SignInNeeded
from chorister.console.algorithms import ALGORITHMS
from chorister.console.background import RunRecord, unexpected
from chorister.console.charts import alternative_text
from chorister.console.forms import Form
from chorister.console.series_view import SeriesView
from chorister.console.web import Visit, Web, brief, decimal
from chorister.console.workspace import StudyView, Workspace
from chorister.device.ledger.budget import Standing
from chorister.errors import ChoristerError, InvalidInput

T = TypeVar("T")

_OPEN_POLL_SECONDS: Final = 0.25  # while something is open
_IDLE_POLL_SECONDS: Final = 1.0
_HEARTBEAT_SECONDS: Final = 15.0
_MAX_STREAM_SECONDS: Final = 600.0  # then the browser reconnects
_MAX_STREAMS: Final = 200
_RETRY_MILLISECONDS: Final = 10_000  # for pages beyond the maximum
_STREAM: Final = "text/event-stream"
_MAX_SEARCH: Final = 200  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCard:
    """A round on the page of a study."""

    round: Round
    progress: Progress | None  # of an open round
    stopped: str | None  # why waiting for it has ended
    text: str  # its chart in words


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveStudy:
    """The part of a study's page that changes while you watch it."""

    view: StudyView
    cards: list[RoundCard]
    runs: list[RunRecord]
    series: list[SeriesView]

    @classmethod
    def of(cls, workspace: Workspace, view: StudyView) -> LiveStudy:
        """The current state; asks the fleet about open rounds."""
        name, study = view.connection.name, view.study
        cards = []
        for round_ in view.rounds:
            if round_.recipe.series is not None:
                continue  # it has a card of its own
            progress = None
            if round_.state is RoundState.ASKED and round_.published:
                seconds = view.connection.poll_seconds
                progress = workspace.waiters.progress(name, study, round_, seconds)
            cards.append(
                RoundCard(
                    round=round_,
                    progress=progress,
                    stopped=workspace.waiters.error(name, study.name, round_.number),
                    text="" if round_.result is None else alternative_text(round_.result),
                )
            )
        return cls(
            view=view,
            cards=cards,
            runs=workspace.runs.of(view.key),
            series=SeriesView.all_of(workspace, view),
        )

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Changes whenever there is something new to show."""
        rounds = tuple(
            (card.round.number, card.round.state, card.stopped, repr(card.progress))
            for card in self.cards
        )
        return rounds, tuple(self.runs), tuple(each.fingerprint for each in self.series)

    @property
    def waiting(self) -> list[RoundCard]:
        """Open rounds."""
        return [card for card in self.cards if card.round.state is RoundState.ASKED]

    @property
    def closed(self) -> list[RoundCard]:
        return [card for card in self.cards if card.round.state is not RoundState.ASKED]

    @property
    def shown_runs(self) -> list[RunRecord]:
        """The newest run, the newest that finished, and older ones that did not."""
        done = next((run for run in self.runs if run.state == "finished"), None)
        return [run for i, run in enumerate(self.runs) if not i or run is done or not run.finished]

    def drawn_by_run(self, round_: Round) -> bool:
        """Whether a run on the page shows this round already: one chart per result."""
        return any(round_.number in run.rounds for run in self.shown_runs)

    def context(self) -> dict[str, Any]:
        budget = self.view.study.budget
        return {
            "live": self,
            "view": self.view,
            "meters": meters(budget.limits, self.view.analysis),
            "fresh": budget.fresh_devices,
            "others": budget.others,
            "unknown": budget.unknown,
            "nouns": {name: each.noun for name, each in ALGORITHMS.items()},
        }


def find_study(visit: Visit, *, to_ask: bool = False) -> StudyView:
    """Find the study that the path names."""
    view = visit.workspace.find(
        visit.analyst, visit.at("connection"), visit.at("owner"), visit.at("study")
    )
    if to_ask and not view.may_ask:
        raise Forbidden("You may view this study, but not ask questions in it.")
    return view


def list_studies(visit: Visit) -> Response:
    """All studies that the analyst may see, and a form for a new one."""
    return _studies(visit, error="", status=200)


def _studies(visit: Visit, *, error: str, status: int) -> Response:
    connections = visit.workspace.usable(visit.analyst)
    every = visit.workspace.visible(visit.analyst)
    words = visit.request.query_params.get("q", "")[:_MAX_SEARCH]
    archived = visit.request.query_params.get("archived", "") == "yes"
    found = [view for view in every if view.matches(words)]
    return visit.page(
        "studies.html",
        status=status,
        every=every,
        views=[view for view in found if view.about.archived == archived],
        elsewhere=sum(view.about.archived != archived for view in found),
        words=words,
        archived=archived,
        connections=connections,
        form=visit.form,
        error=error,
    )


def begin_study(visit: Visit) -> Response:
    connection, _, analysis = visit.form.get("about").partition("/")
    try:
        view = visit.workspace.create(visit.analyst, connection, visit.form.get("name"), analysis)
    except InvalidInput as error:
        return _studies(visit, error=str(error), status=422)
    return visit.go_to(view.path)


def show_study(visit: Visit) -> Response:
    view = find_study(visit)
    return visit.page(
        "study.html",
        colleagues=[
            name
            for name in visit.workspace.analysts
            if name != view.owner and view.connection.permits(name)
        ],
        algorithms=[each for each in ALGORITHMS.values() if each.fits(view.study)],
        terms=view.study.terms,
        **LiveStudy.of(visit.workspace, view).context(),
    )


def share_study(visit: Visit) -> Response:
    """Change who may see a study."""
    view = find_study(visit)
    visit.workspace.share(view, visit.form.get("analyst"), visit.form.get("permission"))
    return visit.go_to(f"{view.path}#sharing")


def describe_study(visit: Visit) -> Response:
    """Change a study's title and note, and whether it is archived."""
    view = find_study(visit)
    visit.workspace.describe(
        view, title=visit.form.get("title"), note=visit.form.get("note"),
        archived=visit.form.get("archived") == "yes",
    )  # fmt: skip
    return visit.go_to(f"{view.path}#about")


def cancel_round(visit: Visit) -> Response:
    """Cancel a question."""
    view = find_study(visit, to_ask=True)
    round_ = view.round(visit.number())
    if round_.recipe.series is not None:
        raise InvalidInput("this is a series: end it on its own page")
    if round_.state is RoundState.ASKED:
        view.study.cancel(round_.number)
    return visit.go_to(view.path)


def wait_again(visit: Visit) -> Response:
    """Wait again after something went wrong."""
    view = find_study(visit, to_ask=True)
    round_ = view.round(visit.number())
    if round_.state is RoundState.ASKED:
        if not round_.published:
            raise ChoristerError("the question was never published: ask it again")
        visit.workspace.waiters.wait(view.connection.name, view.study, round_)
    return visit.go_to(view.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetMeter:
    """One limit of the policy, and how much of it a device can have spent."""

    title: str
    kind: str  # device, analysis, field
    standing: Standing

    @property
    def shares(self) -> dict[str, float]:
        """The used share of each: the fullest binds."""
        spent, allowed = self.standing.spent, self.standing.allowed
        return {
            "epsilon": float(spent.epsilon / allowed.epsilon),
            "delta": float(spent.delta / allowed.delta),
            "reports": self.standing.reports / self.standing.allowed_reports,
        }

    @property
    def fullest(self) -> float:
        """The largest used share: of epsilon, delta or reports."""
        return min(max(self.shares.values()), 1.0)

    @property
    def binds(self) -> str:
        """Which of them has the least left, and so ends first."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def binding_text(self) -> str:
        """What is spent of the one that binds."""
        spent, allowed = self.standing.spent, self.standing.allowed
        if self.binds == "reports":
            return f"{self.standing.reports:,} of {self.standing.allowed_reports:,} reports"
        if self.binds == "delta":
            return f"δ {brief(spent.delta)} of {decimal(allowed.delta)}"
        return f"ε {brief(spent.epsilon)} of {decimal(allowed.epsilon)}"


def meters(standings: Iterable[Standing], analysis: str | None = None) -> list[BudgetMeter]:
    """Show limits, the broadest first: all of a device, or those that bind one analysis."""
    found = []
    for standing in standings:
        name, _, field = standing.limit.removeprefix("analyses.").partition(".fields.")
        if standing.limit == "device":
            title, kind = "The whole device", "device"
        elif field:
            title, kind = field, "field"
        else:
            title, kind = name.removesuffix(".budget"), "analysis"
        if kind == "analysis" and title == analysis:
            title = "This analysis"
        found.append(BudgetMeter(title=title, kind=kind, standing=standing))
    return found


class EventStreams:
    """All open streams of server-sent events."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._open = 0
        self.closing = False

    async def study(self, request: Request) -> Response:
        """Open the stream of a study's page."""

        async def begin() -> Response:
            session = self._web.session_of(request)
            if session is None:
                raise SignInNeeded
            await self._run(
                lambda: self._state(request, session)
            )  # raises if there is no such study
            if self._open >= _MAX_STREAMS:
                # A stream that ends at once: the page stays as it is, and tries again later.
                return Response(
                    f"event: busy\nretry: {_RETRY_MILLISECONDS}\n\n", media_type=_STREAM
                )
            return StreamingResponse(
                self._messages(request, session),
                media_type=_STREAM,
                headers={"x-accel-buffering": "no"},
            )

        return await self._web.answered(request, begin)

    async def _messages(self, request: Request, session: Session) -> AsyncIterator[str]:
        self._open += 1
        try:
            last: object = None
            since_beat, total = 0.0, 0.0
            while total < _MAX_STREAM_SECONDS and not self.closing:
                if self._web.session_of(request) is None:
                    return  # signed out, or the session has expired
                try:
                    state, html = await self._run(partial(self._look, request, session, last))
                    if html is not None:
                        last, since_beat = state.fingerprint, 0.0
                        yield message(html)
                except (NotFound, ChoristerError):
                    return  # no longer shared
                except Exception as error:  # the edge: headers were sent long ago
                    words = unexpected("a stream", error)
                    yield message(self._web.notice(request, "This page is out of date", words))
                    return
                pause = (
                    _OPEN_POLL_SECONDS
                    if state.waiting or any(r.running for r in state.runs)
                    else _IDLE_POLL_SECONDS
                )
                await anyio.sleep(pause)
                total, since_beat = total + pause, since_beat + pause
                if since_beat >= _HEARTBEAT_SECONDS:
                    yield ": still here\n\n"
                    since_beat = 0.0
        finally:
            self._open -= 1

    def _state(self, request: Request, session: Session) -> LiveStudy:
        visit = Visit(web=self._web, request=request, session=session, form=Form([]))
        return LiveStudy.of(self._web.workspace, find_study(visit))

    def _look(
        self, request: Request, session: Session, last: object
    ) -> tuple[LiveStudy, str | None]:
        """The current state, and its HTML if it has changed."""
        state = self._state(request, session)
        if state.fingerprint == last:
            return state, None
        return state, self._web.render(request, "_live.html", session, **state.context())

    async def _run(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self._web.threads)


def message(html: str) -> str:
    """Format an event without a name, which htmx swaps in."""
    lines = re.split(r"\r\n|\r|\n", html)
    return "".join(f"data: {line}\n" for line in lines if line.strip()) + "\n"
