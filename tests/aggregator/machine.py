"""Random operations on a pair, and a model that knows which reports must be counted.

Whatever is done to the pair (copies, lost messages, deaths at any statement, power cuts, wrong
clocks, new keys), a result is exact or absent: the sum of precisely the reports that the helper
holds as added, all of which were uploaded, and all that were acknowledged; plus the noise that was
committed. When the faults stop, the result comes by itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import select

from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.reports import JobRef
from chorister.aggregator.storage.schema import BatchState, batches, report_ids
from chorister.canonical import sha256
from chorister.dap.draft import Problem, ReportError
from chorister.dap.messages import CollectionJobResp
from chorister.errors import ProblemError, Unreachable
from tests.aggregator.faults import (
    FragileDatabase,
    Opener,
    SQLiteFiles,
    Template,
    fast_folder,
)
from tests.aggregator.world import (
    NOW,
    Counts,
    Pair,
    collection_request,
    collector_digest,
    one_bit,
    opened,
    small_recipe,
)
from tests.simulated_disk import Crash

BINS = 3
SIDES = st.sampled_from([0, 1])
# What befalls one operation: nothing, a lost message, or death of a side at its n-th statement.
FATES = st.one_of(
    st.none(),
    st.sampled_from(["request", "answer"]),
    st.tuples(SIDES, st.integers(0, 30)),
)


@dataclass
class Expected:
    """One task, as the model sees it."""

    task: KnownTask
    places: dict[bytes, int] = field(default_factory=dict)  # valid reports by id: the bit set
    bytes_of: dict[bytes, bytes] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)
    result: bytes | None = None  # what the collector saw first
    deleted: bool = False  # the collector deleted a result: there will be no other
    over: bool = False  # some clock has seen the task's end, and a sweep ran


Fate: TypeAlias = tuple[int, int] | str | None


class PairMachine(RuleBasedStateMachine):
    """On SQLite; a subclass runs the same on PostgreSQL."""

    template: ClassVar[Template | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = fast_folder()
        self.drop = ""
        self.refs: list[JobRef] = []
        self.disks: list[SQLiteFiles] = []
        self.pair = Pair(self.make_urls(), open_database=Opener())
        self.pair.wire.before = lambda _: self.lose("request")
        self.pair.wire.after = lambda _: self.lose("answer")
        self.watch_disks()

    def make_urls(self) -> tuple[str, str]:
        cls = type(self)
        if cls.template is None:
            cls.template = Template()
        paths = [self.folder / "leader.db", self.folder / "helper.db"]
        self.disks = [SQLiteFiles(path) for path in paths]
        return cls.template.copy(paths[0]), cls.template.copy(paths[1])

    def watch_disks(self) -> None:
        for side, disk in enumerate(self.disks):
            self.fragile(side).on_durable = disk.sync
            disk.sync()

    def lose(self, what: str) -> None:
        if self.drop == what:
            self.drop = ""
            raise Unreachable(f"the {what} is lost")

    @initialize()
    def recipes(self) -> None:
        tasks = self.pair.accept(
            small_recipe(min_cohort=3, bins=BINS, id="noised"),
            small_recipe(min_cohort=2, bins=BINS, crowd="honest", id="honest"),
        )
        self.expected = [Expected(task) for task in tasks]

    # --- one operation, which may die on the way ------------------------------------------------

    def run(self, operation: Callable[[], object], fate: Fate = None) -> None:
        """After a death both processes are restarted."""
        if isinstance(fate, tuple):
            side, fuse = fate
            self.fragile(side).fuse = fuse
        self.drop = fate if isinstance(fate, str) else ""
        try:
            operation()
        except Crash:
            self.pair.start()
            self.watch_disks()
        self.drop = ""
        for side in (0, 1):
            self.fragile(side).fuse = None

    def fragile(self, side: int) -> FragileDatabase:
        database = self.pair.databases[side]
        assert isinstance(database, FragileDatabase)
        return database

    def store(self, expected: Expected, *bodies: bytes, ids: set[bytes], fate: Fate = None) -> None:
        """Upload bodies at one moment; `ids` are the valid reports among them."""
        plans = [self.pair.leader.writer.check(expected.task, body) for body in bodies]

        def upload() -> None:
            answers = self.pair.leader.writer.store(plans)
            refused: dict[bytes, set[int]] = {}
            for answer in answers:
                for report_id, code in answer.statuses:
                    refused.setdefault(report_id, set()).add(code)
            sent = [report_id for plan in plans for report_id in plan.ids]
            for report_id in ids:
                errors = refused.get(report_id, set())
                stored = not errors or ReportError.REPORT_REPLAYED in errors
                if stored:
                    expected.acknowledged.add(report_id)
                elif sent.count(report_id) == 1:
                    assert errors <= {
                        ReportError.BATCH_COLLECTED,
                        ReportError.TASK_EXPIRED,
                        ReportError.REPORT_TOO_EARLY,
                    }

        self.run(upload, fate)

    # --- devices --------------------------------------------------------------------------------

    @rule(
        which=SIDES, places=st.lists(st.integers(0, BINS - 1), min_size=1, max_size=5), fate=FATES
    )
    def upload(self, which: int, places: list[int], fate: Fate) -> None:
        expected = self.expected[which]
        ids = [os.urandom(16) for _ in places]
        reports = self.pair.reports(expected.task, one_bit(BINS, places), ids=ids)
        expected.places |= dict(zip(ids, places, strict=True))
        expected.bytes_of |= dict(zip(ids, reports, strict=True))
        self.store(expected, b"".join(reports), ids=set(ids), fate=fate)

    @rule(which=SIDES, data=st.data(), together=st.booleans(), fate=FATES)
    def upload_again(self, which: int, data: st.DataObject, together: bool, fate: Fate) -> None:
        expected = self.expected[which]
        if not expected.bytes_of:
            return
        known = sorted(expected.bytes_of)
        report_id = data.draw(st.sampled_from(known))
        copy = expected.bytes_of[report_id]
        bodies = (copy + copy, copy) if together else (copy,)
        self.store(expected, *bodies, ids={report_id}, fate=fate)

    @rule(which=SIDES, how=st.sampled_from(["time", "leader", "helper", "short", "key", "proof"]))
    def upload_tampered(self, which: int, how: str) -> None:
        """Under a new id each, so that it takes no honest report's place."""
        expected = self.expected[which]
        task = expected.task
        time = task.interval.start + 1 if how == "time" else task.interval.start
        (report,) = self.pair.reports(task, one_bit(BINS, [0]), time=time)
        altered = bytearray(report)
        match how:
            case "leader":
                altered[len(report) // 2] ^= 1
            case "helper":
                altered[-1] ^= 1
            case "short":
                # Take the last byte away, and one of the length before it.
                length_at = len(report) - _payload(report) - 4
                altered[length_at + 3] -= 1
                del altered[-1]
            case "key":
                altered[_leader_config_at(report)] ^= 0x80
            case "proof":
                altered[0] ^= 1  # another id: neither the shares nor the proof fit
        self.store(expected, bytes(altered), ids=set())

    # --- the servers' own work ------------------------------------------------------------------

    @rule(limit=st.integers(1, 3))
    def create_jobs(self, limit: int) -> None:
        self.run(lambda: self.refs.extend(self.pair.leader.aggregation.create_jobs(limit)))

    @rule(fate=FATES)
    def step_all(self, fate: Fate) -> None:
        def steps() -> None:
            for ref in self.pair.leader.aggregation.unfinished():
                self.refs.append(ref)
                self.pair.leader.aggregation.step(ref)

        self.run(steps, fate)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def step_any_again(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.refs))
        self.run(lambda: self.pair.leader.aggregation.step(ref))

    @rule(
        which=SIDES,
        places=st.lists(st.integers(0, BINS - 1), min_size=3, max_size=6),
        fates=st.tuples(FATES, FATES, FATES, FATES),
    )
    def busy_day(self, which: int, places: list[int], fates: tuple[Fate, ...]) -> None:
        """The usual order of things, so that many runs get to a result."""
        self.upload(which, places, fates[0])
        self.work(fates[1])
        self.collect(which, fates[2])
        self.work(fates[3])

    @rule(fate=FATES)
    def work(self, fate: Fate) -> None:
        self.run(self.pair.work, fate)

    @rule(which=SIDES, fate=FATES)
    def collect(self, which: int, fate: Fate) -> None:
        def create() -> None:
            try:
                self.pair.collect(self.expected[which].task)
            except ProblemError as error:
                self.excuse(self.expected[which], error)

        self.run(create, fate)

    @rule(fate=FATES)
    def step_collections(self, fate: Fate) -> None:
        def steps() -> None:
            for ref in self.pair.leader.collection.pending():
                self.pair.leader.collection.step(ref)

        self.run(steps, fate)

    @rule(which=SIDES)
    def delete_result(self, which: int) -> None:
        expected = self.expected[which]
        if expected.result is None:
            return
        ref = self.ref(expected)

        def delete() -> None:
            try:
                self.pair.leader.collection.delete(expected.task, ref, collector_digest())
            except ProblemError as error:
                self.excuse(expected, error)

        expected.deleted = True
        self.run(delete)

    def sweep(self, fate: Fate) -> None:
        for clock in (self.pair.clock, self.pair.helper_clock):
            for expected in self.expected:
                expected.over |= clock.now() >= expected.task.ends
        self.run(
            lambda: (
                self.pair.leader.garbage_collector.run(),
                self.pair.helper.garbage_collector.run(),
            ),
            fate,
        )

    # --- what goes wrong ------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.pair.start()
        self.watch_disks()

    @precondition(lambda self: self.disks)
    @rule(side=SIDES)
    def cut_power(self, side: int) -> None:
        self.pair.stop()
        self.disks[side].lose()
        self.pair.start()
        self.watch_disks()

    @rule(side=SIDES, publish=st.booleans())
    def rotate_keys(self, side: int, publish: bool) -> None:
        def rotate() -> None:
            keys = (self.pair.leader, self.pair.helper)[side].keys
            made = keys.unpublished() or [keys.generate()]
            if publish:
                keys.publish(made[0])

        self.run(rotate)

    @rule(
        side=SIDES,
        to=st.sampled_from(["day", "closes", "ends", "over", "hours early", "last year"]),
        do=st.sampled_from(["upload", "work", "collect", "sweep"]),
        fate=FATES,
    )
    def at_another_time(self, side: int, to: str, do: str, fate: Fate) -> None:
        """One operation while a clock is wrong, or right and late."""
        task = self.expected[0].task
        clock = (self.pair.clock, self.pair.helper_clock)[side]
        clock.set(
            {
                "day": NOW + 86_400,
                "closes": task.closes,
                "ends": task.ends,
                "over": task.bucket_end,
                "hours early": task.starts - 7_200,
                "last year": NOW - 366 * 86_400,
            }[to]
        )
        match do:
            case "upload":
                self.upload(0, [0], fate)
            case "work":
                self.work(fate)
            case "collect":
                self.collect(0, fate)
            case "sweep":
                self.sweep(fate)
        self.results_are_exact_or_absent()
        self.pair.set_clocks(NOW + 3_600)

    # --- what must hold -------------------------------------------------------------------------

    def ref(self, expected: Expected) -> bytes:
        return _collection_id(expected.task)

    def excuse(self, expected: Expected, error: ProblemError) -> None:
        """A refusal must have its reason."""
        if error.problem == Problem.BATCH_OVERLAP:
            assert expected.deleted or expected.over
        else:
            assert error.problem == Problem.UNRECOGNIZED_TASK
            assert self.pair.clock.now() >= expected.task.ends

    def added(self, expected: Expected) -> set[bytes]:
        """The reports that the helper holds as added."""
        with self.pair.databases[1].read() as connection:
            own = report_ids.c.task_id == expected.task.task_id
            found = connection.execute(select(report_ids.c.report_id).where(own)).scalars()
            return set(map(bytes, found))

    def state(self, side: int, expected: Expected) -> BatchState | None:
        with self.pair.databases[side].read() as connection:
            own = batches.c.task_id == expected.task.task_id
            state = connection.scalar(select(batches.c.state).where(own))
            return None if state is None else BatchState(state)

    def see(self, expected: Expected) -> CollectionJobResp | None:
        try:
            found = self.pair.leader.collection.result(
                expected.task, self.ref(expected), collector_digest()
            )
        except ProblemError as error:
            assert error.status == 404 or error.problem == Problem.UNRECOGNIZED_TASK
            return None
        return found if isinstance(found, CollectionJobResp) else None

    @invariant()
    def results_are_exact_or_absent(self) -> None:
        for expected in getattr(self, "expected", []):
            self.check(expected)

    def check(self, expected: Expected) -> None:
        if self.state(1, expected) is not None:
            added = self.added(expected)
            assert added <= set(expected.places), "a report was added that nobody made"
        response = self.see(expected)
        if response is None:
            return
        if expected.result is not None:
            assert response.encode() == expected.result, "a second, different result"
            return
        expected.result = response.encode()
        count, summed = opened(expected.task, response)
        assert count >= expected.task.min_batch_size
        assert count == len(added)
        assert expected.acknowledged <= added, "an acknowledged report is missing"
        truth = np.bincount([expected.places[each] for each in added], minlength=BINS)
        assert (summed - self.noise_of(expected)).tolist() == truth.tolist()

    def noise_of(self, expected: Expected) -> Counts:
        if expected.task.noise is None:
            return np.zeros(BINS, np.uint64)
        # A draw that was not committed was drawn again: the last one is the one that counts.
        return self.pair.noise[0].draws[-1] + self.pair.noise[1].draws[-1]

    def teardown(self) -> None:
        try:
            if hasattr(self, "expected"):
                self.recover()
        finally:
            self.pair.stop()
            shutil.rmtree(self.folder)

    def recover(self) -> None:
        """Without faults, every task that has not ended and has enough reports gets its result."""
        self.drop = ""
        self.pair.start()
        self.pair.set_clocks(NOW + 3_600)
        for expected in self.expected:
            if expected.over or expected.deleted:
                continue
            self.pair.collect(expected.task)
            for _ in range(3):
                self.pair.work()
            self.check(expected)
            if len(expected.acknowledged) >= expected.task.min_batch_size:
                assert expected.result is not None, "enough reports, but no result"


def _collection_id(task: KnownTask) -> bytes:
    return sha256(collection_request(task))[:16]


def _leader_config_at(report: bytes) -> int:
    """ReportMetadata (id, time, no extensions), then the public share."""
    at = 16 + 8 + 2
    return at + 4 + int.from_bytes(report[at : at + 4], "big")


def _payload(report: bytes) -> int:
    """The length of the last ciphertext's payload."""
    at = _leader_config_at(report)
    for _ in range(2):
        enc = int.from_bytes(report[at + 1 : at + 3], "big")
        length_at = at + 3 + enc
        length = int.from_bytes(report[length_at : length_at + 4], "big")
        at = length_at + 4 + length
    return length
