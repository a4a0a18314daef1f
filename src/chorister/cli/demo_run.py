"""The demo: servers, devices, a study, a question that is refused, and what everybody saw."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from chorister.aggregator.config import load_config
from chorister.aggregator.service import open_core
from chorister.aggregator.storage.counters import TaskStatus, task_status
from chorister.analyst.fleet import ReleasedSums
from chorister.analyst.live_fleet import LiveFleet, Profile
from chorister.analyst.rounds import Round
from chorister.analyst.study_status import OnProgress
from chorister.cli.demo_scenarios import Estimate, Scenario, ScenarioRound
from chorister.clock import SystemClock
from chorister.device import Sandbox
from chorister.device.audit import Event, Record
from chorister.errors import InternalError
from chorister.fleet.deployment import Deployment
from chorister.fleet.deployment_files import SampleTerms
from chorister.fleet.device_worker import DeviceOutcome
from chorister.fleet.people import bike_share
from chorister.fleet.simulated_fleet import FleetPlan, SimulatedFleet, devices_that_answered
from chorister.recipe import Recipe

# One report per device, for epsilon 2: a few thousand devices hide each other less well than the
# millions of a real fleet, and the demo says so.
TERMS: Final = SampleTerms(
    reports=1, epsilon="2", device_epsilon="2", device_reports=1, longest_window="15m"
)
_MARGIN: Final = "0.9"
_LAST_POLL_SECONDS: Final = 8
"""How long before a window closes the last device polls: a report is due a few seconds later."""
_BYTES_PER_DEVICE: Final = 200_000
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)


class LiveSteps:
    """Steps on the terminal, with a progress bar for the current one."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: Any = None

    def step(self, what: str, total: int = 0) -> Callable[[int, int], None]:
        """Finish the previous step and begin another; call the result with its progress."""
        self.finish()
        task = self._task = self._bar.add_task(what, total=total or None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def finish(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, total=1, completed=1)
            self._bar.stop_task(self._task)


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoOutcome:
    """Everything that the demo shows."""

    scenario: Scenario
    found: Any  # what the algorithm found: it can be drawn and explained
    rounds: list[ScenarioRound]
    estimates: list[Estimate]
    spent: list[DeviceOutcome]
    refused: Record
    servers: dict[str, list[TaskStatus]]
    seconds: float
    policy_epsilon: Decimal


@contextmanager
def temporary_folder(devices: int) -> Iterator[Path]:
    """A folder that is deleted at the end: in memory if there is room, else on disk."""
    base: Path | None = None
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > devices * _BYTES_PER_DEVICE + 10**8:
        base = _MEMORY
    with tempfile.TemporaryDirectory(prefix="chorister-demo-", dir=base) as folder:
        yield Path(folder)


class _DemoFleet(LiveFleet):
    """A live fleet whose simulated devices poll as soon as there is a new question."""

    def __init__(self, deployment: Deployment, fleet: SimulatedFleet, show: LiveSteps) -> None:
        profile = Profile.load(deployment.profile)
        super().__init__(
            profile.access(),
            folder=Path(profile.folder),
            devices=profile.devices,
            margin=float(profile.margin),
            pause=lambda seconds: time.sleep(min(seconds, 0.25)),
        )
        self.answered: list[list[int]] = []
        self._deployment = deployment
        self._devices = fleet
        self._show = show

    def collect(
        self,
        round_: Round,
        on_progress: OnProgress,
        save: Callable[[Round], None],
    ) -> ReleasedSums:
        """Let the devices answer, then collect without waiting for the window's end."""
        recipe = round_.recipe
        if round_.number_in_series is not None:
            return self._collect_window(round_, on_progress, save)
        self._show.step(f"round {round_.number}: both aggregators cosign the question")
        self._deployment.await_recipe(recipe)
        through = self._show.step(
            f"round {round_.number}: devices poll, decide, answer and upload",
            self.devices or 0,
        )
        done = self._devices.answer(through, again=False)
        self.answered.append(devices_that_answered(done, recipe.id))
        self._show.step(f"round {round_.number}: leader and helper verify and add up the reports")
        # Nobody else will answer, so there is no need to wait for more than the minimum cohort.
        return super().collect(replace(round_, target=recipe.privacy.min_cohort), on_progress, save)

    def is_over(self, round_: Round) -> bool:
        """Whether a window can be collected: the demo waits for each in turn."""
        del round_
        return True

    def _collect_window(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Let people change, then devices answer the window; collect it when it closes."""
        number, recipe, window = round_.number_in_series or 0, round_.recipe, round_.window
        name = f"window {number} of {recipe.window_count}"
        self._show.step(f"{name}: waiting for it to open")
        self._deployment.await_recipe(recipe)
        # Two steps each, so that a few windows show the whole way up.
        self._devices.move(bike_share(2 * number))
        time.sleep(max(0.0, window.opens - time.time()))
        through = self._show.step(f"{name}: devices poll, decide, answer and upload")
        # On a slow machine, a window may close before all devices have polled, or before a report
        # arrives. Those devices don't count in it; polling late, they would answer the next one.
        until = window.closes - _LAST_POLL_SECONDS
        done = self._devices.answer(through, again=False, until=until)
        sent = [each for each in done if each.uploaded]
        self.answered.append(devices_that_answered(sent, recipe.id))
        self._show.step(f"{name}: waiting for it to close, and for the sums of both aggregators")
        return super().collect(round_, on_progress, save)


def run_demo(
    place: Path, scenario: Scenario, *, devices: int, seed: int, show: LiveSteps
) -> DemoOutcome:
    """Run the whole demo. The servers are stopped at the end, whatever happens."""
    begun = time.monotonic()
    deployment = Deployment.create(place / "servers", TERMS, devices=devices, margin=_MARGIN)
    plan = FleetPlan(devices=devices, seed=seed, kind=scenario.people)
    with ExitStack() as stack:
        fleet = stack.enter_context(SimulatedFleet(place / "fleet", deployment, plan))
        fleet.start()  # meanwhile the servers start
        stack.enter_context(deployment.running(show.step))
        fleet.make(show.step("creating devices, each with its own key, store and ledger", devices))
        connection = _DemoFleet(deployment, fleet, show)
        study = connection.study("demo", analysis=scenario.analysis)
        study.bar = False  # the demo shows its own progress
        run = scenario.run(study, devices)
        rounds = [
            ScenarioRound(
                result=step.result,
                people=[fleet.people[number] for number in connection.answered[step.number - 1]],
            )
            for step in run
        ]
        for round_ in rounds:
            if round_.result.n_reports != len(round_.people):
                raise InternalError(
                    f"{len(round_.people)} devices answered round {round_.result.round}, but "
                    f"{round_.result.n_reports} reports were counted"
                )
        spent = fleet.spent(show.step("reading what each device spent", devices))
        show.step("asking a question that devices refuse")
        refused = _ask_too_much(deployment, connection, fleet, rounds[-1].result.recipe)
        servers = {role: _tasks(deployment, role) for role in ("leader", "helper")}
    return DemoOutcome(
        scenario=scenario,
        found=run.result,
        rounds=rounds,
        estimates=scenario.rows(run.result, rounds),
        spent=spent,
        refused=refused,
        servers=servers,
        seconds=time.monotonic() - begun,
        policy_epsilon=deployment.policy.device.epsilon,
    )


def _ask_too_much(
    deployment: Deployment, connection: _DemoFleet, fleet: SimulatedFleet, like: Recipe
) -> Record:
    """Publish a question about a column that no analysis may read; return one device's refusal."""
    now = SystemClock().now()
    tree = like.model_dump(mode="json", exclude={"series", "periods"}, exclude_none=True) | {
        "id": "whom-do-you-write-to",
        "study": "curiosity",
        "query": "SELECT recipient AS whom FROM keyboard",
        "reads": {"keyboard": ["recipient"]},
        "features": [{"kind": "categories", "column": "whom", "values": ["friend-1", "friend-2"]}],
        "selection": "uniform",
        "deny": [],
        "window": {"opens": now, "closes": now + 300, "ends": now + 600},
        "participation": {"probability": "1", "once_per_study": False},
    }
    recipe = Recipe.model_validate(tree)
    connection.publish_recipe(recipe)
    deployment.await_recipe(recipe)
    with Sandbox() as sandbox, fleet.device(0, sandbox=sandbox) as device:
        time.sleep(device.quiet_seconds())
        run = device.run_once()
        if recipe.id not in run.refused:
            raise InternalError("a device did not refuse a question that its policy does not allow")
        for record in device.audit.records(newest=5):
            question = record.entry.question
            if record.entry.event is Event.REFUSED and question and question.id == recipe.id:
                return record
    raise InternalError("a refusal is missing from the audit log")


def _tasks(deployment: Deployment, role: str) -> list[TaskStatus]:
    """What an operator sees with `chorister tasks list`."""
    config = load_config(deployment.settings(role))
    core = open_core(config, SystemClock(), migrate=False)
    try:
        return task_status(core.database, core.tasks.all())
    finally:
        core.database.close()
