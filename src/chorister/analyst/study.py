"""A study: a named sequence of rounds under one analysis, kept on disk, resumed after a crash."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from chorister.analyst import series as tracks
from chorister.analyst import statistic_questions
from chorister.analyst.arguments import (
    Real,
    as_arms,
    as_count,
    as_deny_lists,
    as_features,
    as_names,
    as_participation,
    as_periods,
    as_reads,
    as_seconds,
)
from chorister.analyst.cohorts import choose_cohorts, plan_rounds
from chorister.analyst.fleet import Fleet
from chorister.analyst.preflight import preflight
from chorister.analyst.question import Question, check_target, for_accuracy
from chorister.analyst.request import (
    PrivacyRequest,
    expected_cohort,
    reads_of,
    refs_of,
    simple_query,
)
from chorister.analyst.result import Result
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.spending import (
    StudyBudget,
    expected_ledgers,
    fresh_share,
    study_budget,
)
from chorister.analyst.study_status import History, OnProgress, Progress, StudyStatus, progress_bar
from chorister.analyst.tables import paragraphs
from chorister.encoding import AnyFeature, DenyList, Selection
from chorister.errors import (
    CohortTooSmall,
    InvalidInput,
    QuestionWithdrawn,
    ResultPending,
    StudyError,
    WindowOver,
)
from chorister.policy import Analysis, Crowd, ReportKind
from chorister.privacy import Mechanism
from chorister.recipe import Participation, Series
from chorister.recipe.outlook import smallest_share

_WEEK = 7 * 86_400
_RETRY_SECONDS = 5.0  # until a result that was not released yet is collected again
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,89}")  # an id is this with the round's number


class _Withdrawn(Exception):
    """The question was cancelled while this thread waited for its result."""


class Study:
    """A named sequence of rounds: `histogram` plans a question, `ask` asks it and waits."""

    def __init__(self, fleet: Fleet, name: str, analysis: str) -> None:
        asked: object = analysis
        found = fleet.policy.analyses.get(analysis) if isinstance(asked, str) else None
        if found is None:
            known = ", ".join(fleet.policy.analyses)
            raise InvalidInput(f"the policy has no analysis {analysis!r}; it has: {known}")
        given: object = name
        if not isinstance(given, str) or not _NAME.fullmatch(given):
            raise InvalidInput(
                f"{name!r} can't be the name of a study: use up to 90 letters, digits, dots, "
                "hyphens and underscores, without spaces",
                field="name",
            )
        self.fleet = fleet
        self.name = name
        self.analysis = analysis
        self.terms: Analysis = found
        """The policy's entry for this analysis."""
        self.bar: bool | None = None
        """Whether to show a progress bar while waiting; None: if there is a terminal."""
        fleet.archive.register(
            name=name,
            analysis=analysis,
            policy=fleet.policy.digest.hex(),
            fleet=fleet.identity,
        )

    def __repr__(self) -> str:
        return f"<Study {self.name!r} of {self.analysis}: {len(self.rounds)} rounds>"

    def _repr_html_(self) -> str:
        words = paragraphs(f"{self!r}\n{self.status().explain()}")
        return f"<div>{words}{self.history()._repr_html_()}</div>"

    # --- Planning -------------------------------------------------------------------------------

    def histogram(
        self,
        features: AnyFeature | Sequence[AnyFeature],
        *,
        query: str | None = None,
        reads: Mapping[str, Iterable[str]] | None = None,
        group_by: Sequence[str] = (),
        arms: Mapping[str, int] | Sequence[str] = (),
        local_epsilon: Real | None = None,
        epsilon: Real | None = None,
        delta: Real | None = None,
        min_cohort: int | None = None,
        mechanism: Mechanism | str | None = None,
        crowd: Crowd | None = None,
        report: ReportKind | None = None,
        selection: Selection = "uniform",
        deny: DenyList | Sequence[DenyList] = (),
        participation: Participation | Real | str | None = None,
        window: int | str | None = None,
        grace: int | str | None = None,
        period: int | str | Mapping[str, int | str] | None = None,
        series: Series | None = None,
        repeat: int = 0,
    ) -> Question:
        """Plan a histogram. Nothing is asked or spent yet.

        Whatever you leave out follows from the policy: the query from the features' columns, the
        fields read from the query, epsilon and delta from the budgets, the local epsilon and the
        minimum cohort from the number of devices. Every group, and every arm of an experiment (a
        name with a weight, drawn by each device itself), is a separate cohort. `participation` is
        "everyone" (the default) or a share of the devices that have answered nothing in this study
        yet; `window` and `grace` are text such as "12h" or "3d", or seconds. With a `period`, only
        events count that a device got in that time before the window opens: for all streams, or by
        stream. A `series` asks in many windows: `study.track` plans one.
        """
        chosen = as_features(features)
        given: object = series
        if given is not None and not isinstance(given, Series):
            raise InvalidInput("a series is planned with `study.track`", field="series")
        denied, groups = as_deny_lists(deny), as_names(group_by)
        if query is None:
            query = simple_query(self.fleet.policy, self.terms, chosen, denied)
        read = reads_of(query, self.terms) if reads is None else as_reads(reads)
        who, drawn = as_participation(participation), as_arms(arms)
        request = PrivacyRequest(
            local_epsilon=local_epsilon,
            epsilon=epsilon,
            delta=delta,
            min_cohort=as_count(min_cohort, "min_cohort"),
            mechanism=mechanism,
            crowd=crowd,
            report=report,
        )
        cohort = None
        if local_epsilon is None and min_cohort is None:
            parts = self.fleet.policy.cells(groups, 0)
            often = 1.0 if series is None else series.answers / series.windows
            cohort = self._safe_cohort(who, smallest_share(drawn) / parts * often)
        privacy = request.resolve(self.fleet.policy, self.terms, refs_of(read), cohort=cohort)
        limits = self.terms.window
        return Question(
            study=self,
            features=chosen,
            query=query,
            reads=read,
            group_by=groups,
            arms=drawn,
            selection=selection,
            deny=denied,
            privacy=privacy,
            participation=who,
            answer_seconds=(
                min(max(_WEEK, limits.shortest), limits.longest)
                if window is None
                else as_seconds(window, "window")
            ),
            grace_seconds=(
                min(_WEEK, limits.longest_grace) if grace is None else as_seconds(grace, "grace")
            ),
            repeat=as_count(repeat, "repeat") or 0,
            series=series,
            periods=as_periods(
                period, [name for name in read if name in self.fleet.policy.streams]
            ),
        )

    def _safe_cohort(self, who: Participation, part: float) -> int | None:
        """A cohort that this part of the remaining devices reaches almost surely.

        The sizes of groups are unknown: they are assumed to be equal.
        """
        devices = self.fleet.devices
        if devices is None:
            return None
        left = 1.0
        if who.once_per_study:
            left = fresh_share(expected_ledgers(self.fleet), self.name)
        chance = float(who.probability) * part
        return expected_cohort(devices * left * chance, Decimal(chance), self.fleet.margin)

    track = tracks.track
    tracks = tracks.tracks
    cohorts = choose_cohorts
    plan_rounds = plan_rounds
    for_accuracy = for_accuracy
    mean = statistic_questions.mean
    total = statistic_questions.total
    rate = statistic_questions.rate
    quantiles = statistic_questions.quantiles

    @property
    def budget(self) -> StudyBudget:
        """What a device that answered everything has spent and has left, limit by limit."""
        return study_budget(self)

    # --- Asking ---------------------------------------------------------------------------------

    @property
    def rounds(self) -> list[Round]:
        """All rounds so far, in order."""
        return self.fleet.archive.rounds(self.name)

    @property
    def next_number(self) -> int:
        """The number of the next round."""
        return len(self.rounds) + 1

    def ask(
        self, question: Question, *, target: int | None = None, bar: bool | None = None
    ) -> Result:
        """Ask a question and wait for its result.

        A question that this study has already asked is not asked again: its result is returned, or
        waited for. So nothing is spent twice after a crash, or when a notebook cell runs twice.
        Use `question.again()` to ask again on purpose.
        """
        return self.wait(self.post(question, target=target), bar=bar)

    def post(self, question: Question, *, target: int | None = None) -> Round:
        """Ask a question without waiting; `wait` or `ask` fetches the result later."""
        if not isinstance(question, Question):
            raise InvalidInput(f"plan a question with `study.histogram` to ask, not {question!r}")
        if question.study.name != self.name or question.study.fleet is not self.fleet:
            raise InvalidInput("this question was planned in another study")
        check_target(question, target)
        with self.fleet.archive.asking():
            stored = self.asked_before(question)
            if stored is None:
                stored = self._begin(question, target)
            if stored.state is RoundState.ASKED and not stored.published:
                stored = self._publish(stored)
        return stored

    def asked_before(self, question: Question) -> Round | None:
        """Return the round that asked this question already, if there is one."""
        for round_ in self.rounds:
            if round_.digest == question.digest:
                return round_
        return None

    def _begin(self, question: Question, target: int | None) -> Round:
        fleet = self.fleet
        number = self.next_number
        recipe = question.recipe(number=number, opens=fleet.clock.now())
        preflight(fleet, recipe, target=target).require()
        round_ = Round(
            sequence=len(fleet.archive.all_rounds()) + 1,
            number=number,
            digest=question.digest,
            recipe=recipe,
            target=target,
        )
        fleet.archive.write(self.name, round_)
        return round_

    def _publish(self, round_: Round) -> Round:
        if self.fleet.clock.now() >= round_.window.closes:
            self._fail(round_, "WindowOver", "its window ended before it was published")
            raise WindowOver(
                f"round {round_.number} was never published and its window is over: ask again with "
                "`question.again()`"
            )
        self.fleet.publish(round_)
        published = replace(round_, published=True)
        self.fleet.archive.write(self.name, published)
        return published

    def wait(self, round_: Round, *, bar: bool | None = None) -> Result:
        """Wait for the result of a round, with a progress bar."""
        if round_.recipe.series is not None:
            raise InvalidInput("this is a series of questions: collect it with `study.tracks()`")
        if round_.state is not RoundState.ASKED:
            return self._outcome(round_)
        with self.fleet.archive.waiting(self.name, round_.number):
            done = self._stored(round_)  # another thread or process may have been quicker
            if done.state is RoundState.ASKED:
                show = self.bar if bar is None else bar
                with progress_bar(self.name, round_, show) as on_progress:
                    done = self._collect_patiently(done, on_progress)
        return self._outcome(done)

    def _collect_patiently(self, round_: Round, on_progress: OnProgress) -> Round:
        """Collect a round, however long the aggregators take within its grace period."""
        while True:
            try:
                return self.collect_round(self._stored(round_), on_progress)
            except ResultPending:
                self.fleet.pause(_RETRY_SECONDS)

    def collect_round(self, round_: Round, on_progress: OnProgress) -> Round:
        """Collect a round, or one window of a series, and store the outcome.

        Raises `ResultPending`, and stores no outcome, if the aggregators are not ready yet.
        """
        archive = self.fleet.archive
        latest = [round_]

        def save(changed: Round) -> None:
            if self._cancelled(round_):
                raise _Withdrawn
            archive.write(self.name, changed)
            latest.append(changed)

        def unless_cancelled(progress: Progress) -> None:
            if self._cancelled(round_):
                raise _Withdrawn
            on_progress(progress)

        try:
            released = self.fleet.collect(round_, unless_cancelled, save)
        except _Withdrawn:
            return self._stored(round_)
        except CohortTooSmall as error:
            return self._fail(
                round_, "CohortTooSmall", str(error), reports=error.reports, needed=error.needed
            )
        except WindowOver as error:
            return self._fail(round_, "WindowOver", str(error))
        result = Result(
            recipe=round_.recipe,
            parts=released.parts,
            missing=released.missing,
            round=round_.number,
        )
        done = replace(latest[-1], state=RoundState.COLLECTED, result=result)
        with archive.asking():
            if self._cancelled(round_):
                return self._stored(round_)  # a result that comes too late is not kept
            archive.write(self.name, done)
        self.fleet.acknowledge(done)
        return done

    def _stored(self, round_: Round) -> Round:
        if round_.number_in_series is not None:
            windows = self.fleet.archive.windows(self.name, round_.number)
            return windows.get(round_.number_in_series, round_)
        return next(each for each in self.rounds if each.number == round_.number)

    def _cancelled(self, round_: Round) -> bool:
        """Whether another thread or process has cancelled the question in the meantime."""
        self.fleet.archive.refresh()
        return self._stored(round_).state is RoundState.WITHDRAWN

    def _fail(self, round_: Round, error: str, message: str, **fields: int | None) -> Round:
        failure = {"error": error, "message": message, **fields}
        failed = replace(round_, state=RoundState.FAILED, failure=failure)
        self.fleet.archive.write(self.name, failed)
        return failed

    def _outcome(self, round_: Round) -> Result:
        if round_.state is RoundState.WITHDRAWN:
            raise QuestionWithdrawn(
                f"round {round_.number} was cancelled: ask again with `question.again()`"
            )
        if round_.result is not None:
            return round_.result
        failure = round_.failure or {}
        message = str(failure.get("message", "the round has no result"))
        if failure.get("error") == "CohortTooSmall":
            raise CohortTooSmall(
                message, reports=failure.get("reports"), needed=int(failure.get("needed", 0))
            )
        if failure.get("error") == "WindowOver":
            raise WindowOver(message)
        raise StudyError(message)

    def cancel(self, number: int | None = None) -> None:
        """Withdraw the question of an open round (by default the newest): devices stop answering.

        Devices that already answered stay charged: their reports may be on the way. A series is
        ended, as with `Track.end`: windows that have closed before can still be collected.
        """
        with self.fleet.archive.asking():  # and after reading what others have collected since
            still_open = [round_ for round_ in self.rounds if round_.state is RoundState.ASKED]
            chosen = [round_ for round_ in still_open if number in (None, round_.number)]
            if not chosen:
                raise InvalidInput("there is no such open round; see study.status()")
            tracks.withdraw(self, chosen[-1])

    # --- Looking --------------------------------------------------------------------------------

    def history(self) -> History:
        """List all rounds with their outcomes."""
        return History(self.rounds)

    def status(self) -> StudyStatus:
        """Why is there no result yet? The step that is waiting and for what, rejections, times."""
        return StudyStatus.of(self)

    def result(self, number: int = -1) -> Result:
        """Return the result of a round (by default the newest) without waiting."""
        rounds = self.rounds
        for round_ in rounds:
            if round_.number == number or (number == -1 and round_ is rounds[-1]):
                if round_.state is RoundState.ASKED:
                    raise StudyError(
                        f"round {round_.number} has no result yet: {self.status().explain()}"
                    )
                return self._outcome(round_)
        raise InvalidInput(f"there is no round {number}; the study has {len(rounds)}")
