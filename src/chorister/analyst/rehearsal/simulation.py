"""A rehearsal: the recipes, checks and accountant of real devices, on a simulated fleet.

Nothing is approximated. Given who answers and what they hold, a bin that f of n devices hold sums
to `Bin(f, h) + Bin(n - f, q)`, and a noised crowd adds two independent `Bin(min_cohort - 1, q)`.
That is the distribution of the sum of n reports and both aggregators' noise, drawn without drawing
the reports. (Up to n 2^-80: bounded reports are conditioned on their weight.) Who answers is drawn
class by class: coins are binomial, arms multinomial, and a target is reached by a uniformly drawn
subset.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.arguments import as_exact
from chorister.analyst.estimate import Part
from chorister.analyst.fleet import Fleet, ReleasedSums
from chorister.analyst.json_files import require_format, write_atomically
from chorister.analyst.preflight import device_checks, refusal
from chorister.analyst.rehearsal.columns import Ints
from chorister.analyst.rehearsal.drift import DriftingPopulation
from chorister.analyst.rehearsal.population import GroupCounts, Population
from chorister.analyst.rounds import Archive, Round, RoundState
from chorister.analyst.spending import LedgerClasses
from chorister.analyst.study_status import OnProgress, Progress
from chorister.clock import Clock, SettableClock, SystemClock
from chorister.errors import CohortTooSmall, InvalidInput, StudyError
from chorister.policy import Policy
from chorister.privacy.randomizers import AGGREGATORS
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.question import Question
    from chorister.analyst.rehearsal.real_devices import ReportsRehearsal


_FORMAT: Final = "chorister-rehearsal-1"


@overload
def rehearse(
    population: object,
    policy: Policy | str | os.PathLike[str],
    *,
    mode: Literal["law"] = "law",
    later: Sequence[object] = ...,
    device: str = ...,
    count: str = ...,
    devices: int | None = ...,
    device_policy: Policy | None = ...,
    reach: float = ...,
    seed: int | None = ...,
    folder: str | os.PathLike[str] | None = ...,
    clock: Clock | None = ...,
) -> Rehearsal: ...


@overload
def rehearse(
    population: object,
    policy: Policy | str | os.PathLike[str],
    *,
    mode: Literal["reports"],
    device: str = ...,
    count: str = ...,
    devices: int | None = ...,
) -> ReportsRehearsal: ...


def rehearse(
    population: object,
    policy: Policy | str | os.PathLike[str],
    *,
    later: Sequence[object] = (),
    device: str = "device",
    count: str = "count",
    devices: int | None = None,
    device_policy: Policy | None = None,
    reach: float = 1.0,
    mode: Literal["law", "reports"] = "law",
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    clock: Clock | None = None,
) -> Rehearsal | ReportsRehearsal:
    """Simulate a fleet with this population under this policy.

    The policy's file may leave out log, aggregators and keys, which a rehearsal does not use.
    `population` is a table (polars, pandas, Arrow, columns by name, or the path of a .csv or
    .parquet file) whose columns are fields of the policy. Either its rows are events and the column
    `device` says which device each belongs to, or the column `count` says how many devices hold
    each row. Or pass one such table for every stream and profile. `devices` adds devices without
    data; `reach` is the share of devices that come online in a window. With a `folder`, studies are
    kept there and can be resumed; with a `seed`, every run draws the same. `device_policy` is the
    devices' policy, if it differs. `later` has what the same devices hold in the second window of a
    series, in the third, and so on: a population that drifts. The last of them stays.

    With `mode="reports"`, every device is a real one and every report goes through real aggregators
    in this process: for small fleets, and to check that both modes agree. Close it when done.
    """
    rules = policy if isinstance(policy, Policy) else Policy.load_rehearsal(policy)
    if isinstance(population, Population):
        people = population
    else:
        people = Population(population, rules, device=device, count=count, devices=devices)
    if isinstance(later, str) or not isinstance(later, Sequence):
        raise InvalidInput(
            "later lists populations, of the second window, the third one, ...: [population]",
            field="later",
        )
    then = [
        each
        if isinstance(each, Population)
        else Population(each, rules, device=device, count=count, devices=devices)
        for each in later
    ]
    if mode == "reports":
        given = {"seed": seed, "folder": folder, "clock": clock, "device_policy": device_policy,
                 "later": then or None}  # fmt: skip
        unused = [name for name, value in given.items() if value is not None]
        if unused or reach != 1.0:
            raise InvalidInput(
                f"real devices draw at random and live in this process only: leave out "
                f"{', '.join(unused) or 'reach'}"
            )
        from chorister.analyst.rehearsal.real_devices import ReportsRehearsal

        return ReportsRehearsal(people, rules)
    if mode != "law":
        raise InvalidInput(f"mode must be law or reports, not {mode!r}")
    return Rehearsal(
        people,
        rules,
        later=then,
        device_policy=device_policy or rules,
        reach=reach,
        seed=seed,
        folder=None if folder is None else Path(folder),
        clock=clock,
    )


def _margin(reach: float, online: int) -> float:
    """The share of the devices expected online that come almost surely: six standard deviations."""
    if reach == 1.0:
        return 1.0
    return max(min(0.95, 1.0 - 6.0 * math.sqrt((1.0 - reach) / online)), 0.0)


class Rehearsal(Fleet):
    """A simulated fleet: draws what the aggregators would release."""

    def __init__(
        self,
        population: Population,
        policy: Policy,
        *,
        later: Sequence[Population] = (),
        device_policy: Policy,
        reach: float,
        seed: int | None,
        folder: Path | None,
        clock: Clock | None,
    ) -> None:
        if not 0 < as_exact(reach, "reach") <= 1:
            raise InvalidInput(
                f"reach is the share of devices that come online, above 0 and up to 1, not {reach}"
            )
        self.people = DriftingPopulation([population, *later])
        self.population = population
        self.policy = policy
        self.device_policy = device_policy
        # A clock that stands still, so that all rounds fall into one budget period.
        self.clock: Clock = clock or SettableClock(SystemClock().now())
        self.archive = Archive(folder)
        self.devices: int | None = round(self.population.size * reach)
        self.margin = _margin(reach, max(self.devices, 1))
        self.reach = reach
        self.seed = _seed(folder, seed)
        self.identity = f"rehearsal {self.seed}"
        self._ledgers: LedgerClasses[Ints] = LedgerClasses(
            policy=device_policy, fresh=self.people.weights
        )
        self._answered = 0  # rounds whose answers are in the ledgers
        self._waiting: dict[int, Ints] = {}  # answers to collect, by (window,) arm and class
        self._stands_still = clock is None

    def __repr__(self) -> str:
        return f"<Rehearsal of {self.population!r} under {self.policy.name}>"

    def truth(self, question: Question, *, window: int = 0) -> NDArray[np.float64]:
        """The true counts if every device answered, which only a rehearsal knows.

        One per bin, or one row per group. With `uniform` selection, each device counts once, with
        one of its rows drawn at random.
        """
        return self.people.truth(question.recipe(number=1, opens=0), self.seed, window)

    def collector(self, analysis: str) -> str:
        """Return the first collector of the analysis: a rehearsal seals nothing."""
        return self.policy.analyses[analysis].collectors[0]

    def publish(self, round_: Round) -> None:
        """Do nothing: the simulated devices read the archive."""

    def acknowledge(self, round_: Round) -> None:
        """Do nothing: nobody else keeps the result."""

    def withdraw(self, round_: Round) -> None:
        """Do nothing: devices answer only when the result is collected."""

    def is_over(self, round_: Round) -> bool:
        """Whether the window has closed: where time stands still, as soon as you ask."""
        return self._stands_still or super().is_over(round_)

    def progress(self, round_: Round) -> Progress:
        window = round_.window
        return Progress(
            waiting_for="a rehearsal continues when you ask for the result",
            closes=window.closes,
            ends=window.ends,
        )

    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Let the devices answer, and draw what the aggregators would release."""
        del save  # a rehearsal that is killed draws the same again
        recipe = round_.recipe
        self._answer_up_to(round_)
        if round_.number_in_series is None:
            answering = self._waiting.pop(round_.sequence)
        else:
            answering = self._waiting[round_.sequence][round_.number_in_series]
        found = self._group_counts(round_, answering)
        on_progress(Progress(waiting_for="reports are being added up", filled=1.0))
        enough = found.reports >= recipe.privacy.min_cohort
        if not enough.any():
            raise self._too_small(recipe, found)
        return self._release(round_, found, enough)

    def _group_counts(self, round_: Round, answering: Ints) -> GroupCounts:
        """Count what the devices of every group and arm report."""
        recipe, rng = round_.recipe, self._rng(round_, "rows")
        number = round_.number_in_series or 0
        arms = [self.people.answers(recipe, each, rng, number) for each in answering]
        if not recipe.arms:
            return arms[0]
        names = [arm.name for arm in recipe.arms]
        return GroupCounts(
            groups=tuple((*group, name) for group in arms[0].groups for name in names),
            reports=np.stack([arm.reports for arm in arms], axis=1).ravel(),
            counts=np.stack([arm.counts for arm in arms], axis=1).reshape(-1, recipe.encoding.size),
        )

    def _answer_up_to(self, last: Round) -> None:
        """Let the devices answer all rounds up to this one, in the order in which they were asked.

        After a restart this replays earlier rounds: the draws are the same, and so are the ledgers.
        """
        for round_ in self.archive.all_rounds()[self._answered : last.sequence]:
            lost = round_.state is RoundState.FAILED and not round_.published
            # Windows of a series that had closed before it was ended can still be collected.
            ended = round_.state is RoundState.WITHDRAWN
            closed = ended and round_.recipe.series is not None and super().is_over(round_)
            if not lost and (closed or not ended):
                answering = self._answer(round_)
                if closed or round_.state is RoundState.ASKED:
                    self._waiting[round_.sequence] = answering
            self._answered = round_.sequence

    def _release(
        self, round_: Round, found: GroupCounts, enough: NDArray[np.bool_]
    ) -> ReleasedSums:
        recipe, rng = round_.recipe, self._rng(round_, "noise")
        parts = tuple(
            Part(
                group=group,
                reports=int(reports),
                sums=draw_sums(recipe, counts, int(reports), rng),
            )
            for group, reports, counts, released in zip(
                found.groups, found.reports, found.counts, enough, strict=True
            )
            if released
        )
        missing = tuple(
            group for group, released in zip(found.groups, enough, strict=True) if not released
        )
        return ReleasedSums(parts=parts, missing=missing)

    def _answer(self, round_: Round) -> Ints:
        """Draw which devices answer, by arm and class, and charge their ledgers."""
        recipe, rng = round_.recipe, self._rng(round_, "coins")
        nobody = np.zeros((max(len(recipe.arms), 1), len(self.people.weights)), dtype=np.int64)
        refused = refusal(device_checks(recipe, self.device_policy)) is not None
        if recipe.series is not None:
            every = np.zeros((recipe.window_count, *nobody.shape), dtype=np.int64)
            return every if refused else self._answer_series(recipe, every, rng)
        if refused:
            return nobody
        chance = float(recipe.participation.probability) * self.reach

        def take(weight: Ints) -> tuple[Ints, Ints]:
            taken = weight.copy() if chance == 1.0 else rng.binomial(weight, chance)
            return taken, weight - taken

        if round_.target is not None:
            return self._until_target(round_, take, rng)
        taken = self._ledgers.answer(recipe, take, np.add)
        return sum((_by_arm(recipe, each, rng) for each in taken), nobody)

    def _answer_series(self, recipe: Recipe, nobody: Ints, rng: np.random.Generator) -> Ints:
        """Let every device draw its arm and windows, and answer those in which it is online."""
        found = nobody
        chance = float(recipe.participation.probability)

        def split(weight: Ints, most: int) -> dict[int, Ints]:
            taken = weight.copy() if chance == 1.0 else rng.binomial(weight, chance)
            by_answers = {0: weight - taken}
            for arm, devices in enumerate(_by_arm(recipe, taken, rng)):
                answering, often = draw_windows(recipe, devices, most, self.reach, rng)
                found[:, arm] += answering
                for times, count in enumerate(often):
                    by_answers[times] = by_answers.get(times, np.zeros_like(count)) + count
            return by_answers

        self._ledgers.settle(recipe, split, np.add)
        return found

    def _until_target(
        self,
        round_: Round,
        take: Callable[[Ints], tuple[Ints, Ints]],
        rng: np.random.Generator,
    ) -> Ints:
        """The same for a recipe that ends when the smallest part has `target` reports."""
        recipe, target = round_.recipe, round_.target or 0
        names, group_of = self.people.groups_of(recipe.group_by)
        # A dry run on a copy: who would answer?
        dry = LedgerClasses(policy=self._ledgers.policy, fresh=self._ledgers.fresh)
        dry.classes = dict(self._ledgers.classes)
        willing = np.stack(
            [_by_arm(recipe, each, rng) for each in dry.answer(recipe, take, np.add)]
        )  # by ledger, arm and class
        part_of = np.arange(willing.shape[1])[:, None] * len(names) + group_of
        size = len(names) * willing.shape[1]
        parts = np.bincount(part_of.ravel(), willing.sum(axis=0).ravel(), size)
        taken = np.zeros_like(willing)
        for part, kept in enumerate(_stopping_counts(parts, target, rng).tolist()):
            members = part_of == part
            stacked = willing[:, members]
            taken[:, members] = _subset(stacked.ravel(), kept, rng).reshape(stacked.shape)
        queue = iter(taken.sum(axis=1))

        def exactly(weight: Ints) -> tuple[Ints, Ints]:
            chosen = next(queue)
            return chosen, weight - chosen

        self._ledgers.answer(recipe, exactly, np.add)
        answering: Ints = taken.sum(axis=0)
        return answering

    def _too_small(self, recipe: Recipe, found: GroupCounts) -> CohortTooSmall:
        came, least = int(found.reports.max()), recipe.privacy.min_cohort
        refused = refusal(device_checks(recipe, self.device_policy))
        exhausted = self._ledgers.why_nobody(recipe)
        if refused is not None:
            why = f"the devices' policy refuses it ({refused.check}): {refused.why}"
        elif came == 0 and exhausted is not None:
            why = f"no device has the budget for it: {exhausted}"
        else:
            why = "ask a larger share, a longer window or fewer groups"
        return CohortTooSmall(
            f"{came:,} reports when the window closed, but nothing is released below {least:,}; "
            f"{why}",
            reports=came,
            needed=least,
        )

    def _rng(self, round_: Round, purpose: str) -> np.random.Generator:
        """Draws the same for the same round, however often the process is killed."""
        words = [self.seed, round_.sequence, int(round_.digest[:15], 16), *purpose.encode()]
        if round_.number_in_series is not None:
            words.append(round_.number_in_series)
        return np.random.default_rng(words)


def draw_windows(
    recipe: Recipe, devices: Ints, most: int, reach: float, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Draw how many devices of each class answer each window, and how many answer how often.

    Every device draws a subset of the windows. So of those with j windows left to answer, when
    there are w windows left, each answers the next one with the chance j / w, independently. It
    answers if it is online then, and no more than `most` times.
    """
    windows, answers = recipe.window_count, recipe.answers
    state = np.zeros((answers + 1, answers + 1, len(devices)), dtype=np.int64)
    state[answers, 0] = devices  # by windows still to answer, and answers given
    found = np.zeros((windows, len(devices)), dtype=np.int64)
    for number in range(windows):
        after = np.zeros_like(state)
        for left in range(answers + 1):
            if not state[left].any():
                continue
            drawn = rng.binomial(state[left], min(1.0, left / (windows - number)))
            after[left] += state[left] - drawn
            if not left:
                continue
            online = drawn if reach == 1.0 else rng.binomial(drawn, reach)
            online = np.where(np.arange(answers + 1)[:, None] < most, online, 0)
            after[left - 1] += drawn - online
            after[left - 1, 1:] += online[:-1]
            found[number] += online.sum(axis=0)
        state = after
    return found, state[0]


def _by_arm(recipe: Recipe, devices: Ints, rng: np.random.Generator) -> Ints:
    """Let every device draw its arm: one row per arm, one column per class."""
    if not recipe.arms:
        return devices[None, :]
    weights = np.array([arm.weight for arm in recipe.arms], dtype=np.float64)
    drawn: Ints = rng.multinomial(devices, weights / weights.sum()).T
    return drawn


def draw_sums(
    recipe: Recipe, counts: Ints, reports: int, rng: np.random.Generator
) -> NDArray[np.uint64]:
    """Draw the released sums of `reports` devices, of which `counts` hold each bin: exactly."""
    randomizer = recipe.randomizer
    sums = rng.binomial(reports - counts, randomizer.q)
    held = np.flatnonzero(counts)
    sums[held] += rng.binomial(counts[held], randomizer.h)
    if trials := recipe.privacy.noise_trials:
        for _ in range(AGGREGATORS):
            sums += rng.binomial(trials, randomizer.q, size=len(counts))
    return sums.astype(np.uint64)


def _stopping_counts(willing: NDArray[np.int64], target: int, rng: np.random.Generator) -> Ints:
    """Draw how many reports each group has when the last group reaches the target.

    Devices answer at independent uniform times. A group of n reaches the target at a time with the
    distribution Beta(target, n - target + 1); all devices that answer before the last such time
    count. A group that never reaches the target keeps the recipe open to its end.
    """
    counts = willing.astype(np.int64)
    reached = counts >= target
    if not reached.all():
        return counts
    times = rng.beta(target, counts - target + 1)
    last = float(times.max())
    chance = np.where(times < 1.0, (last - times) / np.maximum(1.0 - times, 1e-300), 0.0)
    return target + rng.binomial(counts - target, np.clip(chance, 0.0, 1.0))


def _subset(weights: Ints, kept: int, rng: np.random.Generator) -> Ints:
    """Draw `kept` of all devices without replacement, class by class."""
    if kept >= int(weights.sum()):
        return weights
    if int(weights.sum()) < 10**9:
        drawn: Ints = rng.multivariate_hypergeometric(weights, kept, method="marginals")
        return drawn
    raise InvalidInput("a target can be rehearsed with fewer than 1e9 devices; leave it out")


def _seed(folder: Path | None, seed: int | None) -> int:
    """The seed as given, as stored in the folder, or drawn."""
    given: object = seed
    whole = isinstance(given, SupportsIndex) and not isinstance(given, bool)
    if seed is not None and (not whole or seed < 0):
        raise InvalidInput(f"a seed is a whole number, 0 or above, not {seed!r}", field="seed")
    path = None if folder is None else folder / "rehearsal.json"
    if path is not None and path.exists():
        try:
            tree = json.loads(path.read_bytes())
            require_format(tree, _FORMAT)
            stored = int(tree["seed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StudyError(f"{path} can't be read ({error}): restore it") from None
        if seed is not None and seed != stored:
            raise StudyError(f"{folder} belongs to a rehearsal with the seed {stored}, not {seed}")
        return stored
    chosen = secrets.randbits(48) if seed is None else seed
    if path is not None:
        document = {"format": _FORMAT, "seed": chosen}
        write_atomically(path, json.dumps(document).encode())
    return chosen
