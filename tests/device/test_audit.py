"""The audit log: its chain, its pages, and strangers' words in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.canonical import dumps, loads
from chorister.device.audit import (
    AuditEntry,
    AuditLog,
    Event,
    RecipeSummary,
    Record,
    Sent,
    pack_bits,
)
from chorister.device.audit_pages import as_html, as_json, as_text, date_text, totals, visible
from chorister.device.audit_writer import _REPORTED
from chorister.device.database import transaction
from chorister.device.ledger.budget import Charge
from chorister.errors import InvalidInput, LedgerTampered
from chorister.recipe import SignedRecipe, sign
from tests.device.ledgers import START
from tests.keyboard import AUTHOR, POLICY, RECIPE, recipe_at

SIGNED = SignedRecipe.parse(sign(RECIPE, AUTHOR))
QUESTION = RecipeSummary.of(SIGNED, POLICY)
BITS = bytes([1, 0, 0, 1, 0, 0, 0, 0, 0, 1])
SENT = Sent(
    report="ab" * 16,
    leader=RECIPE.aggregators.leader,
    group={"user.locale": "de_DE"},
    arm="b",
    length=len(BITS),
    bits=pack_bits(BITS),
    digest="cd" * 32,
)


def entry(event: Event = Event.REFUSED, **parts: Any) -> AuditEntry:
    return AuditEntry(**{"time": START, "event": event, "why": "because", **parts})


FULL = (
    entry(check="device.epsilon", why="the budget allows less", question=QUESTION),
    entry(Event.CHARGED, question=QUESTION, charge=Charge.of(RECIPE)),
    entry(Event.REPORTED, question=QUESTION, charge=Charge.of(RECIPE), sent=SENT),
    entry(Event.UPLOADED, sent=SENT),
)


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    yield connection
    connection.close()


@pytest.fixture
def log(connection: apsw.Connection) -> AuditLog:
    log = AuditLog(connection)
    for each in FULL:
        add(connection, log, each)
    return log


def add(connection: apsw.Connection, log: AuditLog, each: AuditEntry) -> Record:
    with transaction(connection):
        return log.append(each)


def rewrite(connection: apsw.Connection, statement: str, values: tuple[Any, ...] = ()) -> None:
    connection.execute("DROP TRIGGER IF EXISTS audit_is_never_changed")
    connection.execute("DROP TRIGGER IF EXISTS audit_is_never_shortened")
    connection.execute(statement, values)


def test_what_is_written_is_read(log: AuditLog) -> None:
    records = list(log.records())
    assert tuple(record.entry for record in records) == FULL
    assert log.verify() == len(FULL)
    assert log.head() == records[-1].digest
    assert list(log.records(newest=2)) == records[-2:]
    assert list(log.records(newest=99)) == records
    assert list(log.records(newest=0)) == []


def test_an_empty_log(connection: apsw.Connection) -> None:
    log = AuditLog(connection)
    assert log.verify() == 0
    assert log.head() == "00" * 32
    assert "Nothing was asked" in as_text(log.records())
    assert "Nothing was asked" in as_html(log.records())
    assert json.loads(as_json(log.records())) == []


def test_entries_belong_to_what_they_tell(connection: apsw.Connection, log: AuditLog) -> None:
    with pytest.raises(InvalidInput, match="inside transaction"):
        log.append(entry())
    connection.execute("BEGIN IMMEDIATE")
    log.append(entry())
    connection.execute("ROLLBACK")
    assert log.verify() == len(FULL)


def test_rows_are_neither_changed_nor_removed(connection: apsw.Connection, log: AuditLog) -> None:
    for statement in ("UPDATE audit SET record = x'00'", "DELETE FROM audit"):
        with pytest.raises(apsw.ConstraintError, match="append-only"):
            connection.execute(statement)
    assert log.verify() == len(FULL)


@pytest.mark.parametrize("sequence", range(len(FULL)))
def test_a_rewritten_past_is_noticed(
    connection: apsw.Connection, log: AuditLog, sequence: int
) -> None:
    head = log.head()
    record = list(log.records())[sequence]
    value = loads(record.canonical(), max_bytes=10**6)
    value["entry"]["why"] = "something else"
    change = "UPDATE audit SET record = ? WHERE sequence = ?"
    rewrite(connection, change, (dumps(value), sequence))
    if sequence < len(FULL) - 1:
        with pytest.raises(LedgerTampered) as caught:
            log.verify()
        assert caught.value.sequence == sequence + 1
    else:
        log.verify()  # the last link: only who kept the head can tell
        assert log.head() != head
    rewrite(connection, "DELETE FROM audit WHERE sequence = ?", (sequence,))
    if sequence < len(FULL) - 1:
        with pytest.raises(LedgerTampered):
            log.verify()


@settings(max_examples=60)
@given(st.data())
def test_no_mutated_row_is_read(data: st.DataObject) -> None:
    connection = apsw.Connection(":memory:")
    log = AuditLog(connection)
    record = add(connection, log, FULL[2])
    changed = bytearray(record.canonical())
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    rewrite(connection, "UPDATE audit SET record = ?", (bytes(changed),))
    try:
        (found,) = log.records()
    except LedgerTampered:
        return
    assert found.canonical() == bytes(changed)


@given(st.binary(max_size=60))
def test_junk_is_no_record(junk: bytes) -> None:
    connection = apsw.Connection(":memory:")
    log = AuditLog(connection)
    connection.execute("INSERT INTO audit VALUES (0, ?)", (junk,))
    with pytest.raises(LedgerTampered):
        log.verify()


# --- bits ----------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=70).map(lambda data: bytes(byte & 1 for byte in data)))
def test_bits_round_trip(bits: bytes) -> None:
    sent = SENT.model_copy(update={"length": len(bits), "bits": pack_bits(bits)})
    Sent.model_validate(sent.model_dump())
    assert sent.ones == tuple(i for i, bit in enumerate(bits) if bit)


@pytest.mark.parametrize(("length", "bits"), [(9, "kA"), (8, "kEA"), (7, "AQ"), (8, "!!")])
def test_bits_of_another_length(length: int, bits: str) -> None:
    with pytest.raises(ValueError, match=r"bits|base64url"):
        Sent.model_validate({**SENT.model_dump(), "length": length, "bits": bits})


def test_only_bits_are_packed() -> None:
    for junk in (b"", b"\x02"):
        with pytest.raises(InvalidInput):
            pack_bits(junk)


# --- pages ---------------------------------------------------------------------------------------


def test_a_person_reads_what_was_asked_decided_and_sent(log: AuditLog) -> None:
    text = as_text(log.records())
    for words in (
        "2027-01-15 08:00:00 UTC  A question was refused",
        "the budget allows less [device.epsilon]",
        "Find words that follow each other, to improve next-word prediction",
        f"author key {SIGNED.key_id}",
        RECIPE.query.splitlines()[0],
        "keyboard.ngram, user.age",
        "epsilon 0.2, delta 1e-6 among at least",
        "to both aggregators together 2; one report",
        f"report {'ab' * 16}, to https://leader.example.org/dap/",
        "3 of 10 bits are 1, most of them noise",
        "user.locale = de_DE (not hidden)",
    ):
        assert words in text, words
    page = as_html(log.records())
    assert "Find words that follow each other" in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page


def test_item_14_the_owners_page_has_dates_plain_words_and_totals(
    connection: apsw.Connection,
) -> None:
    log = AuditLog(connection)
    charge = Charge.of(RECIPE)
    for number, event in enumerate((Event.CHARGED, Event.REPORTED, Event.UPLOADED)):
        sent = SENT if event is not Event.CHARGED else None
        made = entry(
            event, time=START + number * 86_400, question=QUESTION, sent=sent, charge=charge
        )
        add(connection, log, made)
    add(connection, log, entry(time=START + 400_000, question=QUESTION))
    said = " ".join(totals(log.records()))
    assert "From 15 January 2027, 08:00 UTC to 19 January 2027" in said
    assert "1 question was put to this device. It took part in 1 and refused 1; 1 report" in said
    assert "at most epsilon 0.2 of your privacy budget" in said  # once, whatever the entries
    assert "hidden among at least 1,000 devices" in said
    page = as_html(log.records())
    assert page.index("put to this device") < page.index("<article")
    assert page.index("entry-3") < page.index("entry-0")  # the newest first
    plain = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert "Find words that follow each other" in plain
    assert "17 January 2027" in plain
    # Keys, digests, bits and SQL are there for experts only.
    for detail in (SIGNED.key_id, RECIPE.query.split()[0], SENT.digest, SENT.bits):
        assert detail not in plain
        assert detail in page
    assert not [why for why in _REPORTED.values() if "OOV" in why]  # an analyst's word
    assert totals([]) == []
    assert date_text(2**53 - 1).endswith("after 1970")


def test_json_has_everything(log: AuditLog) -> None:
    rows = json.loads(as_json(log.records()))
    assert [row["hash"] for row in rows] == [record.digest for record in log.records()]
    assert rows[2]["entry"]["sent"]["bits"] == SENT.bits
    assert rows[2]["entry"]["charge"]["privacy"]["epsilon"] == "0.2"


class Tags(HTMLParser):
    """Which elements a browser would make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)


OWN = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "article", "dl", "dt", "dd", "p",
    "details", "summary",
}  # fmt: skip
HOSTILE = "<script>alert(1)</script>\x1b[2J\x9b31m\u202e\r\n<img src=x onerror=alert(1)>\u2028"


def test_strangers_words_are_shown_and_not_obeyed(connection: apsw.Connection) -> None:
    """A recipe can't hold most of them, but the log does not rely on that."""
    question = QUESTION.model_copy(update={"query": HOSTILE})
    log = AuditLog(connection)
    add(connection, log, entry(why=HOSTILE, question=question))
    tags = Tags()
    tags.feed(as_html(log.records()))
    assert tags.seen <= OWN
    text = as_text(log.records())
    assert not any(character in text for character in "\x1b\x9b\u202e\r\u2028")
    assert "\\u{1b}[2J" in text
    assert "\x1b" not in as_json(log.records())


@given(st.text(max_size=40))
def test_visible_text_has_no_control_characters(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable() or set(shown) <= {c for c in shown if c.isprintable() or c.isspace()}
    assert "\n" not in shown


@given(st.text(min_size=1, max_size=40))
def test_any_reason_can_be_written(why: str) -> None:
    """A server's words may be anything, and must not keep an entry out of the log."""
    connection = apsw.Connection(":memory:")
    log = AuditLog(connection)
    add(connection, log, entry(why=why))
    assert log.verify() == 1


def test_a_question_about_nothing_the_policy_has(connection: apsw.Connection) -> None:
    signed = SignedRecipe.parse(sign(recipe_at({"analysis": "unknown"}), AUTHOR))
    log = AuditLog(connection)
    add(connection, log, entry(question=RecipeSummary.of(signed, POLICY)))
    assert "a purpose that the policy does not know" in as_text(log.records())


def test_times_beyond_any_calendar(connection: apsw.Connection) -> None:
    log = AuditLog(connection)
    add(connection, log, entry(time=2**53 - 1))
    assert "s after 1970" in as_text(log.records())


def test_every_event_has_words() -> None:
    connection = apsw.Connection(":memory:")
    log = AuditLog(connection)
    for event in Event:
        add(connection, log, entry(event))
    assert as_text(log.records()).count("why:") == len(Event)
