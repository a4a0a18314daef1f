"""A study: a named sequence of rounds under one analysis, kept on disk, resumed after a crash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from chorister.analyst.asking import (
    PrivacyRequest,
    as_arms,
    as_participation,
    expected_cohort,
    reads_of,
    refs_of,
    simple_query,
    smallest_share,
)
from chorister.analyst.bars import waiting_bar
from chorister.analyst.cohorts import Cohorts, RoundsPlan, choose_cohorts, plan_rounds
from chorister.analyst.features import Real
from chorister.analyst.fleet import Fleet, Gathered, Progress, Tell, answered, foreseen
from chorister.analyst.ledgers import refusal
from chorister.analyst.planning import StudyBudget, for_accuracy, study_budget
from chorister.analyst.question import Question, check_target
from chorister.analyst.result import Result
from chorister.analyst.rounds import Round, State
from chorister.analyst.status import History, Status, history_of, status_of
from chorister.encoding import AnyFeature, DenyList, Selection
from chorister.errors import (
    CohortTooSmall,
    InvalidInput,
    QuestionWithdrawn,
    StudyError,
    WindowOver,
)
from chorister.policy import Analysis, Crowd, ReportKind
from chorister.privacy import Mechanism
from chorister.recipe import Participation, Recipe

__all__ = ["Study"]

_WEEK = 7 * 86_400


class _Withdrawn(Exception):
    """Another thread cancelled while this one waited."""


class Study:
    """Ask, look, ask again. `histogram` plans a question; `ask` asks it and waits."""

    def __init__(self, fleet: Fleet, name: str, analysis: str) -> None:
        found = fleet.policy.analyses.get(analysis)
        if found is None:
            known = ", ".join(fleet.policy.analyses)
            raise InvalidInput(f"the policy has no analysis {analysis!r}; it has: {known}")
        self.fleet = fleet
        self.name = name
        self.analysis = analysis
        self.terms: Analysis = found
        """What the policy says about this analysis."""
        self.bar: bool | None = None
        """Whether a bar shows how cohorts fill; None for where there is a terminal."""
        fleet.archive.register(
            name=name,
            analysis=analysis,
            policy=fleet.policy.digest.hex(),
            fleet=fleet.identity,
        )

    def __repr__(self) -> str:
        return f"<Study {self.name!r} of {self.analysis}: {len(self.rounds)} rounds>"

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
        window: int | None = None,
        grace: int | None = None,
        repeat: int = 0,
    ) -> Question:
        """Plan a histogram: the question is priced and asked later.

        What is left out follows from the policy: the query from the features' columns, the fields
        read from the query, epsilon and delta from the budgets, the local epsilon and the minimum
        cohort from the number of devices. Every group, and every arm of an experiment (a name with
        a weight, drawn by each device itself), is a cohort of its own. `participation` is
        "everyone" (the default) or the share of the devices that answered nothing in this study
        yet; `window` and `grace` are seconds.
        """
        chosen = tuple(features) if isinstance(features, Sequence) else (features,)
        denied = (deny,) if isinstance(deny, DenyList) else tuple(deny)
        if query is None:
            query = simple_query(self.fleet.policy, self.terms, chosen, denied)
        read = (
            reads_of(query, self.terms)
            if reads is None
            else {table: tuple(names) for table, names in reads.items()}
        )
        who, drawn = as_participation(participation), as_arms(arms)
        request = PrivacyRequest(
            local_epsilon=local_epsilon,
            epsilon=epsilon,
            delta=delta,
            min_cohort=min_cohort,
            mechanism=mechanism,
            crowd=crowd,
            report=report,
        )
        cohort = None
        if local_epsilon is None and min_cohort is None:
            parts = self.fleet.policy.cells(tuple(group_by), 0)
            cohort = self._sure_cohort(who, smallest_share(drawn) / parts)
        privacy = request.resolve(self.fleet.policy, self.terms, refs_of(read), cohort=cohort)
        limits = self.terms.window
        return Question(
            study=self,
            features=chosen,
            query=query,
            reads=read,
            group_by=tuple(group_by),
            arms=drawn,
            selection=selection,
            deny=denied,
            privacy=privacy,
            participation=who,
            answer_seconds=(
                min(max(_WEEK, limits.shortest), limits.longest) if window is None else window
            ),
            grace_seconds=min(_WEEK, limits.longest_grace) if grace is None else grace,
            repeat=repeat,
        )

    def _sure_cohort(self, who: Participation, part: float) -> int | None:
        """A cohort that is reached almost surely by this part, counting who is left in the study.

        Of groups nobody knows how large they are: they are taken to be equal.
        """
        devices = self.fleet.devices
        if devices is None:
            return None
        left = 1.0
        if who.once_per_study:
            left = sum(
                weight
                for ledger, weight in foreseen(self.fleet).classes.values()
                if all(charge.study != self.name for charge in ledger.charges)
            )
        chance = float(who.probability) * part
        return expected_cohort(devices * left * chance, Decimal(chance), self.fleet.margin)

    def cohorts(
        self, rounds: int, *, reads: Mapping[str, Iterable[str]], wanted: Cohorts | None = None
    ) -> Cohorts:
        """Whether everyone can answer so many rounds, or each goes to devices of its own."""
        return choose_cohorts(self.fleet.policy, self.terms, refs_of(reads), rounds, wanted)

    def plan_rounds(
        self,
        shares: Sequence[Real],
        *,
        reads: Mapping[str, Iterable[str]],
        epsilon: Real | None = None,
        delta: Real | None = None,
        mechanism: Mechanism | str | None = None,
        crowd: Crowd | None = None,
        cohorts: Cohorts | None = None,
        devices: int | None = None,
    ) -> RoundsPlan:
        """Price a sequence of rounds before the first is asked; see `chorister.analyst.cohorts`."""
        known = devices if devices is not None else self.fleet.devices
        if known is None:
            raise InvalidInput("say how many devices there are, about: devices=...")
        return plan_rounds(
            self.fleet.policy,
            self.analysis,
            shares,
            refs=refs_of(reads),
            devices=known,
            epsilon=epsilon,
            delta=delta,
            mechanism=mechanism,
            crowd=crowd,
            cohorts=cohorts,
            margin=self.fleet.margin,
        )

    def for_accuracy(
        self,
        features: AnyFeature | Sequence[AnyFeature],
        *,
        std_error: float | None = None,
        relative_error: float | None = None,
        reports: int | None = None,
        **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
    ) -> Question:
        """The question with the least epsilon that gives this accuracy.

        Either the standard error of an empty bin in devices, with so many reports; or the same as a
        share of the reports, and the number of reports follows. Other options are `histogram`'s.
        """
        return for_accuracy(
            self, features, std_error=std_error, relative_error=relative_error, reports=reports,
            options=options,
        )  # fmt: skip

    @property
    def budget(self) -> StudyBudget:
        """What devices that answered everything have spent, limit by limit, and what is left."""
        return study_budget(self)

    # --- Asking ---------------------------------------------------------------------------------

    @property
    def rounds(self) -> list[Round]:
        """All rounds so far."""
        return self.fleet.archive.rounds(self.name)

    @property
    def next_number(self) -> int:
        """The number of the next round."""
        return len(self.rounds) + 1

    def ask(
        self, question: Question, *, target: int | None = None, bar: bool | None = None
    ) -> Result:
        """Ask a question and wait for its result.

        A question that this study holds already is not asked again: its result is returned, or
        waited for. So after a crash, or when a notebook's cell runs twice, nothing is spent twice;
        `question.again()` asks on purpose.
        """
        return self.wait(self.post(question, target=target), bar=bar)

    def post(self, question: Question, *, target: int | None = None) -> Round:
        """Ask a question without waiting: `wait` or `ask` fetches the result later."""
        if question.study.name != self.name or question.study.fleet is not self.fleet:
            raise InvalidInput("this question was planned in another study")
        check_target(question, target)
        with self.fleet.archive.asking():
            stored = self._find(question)
            if stored is None:
                stored = self._begin(question, target)
            if stored.state is State.ASKED and not stored.published:
                stored = self._publish(stored)
        return stored

    def _find(self, question: Question) -> Round | None:
        for round_ in self.rounds:
            if round_.digest == question.digest:
                return round_
        return None

    def _begin(self, question: Question, target: int | None) -> Round:
        fleet = self.fleet
        number = self.next_number
        recipe = question.recipe(number=number, opens=fleet.clock.now())
        if (refused := refusal(recipe, fleet.policy)) is not None:
            raise refused
        self._expect_enough(recipe)
        round_ = Round(
            sequence=len(fleet.archive.all_rounds()) + 1,
            number=number,
            digest=question.digest,
            recipe=recipe,
            target=target,
        )
        fleet.archive.write(self.name, round_)
        return round_

    def _expect_enough(self, recipe: Recipe) -> None:
        """Refuse what would charge devices for nothing."""
        ledgers = foreseen(self.fleet)
        if (exhausted := ledgers.why_nobody(recipe)) is not None:
            raise exhausted
        share = answered(ledgers, recipe)
        devices, least = self.fleet.devices, recipe.privacy.min_cohort
        if devices is None or recipe.group_by:
            return
        share *= smallest_share(recipe.arms)
        expected = share * devices
        if expected + 6.0 * expected**0.5 < least:
            raise CohortTooSmall(
                f"at most about {expected:,.0f} of {devices:,} devices would answer, but nothing "
                f"is released below {least:,}: ask a larger share, a smaller local epsilon, or a "
                "larger epsilon (each lowers the minimum cohort)",
                reports=round(expected),
                needed=least,
            )

    def _publish(self, round_: Round) -> Round:
        if self.fleet.clock.now() >= round_.recipe.window.closes:
            self._fail(round_, "WindowOver", "its answer period passed before it was published")
            raise WindowOver(
                f"round {round_.number} was never published and its window is over: ask again with "
                "`question.again()`"
            )
        self.fleet.publish(round_)
        published = replace(round_, published=True)
        self.fleet.archive.write(self.name, published)
        return published

    def wait(self, round_: Round, *, bar: bool | None = None) -> Result:
        """The result of a round; while it waits, a bar shows how the cohort fills."""
        if round_.state is not State.ASKED:
            return self._outcome(round_)
        waiting = self.fleet.archive.waiting(self.name, round_.number)
        with waiting:
            done = self._stored(round_)  # perhaps another was quicker
            if done.state is State.ASKED:
                with waiting_bar(self.name, round_, self.bar if bar is None else bar) as tell:
                    done = self._gather(done, tell)
        return self._outcome(done)

    def _gather(self, round_: Round, tell: Tell) -> Round:
        archive = self.fleet.archive
        latest = [round_]

        def keep(changed: Round) -> None:
            if self._cancelled(round_):
                raise _Withdrawn
            archive.write(self.name, changed)
            latest.append(changed)

        def tell_unless_cancelled(progress: Progress) -> None:
            if self._cancelled(round_):
                raise _Withdrawn
            tell(progress)

        try:
            gathered = self.fleet.gather(round_, tell_unless_cancelled, keep)
        except _Withdrawn:
            return self._stored(round_)
        except CohortTooSmall as error:
            return self._fail(
                round_, "CohortTooSmall", str(error), reports=error.reports, needed=error.needed
            )
        except WindowOver as error:
            return self._fail(round_, "WindowOver", str(error))
        done = replace(latest[-1], state=State.COLLECTED, result=_result(round_, gathered))
        with archive.asking():
            if self._cancelled(round_):
                return self._stored(round_)  # what came too late is not looked at
            archive.write(self.name, done)
        self.fleet.settle(done)
        return done

    def _stored(self, round_: Round) -> Round:
        return next(each for each in self.rounds if each.number == round_.number)

    def _cancelled(self, round_: Round) -> bool:
        """Whether another thread or process took the question back in the meantime."""
        self.fleet.archive.refresh()
        return self._stored(round_).state is State.WITHDRAWN

    def _fail(self, round_: Round, error: str, message: str, **fields: int | None) -> Round:
        failure = {"error": error, "message": message, **fields}
        failed = replace(round_, state=State.FAILED, failure=failure)
        self.fleet.archive.write(self.name, failed)
        return failed

    def _outcome(self, round_: Round) -> Result:
        if round_.state is State.WITHDRAWN:
            raise QuestionWithdrawn(
                f"round {round_.number} was cancelled: ask again with `question.again()`"
            )
        if round_.result is not None:
            return round_.result
        failure = round_.failure or {}
        message = str(failure.get("message", "it has no result"))
        if failure.get("error") == "CohortTooSmall":
            raise CohortTooSmall(
                message, reports=failure.get("reports"), needed=int(failure.get("needed", 0))
            )
        if failure.get("error") == "WindowOver":
            raise WindowOver(message)
        raise StudyError(message)

    def cancel(self, number: int | None = None) -> None:
        """Take back the question of an open round (the newest one): no more devices answer it.

        What devices were charged for it stays charged: their reports may be on the way.
        """
        still_open = [round_ for round_ in self.rounds if round_.state is State.ASKED]
        chosen = [round_ for round_ in still_open if number in (None, round_.number)]
        if not chosen:
            raise InvalidInput("no such round is open; see study.status()")
        with self.fleet.archive.asking():
            if chosen[-1].published:
                self.fleet.withdraw(chosen[-1])
            withdrawn = replace(chosen[-1], state=State.WITHDRAWN)
            self.fleet.archive.write(self.name, withdrawn)

    # --- Looking --------------------------------------------------------------------------------

    def history(self) -> History:
        """All rounds with what became of them."""
        return history_of(self.rounds)

    def status(self) -> Status:
        """Why is there no result yet? The step that waits and for what, rejections, times."""
        return status_of(self)

    def result(self, number: int = -1) -> Result:
        """The result of a round (the newest one), without waiting."""
        rounds = self.rounds
        for round_ in rounds:
            if round_.number == number or (number == -1 and round_ is rounds[-1]):
                if round_.state is State.ASKED:
                    raise StudyError(
                        f"round {round_.number} has no result yet: {self.status().explain()}"
                    )
                return self._outcome(round_)
        raise InvalidInput(f"there is no round {number}; there are {len(rounds)}")


def _result(round_: Round, gathered: Gathered) -> Result:
    return Result(
        recipe=round_.recipe,
        parts=gathered.parts,
        missing=gathered.missing,
        round=round_.number,
    )
