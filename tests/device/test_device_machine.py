"""A hypothesis state machine: donations, recipes, crashes, clocks, lost answers, policy updates.

The model is what left: every report that the leader saw, and every charge that was ever in the
ledger, whatever was restored since. Whatever the order of events, no recipe and no window of a
series has two reports, nothing left that was not charged, the query never ran twice for a charge,
no limit is exceeded, no device answers more windows than a series allows, and the logs verify.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chorister._native import scan_reports
from chorister.device.ledger.ledger_entries import Charged, Created, PolicyTaken
from chorister.device.run import RunStep
from chorister.errors import Unreachable
from chorister.policy import Policy
from chorister.recipe import Recipe
from tests.device.home import Home, the_sandbox
from tests.device.world import ANALYSIS, DAY, NOW, a_generous_policy, a_recipe
from tests.keyboard import RECIPE, REMOVE
from tests.logworld import OTHER_ANALYSIS

LIMIT = Decimal("1")
REPORTS = 7
SHORTEST = 2 * DAY  # of all periods, and each of them is a multiple
RENAMED = "keyboard.renamed"
GARBAGE = b"not a head"


class Killed(BaseException):
    """The process ended here; what was not committed is gone."""


def policy(
    limit: Decimal,
    *,
    period: str | None = None,
    composition: Any = "basic",
    analysis: str = ANALYSIS,
    perplexity: bool = True,
    answers: int | None = 3,
) -> Policy:
    """Without a period at first: what is charged then never renews, whatever comes."""
    changes: dict[str, Any] = {
        "device/epsilon": limit,
        "device/reports": REPORTS,
        "device/period": period or REMOVE,
        f"analyses/{ANALYSIS}/budget/period": period or REMOVE,
        "device/composition": composition,
    }
    if answers is not None:
        limits = {"windows": 6, "longest": "13d", "answers": answers, "cells": 30}
        changes[f"analyses/{ANALYSIS}/series"] = limits
    if not perplexity:
        for name in (ANALYSIS, OTHER_ANALYSIS):
            changes[f"analyses/{name}/fields/keyboard.perplexity"] = REMOVE
        changes["streams/keyboard/fields/perplexity"] = REMOVE
    tree = json.loads(a_generous_policy(changes).model_dump_json())
    tree["analyses"][analysis] = tree["analyses"].pop(ANALYSIS)
    return Policy.model_validate_json(json.dumps(tree))


class SharedSandbox:
    """The real one; it counts how often each query runs."""

    def __init__(self, queries: Counter[str]) -> None:
        self._queries = queries

    def choose(self, query: str, *arguments: Any, **options: Any) -> Any:
        self._queries[query] += 1
        return the_sandbox().choose(query, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(the_sandbox(), name)


class DeviceMachine(RuleBasedStateMachine):
    """One device, its person, its host app, and a world that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.home = Home(Path(self.folder.name), policy(LIMIT))
        self.largest = LIMIT
        self.analysis = ANALYSIS
        self.has_perplexity = self.is_basic = True
        self.charged: dict[tuple[str, int | None], Decimal] = {}  # ever, by recipe and window
        # Of each, the shortest period in which it was charged; None if it never renews.
        self.periods: dict[tuple[str, int | None], int | None] = {}
        self.ended: dict[str, set[int | None]] = {}  # what was charged when a recipe ended
        self.asked: list[Recipe] = []  # published at some time; `recipes` are listed now
        self.backup: Path | None = None
        self.restored = False
        self.recipes: list[Recipe] = []
        self.kill_at: RunStep | None = None
        self.queries: Counter[str] = Counter()
        self.head = self.home.folder / "elsewhere" / "head"
        self._restart()

    def teardown(self) -> None:
        self.home.device.close()
        self.folder.cleanup()

    def _restart(self) -> None:
        self.kill_at = None
        self.home.restart(hook=self._hook, sandbox=SharedSandbox(self.queries))

    def _hook(self, step: RunStep) -> None:
        if step is self.kill_at:
            raise Killed

    def _run(self, *, upload: bool) -> None:
        device = self.home.device
        try:
            if upload:
                device.upload_due()
            else:
                self.home.network.log.publish(self.recipes, time=self.home.clock.now())
                device.run_once()
        except Killed:
            self._restart()
        self.kill_at = None

    @rule(words=st.sampled_from(["hello world you", "how are you", "nothing"]))
    def donate(self, words: str) -> None:
        event = {"ngram": words, "perplexity": 1.0}
        if not self.has_perplexity:
            del event["perplexity"]
        self.home.device.donate("keyboard", event)

    @precondition(lambda self: len(self.asked) < 12)
    @rule(
        coin=st.sampled_from(["1", "1", "0.5"]),
        once=st.booleans(),
        answers=st.sampled_from([None, 1, 2, 3]),
    )
    def ask(self, coin: str, once: bool, answers: int | None) -> None:
        changes: dict[str, Any] = {
            "participation/probability": coin,
            "participation/once_per_study": once,
            "analysis": self.analysis,
            "study": f"study-{len(self.asked) % 3}",
            "query": f"{RECIPE.query} LIMIT {1000 + len(self.asked)}",
            "window": {"opens": NOW - DAY, "closes": NOW + 12 * DAY, "ends": NOW + 13 * DAY},
        }
        if answers is not None:
            # The first windows are over at times, the last ones have not opened yet.
            changes["window"] = {"opens": NOW - DAY, "closes": NOW + DAY, "ends": NOW + 2 * DAY}
            changes["series"] = {"windows": 6, "every": 2 * DAY, "answers": answers}
            changes["periods"] = {"keyboard": 2 * DAY}
        self.asked.append(a_recipe(f"r{len(self.asked)}", changes))
        self.recipes.append(self.asked[-1])
        self._run(upload=False)

    @precondition(lambda self: self.recipes and self.head.exists())
    @rule(place=st.integers(0, 11))
    def end_a_recipe(self, place: int) -> None:
        """Its author ends it: from now on it is not listed."""
        self._restart()
        self.home.run()  # which recovers what a crash left charged
        recipe = self.recipes.pop(place % len(self.recipes))
        self.ended[recipe.digest.hex()] = self._charged_windows(recipe)

    def _note_charges(self) -> None:
        entries = self.home.device._opened().ledger.entries()
        charged = [entry.charge for entry in entries if isinstance(entry, Charged)]
        assert len({(charge.recipe, charge.window) for charge in charged}) == len(charged)
        offset, renews = 0, False
        for entry in entries:
            if isinstance(entry, Created):
                offset = entry.offset
            elif isinstance(entry, PolicyTaken):
                renews = entry.terms.device.period is not None
            elif isinstance(entry, Charged):
                key = (entry.charge.recipe, entry.charge.window)
                self.charged[key] = entry.charge.privacy.epsilon
                self.periods[key] = (entry.time + offset) // SHORTEST if renews else None

    def _charged_windows(self, recipe: Recipe) -> set[int | None]:
        self._note_charges()
        return {window for digest, window in self.charged if digest == recipe.digest.hex()}

    @rule()
    def to_the_next_window(self) -> None:
        opens = [recipe.next_opening(self.home.clock.now()) for recipe in self.recipes]
        self.home.clock.set(min((time for time in opens if time is not None), default=NOW) + 60)
        self._run(upload=False)

    @rule()
    def lose_everything_but_the_ledger(self) -> None:
        """Whatever says what was drawn and decided is gone; the ledger alone counts."""
        connection = self.home.device._opened().connection
        for table in ("attempts", "draws", "outbox", "refusals"):
            connection.execute(f"DELETE FROM {table}")  # noqa: S608
        self._run(upload=False)

    @rule()
    def poll(self) -> None:
        self._run(upload=False)

    @rule(step=st.sampled_from(RunStep))
    def crash(self, step: RunStep) -> None:
        self.kill_at = step
        self._run(upload=False)

    @rule(step=st.sampled_from([RunStep.UPLOADING, RunStep.ANSWERED, RunStep.NOTED]))
    def crash_while_uploading(self, step: RunStep) -> None:
        self.home.clock.advance(3600)
        self.kill_at = step
        self._run(upload=True)

    @rule()
    def restart(self) -> None:
        self._restart()

    @rule(seconds=st.integers(1, DAY))
    def wait(self, seconds: int) -> None:
        self.home.clock.advance(seconds)
        self._run(upload=True)

    @rule(seconds=st.integers(-30 * DAY, 30 * DAY))
    def lie_about_the_time(self, seconds: int) -> None:
        now = self.home.clock.now()
        self.home.clock.set(now + seconds)
        self.home.run()
        self.home.clock.set(now)

    @rule(count=st.integers(1, 3))
    def lose_answers(self, count: int) -> None:
        self.home.network.answers.extend([Unreachable("the answer was lost")] * count)

    @rule(
        limit=st.sampled_from(["0.5", "1", "2"]),
        period=st.sampled_from([None, f"{SHORTEST // DAY}d", "180d"]),
        composition=st.sampled_from(["basic", "basic", {"renyi": 64}]),
        analysis=st.sampled_from([ANALYSIS, RENAMED]),
        perplexity=st.booleans(),
        answers=st.sampled_from([None, 1, 3, 3]),
    )
    def update_the_policy(
        self,
        limit: str,
        period: str | None,
        composition: Any,
        analysis: str,
        perplexity: bool,
        answers: int | None,
    ) -> None:
        self.home.policy = policy(
            Decimal(limit),
            period=period,
            composition=composition,
            analysis=analysis,
            perplexity=perplexity,
            answers=answers,
        )
        self.largest = max(self.largest, Decimal(limit))
        self.analysis, self.has_perplexity = analysis, perplexity
        self.is_basic &= composition == "basic"
        self._restart()

    @rule()
    def back_up(self) -> None:
        self.home.device.close()
        self.backup = self.home.folder / "backup"
        shutil.rmtree(self.backup, ignore_errors=True)
        shutil.copytree(self.home.folder / "device", self.backup)

    # While the head is lost, a backup in the ledger's place can't be noticed either.
    @precondition(lambda self: self.backup is not None and self.head.exists())
    @rule()
    def restore(self) -> None:
        assert self.backup is not None
        self.home.device.close()
        shutil.rmtree(self.home.folder / "device")
        shutil.copytree(self.backup, self.home.folder / "device")
        self.restored = True
        self._restart()
        self._run(upload=False)

    # A run that must not send yet does not write a lost head again.
    @precondition(lambda self: self.head.exists())
    @rule()
    def find_a_damaged_head(self) -> None:
        head = self.head
        kept = head.read_bytes()
        head.write_bytes(GARBAGE)
        before = len(self.home.network.posts)
        self._run(upload=False)
        assert len(self.home.network.posts) == before
        assert head.read_bytes() == GARBAGE
        head.write_bytes(kept)

    @precondition(lambda self: not self.restored)  # both together can't be noticed
    @rule()
    def lose_the_head(self) -> None:
        self.head.unlink(missing_ok=True)
        self._run(upload=False)

    @rule()
    def change_consent(self) -> None:
        self.home.device.opt_out(purge=False)
        self.home.run()
        self.home.device.opt_in()

    @invariant()
    def no_recipe_has_two_reports(self) -> None:
        bodies: dict[str, set[bytes]] = {}
        for url, _, body in self.home.network.posts:
            bodies.setdefault(url, set()).add(body)
        # What is restored to a moment between charge and report is finished as OOV, under the id
        # that was drawn: the leader takes the first.
        assert self.restored or all(len(each) == 1 for each in bodies.values())
        identifiers = {scan_reports(body).ids for each in bodies.values() for body in each}
        assert len(identifiers) == len(bodies)

    @invariant()
    def what_left_was_charged_and_fits(self) -> None:
        self._note_charges()
        assert len({url for url, _, _ in self.home.network.posts}) <= len(self.charged)
        for period in {None, *self.periods.values()}:
            # What never renews counts in every period, whichever was charged first.
            counted = [
                epsilon
                for key, epsilon in self.charged.items()
                if self.periods[key] in (None, period)
            ]
            assert len(counted) <= REPORTS
            if self.is_basic:
                assert sum(counted, Decimal(0)) <= self.largest

    @invariant()
    def no_device_answers_more_windows_than_allowed(self) -> None:
        for recipe in self.asked:
            charged = self._charged_windows(recipe)
            assert len(charged) <= recipe.answers
            assert (None in charged) <= (recipe.series is None)
            assert self.ended.get(recipe.digest.hex(), charged) == charged

    @invariant()
    def no_query_ran_twice(self) -> None:
        for recipe in self.asked:
            assert self.queries[recipe.query] <= len(self._charged_windows(recipe))

    @invariant()
    def the_logs_verify(self) -> None:
        self.home.device.verify()


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
