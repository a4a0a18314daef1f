"""What an analyst has in front of them: connections, studies, and who may see which.

The name of a study is its owner's name, a dot, and what the owner calls it: so ownership is plain
from the name, in a notebook as well. Whatever somebody may not see does not exist for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chorister.analyst.rounds import Round, State
from chorister.analyst.study import Study
from chorister.console.config import ConsoleConfig
from chorister.console.connections import FleetConnection, open_connection
from chorister.console.errors import NotFound
from chorister.console.public_log import PublicLogs
from chorister.console.runs import Runs
from chorister.console.shares import Permission, Shares
from chorister.console.waiting import Waiters
from chorister.errors import InvalidInput, ServiceError

__all__ = ["StudyView", "Workspace"]

_SHORT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyView:
    """A study as one analyst sees it."""

    connection: FleetConnection
    owner: str
    short: str  # what the owner calls it
    analysis: str
    study: Study
    viewer: str
    permission: Permission
    shared: dict[str, Permission]

    @property
    def own(self) -> bool:
        """Whether the viewer owns it."""
        return self.viewer == self.owner

    @property
    def may_ask(self) -> bool:
        """Whether the viewer may ask in it."""
        return self.permission is Permission.ASK

    @property
    def path(self) -> str:
        """Where its page is."""
        return f"/studies/{self.connection.name}/{self.owner}/{self.short}"

    @property
    def rounds(self) -> list[Round]:
        """Newest first."""
        return list(reversed(self.study.rounds))

    @property
    def open_rounds(self) -> int:
        """How many questions wait."""
        return sum(round_.state is State.ASKED for round_ in self.study.rounds)

    def round(self, number: int) -> Round:
        """One round."""
        for round_ in self.study.rounds:
            if round_.number == number:
                return round_
        raise NotFound


class Workspace:
    """Everything behind the pages."""

    def __init__(self, config: ConsoleConfig, connections: list[FleetConnection]) -> None:
        folder = Path(config.folder)
        self.config = config
        self.connections = {each.name: each for each in connections}
        self.analysts = tuple(each.name for each in config.analysts)
        self.shares = Shares(folder / "shares.json")
        self.waiters = Waiters()
        self.runs = Runs(folder / "runs")
        self.logs = PublicLogs()

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: ConsoleConfig) -> Iterator[Workspace]:
        """Open all connections, and go on waiting for whatever is open."""
        folder = Path(config.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ServiceError(f"can't use {folder}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServiceError(f"another console runs on {folder}: stop it first") from None
            workspace = cls(config, [open_connection(each) for each in config.connections])
            workspace.resume()
            yield workspace
        finally:
            os.close(lock)

    def resume(self) -> None:
        """Wait for every open round again."""
        for connection in self.connections.values():
            for name, analysis in connection.studies().items():
                study = connection.study(name, analysis)
                for round_ in study.rounds:
                    if round_.state is State.ASKED and round_.published:
                        self.waiters.wait(connection.name, study, round_)

    # --- Who sees what --------------------------------------------------------------------------

    def usable(self, analyst: str) -> list[FleetConnection]:
        """The connections that somebody may use."""
        return [each for each in self.connections.values() if each.permits(analyst)]

    def visible(self, analyst: str) -> list[StudyView]:
        """All studies that somebody owns, or that are shared with them."""
        views = []
        for connection in self.usable(analyst):
            for name, analysis in connection.studies().items():
                view = self._view(connection, name, analysis, analyst)
                if view is not None:
                    views.append(view)
        return sorted(views, key=lambda view: (not view.own, view.connection.name, view.short))

    def find(self, analyst: str, connection: str, owner: str, short: str) -> StudyView:
        """One study; raises `NotFound` alike where there is none and where it is another's."""
        found = self.connections.get(connection)
        if found is None or not found.permits(analyst):
            raise NotFound
        name = f"{owner}.{short}"
        analysis = found.studies().get(name)
        view = None if analysis is None else self._view(found, name, analysis, analyst)
        if view is None or view.short != short:
            raise NotFound
        return view

    def _view(
        self, connection: FleetConnection, name: str, analysis: str, analyst: str
    ) -> StudyView | None:
        owner, dot, short = name.partition(".")
        if not dot or owner not in self.analysts:
            return None
        shared = self.shares.of(connection.name, name)
        permission = Permission.ASK if owner == analyst else shared.get(analyst)
        if permission is None:
            return None
        return StudyView(
            connection=connection,
            owner=owner,
            short=short,
            analysis=analysis,
            study=connection.study(name, analysis),
            viewer=analyst,
            permission=permission,
            shared=shared,
        )

    # --- Doing ----------------------------------------------------------------------------------

    def create(self, analyst: str, connection: str, short: str, analysis: str) -> StudyView:
        """Begin a study."""
        found = self.connections.get(connection)
        if found is None or not found.permits(analyst):
            raise InvalidInput("choose one of the fleets that are listed")
        if not _SHORT.fullmatch(short):
            raise InvalidInput(
                f"{short[:80]!r} can't name a study: use up to 60 letters, digits, dots, hyphens "
                "and underscores, without spaces"
            )
        if analysis not in found.policy.analyses:
            raise InvalidInput("choose one of the analyses that are listed")
        name = f"{analyst}.{short}"
        if name in found.studies():
            raise InvalidInput(f"you have a study {short!r} already: choose another name")
        found.study(name, analysis)
        return self.find(analyst, connection, analyst, short)

    def share(self, view: StudyView, analyst: str, permission: str) -> None:
        """Let a colleague look or ask, or no longer."""
        if not view.own:
            raise InvalidInput("only its owner shares a study")
        if analyst not in self.analysts or analyst == view.owner:
            raise InvalidInput("there is no such colleague here")
        if not view.connection.permits(analyst):
            raise InvalidInput(f"{analyst} may not use the fleet {view.connection.title}")
        name = view.study.name
        if permission == "none":
            self.shares.take(view.connection.name, name, analyst)
        elif permission in tuple(Permission):
            self.shares.give(view.connection.name, name, analyst, Permission(permission))
        else:
            raise InvalidInput("share to look, to ask, or not at all")
