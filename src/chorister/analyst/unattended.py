"""Collection without anybody present: every question and series of a fleet's studies.

Each open question and each series is collected in its own thread, so that a leader that can't be
reached holds up nothing else. Everything is on disk before it is relied upon: a process that ends
loses nothing, and the next one resumes until the bucket ends. Two processes may collect from the
same folder; each result is collected by one of them. A study that can't be read, or belongs to
another fleet, is reported and holds up no other.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from chorister.analyst.alert_delivery import AlertSender
from chorister.analyst.alert_record import AlertRecord
from chorister.analyst.alerts import judge_trend
from chorister.analyst.fleet import Fleet
from chorister.analyst.json_files import require_format, write_atomically
from chorister.analyst.rounds import Round, RoundState, read_study
from chorister.analyst.series import Track, WindowState
from chorister.analyst.study import Study
from chorister.errors import ChoristerError, InvalidInput, StudyError

_log = logging.getLogger("chorister.collect")
POLL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 30.0  # after an error
_FORMAT: Final = "chorister-paused-1"
_JobKey: TypeAlias = tuple[str, str, int]
"""The name of a study, "round" or "series", and a number."""


# --- Pausing ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Since when nobody collects a series, and who wanted that."""

    since: int  # POSIX seconds
    by: str


def pauses(study: Study) -> dict[int, Pause]:
    """The paused series of a study, by their number."""
    path = _pause_file(study)
    if path is None or not path.exists():
        return {}
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _FORMAT)
        return {
            int(number): Pause(since=int(each["since"]), by=str(each["by"]))
            for number, each in tree["series"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StudyError(f"can't read {path} ({error}): restore it, or delete it") from None


def pause(track: Track, *, by: str) -> None:
    """Stop collecting a series and raising alerts about it, until `resume`.

    Devices continue to answer and to be charged: a window that is not collected before its grace
    period is over is lost.
    """
    _change(track, Pause(since=track.study.fleet.clock.now(), by=by))


def resume(track: Track) -> None:
    """Collect a series again, with all windows that can still be collected."""
    _change(track, None)


def _change(track: Track, wanted: Pause | None) -> None:
    path = _pause_file(track.study)
    if path is None:
        raise InvalidInput("a study without a folder can't be paused: it is not collected either")
    with track.study.fleet.archive.asking():
        found = pauses(track.study)
        if wanted is None:
            found.pop(track.number, None)
        else:
            found.setdefault(track.number, wanted)
        tree = {str(number): asdict(each) for number, each in sorted(found.items())}
        write_atomically(path, json.dumps({"format": _FORMAT, "series": tree}).encode())


def _pause_file(study: Study) -> Path | None:
    folder = study.fleet.archive.folder
    return None if folder is None else folder / study.name / "paused.json"


def alert_record(study: Study) -> AlertRecord:
    """What rules have found in a study so far."""
    folder = study.fleet.archive.folder
    if folder is None:
        raise InvalidInput("alerts need a study in a folder: their record is kept there")
    return AlertRecord(folder / study.name / "alerts.json")


# --- Collecting ---------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Job:
    thread: threading.Thread
    error: str = ""  # why it ended without a result
    ended: float = 0.0  # by the monotonic clock; 0: it runs

    @property
    def running(self) -> bool:
        return self.thread.is_alive()


class UnattendedCollector:
    """Collects what studies wait for, and raises alerts about it. Thread-safe."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        alerts: AlertSender | None = None,
        rounds: bool = True,
        on_result: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`rounds`: whether to collect single questions as well, not only series.

        `on_result` gets a line for every result and every window without one, from any thread.
        """
        self._fleet = fleet
        self._alerts = alerts
        self._rounds = rounds
        self._on_result = on_result
        self._lock = threading.Lock()
        self._jobs: dict[_JobKey, _Job] = {}
        self._logged: dict[str, set[str]] = {}  # problems that the log has already, by what failed

    def error(self, study: str, kind: str, number: int) -> str:
        """Why collecting failed the last time; it is tried again."""
        with self._lock:
            job = self._jobs.get((study, kind, number))
            return "" if job is None else job.error

    def run_once(self, *, seconds: float) -> list[str]:
        """Collect all that is over, within this time; return what is left to do, in words."""
        deadline = time.monotonic() + seconds
        left = self.start_due(early=False)
        with self._lock:
            jobs = sorted(self._jobs.items())
        for (study, kind, number), job in jobs:
            job.thread.join(max(0.0, deadline - time.monotonic()))
            if job.running or job.error:
                why = job.error or "it is not released yet, or the leader can't be reached"
                left.append(f"{study}, {kind} {number}: {why}")
        return list(dict.fromkeys([*left, *self.raise_alerts()]))

    def watch(self, stop: threading.Event) -> None:
        """Collect every window when it closes, until told to stop."""
        alerting: threading.Thread | None = None
        while not stop.is_set():
            self._log_new("collecting", self.start_due(early=True))
            # Apart from collecting: a webhook may take its time.
            if alerting is None or not alerting.is_alive():
                alerting = threading.Thread(target=self._try_alerts, daemon=True, name="alerts")
                alerting.start()
            stop.wait(POLL_SECONDS)

    def start_due(self, *, early: bool) -> list[str]:
        """Begin with everything that nobody in this process collects yet; return the problems.

        `early`: also with questions whose windows are open, because they may reach a target.
        """
        problems: list[str] = []
        for study in self._studies(problems):
            try:
                self._start_study(study, early=early)
            except Exception as error:  # of any kind: it concerns this study alone
                problems.append(f"{study.name}: {_reason(error)}")
        return problems

    def _start_study(self, study: Study, *, early: bool) -> None:
        for round_ in study.rounds if self._rounds else ():
            single = round_.recipe.series is None and round_.published
            waits = round_.state is RoundState.ASKED and single
            if waits and (early or self._fleet.is_over(round_)):
                key = (study.name, "round", round_.number)
                self._start(key, partial(self._collect_round, study, round_))
        paused = pauses(study)
        for track in study.tracks():
            if track.number not in paused and track.due:
                key = (study.name, "series", track.number)
                self._start(key, partial(self._collect_series, track))

    def _studies(self, problems: list[str]) -> Iterator[Study]:
        """All studies on disk, with what other processes have asked in them.

        What can't be read is added to `problems`, and the others are still found.
        """
        archive = self._fleet.archive
        if archive.folder is None:
            return
        try:
            archive.refresh()
        except (ChoristerError, OSError) as error:
            problems.append(str(error))
        for path in sorted(archive.folder.glob("*/study.json")):
            name = path.parent.name
            try:
                stored = read_study(path)
                analysis = stored.get("analysis")
                if stored.get("name") != name or analysis not in self._fleet.policy.analyses:
                    continue
                study = self._fleet.study(name, analysis=analysis)
            except Exception as error:  # of any kind: it concerns this study alone
                problems.append(f"{name}: {_reason(error)}")
            else:
                yield study

    def _start(self, key: _JobKey, collect: Callable[[], None]) -> None:
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and (
                job.running or (job.error and time.monotonic() < job.ended + _RETRY_SECONDS)
            ):
                return
            # A daemon: whatever it waits for may take days, and the next process resumes.
            thread = threading.Thread(
                target=self._run, args=(key, collect), daemon=True,
                name=f"collect {key[0]} {key[1]} {key[2]}",
            )  # fmt: skip
            self._jobs[key] = _Job(thread=thread)
            thread.start()

    def _run(self, key: _JobKey, collect: Callable[[], None]) -> None:
        error = ""
        try:
            collect()
        except Exception as problem:  # of any kind: it is tried again
            error = _reason(problem)
        with self._lock:
            self._jobs[key].error, self._jobs[key].ended = error, time.monotonic()

    def _collect_round(self, study: Study, round_: Round) -> None:
        try:
            result = study.wait(round_, bar=False)
            text = f"{result.n_reports:,} reports"
        except StudyError as error:
            if study.rounds[round_.number - 1].state is RoundState.ASKED:
                raise  # another process waits for it
            text = f"no result: {error}"
        self._on_result(f"{study.name}, round {round_.number}: {text}")

    def _collect_series(self, track: Track) -> None:
        settled = (WindowState.COLLECTED, WindowState.FAILED)
        before = {each.number for each in track.windows if each.state in settled}
        track.collect(bar=False)
        for each in track.windows:
            if each.number not in before and each.state in settled:
                found = f"no result: {each.why}" if each.reports is None else (
                    f"{each.reports:,} reports"
                )  # fmt: skip
                where = f"{track.study.name}, series {track.number}, window {each.number}"
                self._on_result(f"{where}: {found}")

    # --- Alerts ---------------------------------------------------------------------------------

    def _try_alerts(self) -> None:
        try:
            problems = self.raise_alerts()
        except Exception as error:  # of any kind: collecting goes on, and is tried again
            problems = [f"alerts could not be raised: {_reason(error)}"]
        self._log_new("alerts", problems)

    def _log_new(self, what: str, problems: list[str]) -> None:
        """Log what is new among the problems."""
        for problem in set(problems) - self._logged.get(what, set()):
            _log.warning("%s", problem)
        self._logged[what] = set(problems)

    def raise_alerts(self) -> list[str]:
        """Judge what is new and deliver what is pending; return what could not be delivered."""
        if self._alerts is None:
            return []
        left, problems = 0, list[str]()
        for study in self._studies(problems):
            try:
                left += self._raise_in_turn(study, self._alerts, problems)
            except Exception as error:  # of any kind: it concerns this study alone
                problems.append(f"alerts about {study.name}: {_reason(error)}")
        if left:
            why = "; ".join(f"{name}: {why}" for name, why in self._alerts.problems.items())
            problems.append(f"{left:,} deliveries of alerts: {why or 'too many for one run'}")
        return problems

    def _raise_in_turn(self, study: Study, sender: AlertSender, problems: list[str]) -> int:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._fleet.archive.alerting(study.name))
            except StudyError:
                return 0  # another process raises alerts about this study
            return self._raise(study, sender, problems)

    def _raise(self, study: Study, sender: AlertSender, problems: list[str]) -> int:
        record, paused = alert_record(study), pauses(study)
        for track in study.tracks():
            for rule in sender.settings.rules:
                if rule.watches(study.name, track.number) and track.number not in paused:
                    try:
                        judge_trend(record, rule, track.number, track.trend)
                    except (ChoristerError, OSError) as error:  # other rules still judge
                        problems.append(f"alerts about {study.name}: {error}")
        return sender.deliver(record)


def _reason(error: Exception) -> str:
    """Why something failed; the log gets the details of a bug."""
    if isinstance(error, ChoristerError | OSError):
        return str(error)
    _log.error("there is a bug in Chorister", exc_info=error)
    return "there is a bug in Chorister; the log has the details"
