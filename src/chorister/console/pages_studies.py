"""The list of studies, a study's page, and who shares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from chorister.analyst.fleet import Progress
from chorister.analyst.planning import StudyBudget
from chorister.analyst.rounds import Round, State
from chorister.console.algorithms import ALGORITHMS
from chorister.console.errors import Forbidden
from chorister.console.meters import Meter, meters
from chorister.console.pictures import alternative_text
from chorister.console.runs import RunRecord
from chorister.console.web import Visit
from chorister.console.workspace import StudyView, Workspace
from chorister.errors import ChoristerError, InvalidInput

__all__ = ["LiveStudy", "begin_study", "find_study", "list_studies", "share_study", "show_study"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCard:
    """A round as a study's page shows it."""

    round: Round
    progress: Progress | None  # of an open one
    stopped: str | None  # why nobody waits for it any longer
    text: str  # its picture in words


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveStudy:
    """What changes while one watches a study."""

    view: StudyView
    cards: list[RoundCard]
    runs: list[RunRecord]

    @classmethod
    def of(cls, workspace: Workspace, view: StudyView) -> LiveStudy:
        """Its present state, asking the fleet about open rounds."""
        name, study = view.connection.name, view.study
        cards = []
        for round_ in view.rounds:
            progress = None
            if round_.state is State.ASKED and round_.published:
                look = view.connection.look_seconds
                progress = workspace.waiters.progress(name, study, round_, look)
            cards.append(
                RoundCard(
                    round=round_,
                    progress=progress,
                    stopped=workspace.waiters.error(name, study.name, round_.number),
                    text="" if round_.result is None else alternative_text(round_.result),
                )
            )
        return cls(view=view, cards=cards, runs=workspace.runs.of(name, study.name))

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Differs whenever there is something new to show."""
        rounds = tuple(
            (card.round.number, card.round.state, card.stopped, repr(card.progress))
            for card in self.cards
        )
        return rounds, tuple(self.runs)

    @property
    def waiting(self) -> list[RoundCard]:
        """Rounds without a result yet."""
        return [card for card in self.cards if card.round.state is State.ASKED]

    @property
    def closed(self) -> list[RoundCard]:
        """The others."""
        return [card for card in self.cards if card.round.state is not State.ASKED]

    def context(self) -> dict[str, Any]:
        """For the template."""
        budget: StudyBudget = self.view.study.budget
        found: list[Meter] = meters(budget, self.view.analysis)
        return {"live": self, "view": self.view, "meters": found, "fresh": budget.fresh_devices}


def find_study(visit: Visit, *, to_ask: bool = False) -> StudyView:
    """The study that a path names."""
    view = visit.workspace.find(
        visit.analyst, visit.at("connection"), visit.at("owner"), visit.at("study")
    )
    if to_ask and not view.may_ask:
        raise Forbidden("This study is shared with you to look at, not to ask in.")
    return view


def list_studies(visit: Visit) -> Response:
    """All studies that somebody may see, and a form for a new one."""
    return _studies(visit, error="", status=200)


def _studies(visit: Visit, *, error: str, status: int) -> Response:
    connections = visit.workspace.usable(visit.analyst)
    return visit.page(
        "studies.html",
        status=status,
        views=visit.workspace.visible(visit.analyst),
        connections=connections,
        form=visit.form,
        error=error,
    )


def begin_study(visit: Visit) -> Response:
    """Begin a study, and go to its page."""
    connection, _, analysis = visit.form.get("about").partition("/")
    try:
        view = visit.workspace.create(visit.analyst, connection, visit.form.get("name"), analysis)
    except InvalidInput as error:
        return _studies(visit, error=str(error), status=422)
    return visit.go_to(view.path)


def show_study(visit: Visit) -> Response:
    """A study's page."""
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
    """Share a study, or no longer."""
    view = find_study(visit)
    visit.workspace.share(view, visit.form.get("analyst"), visit.form.get("permission"))
    return visit.go_to(f"{view.path}#sharing")


def cancel_round(visit: Visit) -> Response:
    """Take a question back."""
    view = find_study(visit, to_ask=True)
    round_ = view.round(visit.number())
    if round_.state is State.ASKED:
        view.study.cancel(round_.number)
    return visit.go_to(view.path)


def wait_again(visit: Visit) -> Response:
    """Go on waiting after something went wrong."""
    view = find_study(visit, to_ask=True)
    round_ = view.round(visit.number())
    if round_.state is State.ASKED:
        if not round_.published:
            raise ChoristerError("it was never published: ask the same question again")
        visit.workspace.waiters.wait(view.connection.name, view.study, round_)
    return visit.go_to(view.path)
