"""Structured logs without people in them.

A line says what the server did, for which task, and how many reports: never a share, a bit, a
token, a credential or a network address. Only a fixed list of fields may be logged, and every value
is a number, a word or a digest of something public. A field that is not on the list is a bug, and
is left out.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO

import structlog

from chorister.errors import ChoristerError

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
"""Every field that a line may have; a test compares the list with the calls in the source."""

_MAX_VALUE_CHARACTERS: Final = 500
_REPEAT_SECONDS: Final = 60.0
"""The time between two identical lines of a library."""
_REMEMBERED_MESSAGES: Final = 256


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
        return f"{len(value)} bytes"  # whatever they are, they don't belong in a log
    return str(value)[:_MAX_VALUE_CHARACTERS]


class _ToStructlog(logging.Handler):
    """Formats what libraries log in the same way, without repeating the same message too often.

    Anybody can make uvicorn complain about a malformed request, as often as they like.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # last logged, suppressed since

    def emit(self, record: logging.LogRecord) -> None:
        # Arguments may be anything, so only the fixed part of the message is kept.
        words = str(record.msg)[:_MAX_VALUE_CHARACTERS]
        now, key = self._clock(), (record.name, words)
        last, suppressed = self._said.get(key, (-math.inf, 0))
        if now < last + _REPEAT_SECONDS:
            self._said[key] = (last, suppressed + 1)
            return
        if len(self._said) >= _REMEMBERED_MESSAGES:
            self._said.clear()
        self._said[key] = (now, 0)
        more = {"repeated": suppressed} if suppressed else {}
        structlog.get_logger().log(record.levelno, words, kind=record.name, **more)


def configure_logs(*, level: str, form: str, stream: TextIO | None = None) -> None:
    """Log messages of `level` and above to stderr, as JSON or as text."""
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
        # Looked up for every line, so that replacing stderr takes effect immediately.
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    root.setLevel(max(number, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error"):  # another server in this process may have set them up
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _stack_without_values(
    _: object, __: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Log where an unexpected exception came from, without its message, which could quote data."""
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        frames, trace = [], error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
            trace = trace.tb_next
        event["frames"] = [type(error).__name__, *frames[-12:]]
    return event


def log_failure(
    event: str,
    error: BaseException,
    *,
    level: int = logging.ERROR,
    **fields: Any,  # noqa: ANN401 (structlog's own)
) -> None:
    """Log what a typed error says; for any other, that it is a bug and where it happened."""
    if isinstance(error, ChoristerError):
        name = type(error).__name__
        get_logger().log(level, event, reason=name, error=str(error), **fields)
    else:
        get_logger().error(f"{event} because of a bug in Chorister", exc_info=error, **fields)


def get_logger() -> Any:  # noqa: ANN401 (structlog's own type says no more)
    """Return the aggregator's logger."""
    if not structlog.is_configured():  # its default would print the variables of a traceback
        configure_logs(level="warning", form="text")
    return structlog.get_logger()
