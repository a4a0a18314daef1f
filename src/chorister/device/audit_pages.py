"""The audit log for people and programs: as text for a terminal, as one web page, or as JSON.

Recipes are written by strangers. On a terminal their control characters could move the cursor, and
on a page their markup could run. Both are displayed, never obeyed.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from chorister.clock import utc_minute, utc_text
from chorister.device.audit import AuditEntry, Event, RecipeSummary, Record
from chorister.policy.values import duration_text, number_text

_WHAT: Final = {
    Event.REFUSED: "A question was refused",
    Event.NOT_DRAWN: "A question was allowed, but this device was not drawn to answer it",
    Event.DRAWN: "This device drew when to answer a question that is asked repeatedly",
    Event.CHARGED: "A question was accepted, and its cost charged",
    Event.REPORTED: "A report was made, with noise, and sealed",
    Event.UPLOADED: "A report was sent",
    Event.POSTPONED: "A report will be sent later",
    Event.DROPPED: "A report was thrown away; its cost stays charged",
    Event.RECOVERED: "A charge was recovered after a crash; it was never answered",
    Event.SILENT: "The device stayed silent",
    Event.POLICY: "A policy took effect",
    Event.PAUSED: "The device was paused",
    Event.UNPAUSED: "The device was resumed",
    Event.OPTED_IN: "The person opted in",
    Event.OPTED_OUT: "The person opted out",
    Event.PURGED: "Data was deleted",
}

_MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_MINUTE: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2}) ([0-9]{2}:[0-9]{2}) UTC")
_STYLE: Final = (
    ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}article{border-top:1px solid;padding:.5rem 0}"
    "h2{font-size:1.1rem;margin:.5rem 0}dl{display:grid;grid-template-columns:8rem 1fr;"
    "gap:.25rem 1rem;margin:0}dt{opacity:.7}dd{margin:0;overflow-wrap:anywhere;"
    "white-space:pre-wrap}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An entry in words, for other pages, which escape it themselves."""

    sequence: int
    heading: str
    time: str
    event: Event
    plain: tuple[tuple[str, str], ...]  # label and text, for the owner
    lines: tuple[tuple[str, str], ...]  # the same with every detail, for experts


def shown(record: Record) -> Shown:
    """Return an entry as a person reads it; nothing in it moves a cursor or reverses text."""
    return Shown(
        sequence=record.sequence,
        heading=_WHAT[record.entry.event],
        time=date_text(record.entry.time),
        event=record.entry.event,
        plain=tuple((label, visible(text)) for label, text in _plain(record.entry)),
        lines=tuple((label, visible(text)) for label, text in _lines(record.entry)),
    )


def date_text(seconds: int) -> str:
    """Write a time for a calendar: "16 November 2026, 08:42 UTC"."""
    text = utc_minute(seconds)
    found = _MINUTE.fullmatch(text)
    if found is None:
        return text  # beyond any calendar
    year, month, day, minute = found.groups()
    return f"{int(day)} {_MONTHS[int(month) - 1]} {year}, {minute} UTC"


def totals(records: Iterable[Record]) -> list[str]:
    """Sum up a log for its owner, in sentences; empty if there is nothing to sum up."""
    entries = [record.entry for record in records]
    if not entries:
        return []
    asked = {entry.question.recipe for entry in entries if entry.question is not None}
    count = Counter(entry.event for entry in entries)
    first, last = date_text(entries[0].time), date_text(entries[-1].time)
    when = f"On {first}" if len(entries) == 1 else f"From {first} to {last}"
    refused = {
        entry.question.recipe
        for entry in entries
        if entry.event is Event.REFUSED and entry.question is not None
    }
    answered = {
        entry.question.recipe
        for entry in entries
        if entry.event is Event.CHARGED and entry.question is not None
    }
    questions = f"{_number(len(asked), 'question')} {'was' if len(asked) == 1 else 'were'}"
    lines = [
        f"{when}, {questions} put to this device. It took part in {len(answered):,} and "
        f"refused {len(refused):,}; {_number(count[Event.UPLOADED], 'report')} left it."
    ]
    # One that was recovered after a crash was paid for as well.
    charges = {
        (entry.charge.recipe, entry.charge.window): entry.charge
        for entry in entries
        if entry.event in (Event.CHARGED, Event.RECOVERED) and entry.charge is not None
    }.values()
    if charges:
        epsilon = sum((charge.privacy.epsilon for charge in charges), Decimal(0))
        least = min(charge.privacy.min_cohort for charge in charges)
        lines.append(
            f"Together they cost at most epsilon {number_text(epsilon)} of your privacy budget. "
            f"Every answer is mixed with noise and hidden among at least {least:,} devices, so "
            "results hardly depend on what you answered; epsilon bounds how much. Smaller is safer."
        )
        purposes = {
            entry.question.analysis: entry.question.purpose or entry.question.analysis
            for entry in entries
            if entry.question is not None
        }
        taken = Counter(charge.analysis for charge in charges)
        listed = "; ".join(f"{purposes.get(name, name)} ({taken[name]})" for name in sorted(taken))
        lines.append(f"What it took part in: {listed}.")
    return [visible(text) for text in lines]


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def as_json(records: Iterable[Record]) -> str:
    """Return everything that is stored, with each record's hash; decimal numbers are strings."""
    rows = [
        {**record.model_dump(mode="json", exclude_none=True), "hash": record.digest}
        for record in records
    ]
    return json.dumps(rows, indent=2, ensure_ascii=True)


def as_text(records: Iterable[Record]) -> str:
    """Return text for a terminal: each entry is a heading and indented lines."""
    blocks = []
    for record in records:
        heading = f"{record.sequence}. {utc_text(record.entry.time)}  {_WHAT[record.entry.event]}"
        lines = [f"   {label + ':':<12}{visible(text)}" for label, text in _lines(record.entry)]
        blocks.append("\n".join([heading, *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else "Nothing was asked of this device yet.\n"


def as_html(records: Iterable[Record]) -> str:
    """Return one web page that needs nothing else, and may load nothing else."""
    listed = list(records)
    summary = "".join(f"<p>{html.escape(text)}</p>" for text in totals(listed))
    articles = [_article(shown(record)) for record in reversed(listed)]
    body = summary + "\n".join(articles) or "<p>Nothing was asked of this device yet.</p>"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>What left this device</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>What left this device</h1>\n{body}\n</body></html>\n"
    )


def _article(entry: Shown) -> str:
    return (
        f'<article id="entry-{entry.sequence}"><h2>{html.escape(entry.heading)}</h2>'
        f"<p>{html.escape(entry.time)}</p><dl>{_rows(entry.plain)}</dl>"
        f"<details><summary>Entry {entry.sequence} in full, for experts</summary>"
        f"<dl>{_rows(entry.lines)}</dl></details></article>"
    )


def _rows(lines: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(text)}</dd>" for label, text in lines
    )


def visible(text: str) -> str:
    """Return the text with every character that a terminal or page might obey spelled out."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    # Control, format (text direction among them), surrogate, private, line and paragraph
    # separators; the space is Zs and stays.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\\u{{{ord(character):x}}}"
    return character


def _plain(entry: AuditEntry) -> Iterator[tuple[str, str]]:
    """What an owner wants to know: why, what for, what was looked at, what left, at what cost."""
    yield "Why", entry.why
    if (question := entry.question) is not None:
        yield "Asked to", question.purpose or "a purpose that the policy does not know"
        if question.windows is not None:
            yield "Asked", _window(question)
        yield "Looks at", ", ".join(question.fields)
        if question.periods is not None:
            yield "Only", _periods(question)
        yield "Answer", f"one of {question.bins:,} possible ones, mixed with random noise"
        if question.group_by:
            yield "Not hidden", f"your {', '.join(question.group_by)}"
    if (charge := entry.charge) is not None:
        privacy = charge.privacy
        yield (
            "Cost",
            f"epsilon {number_text(privacy.epsilon)} of your privacy budget, hidden among at least "
            f"{privacy.min_cohort:,} devices",
        )
    if (sent := entry.sent) is not None:
        yield (
            "Report",
            f"in two sealed halves, for {sent.leader} and its helper; neither can read it alone",
        )


def _window(question: RecipeSummary) -> str:
    which = "" if question.window is None else f", this is number {question.window + 1:,}"
    return f"in {question.windows:,} windows{which}"


def _periods(question: RecipeSummary) -> str:
    lines = (
        f"events of {stream} from {duration_text(period)} before the window opens"
        for stream, period in (question.periods or {}).items()
    )
    return "; ".join(lines)


def _lines(entry: AuditEntry) -> Iterator[tuple[str, str]]:
    yield "why", f"{entry.why} [{entry.check}]" if entry.check else entry.why
    if (question := entry.question) is not None:
        yield "asked for", question.purpose or "a purpose that the policy does not know"
        yield "analysis", f"{question.analysis}, study {question.study}, recipe {question.id}"
        yield "asked by", f"author key {question.author}, for collector {question.collector}"
        yield "query", question.query
        if question.windows is not None:
            yield "window", _window(question)
        yield "read", ", ".join(question.fields)
        if question.periods is not None:
            yield "only", _periods(question)
        if question.group_by:
            yield "split by", f"{', '.join(question.group_by)} (not hidden)"
        yield "answer", f"one of {question.bins:,} bins, under noise"
        yield "recipe", question.recipe
    if (charge := entry.charge) is not None:
        privacy = charge.privacy
        yield (
            "cost",
            (
                f"epsilon {number_text(privacy.epsilon)}, delta {number_text(privacy.delta)} "
                f"among at least {privacy.min_cohort:,} devices; to both aggregators together "
                f"{number_text(charge.replacement_epsilon)}; one report"
            ),
        )
        yield "charged to", f"{charge.analysis}: {', '.join(charge.fields)}"
    if (sent := entry.sent) is not None:
        yield "sent", f"report {sent.report}, to {sent.leader} and its helper, in two sealed shares"
        ones = len(sent.ones)
        yield "bits", f"{ones:,} of {sent.length:,} bits are 1, most of them noise: {sent.bits}"
        if sent.group:
            group = ", ".join(f"{ref} = {value}" for ref, value in sent.group.items())
            yield "group", f"{group} (not hidden)"
        if sent.arm is not None:
            yield "arm", f"{sent.arm} (not hidden)"
        yield "sealed as", sent.digest
