"""Death at every statement and on both sides of every commit, one after the other."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chorister.aggregator.known_tasks import KnownTask
from chorister.errors import Unreachable
from tests.aggregator.faults import (
    FragileDatabase,
    Opener,
    SQLiteFiles,
    Template,
    fast_folder,
)
from tests.aggregator.world import Pair, one_bit, small_recipe
from tests.simulated_disk import Crash

PLACES = [0, 1, 1, 3]


class Stage:
    """One pair, put back to its beginning as often as needed."""

    def __init__(self, folder: Path) -> None:
        self.template = Template()
        self.paths = [folder / "leader.db", folder / "helper.db"]
        first, second = [self.template.copy(path) for path in self.paths]
        self.pair = Pair((first, second), open_database=Opener())

    def reset(self) -> tuple[KnownTask, list[bytes]]:
        self.pair.stop()
        for path in self.paths:
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            self.template.copy(path)
        self.pair.start()
        for keys in (self.pair.leader.keys, self.pair.helper.keys):
            keys.publish(keys.generate())
        for noise in self.pair.noise:
            noise.draws.clear()
        (task,) = self.pair.accept(small_recipe(min_cohort=3))
        return task, self.pair.reports(task, one_bit(4, PLACES))

    def disks(self) -> list[SQLiteFiles]:
        """That keep, from now on, what was durable last."""
        made = [SQLiteFiles(path) for path in self.paths]
        for database, disk in zip(self.pair.databases, made, strict=True):
            assert isinstance(database, FragileDatabase)
            database.on_durable = disk.sync
            disk.sync()
        return made

    def light(self, side: int, fuse: int | None) -> None:
        database = self.pair.databases[side]
        assert isinstance(database, FragileDatabase)
        database.fuse = fuse

    def play(self, task: KnownTask, reports: list[bytes]) -> None:
        """Devices send, and send again; the servers work; the collector asks."""
        self.pair.upload(task, *reports[:2])
        self.pair.upload(task, *reports[2:])
        self.pair.work()
        self.pair.collect(task)
        self.pair.work()


@pytest.fixture
def stage() -> Iterator[Stage]:
    folder = fast_folder()
    made = Stage(folder)
    yield made
    made.pair.stop()
    shutil.rmtree(folder)
    shutil.rmtree(made.template.folder)


@pytest.mark.parametrize("side", [0, 1], ids=["leader", "helper"])
def test_nothing_is_lost_or_counted_twice_wherever_a_process_dies(stage: Stage, side: int) -> None:
    for fuse in itertools.count():
        task, reports = stage.reset()
        stage.light(side, fuse)
        try:
            stage.play(task, reports)
            died = False
        except Crash:
            died = True
        stage.light(side, None)
        if died:
            stage.pair.start()
            # A report whose upload was not acknowledged is sent again, unless the batch is closed.
            stage.play(task, reports)
        collected = stage.pair.result(task)
        assert collected is not None, f"no result after a death at {fuse}"
        count, summed = collected
        noise = sum((each.draws[-1] for each in stage.pair.noise), np.zeros(4, np.uint64))
        assert count == 4, f"after a death at {fuse}"
        assert (summed - noise).tolist() == [1, 2, 0, 1]
        assert stage.pair.result(task) is not None
        if not died:
            break
    assert fuse > 20  # it did die, at many places


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_power_cut_forgets_no_job_that_was_sent(stage: Stage, lost: str) -> None:
    """What the leader writes without waiting for the disk is durable before it sends anything."""
    task, reports = stage.reset()
    disks = stage.disks()
    sent: list[bytes] = []

    def lose(message: bytes) -> None:
        sent.append(message)
        raise Unreachable(f"the {lost} is lost")

    setattr(stage.pair.wire, "before" if lost == "request" else "after", lose)
    stage.pair.upload(task, *reports)
    stage.pair.work()
    assert len(sent) == 1
    for cut in (0, 1):
        stage.pair.stop()
        disks[cut].lose()
        stage.pair.start()
    stage.pair.wire.before = sent.append
    stage.pair.wire.after = lambda _: None
    # A report that comes later does not change the job that was sent.
    stage.pair.upload(task, *stage.pair.reports(task, one_bit(4, [0])))
    stage.pair.work()
    if lost == "request":
        assert sent.count(sent[0]) == 2
    stage.pair.collect(task)
    stage.pair.work()
    collected = stage.pair.result(task)
    assert collected is not None
    assert collected[0] == 5


def test_a_power_cut_after_a_finished_job_repeats_it_without_counting_twice(stage: Stage) -> None:
    task, reports = stage.reset()
    disks = stage.disks()
    stage.pair.upload(task, *reports)
    stage.pair.work()
    (status,) = stage.pair.leader.status([task])
    assert status.verified == 4
    stage.pair.stop()
    disks[0].lose()
    stage.pair.start()
    (status,) = stage.pair.leader.status([task])
    assert (status.verified, status.unfinished_jobs) == (0, 1)
    stage.play(task, reports)
    collected = stage.pair.result(task)
    assert collected is not None
    assert collected[0] == 4
