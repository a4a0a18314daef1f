"""The demo's course: servers, devices, a study, a question too many, and what everybody saw."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Protocol

from chorister.aggregator.config import load_config
from chorister.aggregator.progress import TaskStatus, task_status
from chorister.aggregator.service import open_core
from chorister.analyst import fleet as analyst_fleet
from chorister.analyst import rounds as analyst_rounds
from chorister.analyst.live import Connection
from chorister.analyst.profile import Profile
from chorister.cli.demo_stories import Estimate, Round, Story
from chorister.clock import SystemClock
from chorister.device import Sandbox
from chorister.device.audit import Event, Record
from chorister.errors import InternalError
from chorister.fleet.deployment import Deployment
from chorister.fleet.sample_policy import PolicyTerms
from chorister.fleet.simulated import FleetPlan, SimulatedFleet, numbers_of
from chorister.fleet.worker import Done
from chorister.recipe import Recipe, sign
from chorister.transparency.client import RegistryClient
from chorister.transparency.entries import RecipeEntry

__all__ = ["Outcome", "Show", "run_demo", "temporary_place"]

# One report a device, for epsilon 2: a few thousand devices hide each other less well than the
# millions of a real fleet, and the demo says so.
TERMS: Final = PolicyTerms(
    reports=1, epsilon="2", device_epsilon="2", device_reports=1, longest_window="15m"
)
_MARGIN: Final = "0.9"
_BYTES_A_DEVICE: Final = 200_000
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)


class Show(Protocol):
    """Where progress is shown."""

    def step(self, what: str, total: int = 0) -> Callable[[int, int], None]:
        """Begin a step; what is returned is told how far it is."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """All that the demo has to tell."""

    story: Story
    found: Any  # what the algorithm found: it can be drawn and explained
    rounds: list[Round]
    answered: list[int]  # devices, a round
    estimates: list[Estimate]
    spent: list[Done]
    refused: Record
    explained: list[str]  # what the same device says of the refused recipe, check by check
    servers: dict[str, list[TaskStatus]]
    seconds: float
    policy_epsilon: Decimal


@contextmanager
def temporary_place(devices: int) -> Iterator[Path]:
    """A folder that is deleted at the end: in memory where there is room, else on disk."""
    base: Path | None = None
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > devices * _BYTES_A_DEVICE + 10**8:
        base = _MEMORY
    with tempfile.TemporaryDirectory(prefix="chorister-demo-", dir=base) as folder:
        yield Path(folder)


class _DemoConnection(Connection):
    """A live connection whose simulated fleet is told to look at the log when there is news."""

    def __init__(self, deployment: Deployment, fleet: SimulatedFleet, show: Show) -> None:
        profile = Profile.load(deployment.profile)
        super().__init__(
            profile.read_policy(),
            registry=profile.registry,
            author=profile.read_author_key(),
            keypair=profile.read_collector_key(),
            token=profile.read_token(),
            folder=Path(profile.folder),
            devices=profile.devices,
            margin=float(profile.margin),
            pause=lambda seconds: time.sleep(min(seconds, 0.25)),
        )
        self.author = profile.read_author_key()
        self.answered: list[list[int]] = []
        self._deployment = deployment
        self._devices = fleet
        self._show = show

    def gather(
        self,
        round_: analyst_rounds.Round,
        tell: analyst_fleet.Tell,
        keep: Callable[[analyst_rounds.Round], None],
    ) -> analyst_fleet.Gathered:
        """Let the devices answer, then collect without waiting for the window's end."""
        recipe = round_.recipe
        self._show.step(f"round {round_.number}: both aggregators cosign the question")
        self._deployment.await_recipe(recipe)
        through = self._show.step(
            f"round {round_.number}: devices look at the log, decide, answer, upload",
            self.devices or 0,
        )
        done = self._devices.answer(through, again=False)
        self.answered.append(list(numbers_of(done, recipe.id)))
        self._show.step(f"round {round_.number}: leader and helper verify and add up")
        # The simulation knows that nobody else will answer: the least cohort is target enough.
        return super().gather(replace(round_, target=recipe.privacy.min_cohort), tell, keep)


def run_demo(place: Path, story: Story, *, devices: int, seed: int, show: Show) -> Outcome:
    """All of it; the servers are stopped at the end, whatever happens."""
    begun = time.monotonic()
    deployment = Deployment.create(place / "servers", TERMS, devices=devices, margin=_MARGIN)
    plan = FleetPlan(devices=devices, seed=seed, kind=story.people)

    def tell(what: str) -> None:
        show.step(what)

    with (
        deployment.running(tell),
        SimulatedFleet(place / "fleet", deployment, plan) as fleet,
    ):
        fleet.make(show.step("devices, each with a key, a store and a ledger of its own", devices))
        connection = _DemoConnection(deployment, fleet, show)
        study = connection.study("demo", analysis=story.analysis)
        study.bar = False  # the demo shows its own
        run = story.run(study, devices)
        rounds = [
            Round(
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
        spent = fleet.spent(show.step("what each device spent", devices))
        show.step("one question too many")
        refused, explained = ask_too_much(deployment, connection, fleet, rounds[-1].result.recipe)
        servers = {role: _tasks(deployment, role) for role in ("leader", "helper")}
    return Outcome(
        story=story,
        found=run.result,
        rounds=rounds,
        answered=[len(numbers) for numbers in connection.answered],
        estimates=story.rows(run.result, rounds),
        spent=spent,
        refused=refused,
        explained=explained,
        servers=servers,
        seconds=time.monotonic() - begun,
        policy_epsilon=deployment.policy.device.epsilon,
    )


def ask_too_much(
    deployment: Deployment, connection: _DemoConnection, fleet: SimulatedFleet, like: Recipe
) -> tuple[Record, list[str]]:
    """Publish a question about a column that no analysis opens; what one device makes of it."""
    now = SystemClock().now()
    tree = like.model_dump(mode="json", exclude_none=True) | {
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
    entry = RecipeEntry(
        author_key=connection.author.public_key().public_bytes_raw(),
        jws=sign(recipe, connection.author),
    )
    with RegistryClient(deployment.registry) as registry:
        registry.submit(entry)
    deployment.await_recipe(recipe)
    with Sandbox() as sandbox, fleet.device(0, sandbox=sandbox) as device:
        run = device.run_once()
        if recipe.id not in run.refused:
            raise InternalError("a device did not refuse what its policy does not open")
        checks = [f"{each.name}: {each.why}" for each in device.explain(recipe) if not each.passed]
        for record in device.audit.records(newest=5):
            question = record.entry.question
            if record.entry.event is Event.REFUSED and question and question.id == recipe.id:
                return record, checks
    raise InternalError("a refusal is not in the audit log")


def _tasks(deployment: Deployment, role: str) -> list[TaskStatus]:
    """What an operator sees with `chorister tasks list`."""
    config = load_config(deployment.settings(role))
    core = open_core(config, SystemClock(), migrate=False)
    try:
        return task_status(core.database, core.tasks.all())
    finally:
        core.database.close()
