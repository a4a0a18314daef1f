"""A pair of aggregators in one process: real databases, real cryptography, calls for messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from chorister._native import HPKEKeypair
from chorister.aggregator.http.leader_routes import recipe_progress
from chorister.aggregator.http.report_writer import ReportWriter
from chorister.aggregator.jobs.aggregation_job_driver import AggregationJobDriver
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.jobs.garbage_collector import GarbageCollector
from chorister.aggregator.jobs.helper import Helper
from chorister.aggregator.jobs.release import CollectedFile, sample_noise
from chorister.aggregator.known_tasks import KnownTask, Noise
from chorister.aggregator.service import LeaderJobs
from chorister.aggregator.storage.batches import CollectionRef
from chorister.aggregator.storage.counters import TaskStatus, task_status
from chorister.aggregator.storage.database import Database, Sealer
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.schema import metadata
from chorister.aggregator.storage.tasks import TaskStore
from chorister.canonical import WIRE, sha256
from chorister.clock import SettableClock
from chorister.dap.draft import Problem, Role, aggregate_share_info
from chorister.dap.helper_client import HelperClient
from chorister.dap.messages import (
    AggregateShareAad,
    CollectionJobReq,
    CollectionJobResp,
    Query,
)
from chorister.dap.task import AdvertisedTask, task_binding
from chorister.dap.upload_messages import UploadErrors
from chorister.errors import ProblemError
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, sign
from tests.keyboard import ANALYSIS, AUTHOR, changed, policy_tree, recipe_tree

LEADER_URL = "https://leader.example.org/dap/"
HELPER_URL = "https://helper.example.net/dap/"
NOW = 1_794_787_200  # the example recipe's answer period opens
Counts = npt.NDArray[np.uint64]


@lru_cache
def collector_keys() -> HPKEKeypair:
    return HPKEKeypair.generate(7)


def collector_digest() -> bytes:
    return sha256(collector_keys().config)


@lru_cache
def small_policy() -> Policy:
    """The example policy, for cohorts of two and up, with this world's collector."""
    analysis = f"analyses/{ANALYSIS}"
    budget = {"local_epsilon": 8, "epsilon": 8, "delta": Decimal("1e-6"), "reports": 1}
    return Policy.model_validate(
        changed(
            policy_tree(),
            {
                "device/epsilon": 8,
                f"{analysis}/collectors": [collector_digest().hex()],
                f"{analysis}/cohort/smallest": 2,
                f"{analysis}/crowds": ["noised", "honest"],
                f"{analysis}/honest_fraction": "1/1",
                f"{analysis}/report_kinds": ["bounded", "plain"],
                f"{analysis}/budget/epsilon": 8,
                f"{analysis}/fields/user.age": budget,
            },
        )
    )


def small_recipe(
    *,
    min_cohort: int = 3,
    bins: int = 4,
    crowd: str = "noised",
    group_by: Sequence[str] = (),
    local_epsilon: str = "2",
    report: str = "bounded",
    **changes: Any,
) -> Recipe:
    """A question about ages with few bins (OOV is one of them) and a tiny cohort."""
    edges = [str(10 * (place + 1)) for place in range(bins)]
    privacy: dict[str, Any] = recipe_tree()["privacy"] | {
        "local_epsilon": local_epsilon,
        "epsilon": "4",
        "min_cohort": min_cohort,
        "crowd": crowd,
        "report": report,
    }
    if crowd == "honest":
        privacy["honest_fraction"] = "1/1"
    tree = changed(
        recipe_tree(),
        {
            "collector": collector_digest().hex(),
            "query": "SELECT user.age AS age FROM user",
            "reads": {"user": ["age"]},
            "features": [{"kind": "intervals", "column": "age", "edges": edges}],
            "group_by": list(group_by),
            "privacy": privacy,
        }
        | changes,
    )
    return Recipe.model_validate(tree, context=WIRE)


def signed(recipe: Recipe) -> SignedRecipe:
    return SignedRecipe.parse(sign(recipe, AUTHOR))


class Recorded:
    """Draws noise as an aggregator does, and remembers each draw."""

    def __init__(self) -> None:
        self.draws: list[Counts] = []

    def __call__(self, bins: int, noise: Noise) -> bytes:
        drawn = sample_noise(bins, noise)
        self.draws.append(np.frombuffer(drawn, np.uint64))
        return drawn


@dataclass
class DirectHelper(HelperClient):
    """The leader's way to the helper: a call. Requests and answers can be lost on the way."""

    helper: Callable[[], HelperSide]
    before: Callable[[bytes], None] = lambda _request: None
    after: Callable[[bytes], None] = lambda _answer: None

    def create_aggregation_job(self, task: AdvertisedTask, request: bytes) -> bytes:
        self.before(request)
        answer = self.helper().create_job(self._known(task), request).body
        self.after(answer)
        return answer

    def aggregate_share(self, task: AdvertisedTask, request: bytes) -> bytes:
        self.before(request)
        answer = self.helper().create_share(self._known(task), request).body
        self.after(answer)
        return answer

    def _known(self, task: AdvertisedTask) -> KnownTask:
        known = self.helper().tasks.find(task.task_id)
        if known is None:
            raise ProblemError(Problem.INVALID_TASK, "not one of ours", task_id=task.task_id)
        return known


@dataclass(frozen=True, kw_only=True)
class LeaderSide(LeaderJobs):
    """A leader's parts with what they share."""

    database: Database
    tasks: TaskStore
    keys: KeyRing
    clock: SettableClock
    garbage_collector: GarbageCollector

    def status(self, tasks: Sequence[KnownTask]) -> list[TaskStatus]:
        return task_status(self.database, tasks)

    def progress(self, recipe_digest: bytes) -> dict[str, object]:
        statuses = self.status(self.tasks.of_recipe(recipe_digest))
        return recipe_progress(statuses, self.clock.now())


class HelperSide(Helper):
    """A helper with what its parts share."""

    def __init__(
        self,
        database: Database,
        tasks: TaskStore,
        keys: KeyRing,
        clock: SettableClock,
        **settings: Any,
    ) -> None:
        super().__init__(database, keys, clock, **settings)
        self.database = database
        self.tasks = tasks
        self.keys = keys
        self.garbage_collector = GarbageCollector(database, tasks, keys, clock)

    def status(self, tasks: Sequence[KnownTask]) -> list[TaskStatus]:
        return task_status(self.database, tasks)


OpenDatabase: TypeAlias = Callable[[str, Role, Sealer], Database]


def _open(url: str, role: Role, sealer: Sealer) -> Database:
    return Database.open(url, role=role, sealer=sealer, migrate=True)


class Pair:
    """A leader and a helper, each with a database, an at-rest key and a clock of its own."""

    def __init__(
        self,
        urls: tuple[str, str],
        *,
        policies: Sequence[Policy] | None = None,
        now: int = NOW,
        threads: int = 1,
        open_database: OpenDatabase = _open,
    ) -> None:
        self.urls = urls
        self.policies = list(policies or [small_policy()])
        self.clock = SettableClock(now)
        self.helper_clock = SettableClock(now)
        self.verify_key_init = os.urandom(32)
        self.collectors = {collector_digest(): collector_keys().config}
        self.sealers = (Sealer(os.urandom(32)), Sealer(os.urandom(32)))
        self.noise = (Recorded(), Recorded())
        self.wire = DirectHelper(lambda: self.helper)
        self.threads = threads
        self.open_database = open_database
        self.collected_file: CollectedFile | None = None  # the leader's
        self.databases: list[Database] = []
        self.start()
        for keys in (self.leader.keys, self.helper.keys):
            keys.publish(keys.generate())

    @classmethod
    def in_folder(cls, folder: Path, **settings: Any) -> Pair:
        return cls((f"sqlite:///{folder}/leader.db", f"sqlite:///{folder}/helper.db"), **settings)

    def start(self) -> None:
        """Reopen both databases, as two new processes do."""
        self.stop()
        roles = (Role.LEADER, Role.HELPER)
        self.databases = [
            self.open_database(url, role, sealer)
            for url, role, sealer in zip(self.urls, roles, self.sealers, strict=True)
        ]
        self.leader = self.make_leader(self.databases[0])
        self.helper = self.make_helper(self.databases[1])

    def stop(self) -> None:
        for database in self.databases:
            database.close()
        self.databases = []

    def make_leader(self, database: Database) -> LeaderSide:
        keys = KeyRing(database, self.clock, checkpoint_max_age=3600)
        tasks = TaskStore(
            database, self.clock, url=LEADER_URL, role=Role.LEADER, policies=self.policies
        )
        return LeaderSide(
            database=database,
            tasks=tasks,
            keys=keys,
            clock=self.clock,
            garbage_collector=GarbageCollector(database, tasks, keys, self.clock),
            writer=ReportWriter(database, keys, self.clock),
            aggregation=AggregationJobDriver(
                database,
                tasks,
                keys,
                self.clock,
                verify_key_init=lambda _: self.verify_key_init,
                helper=self.wire,
                threads=self.threads,
            ),
            collection=CollectionJobDriver(
                database,
                tasks,
                self.clock,
                helper=self.wire,
                collectors=self.collectors,
                sample=self.noise[0],
                collected=self.collected_file,
            ),
        )

    def make_helper(self, database: Database) -> HelperSide:
        keys = KeyRing(database, self.helper_clock, checkpoint_max_age=3600)
        tasks = TaskStore(
            database, self.helper_clock, url=HELPER_URL, role=Role.HELPER, policies=self.policies
        )
        return HelperSide(
            database,
            tasks,
            keys,
            self.helper_clock,
            verify_key_init=lambda _: self.verify_key_init,
            collectors=self.collectors,
            threads=self.threads,
            sample=self.noise[1],
        )

    # --- the world around them ------------------------------------------------------------------

    def accept(self, *recipes: Recipe) -> list[KnownTask]:
        """Both aggregators see the recipes in the log; the leader's tasks."""
        found = [signed(recipe) for recipe in recipes]
        self.leader.tasks.accept(found)
        self.helper.tasks.accept(found)
        return [task for recipe in recipes for task in self.leader.tasks.of_recipe(recipe.digest)]

    def set_clocks(self, now: int) -> None:
        self.clock.set(now)
        self.helper_clock.set(now)

    def reports(
        self,
        task: KnownTask,
        bits: npt.NDArray[np.uint8],
        *,
        ids: Sequence[bytes] | None = None,
        time: int | None = None,
    ) -> list[bytes]:
        """One sealed report for each row."""
        return task_binding(task.configuration).seal_reports(
            np.ascontiguousarray(bits),
            report_ids=b"".join(ids) if ids is not None else os.urandom(16 * len(bits)),
            time=task.interval.start if time is None else time,
            leader_config=self.leader.keys.published()[0],
            helper_config=self.helper.keys.published()[0],
            threads=1,
        )

    def upload(self, task: KnownTask, *reports: bytes) -> UploadErrors:
        (errors,) = self.leader.writer.store([self.leader.writer.check(task, b"".join(reports))])
        return errors

    def work(self) -> list[str]:
        """Run all jobs once, as the server's loop does; why some of them wait."""
        while self.leader.aggregation.create_jobs(16):
            pass
        steps = [self.leader.aggregation.step(job) for job in self.leader.aggregation.unfinished()]
        steps += [self.leader.collection.step(each) for each in self.leader.collection.pending()]
        return [step.reason for step in steps if step.reason is not None]

    def collect(self, task: KnownTask) -> CollectionRef:
        return self.leader.collection.create(task, collection_request(task), collector_digest())

    def result(self, task: KnownTask) -> tuple[int, Counts] | None:
        """What the collector gets: how many reports, and the noisy sum."""
        ref = self.collect(task)
        found = self.leader.collection.result(task, ref.collection_id, collector_digest())
        return opened(task, found) if isinstance(found, CollectionJobResp) else None

    def row_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rows of each table, in both databases."""
        counted = []
        for database in self.databases:
            with database.read() as connection:
                counted.append(
                    {
                        name: connection.scalar(select(func.count()).select_from(table)) or 0
                        for name, table in metadata.tables.items()
                    }
                )
        return counted[0], counted[1]


def collection_request(task: KnownTask) -> bytes:
    return CollectionJobReq(query=Query.of(task.interval)).encode()


def opened(task: KnownTask, response: CollectionJobResp) -> tuple[int, Counts]:
    """What the collector does with its key."""
    aad = AggregateShareAad(
        task_id=task.task_id,
        task_configuration=task.configuration,
        collection_job_req=CollectionJobReq.decode(collection_request(task)),
    ).encode()
    shares = [
        collector_keys().open(sealed, aggregate_share_info(sender), aad)
        for sealed, sender in (
            (response.leader_encrypted_agg_share, Role.LEADER),
            (response.helper_encrypted_agg_share, Role.HELPER),
        )
    ]
    trials = task.noise.trials if task.noise else 0
    summed = task.vdaf.unshard(*shares, count=response.report_count, noise_trials=trials)
    return response.report_count, np.frombuffer(summed, np.uint64)


def one_bit(bins: int, places: Sequence[int]) -> npt.NDArray[np.uint8]:
    """One report a place, with that bit set."""
    bits = np.zeros((len(places), bins), np.uint8)
    bits[np.arange(len(places)), list(places)] = 1
    return bits
