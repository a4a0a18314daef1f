"""What an analyst works with: connections, studies, and who may see which study.

The name of a study is its owner's name, a dot, and a short name: so its owner is obvious, also in a
notebook. What an analyst may not see does not exist for them. One small file, replaced atomically,
says who may look at or ask in whose study.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from chorister.analyst.alert_delivery import AlertSender
from chorister.analyst.alerts import AlertSettings
from chorister.analyst.json_files import require_format, write_atomically
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.study import Study
from chorister.analyst.unattended import UnattendedCollector
from chorister.console.access import NotFound
from chorister.console.background import RoundWaiters, RunStore, StudyKey
from chorister.console.config import ConsoleConfig
from chorister.console.connections import FleetConnection, PublicLogs, open_connection
from chorister.errors import InvalidInput, ServiceError

_SHORT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")
_FORMAT: Final = "chorister-shares-1"
_NOTES_FORMAT: Final = "chorister-notes-1"
_MAX_TITLE: Final = 80
_MAX_NOTE: Final = 4_000


class Permission(StrEnum):
    """What an analyst may do in somebody else's study."""

    LOOK = "look"
    ASK = "ask"


class StudyPermissions:
    """Who may do what in which study. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lists: dict[str, dict[str, Permission]] = {}
        if path.exists():
            self._lists = _read(path)

    def of(self, connection: str, study: str) -> dict[str, Permission]:
        """Permissions in one study, by analyst."""
        with self._lock:
            return dict(self._lists.get(f"{connection}/{study}", {}))

    def grant(self, connection: str, study: str, analyst: str, permission: Permission) -> None:
        with self._lock:
            self._lists.setdefault(f"{connection}/{study}", {})[analyst] = permission
            self._write()

    def revoke(self, connection: str, study: str, analyst: str) -> None:
        with self._lock:
            self._lists.get(f"{connection}/{study}", {}).pop(analyst, None)
            self._write()

    def _write(self) -> None:
        document = {"format": _FORMAT, "studies": self._lists}
        write_atomically(self._path, json.dumps(document, indent=1).encode())


def _read(path: Path) -> dict[str, dict[str, Permission]]:
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _FORMAT)
        return {
            str(study): {str(name): Permission(each) for name, each in people.items()}
            for study, people in tree["studies"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"can't read {path} ({error}): restore it") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyAbout:
    """What its owner says about a study."""

    title: str = ""
    note: str = ""
    archived: bool = False


class StudyNotes:
    """Titles, notes, and which studies are archived. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._notes: dict[str, StudyAbout] = {}
        if path.exists():
            self._notes = _read_notes(path)

    def of(self, connection: str, study: str) -> StudyAbout:
        with self._lock:
            return self._notes.get(f"{connection}/{study}", StudyAbout())

    def write(self, connection: str, study: str, about: StudyAbout) -> None:
        with self._lock:
            self._notes[f"{connection}/{study}"] = about
            tree = {name: asdict(each) for name, each in self._notes.items()}
            document = {"format": _NOTES_FORMAT, "studies": tree}
            write_atomically(self._path, json.dumps(document, indent=1).encode())


def _read_notes(path: Path) -> dict[str, StudyAbout]:
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _NOTES_FORMAT)
        return {
            str(study): StudyAbout(
                title=str(about["title"]), note=str(about["note"]),
                archived=bool(about["archived"]),
            )
            for study, about in tree["studies"].items()
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"can't read {path} ({error}): restore it") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyView:
    """A study as one analyst sees it."""

    connection: FleetConnection
    owner: str
    short: str  # its name without the owner
    analysis: str
    study: Study
    viewer: str
    permission: Permission
    shared: dict[str, Permission]
    about: StudyAbout = StudyAbout()

    @property
    def title(self) -> str:
        """What its owner calls it; its name, if they gave it no other."""
        return self.about.title or self.short

    def matches(self, words: str) -> bool:
        """Whether all these words occur in what is known about the study."""
        texts = (self.short, self.title, self.about.note, self.owner, self.analysis,
                 self.study.terms.purpose, self.connection.title)  # fmt: skip
        known = "\n".join(texts).casefold()
        return all(word in known for word in words.casefold().split())

    @property
    def own(self) -> bool:
        return self.viewer == self.owner

    @property
    def may_ask(self) -> bool:
        return self.permission is Permission.ASK

    @property
    def key(self) -> StudyKey:
        return self.connection.name, self.study.name

    @property
    def path(self) -> str:
        return f"/studies/{self.connection.name}/{self.owner}/{self.short}"

    @property
    def rounds(self) -> list[Round]:
        """Newest first."""
        return list(reversed(self.study.rounds))

    @property
    def open_rounds(self) -> int:
        """The number of open questions."""
        return sum(round_.state is RoundState.ASKED for round_ in self.study.rounds)

    def round(self, number: int) -> Round:
        for round_ in self.study.rounds:
            if round_.number == number:
                return round_
        raise NotFound


class Workspace:
    """Everything that the pages show."""

    def __init__(self, config: ConsoleConfig, connections: list[FleetConnection]) -> None:
        folder = Path(config.folder)
        self.config = config
        self.connections = {each.name: each for each in connections}
        self.analysts = tuple(each.name for each in config.analysts)
        self.permissions = StudyPermissions(folder / "shares.json")
        self.notes = StudyNotes(folder / "notes.json")
        self.waiters = RoundWaiters()
        self.runs = RunStore(folder / "runs")
        self.logs = PublicLogs()
        self.explained: dict[Hashable, tuple[Hashable, list[str]]] = {}
        """What trends say in words, and which windows they are of; by series."""
        alerts = None if config.alerts is None else AlertSettings.load(Path(config.alerts))
        self.collectors = {
            each.name: UnattendedCollector(
                each.fleet,
                # Nobody wants to be woken by a rehearsal.
                alerts=AlertSender(alerts, each.fleet.clock) if alerts and each.live else None,
                rounds=False,  # `waiters` wait for these
            )
            for each in connections
        }

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: ConsoleConfig) -> Iterator[Workspace]:
        """Open all connections, and wait for all open rounds."""
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
                raise ServiceError(f"another console is using {folder}: stop it first") from None
            workspace = cls(config, [open_connection(each) for each in config.connections])
            workspace.resume()
            with workspace.collecting():
                yield workspace
        finally:
            os.close(lock)

    def resume(self) -> None:
        """Wait again for every open round."""
        for connection in self.connections.values():
            for name, analysis in connection.studies().items():
                study = connection.study(name, analysis)
                for round_ in study.rounds:
                    single = round_.recipe.series is None
                    if single and round_.state is RoundState.ASKED and round_.published:
                        self.waiters.wait(connection.name, study, round_)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the windows of all series as they close, in the background."""
        stop = threading.Event()
        for name, collector in self.collectors.items():
            threading.Thread(
                target=collector.watch, args=(stop,), daemon=True, name=f"collect {name}"
            ).start()
        try:
            yield
        finally:
            stop.set()

    # --- Who sees what --------------------------------------------------------------------------

    def usable(self, analyst: str) -> list[FleetConnection]:
        """The connections that an analyst may use."""
        return [each for each in self.connections.values() if each.permits(analyst)]

    def visible(self, analyst: str) -> list[StudyView]:
        """All studies that an analyst owns or that are shared with them."""
        views = []
        for connection in self.usable(analyst):
            for name, analysis in connection.studies().items():
                view = self._view(connection, name, analysis, analyst)
                if view is not None:
                    views.append(view)
        return sorted(views, key=lambda view: (not view.own, view.connection.name, view.short))

    def find(self, analyst: str, connection: str, owner: str, short: str) -> StudyView:
        """Find a study; raise `NotFound` if there is none or if the analyst may not see it."""
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
        shared = self.permissions.of(connection.name, name)
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
            about=self.notes.of(connection.name, name),
        )

    # --- Changes --------------------------------------------------------------------------------

    def create(self, analyst: str, connection: str, short: str, analysis: str) -> StudyView:
        found = self.connections.get(connection)
        if found is None or not found.permits(analyst):
            raise InvalidInput("choose one of the listed fleets")
        if not _SHORT.fullmatch(short):
            raise InvalidInput(
                f"{short[:80]!r} can't be the name of a study: use up to 60 letters, digits, dots, "
                "hyphens and underscores, without spaces"
            )
        if analysis not in found.policy.analyses:
            raise InvalidInput("choose one of the listed analyses")
        name = f"{analyst}.{short}"
        if name in found.studies():
            raise InvalidInput(f"you already have a study {short!r}: choose another name")
        found.study(name, analysis)
        return self.find(analyst, connection, analyst, short)

    def describe(self, view: StudyView, *, title: str, note: str, archived: bool) -> None:
        """Change the title and the note of a study, and whether it is archived."""
        if not view.own:
            raise InvalidInput("only the owner can change a study's title and note")
        if len(title) > _MAX_TITLE or len(note) > _MAX_NOTE:
            raise InvalidInput(
                f"a title has up to {_MAX_TITLE} characters, a note up to {_MAX_NOTE:,}: shorten it"
            )
        about = StudyAbout(title=" ".join(title.split()), note=note.strip(), archived=archived)
        self.notes.write(view.connection.name, view.study.name, about)

    def share(self, view: StudyView, analyst: str, permission: str) -> None:
        """Change what a colleague may do in a study."""
        if not view.own:
            raise InvalidInput("only the owner can share a study")
        if analyst not in self.analysts or analyst == view.owner:
            raise InvalidInput("there is no such analyst here")
        if not view.connection.permits(analyst):
            raise InvalidInput(f"{analyst} may not use the fleet {view.connection.title}")
        name = view.study.name
        if permission == "none":
            self.permissions.revoke(view.connection.name, name, analyst)
        elif permission in tuple(Permission):
            self.permissions.grant(view.connection.name, name, analyst, Permission(permission))
        else:
            raise InvalidInput("the permission must be look, ask or none")
