"""Log lines: names from a closed list, no bytes, no addresses, no values of a traceback."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import uvicorn

import chorister.aggregator
from chorister.aggregator.operations.logs import (
    FIELDS,
    _ToStructlog,
    configure_logs,
    get_logger,
)

SOURCE = Path(str(chorister.aggregator.__file__)).parent


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logs(level="info", form="json", stream=stream)
    yield stream
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in [each for each in root.handlers if type(each).__name__ == "_ToStructlog"]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_known_names_only(stream: io.StringIO) -> None:
    get_logger().info("did something", retry_in=3, task="ab", client="203.0.113.7", token=b"secret")
    (line,) = lines(stream)
    assert line["error"] == "fields left out: client, token"
    assert (line["event"], line["retry_in"], line["level"]) == ("did something", 3, "info")
    assert "203.0.113.7" not in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_bytes_are_never_written(stream: io.StringIO) -> None:
    get_logger().info("saw", reason=b"share share share")
    assert lines(stream)[0]["reason"] == "17 bytes"


def test_a_traceback_has_places_and_no_values(stream: io.StringIO) -> None:
    def fail(share: str) -> None:
        raise ValueError(f"bad share {share}")

    try:
        fail("0123456789")
    except ValueError as error:
        get_logger().error("failed", exc_info=error)
    (line,) = lines(stream)
    assert "0123456789" not in stream.getvalue()
    assert str(line["frames"]).startswith("['ValueError', ")
    assert "test_logs.py" in str(line["frames"])


def test_a_library_that_was_set_up_before_writes_no_lines_of_its_own(
    stream: io.StringIO,
) -> None:
    uvicorn.Config(lambda: None, log_level="warning")
    assert not logging.getLogger("uvicorn").propagate
    configure_logs(level="info", form="json", stream=stream)
    logging.getLogger("uvicorn.error").warning("Invalid request from %s", "203.0.113.8")
    assert [line["event"] for line in lines(stream)] == ["Invalid request from %s"]


def test_libraries_log_their_fixed_words_only(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid request from %s", "203.0.113.7")
    (line,) = lines(stream)
    assert (line["event"], line["kind"]) == ("Invalid request from %s", "uvicorn.error")


def test_libraries_repeat_themselves_in_numbers_only(stream: io.StringIO) -> None:
    now = [0.0]
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        handler._clock = lambda: now[0]
    for _ in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").warning("Exceeded concurrency limit.")
    now[0] = 61
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    first, other, again = lines(stream)
    assert "repeated" not in first
    assert other["event"] == "Exceeded concurrency limit."
    assert (again["event"], again["repeated"]) == (first["event"], 999)


@pytest.mark.usefixtures("stream")
def test_text_is_written_without_values_too() -> None:
    stream = io.StringIO()
    configure_logs(level="info", form="text", stream=stream)
    get_logger().error("failed", exc_info=ValueError("share"), kind="aggregate")
    assert "failed" in stream.getvalue()
    assert "share" not in stream.getvalue()


def test_levels(stream: io.StringIO) -> None:
    get_logger().debug("too quiet")
    assert not stream.getvalue()


def test_every_call_in_the_source_uses_known_names() -> None:
    """What is passed to a logger's method anywhere in the room is on the list."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            target, _, method = called.rpartition(".")
            if called == "log_failure" or (
                method in {"info", "warning", "error", "debug", "log"} and "log" in target
            ):
                found |= {keyword.arg for keyword in node.keywords}
    found -= {"level"}  # of `log_failure`
    of_every_line = {"event", "frames", "level", "timestamp"}
    assert found - {"exc_info", None} | {"repeated"} | of_every_line == FIELDS


@pytest.mark.usefixtures("stream")  # which cleans up
def test_lines_go_to_stderr_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    configure_logs(level="info", form="json")
    monkeypatch.setattr(sys, "stderr", after)
    before.close()
    get_logger().warning("the helper is away")
    assert "the helper is away" in after.getvalue()
