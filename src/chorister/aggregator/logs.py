"""Structured logs without people in them.

A line says what the server did, for which task, and how many reports: never a share, a bit, a
token, a credential or a network address. What may be logged is a closed list of names, and every
value is a number, a word or a digest of something public; a name that is not on the list is a bug,
and the value is left out.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO

import structlog

__all__ = ["FIELDS", "configure_logs", "get_logger"]

FIELDS: Final = frozenset(
    {
        "aggregator",
        "checkpoint_size",
        "config_id",
        "entry",
        "error",
        "event",
        "frames",
        "jobs",
        "kind",
        "level",
        "reason",
        "repeated",
        "retry_in",
        "route",
        "task",
        "timestamp",
        "waiting_for",
    }
)
"""Every name that a line may carry; a test compares it with the calls in the source."""

_LONGEST: Final = 500
_ONCE_IN: Final = 60.0
"""Seconds between two lines of a library that say the same."""
_KEPT: Final = 256


def _only_known(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    kept = {name: _plain(value) for name, value in event.items() if name in FIELDS}
    left_out = sorted(set(event) - set(kept) - {"exc_info"})
    if left_out:
        kept["error"] = f"fields left out: {', '.join(left_out)}"
    if "exc_info" in event:
        kept["exc_info"] = event["exc_info"]
    return kept


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"  # whatever they are, they are not for a log
    return str(value)[:_LONGEST]


class _ToStructlog(logging.Handler):
    """What libraries log, in the same form; the same words once in a while only.

    Anybody can make uvicorn complain of a malformed request, as often as he likes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when last, how often since

    def emit(self, record: logging.LogRecord) -> None:
        # Their arguments may be anything, so only the fixed part of the message is kept.
        words = str(record.msg)[:_LONGEST]
        now, key = self._clock(), (record.name, words)
        last, left_out = self._said.get(key, (-math.inf, 0))
        if now < last + _ONCE_IN:
            self._said[key] = (last, left_out + 1)
            return
        if len(self._said) >= _KEPT:
            self._said.clear()
        self._said[key] = (now, 0)
        more = {"repeated": left_out} if left_out else {}
        structlog.get_logger().log(record.levelno, words, kind=record.name, **more)


def configure_logs(*, level: str, form: str, stream: TextIO | None = None) -> None:
    """Send everything from `level` on to stderr, as JSON or as text."""
    number = getattr(logging, level.upper())
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _only_known,
            _stack_without_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # Looked up line by line: whoever replaces stderr gets what is written from then on.
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    root.setLevel(max(number, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error"):  # another server of this process may have set them up
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _stack_without_values(
    _: object, __: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Where an unforeseen exception came from; its message could quote data and stays out."""
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        frames, trace = [], error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
            trace = trace.tb_next
        event["frames"] = [type(error).__name__, *frames[-12:]]
    return event


def get_logger() -> Any:  # noqa: ANN401 (structlog's own type says no more)
    """The logger of an aggregator."""
    if not structlog.is_configured():  # its own default would print the variables of a traceback
        configure_logs(level="warning", form="text")
    return structlog.get_logger()
