"""Send alerts to webhooks, files and the log. A destination that fails is tried again later."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from chorister import key_files
from chorister.analyst.alert_record import AlertRecord
from chorister.analyst.alerts import LOG, Alert, AlertDestination, AlertSettings, check_webhook
from chorister.canonical import FieldError
from chorister.clock import Clock
from chorister.errors import ChoristerError, ServiceError
from chorister.http_client import WebClient

_log = logging.getLogger("chorister.alerts")
WEBHOOK_TIMEOUT_SECONDS: Final = 10.0
_MAX_ANSWER_BYTES: Final = 16_384
_FIRST_RETRY_SECONDS: Final = 30
_LAST_RETRY_SECONDS: Final = 3_600
UNCLAIMED_DAYS: Final = 30
"""How long an alert waits for a destination that this process does not know: another may."""
_MAX_AT_ONCE: Final = 50  # alerts sent to one destination before others get their turn


class AlertSender:
    """Delivers what records hold. Thread-safe; remembers which destinations failed."""

    def __init__(
        self,
        settings: AlertSettings,
        clock: Clock,
        *,
        timeout: float = WEBHOOK_TIMEOUT_SECONDS,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._client = WebClient(timeout=timeout, error_bytes=_MAX_ANSWER_BYTES)
        self._lock = threading.Lock()
        self._failed: dict[str, tuple[int, float]] = {}  # how often in a row; when to try again
        self._why: dict[str, str] = {}
        self._unknown: dict[Path, set[str]] = {}  # destinations that others know, by record

    @property
    def problems(self) -> dict[str, str]:
        """Why destinations fail, by name."""
        with self._lock:
            unknown = {name for names in self._unknown.values() for name in names}
            why = f"these settings have no such destination; dropped after {UNCLAIMED_DAYS} days"
            return {**self._why, **dict.fromkeys(sorted(unknown), why)}

    def deliver(self, record: AlertRecord) -> int:
        """Send what is pending; return how many deliveries are still due."""
        sent: dict[str, int] = {}
        unknown: set[str] = set()
        for alert in record.pending:
            for name in alert.pending:
                if name != LOG and name not in self.settings.destinations:
                    if not self._drop_unclaimed(record, alert, name):
                        unknown.add(name)
                elif sent.get(name, 0) < _MAX_AT_ONCE and self._due(name):
                    sent[name] = sent.get(name, 0) + 1
                    self._try(name, alert, record)
        with self._lock:
            self._unknown[record.path] = unknown
        return sum(len(alert.pending) for alert in record.pending)

    def _drop_unclaimed(self, record: AlertRecord, alert: Alert, name: str) -> bool:
        """Drop a destination that we don't know if nobody delivered to it for a long time."""
        now = self._clock.now()
        if now - record.unclaimed(alert, name, now) < UNCLAIMED_DAYS * 86_400:
            return False
        _log.warning("alert %s was for %s, which no longer exists", alert.id, name)
        record.drop(alert, name)
        return True

    def _due(self, name: str) -> bool:
        with self._lock:
            return self._clock.uptime() >= self._failed.get(name, (0, float("-inf")))[1]

    def _try(self, name: str, alert: Alert, record: AlertRecord) -> None:
        try:
            if name == LOG:
                _log.warning("%s", alert.text)
            else:
                self._send(self.settings.destinations[name], alert)
            # Where this fails, on a full disk for example, the alert is sent again: not too often.
            record.delivered(alert, name, self._clock.now())
        except (ChoristerError, OSError) as error:
            why = error.strerror or "" if isinstance(error, OSError) else str(error)
            self._note_failure(name, why)
            return
        with self._lock:
            self._failed.pop(name, None)
            self._why.pop(name, None)

    def _note_failure(self, name: str, why: str) -> None:
        with self._lock:
            times = self._failed.get(name, (0, 0.0))[0] + 1
            wait = min(_FIRST_RETRY_SECONDS * 2 ** min(times - 1, 20), _LAST_RETRY_SECONDS)
            self._failed[name] = (times, self._clock.uptime() + wait)
            self._why[name] = why
        _log.warning("alerts can't be sent to %s (%s); next attempt in %d s", name, why, wait)

    def _send(self, destination: AlertDestination, alert: Alert) -> None:
        if destination.file is not None:
            append_line(Path(destination.file), alert.message())
            return
        headers = {"Content-Type": "application/json"}
        if destination.token is not None:
            headers["Authorization"] = f"Bearer {key_files.read_token(destination.token)}"
        url = _webhook_url(destination.webhook or "")
        try:
            answer = self._client.exchange(
                "POST", url, headers=headers, body=alert.message(), limit=_MAX_ANSWER_BYTES
            )
        except ChoristerError as error:
            # The message would quote the URL, which may be a secret.
            cause = type(error.__cause__ or error).__name__
            raise ServiceError(f"the webhook can't be reached: {cause}") from None
        if not 200 <= answer.status < 300:
            raise ServiceError(f"the webhook answers with HTTP status {answer.status}")


def _webhook_url(reference: str) -> str:
    if not reference.startswith("env:"):
        return reference
    name = reference.removeprefix("env:")
    url = os.environ.get(name, "")
    try:
        check_webhook(url)
    except FieldError as error:
        raise ServiceError(f"the environment variable {name}: {error}") from None
    return url


def append_line(path: Path, line: bytes) -> None:
    """Append a line and wait until it is on disk. A line that a crash cut off stays apart."""
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
