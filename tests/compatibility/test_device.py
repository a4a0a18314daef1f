"""A device's folder that an earlier version left goes on where it was.

**What every version owes to these files:** it opens them, with everything that was spent, decided
and promised; or it refuses them with an error of `chorister.errors` that says what to do (see
`test_refusals.py`). It never opens them by half: a ledger that lost a charge, an outbox that lost
or changed a report, or a coin that is flipped again would break promises that were made to people.
So formats change by migrations, and these tests ask only what the current classes say.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_decode, sha256
from chorister.cli import app
from chorister.clock import SettableClock
from chorister.device import Device, KeyFile, Sandbox
from chorister.device.audit import AuditEntry, Event
from chorister.device.records import AttemptState
from chorister.device.store import EventStore
from chorister.device.transport import Answer
from chorister.recipe import Recipe, SignedRecipe
from tests.compatibility.opening import (
    FIXTURES,
    a_network,
    keys_from_json,
    open_device,
    unpack,
)
from tests.device.home import the_sandbox
from tests.device.world import Network, bits_of
from tests.logworld import DAY, entry_with

BUSY = Answer(status=503, content_type="", body=b"")


class Untouched:
    """A sandbox that must not be used."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def weaknesses(self) -> tuple[str, ...]:
        return ()

    def revive(self) -> None:
        """Before every run, whatever it does."""

    def __getattr__(self, name: str) -> Any:
        self.used.append(name)
        raise AttributeError(name)


@dataclass
class KeptDevice:
    """A device of an earlier version, and the world that it knew."""

    folder: Path
    expected: dict[str, Any]
    clock: SettableClock
    network: Network
    keys: list[HPKEKeypair]

    @contextmanager
    def opened(self, sandbox: Any = None) -> Iterator[Device]:
        chosen = cast(Sandbox, the_sandbox() if sandbox is None else sandbox)
        with open_device(self.folder, self.clock, self.network, sandbox=chosen) as device:
            yield device

    def jws(self, name: str) -> bytes:
        return str(self.expected["recipes"][name]).encode()

    def recipe(self, name: str) -> Recipe:
        return SignedRecipe.parse(self.jws(name)).recipe

    def publish(self, *names: str) -> None:
        self.network.log.publish(
            [entry_with(self.jws(name)) for name in names],
            time=self.clock.now(),
        )


@pytest.fixture
def old(kept: Path, tmp_path: Path) -> KeptDevice:
    expected = unpack(kept, "device", tmp_path)
    keys = keys_from_json(expected["keys"])
    clock = SettableClock(expected["time"])
    return KeptDevice(tmp_path, expected, clock, a_network(keys), keys)


def budgets(device: Device) -> dict[str, list[Any]]:
    return {
        each.limit: [str(each.spent.epsilon), str(each.spent.delta), each.reports]
        for each in device.status().budgets
    }


def entries(device: Device, event: Event, id_: str) -> list[AuditEntry]:
    """What the audit log tells about a recipe."""
    return [
        record.entry
        for record in device.audit.records()
        if record.entry.event is event
        and record.entry.question is not None
        and record.entry.question.id == id_
    ]


def test_the_first_set_is_kept() -> None:
    assert (FIXTURES / "2026-11-16").is_dir()


def test_ledger_audit_log_and_decisions_are_all_there(old: KeptDevice) -> None:
    with old.opened() as device:
        device.verify()
        status = device.status()
        assert status.consent.opted_in
        assert not status.paused
        assert status.silent is None
        assert status.head == "file"
        found = budgets(device)
        assert {limit: found.get(limit) for limit in old.expected["budgets"]} == (
            old.expected["budgets"]
        )
        assert {state.name: count for state, count in status.recipes.items()} == (
            old.expected["states"]
        )
        assert [each.recipe for each in status.outbox] == ["queued"]
        told = [[record.digest, record.entry.event.name] for record in device.audit.records()]
        assert told[: len(old.expected["audit"])] == old.expected["audit"]


def test_the_persons_data_is_all_there(old: KeptDevice) -> None:
    key = KeyFile(old.folder / "elsewhere" / "key", store=old.folder / "device").obtain(
        create=False
    )
    with old.opened() as device:
        policy = device.policy
    path = old.folder / "device" / "events.db"
    with EventStore(path, key, policy, old.clock, create=False) as store:
        assert (store.profile("user.age"), store.profile("user.locale")) == (33, "de_DE")
        image = store.snapshot({"keyboard": ["ngram"]}).image
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(image)
        rows = connection.execute("SELECT ngram FROM keyboard").fetchall()
    assert sorted(text for (text,) in rows) == sorted(old.expected["ngrams"])


def test_the_queued_report_leaves_byte_for_byte_as_it_was_sealed(old: KeptDevice) -> None:
    queued = old.expected["queued"]
    body = b64url_decode(queued["body"])
    old.network.answers.extend([BUSY, BUSY])  # for the interrupted one, too
    with old.opened() as device:
        for _ in range(2):
            old.clock.advance(DAY)
            device.upload_due()
        assert device.status().outbox == ()
        assert len(entries(device, Event.UPLOADED, "queued")) == 1
        sent = [(url, headers) for url, headers, posted in old.network.posts if posted == body]
        assert len(sent) == 2, "it was to be sent, and sent again, with the same bytes"
        for url, headers in sent:
            assert url == queued["url"]
            assert headers.items() >= queued["headers"].items()
        _, bits = bits_of(device.policy, old.recipe("queued"), body, old.keys)
    assert len(bits) == queued["bits"]
    assert [place for place, bit in enumerate(bits) if bit] == queued["ones"]
    # What had left before stays there.
    assert not {sha256(each).hex() for each in old.network.reports} & {
        *old.expected["uploaded_before"]
    }


def test_the_interrupted_question_is_answered_with_oov_and_its_query_never_runs(
    old: KeptDevice,
) -> None:
    sandbox = Untouched()
    with old.opened(sandbox) as device:
        old.clock.advance(DAY)
        device.upload_due()
        (made,) = entries(device, Event.REPORTED, "interrupted")
        assert "interrupted" in made.why
        assert "no row is reported" in made.why
        assert len(entries(device, Event.UPLOADED, "interrupted")) == 1
        assert budgets(device).items() >= old.expected["budgets"].items()  # charged once
        before, after = old.expected["states"], device.status().recipes
        assert after.get(AttemptState.CHARGED, 0) == 0
        assert after[AttemptState.SENT] == before["SENT"] + before["CHARGED"] + before["QUEUED"]
        assert made.sent is not None
        (report,) = [each for each in old.network.reports if sha256(each).hex() == made.sent.digest]
        task, bits = bits_of(device.policy, old.recipe("interrupted"), report, old.keys)
        device.verify()
    assert sandbox.used == []
    assert tuple(place for place, bit in enumerate(bits) if bit) == made.sent.ones
    assert dict(task.group.values) == {"user.locale": "de_DE"}


def test_no_question_is_answered_or_drawn_a_second_time(old: KeptDevice) -> None:
    answered: list[str] = []
    with old.opened() as device:
        for _ in range(3):
            old.clock.advance(DAY)
            old.publish(*old.expected["recipes"])
            done = device.run_once()
            answered += done.answered
            assert done.declined == ()
        assert "next" in answered  # which was never asked before
        assert not {*answered} & {"sent", "dropped", "declined", "refused", "queued"}
        charged = {
            record.entry.question.id
            for record in list(device.audit.records())[len(old.expected["audit"]) :]
            if record.entry.event is Event.CHARGED and record.entry.question is not None
        }
        assert charged == {"next"}
        now, next_ = budgets(device), old.recipe("next")
        costs = {"device", f"analyses.{next_.analysis}.budget"}
        costs |= {f"analyses.{next_.analysis}.fields.{ref}" for ref in next_.fields_read}
        for limit, (_, _, reports) in old.expected["budgets"].items():
            assert now[limit][2] == reports + (limit in costs)
        (made,) = entries(device, Event.REPORTED, "next")
        assert made.sent is not None
        (report,) = [each for each in old.network.reports if sha256(each).hex() == made.sent.digest]
        _, bits = bits_of(device.policy, next_, report, old.keys)
        assert tuple(place for place, bit in enumerate(bits) if bit) == made.sent.ones
        device.verify()


def test_a_charge_that_was_only_in_a_lost_log_still_counts(old: KeptDevice) -> None:
    """The write-ahead log with the last charge is gone; the head outside the folder has it."""
    (old.folder / "device" / "ledger.db-wal").unlink()
    old.clock.advance(DAY)
    old.publish(*old.expected["recipes"])
    with old.opened() as device:
        assert "interrupted" not in device.run_once().answered
        recovered = [r for r in device.audit.records() if r.entry.event is Event.RECOVERED]
        assert len(recovered) == 1
        spent = budgets(device)
        for limit, (_, _, reports) in old.expected["budgets"].items():
            assert spent[limit][2] >= reports


def test_the_command_line_opens_it(old: KeptDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old.folder)
    run = CliRunner()
    status = run.invoke(app, ["device", "status", "--folder", "device", "--json"])
    assert status.exit_code == 0, status.output
    found = json.loads(status.stdout)
    assert found["opted_in"] is True
    assert [each["recipe"] for each in found["outbox"]] == ["queued"]
    verified = run.invoke(app, ["device", "audit", "verify", "--folder", "device", "--json"])
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["records"] >= len(old.expected["audit"])
