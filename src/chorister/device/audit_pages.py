"""The audit log for people and programs: as text for a terminal, as one web page, or as JSON.

Recipes are written by strangers. On a terminal their control characters could move the cursor, and
on a page their markup could run. Both are displayed, never obeyed.
"""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from chorister.clock import utc_text
from chorister.device.audit import AuditEntry, Event, Record
from chorister.policy.values import number_text

_WHAT: Final = {
    Event.REFUSED: "A question was refused",
    Event.NOT_DRAWN: "A question was allowed, but this device was not drawn to answer it",
    Event.CHARGED: "A question was accepted, and its cost charged",
    Event.REPORTED: "A report was made, with noise, and sealed",
    Event.UPLOADED: "A report was sent",
    Event.POSTPONED: "A report will be sent later",
    Event.DROPPED: "A report was thrown away; its cost stays charged",
    Event.RECOVERED: "A charge was recovered after a crash; it was never answered",
    Event.SILENT: "The device kept silent",
    Event.POLICY: "Another policy took effect",
    Event.PAUSED: "The device was paused",
    Event.UNPAUSED: "The device goes on",
    Event.OPTED_IN: "The person opted in",
    Event.OPTED_OUT: "The person opted out",
    Event.PURGED: "Data was deleted",
}

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
    lines: tuple[tuple[str, str], ...]  # label and text


def shown(record: Record) -> Shown:
    """Return an entry as a person reads it; nothing in it moves a cursor or reverses text."""
    return Shown(
        sequence=record.sequence,
        heading=_WHAT[record.entry.event],
        time=utc_text(record.entry.time),
        event=record.entry.event,
        lines=tuple((label, visible(text)) for label, text in _lines(record.entry)),
    )


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
    articles = []
    for record in records:
        rows = "".join(
            f"<dt>{html.escape(label)}</dt><dd>{html.escape(visible(text))}</dd>"
            for label, text in _lines(record.entry)
        )
        heading = html.escape(f"{record.sequence}. {_WHAT[record.entry.event]}")
        time = html.escape(utc_text(record.entry.time))
        articles.append(
            f'<article id="entry-{record.sequence}"><h2>{heading}</h2>'
            f"<dl><dt>when</dt><dd>{time}</dd>{rows}</dl></article>"
        )
    body = "\n".join(articles) or "<p>Nothing was asked of this device yet.</p>"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>What left this device</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>What left this device</h1>\n{body}\n</body></html>\n"
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


def _lines(entry: AuditEntry) -> Iterator[tuple[str, str]]:
    yield "why", f"{entry.why} [{entry.check}]" if entry.check else entry.why
    if (question := entry.question) is not None:
        yield "asked for", question.purpose or "a purpose that the policy does not know"
        yield "analysis", f"{question.analysis}, study {question.study}, recipe {question.id}"
        yield "asked by", f"author key {question.author}, for collector {question.collector}"
        yield "query", question.query
        yield "read", ", ".join(question.fields)
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
