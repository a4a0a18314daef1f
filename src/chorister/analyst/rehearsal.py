"""A rehearsal: the same recipes, checks and accountant as devices, on a simulated fleet.

Nothing is approximated. Given who answers and what they hold, a bin that f of n devices hold sums
to `Bin(f, h) + Bin(n - f, q)`, and a noised crowd adds two independent `Bin(min_cohort - 1, q)`:
the law of the sum of n reports and both aggregators' noise, drawn without drawing the reports. (Up
to n 2^-80: bounded reports are conditioned on their weight.) Who answers is drawn class by class:
coins are binomial, arms multinomial, a target is reached by a uniformly drawn subset.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.files import write_atomically
from chorister.analyst.fleet import Gathered, Progress, Tell
from chorister.analyst.ledgers import Ledgers, refusal
from chorister.analyst.population import Answers, Population
from chorister.analyst.rounds import Archive, Round, State
from chorister.analyst.study import Study
from chorister.analyst.view import Part
from chorister.clock import Clock, SettableClock, SystemClock
from chorister.errors import CohortTooSmall, InvalidInput, StudyError
from chorister.policy import Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.question import Question
    from chorister.analyst.reports import ReportsRehearsal

__all__ = ["Rehearsal", "rehearse"]

Ints: TypeAlias = NDArray[np.int64]
_FORMAT: Final = "chorister-rehearsal-1"


@overload
def rehearse(
    population: object,
    policy: Policy | str | os.PathLike[str],
    *,
    mode: Literal["law"] = "law",
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
    """A simulated fleet with this population, under this policy.

    `population` is a frame (polars, pandas, Arrow, or columns by name) of events by device, its
    columns being fields of the policy and `device` saying whose a row is; or of counts, `count`
    saying how many devices hold a row; or one such frame for every stream and profile. `devices`
    adds devices without data, `reach` is the share of devices that come online in a window. With a
    `folder`, studies are kept there and can be resumed; with a `seed`, chance repeats itself.
    `device_policy` is what the devices have, if not what the analyst has.

    With `mode="reports"` every device is a real one and every report goes through real aggregators
    in this process: for small fleets, and to see that both modes agree. Close it when done.
    """
    rules = policy if isinstance(policy, Policy) else Policy.load(policy)
    if isinstance(population, Population):
        people = population
    else:
        people = Population(population, rules, device=device, count=count, devices=devices)
    if mode == "reports":
        given = {"seed": seed, "folder": folder, "clock": clock, "device_policy": device_policy}
        unused = [name for name, value in given.items() if value is not None]
        if unused or reach != 1.0:
            raise InvalidInput(
                f"real devices draw by themselves and live in this process only: leave out "
                f"{', '.join(unused) or 'reach'}"
            )
        from chorister.analyst.reports import ReportsRehearsal

        return ReportsRehearsal(people, rules)
    if mode != "law":
        raise InvalidInput(f"mode is law or reports, not {mode!r}")
    return Rehearsal(
        people,
        rules,
        device_policy=device_policy or rules,
        reach=reach,
        seed=seed,
        folder=None if folder is None else Path(folder),
        clock=clock,
    )


class Rehearsal:
    """A simulated fleet; `study` begins or resumes a study of it."""

    def __init__(
        self,
        population: Population,
        policy: Policy,
        *,
        device_policy: Policy,
        reach: float,
        seed: int | None,
        folder: Path | None,
        clock: Clock | None,
    ) -> None:
        if not 0.0 < reach <= 1.0:
            raise InvalidInput(f"reach is the share of devices that come online, not {reach}")
        self.population = population
        self.policy = policy
        self.device_policy = device_policy
        self.clock: Clock = clock if clock is not None else _standing_clock()
        self.archive = Archive(folder)
        self.devices: int | None = round(population.size * reach)
        self.margin = 1.0 if reach == 1.0 else 0.95
        self.reach = reach
        self.seed = _seed(folder, seed)
        self.identity = f"rehearsal {self.seed}"
        self._ledgers: Ledgers[Ints] = Ledgers(policy=device_policy, fresh=population.weights)
        self._followed = 0  # rounds whose answers are in the ledgers
        self._waiting: dict[int, Ints] = {}  # who answered rounds not yet collected: arms, classes

    def __repr__(self) -> str:
        return f"<Rehearsal of {self.population!r} under {self.policy.name}>"

    def study(self, name: str, *, analysis: str | None = None) -> Study:
        """Begin a study, or resume the one of this name."""
        if analysis is None:
            if len(self.policy.analyses) != 1:
                raise InvalidInput(f"say which analysis: {', '.join(self.policy.analyses)}")
            analysis = next(iter(self.policy.analyses))
        return Study(self, name, analysis)

    def truth(self, question: Question) -> NDArray[np.float64]:
        """The true counts if every device answered: what only a rehearsal knows.

        One a bin, or a row a group; by `uniform` selection a device counts once, with one of its
        rows drawn by chance.
        """
        return self.population.truth(question.recipe(number=1, opens=0), self.seed)

    # --- What a study asks of a fleet -----------------------------------------------------------

    def collector(self, analysis: str) -> str:
        """Nothing is sealed in a rehearsal: the analysis' first collector."""
        return self.policy.analyses[analysis].collectors[0]

    def publish(self, round_: Round) -> None:
        """The simulated devices read the study's archive."""

    def settle(self, round_: Round) -> None:
        """Nobody keeps anything in a rehearsal."""

    def withdraw(self, round_: Round) -> None:
        """Nothing is on the way in a rehearsal."""

    def progress(self, round_: Round) -> Progress:
        """A rehearsal's round waits only for somebody to ask for it."""
        window = round_.recipe.window
        return Progress(
            waiting_for="a rehearsal goes on when it is asked for the result",
            closes=window.closes,
            ends=window.ends,
        )

    def gather(self, round_: Round, tell: Tell, keep: Callable[[Round], None]) -> Gathered:
        """Let the devices answer and draw what the aggregators would release."""
        del keep  # a rehearsal that is killed draws the same again
        recipe = round_.recipe
        self._follow(round_)
        answering = self._waiting.pop(round_.sequence)
        people = self._held(recipe, answering, self._rng(round_, "rows"))
        tell(Progress(waiting_for="reports are being added up", filled=1.0))
        enough = people.reports >= recipe.privacy.min_cohort
        if not enough.any():
            raise self._too_small(recipe, people)
        return self._release(round_, people, enough)

    def _held(self, recipe: Recipe, answering: Ints, rng: np.random.Generator) -> Answers:
        """What the devices of every group and arm report."""
        arms = [self.population.answers(recipe, each, rng) for each in answering]
        if not recipe.arms:
            return arms[0]
        names = [arm.name for arm in recipe.arms]
        return Answers(
            groups=tuple((*group, name) for group in arms[0].groups for name in names),
            reports=np.stack([arm.reports for arm in arms], axis=1).ravel(),
            counts=np.stack([arm.counts for arm in arms], axis=1).reshape(-1, recipe.encoding.size),
        )

    def _follow(self, last: Round) -> None:
        """Let the devices answer all rounds up to this one, in the order in which they were asked.

        After a restart that is a replay: chance is the same, and so are the ledgers.
        """
        for round_ in self.archive.all_rounds()[self._followed : last.sequence]:
            lost = round_.state is State.FAILED and not round_.published
            if round_.state is not State.WITHDRAWN and not lost:
                answering = self._answer(round_)
                if round_.state is State.ASKED:
                    self._waiting[round_.sequence] = answering
            self._followed = round_.sequence

    def _release(self, round_: Round, people: Answers, enough: NDArray[np.bool_]) -> Gathered:
        recipe, rng = round_.recipe, self._rng(round_, "noise")
        parts = tuple(
            Part(
                group=group,
                reports=int(reports),
                sums=draw_sums(recipe, counts, int(reports), rng),
            )
            for group, reports, counts, released in zip(
                people.groups, people.reports, people.counts, enough, strict=True
            )
            if released
        )
        missing = tuple(
            group for group, released in zip(people.groups, enough, strict=True) if not released
        )
        return Gathered(parts=parts, missing=missing)

    def _answer(self, round_: Round) -> Ints:
        """Which devices answer, by arm and class; their ledgers are charged."""
        recipe, rng = round_.recipe, self._rng(round_, "coins")
        nobody = np.zeros((max(len(recipe.arms), 1), len(self.population.weights)), dtype=np.int64)
        if refusal(recipe, self.device_policy) is not None:
            return nobody
        chance = float(recipe.participation.probability) * self.reach

        def take(weight: Ints) -> tuple[Ints, Ints]:
            taken = weight.copy() if chance == 1.0 else rng.binomial(weight, chance)
            return taken, weight - taken

        if round_.target is not None:
            return self._until_target(round_, take, rng)
        taken = self._ledgers.answer(recipe, take, np.add)
        return sum((_by_arm(recipe, each, rng) for each in taken), nobody)

    def _until_target(
        self,
        round_: Round,
        take: Callable[[Ints], tuple[Ints, Ints]],
        rng: np.random.Generator,
    ) -> Ints:
        """The same, but the recipe ends when the smallest part has `target` reports."""
        recipe, target = round_.recipe, round_.target or 0
        names, group_of = self.population._group_of(recipe.group_by)
        # A dry run on a copy: who would answer in time?
        dry = Ledgers(policy=self._ledgers.policy, fresh=self._ledgers.fresh)
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

    def _too_small(self, recipe: Recipe, people: Answers) -> CohortTooSmall:
        came, least = int(people.reports.max()), recipe.privacy.min_cohort
        refused = refusal(recipe, self.device_policy)
        exhausted = self._ledgers.why_nobody(recipe)
        if refused is not None:
            why = f"the devices' policy refuses it ({refused.check}): {refused.why}"
        elif came == 0 and exhausted is not None:
            why = f"no device has the budget for it: {exhausted}"
        else:
            why = "ask a larger share, for a longer window, or for fewer groups"
        return CohortTooSmall(
            f"{came:,} reports when the window closed, but nothing is released below {least:,}; "
            f"{why}",
            reports=came,
            needed=least,
        )

    def _rng(self, round_: Round, purpose: str) -> np.random.Generator:
        """The same chance for the same round, however often the process is killed."""
        words = [self.seed, round_.sequence, int(round_.digest[:15], 16), *purpose.encode()]
        return np.random.default_rng(words)


def _by_arm(recipe: Recipe, devices: Ints, rng: np.random.Generator) -> Ints:
    """Every device draws its arm: a row an arm, a column a class."""
    if not recipe.arms:
        return devices[None, :]
    weights = np.array([arm.weight for arm in recipe.arms], dtype=np.float64)
    drawn: Ints = rng.multinomial(devices, weights / weights.sum()).T
    return drawn


def draw_sums(
    recipe: Recipe, counts: Ints, reports: int, rng: np.random.Generator
) -> NDArray[np.uint64]:
    """The released sums of `reports` devices of which `counts` hold each bin: the exact law."""
    randomizer = recipe.randomizer
    sums = rng.binomial(reports - counts, randomizer.q)
    held = np.flatnonzero(counts)
    sums[held] += rng.binomial(counts[held], randomizer.h)
    if recipe.privacy.crowd == "noised":
        trials = recipe.privacy.min_cohort - 1
        for _ in range(2):
            sums += rng.binomial(trials, randomizer.q, size=len(counts))
    return sums.astype(np.uint64)


def _stopping_counts(willing: NDArray[np.int64], target: int, rng: np.random.Generator) -> Ints:
    """How many reports each group has when the last one to do so reaches the target.

    Devices answer at independent uniform times. A group of n reaches the target at a time with the
    law Beta(target, n - target + 1); whoever of the others answers before the last such time is
    in. A group that never reaches it keeps the recipe open to its end.
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
    """`kept` of all devices, drawn without replacement, class by class."""
    if kept >= int(weights.sum()):
        return weights
    if int(weights.sum()) < 10**9:
        drawn: Ints = rng.multivariate_hypergeometric(weights, kept, method="marginals")
        return drawn
    raise InvalidInput("a target is rehearsed with fewer than 1e9 devices; leave it out")


def _standing_clock() -> SettableClock:
    """A rehearsal's time stands still: all rounds fall into one budget period."""
    return SettableClock(SystemClock().now())


def _seed(folder: Path | None, seed: int | None) -> int:
    """The seed: as given, as kept in the folder, or drawn."""
    if seed is not None and (isinstance(seed, bool) or seed < 0):
        raise InvalidInput(f"a seed is a whole number from 0, not {seed!r}")
    path = None if folder is None else folder / "rehearsal.json"
    if path is not None and path.exists():
        try:
            stored = int(json.loads(path.read_bytes())["seed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StudyError(f"{path} can't be read ({error}): restore it") from None
        if seed is not None and seed != stored:
            raise StudyError(f"{folder} was rehearsed with the seed {stored}, not {seed}")
        return stored
    chosen = secrets.randbits(48) if seed is None else seed
    if path is not None:
        document = {"format": _FORMAT, "seed": chosen}
        write_atomically(path, json.dumps(document).encode())
    return chosen
