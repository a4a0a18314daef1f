"""The doctor finds each planted defect, names the file or rule, and says what to do."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from chorister.clock import SystemClock
from chorister.fleet.deployment import Deployment
from chorister.fleet.health_check import CheckResult, HealthCheck
from tests.adversary.test_trickling import HEAD, trickling
from tests.certificates import a_certificate
from tests.device.loopback import Reply, serve
from tests.fleet.local import create

Plant = Callable[[Path], None]


def bad(deployment: Deployment) -> dict[str, CheckResult]:
    health_check = HealthCheck()
    health_check.deployment(deployment)
    return {each.what: each for each in health_check.findings if each.state == "bad"}


def replaced(name: str, old: str, new: str) -> Plant:
    def plant(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return plant


def readable(name: str) -> Plant:
    return lambda folder: (folder / name).chmod(0o644)


def removed(name: str) -> Plant:
    return lambda folder: (folder / name).unlink()


def swapped(one: str, other: str) -> Plant:
    """A key that is good, but not the one that the policy lists."""

    def plant(folder: Path) -> None:
        (folder / one).write_bytes((folder / other).read_bytes())

    return plant


DEFECTS: dict[str, tuple[Plant, str, str]] = {
    "a log key that others read": (readable("registry/log.key"), "registry key", "others"),
    "a cosigning key that others read": (
        readable("leader/cosigning.key"),
        "leader cosigning_key",
        "others",
    ),
    "an at-rest key that others read": (
        readable("helper/at-rest.key"),
        "helper at_rest_key",
        "others",
    ),
    "a collector key that others read": (
        readable("analyst/collector.json"),
        "analyst collector_key",
        "others",
    ),
    "no verify key": (removed("leader/verify.key"), "leader verify_key", "verify.key"),
    "no author key": (removed("analyst/author.key"), "analyst author_key", "author.key"),
    "no helper token": (removed("leader/helper.token"), "leader helper_token", "helper.token"),
    "another cosigning key": (
        swapped("helper/cosigning.key", "leader/cosigning.key"),
        "helper cosigning_key",
        "does not list",
    ),
    "different verify keys": (
        swapped("helper/verify.key", "helper/at-rest.key"),
        "verify_key",
        "different",
    ),
    "a token that the helper does not know": (
        swapped("leader/helper.token", "analyst/token"),
        "helper_token",
        "does not accept",
    ),
    "no settings": (removed("helper/helper.toml"), "helper settings", "helper.toml"),
    "settings that are no TOML": (
        replaced("leader/leader.toml", "role =", "role"),
        "leader settings",
        "leader.toml",
    ),
    "a setting that is none": (
        replaced("registry/registry.toml", "interval", "intervall"),
        "registry settings",
        "intervall",
    ),
    "an URL that the policy does not name": (
        replaced("leader/leader.toml", "/dap/", "/other/"),
        "leader in the policy",
        "has no leader",
    ),
    "a policy that is none": (
        replaced("policy.toml", "version = 1", "version = 2"),
        "leader policies",
        "version",
    ),
    "another log": (
        replaced("registry/registry.toml", "chorister.local/log", "elsewhere/log"),
        "registry origin",
        "elsewhere",
    ),
    "no collector": (
        replaced("helper/helper.toml", "[[collectors]]", "[[nobody]]"),
        "helper settings",
        "nobody",
    ),
    "no profile": (removed("analyst/profile.toml"), "profile", "profile.toml"),
}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return create(tmp_path / "here")


def test_nothing_but_that_it_does_not_run(deployment: Deployment) -> None:
    with contextlib.ExitStack() as stack:
        for port in deployment.ports.values():  # so that no other test's server gets it meanwhile
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        found = bad(deployment)
    assert set(found) == {
        "processes",
        "registry log",
        "leader to the registry",
        "leader itself",
        "leader to the helper",
        "helper to the registry",
        "helper itself",
    }
    assert "chorister up" in found["processes"].remedy
    assert all(each.remedy for each in found.values())


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found(deployment: Deployment, defect: str) -> None:
    plant, what, words = DEFECTS[defect]
    before = bad(deployment)
    plant(deployment.folder)
    found = bad(deployment)
    assert what not in before
    assert words in found[what].why
    assert found[what].remedy


@contextlib.contextmanager
def server(*, status: int = 200, skew: int = 0, date: bool = True) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(status)
            if date:
                self.send_header("Date", formatdate(SystemClock().now() + skew, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("skew", "state", "words"),
    [(0, "good", "s"), (60, "note", "+"), (-60, "note", "-"), (900, "bad", "nothing is cosigned")],
)
def test_clocks_are_compared(
    deployment: Deployment,
    skew: int,
    state: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The machine may stand still between the two looks at its clock.
    monkeypatch.setattr("chorister.fleet.health_check._NOTABLE_SKEW_SECONDS", 30)
    monkeypatch.setattr("chorister.fleet.health_check._TIMEOUT_SECONDS", 30.0)
    with server(skew=skew) as url:
        settings = deployment.settings("helper")
        registry = deployment.registry.rstrip("/")
        settings.write_text(settings.read_text().replace(registry, url))
        health_check = HealthCheck()
        health_check.server(settings)
    (found,) = [e for e in health_check.findings if e.what == "helper to the registry: clock"]
    assert found.state == state
    assert words in found.why


def test_a_server_that_fails_or_has_no_clock(deployment: Deployment) -> None:
    settings = deployment.settings("helper")
    text = settings.read_text()
    registry = deployment.registry.rstrip("/")
    for options, what, state in (
        ({"status": 503}, "helper to the registry", "bad"),
        ({"date": False}, "helper to the registry: clock", "note"),
    ):
        with server(**options) as url:
            settings.write_text(text.replace(registry, url))
            health_check = HealthCheck()
            health_check.server(settings)
        (found,) = [each for each in health_check.findings if each.what == what]
        assert found.state == state


def test_the_settings_authorities_are_believed(deployment: Deployment, tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    settings = deployment.settings("helper")
    text = settings.read_text()
    for bundle, state in ((f"ca_bundle = {json.dumps(str(chain))}\n", "good"), ("", "bad")):
        with serve(lambda _: Reply(), tls=context) as registry:
            changed = text.replace(deployment.registry.rstrip("/"), registry.url)
            settings.write_text(bundle + changed)
            health_check = HealthCheck()
            health_check.server(settings)
        (found,) = [each for each in health_check.findings if each.what == "helper to the registry"]
        assert found.state == state


def test_a_server_that_trickles_is_not_waited_for(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chorister.fleet.health_check._TIMEOUT_SECONDS", 0.5)
    settings = deployment.settings("helper")
    with trickling(HEAD, lambda count: b"X-%d: 1\r\n" % count) as port:
        url = f"http://127.0.0.1:{port}"
        settings.write_text(settings.read_text().replace(deployment.registry.rstrip("/"), url))
        health_check = HealthCheck()
        begun = time.monotonic()
        health_check.server(settings)
        assert time.monotonic() - begun < 20
    (found,) = [each for each in health_check.findings if each.what == "helper to the registry"]
    assert found.state == "bad"
    assert "takes more than 0.5 s" in found.why


def test_the_sandbox_is_looked_at() -> None:
    health_check = HealthCheck()
    health_check.sandbox()
    assert {each.what for each in health_check.findings} == {"sandbox"}
    assert {each.state for each in health_check.findings} <= {"good", "note"}
