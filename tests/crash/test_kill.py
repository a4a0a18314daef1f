"""kill -9 at every step of a report's life: real processes, real files.

Whatever the moment: at most one report ever leaves, the same bytes each time; the query runs at
most once; if anything left, it is charged; the ledger and the audit log verify.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chorister.clock import SettableClock
from chorister.device.audit import Event
from chorister.device.ledger.ledger_entries import Charged
from chorister.device.run import RunStep
from tests.conftest import REPOSITORY
from tests.crash.killed_device import DiskNetwork, a_device, lines
from tests.device.world import DAY, NOW, ForgedLog, a_policy, a_recipe, bits_of

POLICY = a_policy()
RECIPE = a_recipe("one")
KILLED = -signal.SIGKILL


@dataclass
class Nursery:
    """The process that forks victims."""

    process: subprocess.Popen[str]

    def live(
        self,
        folder: Path,
        *,
        step: RunStep | None = None,
        now: int = NOW,
        upload: bool = True,
        down: bool = False,
        act: str | None = None,
    ) -> int:
        """One life, begun with what the person does: `act` is a method of `Device`."""
        (end,) = self.live_together(
            1, folder, step=step, now=now, upload=upload, down=down, act=act
        )
        return end

    def live_together(self, copies: int, folder: Path, **task: object) -> list[int]:
        task |= {"copies": copies, "folder": str(folder)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        ends: list[int] = json.loads(self.process.stdout.readline())
        return ends


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.killed_device"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A device that opted in and has data, whose ledger is old enough; and one open recipe."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "policy.json").write_text(POLICY.model_dump_json())
    clock = SettableClock(NOW - DAY)
    publish(tmp_path, [], time=clock.now())
    network = DiskNetwork(tmp_path)
    with a_device(tmp_path, clock, POLICY, create=True, transport=network) as device:
        device.opt_in()
        device.set_profile("user", {"age": 33, "locale": "de_DE"})
        device.donate("keyboard", {"ngram": "hello world you", "perplexity": 1.5})
        device.run_once()
    publish(tmp_path, [RECIPE], time=NOW)
    return tmp_path


def publish(folder: Path, recipes: list[object], *, time: int) -> None:
    grown = folder / "log-size"  # a log only grows
    log = ForgedLog()
    log.size = int(grown.read_text()) if grown.exists() else 0
    log.publish(recipes, time=time)  # type: ignore[arg-type]
    grown.write_text(str(log.size))
    for name, data in log.files.items():
        path = folder / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@dataclass(frozen=True)
class Traces:
    """What is in the files of a device."""

    uploads: list[str]
    queries: int
    charges: int
    events: list[Event]
    waiting: int


def traces(folder: Path) -> Traces:
    with a_device(folder, SettableClock(NOW), POLICY) as device:
        opened = device._opened()
        opened.ledger.verify()
        device.audit.verify()
        return Traces(
            uploads=lines(folder / "uploads"),
            queries=len(lines(folder / "queries")),
            charges=sum(isinstance(entry, Charged) for entry in opened.ledger.entries()),
            events=[record.entry.event for record in device.audit.records()],
            waiting=len(opened.outbox.all()),
        )


def check(folder: Path) -> Traces:
    """What holds at every moment."""
    found = traces(folder)
    assert len(set(found.uploads)) <= 1, "a second report left, or the same with other noise"
    assert found.queries <= 1, "the query ran twice"
    assert found.charges <= 1
    if found.uploads or found.queries or found.waiting:
        assert found.charges == 1, "something left, or data was touched, without a charge"
    return found


def test_without_a_crash_one_report_leaves(nursery: Nursery, folder: Path) -> None:
    assert nursery.live(folder) == 0
    found = check(folder)
    assert (len(found.uploads), found.queries, found.charges) == (1, 1, 1)
    assert found.events[-3:] == [Event.CHARGED, Event.REPORTED, Event.UPLOADED]


# The head is written before the charge is committed: a crash in between costs the answer.
UNANSWERED = {RunStep.CHARGE_WRITTEN}


# Passed only where the person said something, or the ledger is out of step.
RARE = [
    RunStep.CONSENT_CHANGED,
    RunStep.CONSENT_WRITTEN,
    RunStep.CONSENT_RECORDED,
    RunStep.SETTLE_WRITTEN,
]


@pytest.mark.parametrize("step", [step for step in RunStep if step not in RARE])
def test_a_device_killed_at_any_step_goes_on_safely(
    step: RunStep, nursery: Nursery, folder: Path
) -> None:
    assert nursery.live(folder, step=step) == KILLED
    before = check(folder)
    later = NOW + 3600
    publish(folder, [RECIPE], time=later)
    for _ in range(2):
        assert nursery.live(folder, now=later) == 0
        after = check(folder)
    assert after.charges == 1
    assert after.waiting == 0
    assert set(before.uploads) <= set(after.uploads)
    if step in UNANSWERED:
        assert not after.uploads
        assert Event.RECOVERED in after.events
        return
    assert len(set(after.uploads)) == 1
    _, bits = bits_of(POLICY, RECIPE, bytes.fromhex(after.uploads[0]))
    assert len(bits) == RECIPE.encoding.size
    assert after.events.count(Event.UPLOADED) == 1
    ran = {RunStep.QUERIED, RunStep.RANDOMIZED, RunStep.SEALED, RunStep.QUEUE_WRITTEN}
    if step in ran:
        assert (before.queries, after.queries) == (1, 1)
    if step is RunStep.CHARGED:
        assert after.queries == 0, "after a charge that was found at a start no query runs"


@pytest.mark.parametrize("times", [1, 3])
def test_a_recovered_charge_is_told_with_its_recovery(
    times: int, nursery: Nursery, folder: Path
) -> None:
    assert nursery.live(folder, step=RunStep.CHARGE_WRITTEN) == KILLED
    for _ in range(times):
        assert nursery.live(folder, step=RunStep.SETTLE_WRITTEN) == KILLED
        found = check(folder)
        assert (found.charges, found.events.count(Event.RECOVERED)) == (0, 0)
    assert nursery.live(folder, step=RunStep.RECIPE_ARRIVED) in {KILLED, 0}
    found = check(folder)
    assert (found.charges, found.events.count(Event.RECOVERED)) == (1, 1)
    assert nursery.live(folder, now=NOW + 3600) == 0
    found = check(folder)
    assert (found.charges, found.events.count(Event.RECOVERED)) == (1, 1)
    assert not found.uploads


def test_a_policy_is_told_with_its_entry(nursery: Nursery, folder: Path) -> None:
    changed = a_policy({"device/epsilon": 2})
    (folder / "policy.json").write_text(changed.model_dump_json())
    told = check(folder).events.count(Event.POLICY)
    assert nursery.live(folder, step=RunStep.SETTLE_WRITTEN) == KILLED
    assert check(folder).events.count(Event.POLICY) == told
    assert nursery.live(folder) == 0
    assert check(folder).events.count(Event.POLICY) == told + 1


def test_a_poll_is_written_whole_or_not_at_all(nursery: Nursery, folder: Path) -> None:
    with a_device(folder, SettableClock(NOW), POLICY) as device:
        before = device.status().checkpoint_time
    assert nursery.live(folder, step=RunStep.POLL_WRITTEN) == KILLED
    with a_device(folder, SettableClock(NOW), POLICY) as device:
        assert device.status().checkpoint_time == before
        assert device._opened().settings.get(f"size of log v2 {POLICY.log.origin}") == 3
        held = device._opened().connection.execute("SELECT count(*) FROM bodies").get
    assert held == 0, "those of the poll before were forgotten before the first new one was fetched"
    assert nursery.live(folder) == 0
    assert len(check(folder).uploads) == 1


@pytest.mark.parametrize(
    ("act", "event", "opted_in"),
    [
        ("opt_out", Event.OPTED_OUT, False),
        ("purge", Event.PURGED, True),
        ("opt_in", Event.OPTED_IN, True),
    ],
)
@pytest.mark.parametrize(
    "step", [RunStep.CONSENT_CHANGED, RunStep.CONSENT_WRITTEN, RunStep.CONSENT_RECORDED]
)
def test_what_the_person_said_holds_and_is_told_once(
    step: RunStep, act: str, event: Event, opted_in: bool, nursery: Nursery, folder: Path
) -> None:
    """Between the two databases: killed there, the deed is done, and the log tells it later."""
    assert nursery.live(folder, upload=False) == 0
    told = check(folder).events.count(event)
    assert nursery.live(folder, step=step, act=act) == KILLED
    with a_device(folder, SettableClock(NOW), POLICY) as device:
        assert device.status().consent.opted_in == opted_in
        if act != "opt_in":
            assert device._opened().store.profile("user.age") is None
    for _ in range(2):
        assert nursery.live(folder, now=NOW + 3600) == 0
    found = check(folder)
    assert found.events.count(event) == told + 1
    assert found.waiting == 0
    assert found.events.count(Event.UPLOADED) == len(found.uploads) == (act != "opt_out")
    if act == "opt_out":
        assert found.events[-2:] == [Event.OPTED_OUT, Event.DROPPED]


@pytest.mark.parametrize(
    "again",
    [RunStep.RANDOMIZED, RunStep.SEALED, RunStep.QUEUE_WRITTEN, RunStep.QUEUED, RunStep.ANSWERED],
)
def test_a_device_killed_again_while_it_recovers(
    again: RunStep, nursery: Nursery, folder: Path
) -> None:
    assert nursery.live(folder, step=RunStep.QUERIED) == KILLED
    assert nursery.live(folder, step=again, now=NOW + 60) == KILLED
    check(folder)
    assert nursery.live(folder, now=NOW + 3600) == 0
    found = check(folder)
    assert len(set(found.uploads)) == 1
    assert found.events.count(Event.REPORTED) == 1
    assert found.events[-1] is Event.UPLOADED


def test_an_answer_that_is_lost_brings_the_same_bytes_again(nursery: Nursery, folder: Path) -> None:
    assert nursery.live(folder, down=True) == 0
    assert nursery.live(folder, step=RunStep.ANSWERED, now=NOW + DAY) == KILLED
    assert nursery.live(folder, now=NOW + DAY) == 0
    found = check(folder)
    assert len(found.uploads) == 3
    assert found.events[-1] is Event.UPLOADED


def test_a_crash_that_outlasts_the_window_drops_the_report(nursery: Nursery, folder: Path) -> None:
    assert nursery.live(folder, step=RunStep.QUERIED) == KILLED
    late = RECIPE.window.closes
    publish(folder, [], time=late)
    assert nursery.live(folder, now=late) == 0
    found = check(folder)
    assert not found.uploads
    assert (found.charges, found.waiting) == (1, 0)
    assert found.events.count(Event.DROPPED) == 1


def test_several_processes_at_once_make_one_report(nursery: Nursery, folder: Path) -> None:
    """One of them runs the device; the others find it at work, or find its work done."""
    ends = nursery.live_together(6, folder, step=None, now=NOW, upload=True, down=False, act=None)
    assert set(ends) <= {0, 2}
    assert 0 in ends
    found = check(folder)
    assert (len(set(found.uploads)), found.queries, found.charges) == (1, 1, 1)
