"""`chorister serve leader|helper` and `chorister tasks`: processes, TLS, metrics, orderly ends."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import insert
from typer.testing import CliRunner

from chorister.aggregator.service import open_core
from chorister.aggregator.storage.schema import aggregation_jobs, counters
from chorister.canonical import b64url_encode
from chorister.cli import app
from chorister.clock import SystemClock
from chorister.dap.draft import UPLOAD_REQUEST, reports_path
from chorister.recipe import SignedRecipe
from tests.aggregator.operators import OperatorAddresses, Operators, free_port
from tests.aggregator.server_processes import process, stop
from tests.certificates import a_certificate
from tests.logworld import body_of

ALONE = {"cosign": False}  # without a registry


def get(url: str, path: str, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    at = urlsplit(url)
    assert at.hostname is not None
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
    else:
        connection = http.client.HTTPSConnection(at.hostname, at.port, timeout=20, context=tls)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_tls_metrics_health_and_an_orderly_end(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    metrics = free_port()
    settings = {
        "helper": {
            **ALONE,
            "tls_certificate": chain.name,
            "tls_key": key.name,
            "metrics_port": metrics,
        }
    }
    operators = Operators(tmp_path, OperatorAddresses.local(), settings=settings)
    log = tmp_path / "helper.log"
    tls = ssl.create_default_context(cafile=str(chain))
    with process("helper", operators.settings("helper"), log) as (url, server):
        assert url.startswith("https://")
        status, body = get(url, "/healthz", tls)
        assert (status, json.loads(body)) == (200, {"ok": True, "role": "helper"})
        assert get(url, "/metrics", tls)[0] == 404  # not for the public
        status, body = get(f"http://127.0.0.1:{metrics}", "/metrics")
        assert status == 200
        assert b'chorister_requests_total{route="healthz",status="200"} 1.0' in body
        with pytest.raises(ssl.SSLError):
            get(url, "/healthz", ssl.create_default_context())  # a stranger's certificate
        assert stop(server) == 0
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "started"
    assert events[-1] == "stopped"


def test_logs_have_nobody_in_them(tmp_path: Path) -> None:
    """Everything that can go wrong with a request, at the most talkative level."""
    settings = {"leader": {**ALONE, "log_level": "debug", "log_format": "text"}}
    operators = Operators(tmp_path, OperatorAddresses.local(), settings=settings)
    recipe = operators.recipe("ages", SystemClock().now())
    core = open_core(operators.leader(), SystemClock(), migrate=True)
    core.tasks.accept([SignedRecipe.parse(body_of(operators.entry(recipe)).jws)])
    core.database.close()
    log = tmp_path / "log"
    secret = "c0ffee" * 8
    path = f"/dap/{reports_path(operators.task(recipe).task_id)}"
    with process("leader", operators.settings("leader"), log) as (url, server):
        at = urlsplit(url)
        assert at.hostname is not None
        assert at.port is not None
        requests = [
            ("POST", path, {"Content-Type": UPLOAD_REQUEST}, secret),
            ("POST", path, {"Content-Type": "text/plain"}, secret),
            ("POST", f"/dap/tasks/{secret[:43]}/reports", {"Content-Type": UPLOAD_REQUEST}, secret),
            ("POST", path.replace("reports", "collection_jobs"), {"Authorization": secret}, secret),
            ("GET", f"/{secret}", {"Chorister-Upload-Credential": secret}, ""),
            ("GET", f"/dap/chorister/recipes/{secret}", {"Authorization": f"Bearer {secret}"}, ""),
        ]
        for method, target, headers, body in requests:
            connection = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
            connection.request(method, target, body.encode(), headers)
            assert connection.getresponse().status >= 400
            connection.close()
        with socket.create_connection((at.hostname, at.port), timeout=20) as raw:
            raw.sendall(f"{secret}\r\n\r\n".encode())
            assert b"400" in raw.recv(4096)
        with socket.create_connection((at.hostname, at.port), timeout=20) as raw:
            raw.sendall(f"POST {path} HTTP/1.1\r\nContent-Length: 900\r\n\r\n{secret}".encode())
        assert stop(server) == 0
    text = log.read_text().replace(operators.at.leader, "")
    assert "started" in text
    assert secret[:12] not in text
    assert not re.search(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+", text)


def test_a_request_under_way_is_answered_before_the_end(tmp_path: Path) -> None:
    operators = Operators(tmp_path, OperatorAddresses.local(), settings={"leader": ALONE})
    recipe = operators.recipe("ages", SystemClock().now())
    core = open_core(operators.leader(), SystemClock(), migrate=True)
    core.tasks.accept([SignedRecipe.parse(body_of(operators.entry(recipe)).jws)])
    core.database.close()
    path = f"/dap/{reports_path(operators.task(recipe).task_id)}"
    with process("leader", operators.settings("leader"), tmp_path / "log") as (url, server):
        at = urlsplit(url)
        connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=30)
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "2")
        connection.putheader("Content-Type", UPLOAD_REQUEST)
        connection.endheaders(b"x")
        # It waits for the rest of the body. Who is answered later came later.
        for _ in range(2):
            assert get(url, "/healthz")[0] == 200
        ended = threading.Thread(target=stop, args=(server,))
        ended.start()
        time.sleep(1)
        connection.send(b"y")
        assert connection.getresponse().status == 400
        ended.join()
        assert server.returncode == 0


def test_tasks(tmp_path: Path) -> None:
    operators = Operators(tmp_path, settings={"leader": {"collectors": []}})
    recipe = operators.recipe("ages", SystemClock().now(), {"group_by": ["user.locale"]})
    core = open_core(operators.leader(), SystemClock(), migrate=True)
    core.tasks.accept([SignedRecipe.parse(body_of(operators.entry(recipe)).jws)])
    ids = [b64url_encode(task.task_id) for task in core.tasks.all()]
    core.database.close()
    config = ["--config", str(operators.settings("leader"))]
    result = CliRunner().invoke(app, ["tasks", "list", *config, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["tasks"]
    assert [each["task"] for each in found] == ids
    assert len(found) == 5  # four locales and others
    assert {each["state"] for each in found} == {"open"}
    none = CliRunner().invoke(app, ["tasks", "list", *config, "--recipe", "zz", "--json"])
    assert json.loads(none.output) == {"tasks": []}
    shown = CliRunner().invoke(app, ["tasks", "show", ids[0], *config, "--json"])
    one = json.loads(shown.output)
    assert one["rejected"] == {"upload": {}, "leader": {}, "helper": {}, "disputed": {}}
    assert one["waiting_for"] == [
        f"collector {operators.digest.hex()[:16]}… is not in the settings: it can't collect",
        "3 more verified reports",
    ]
    for command, words in ((["list"], "en_GB"), (["show", ids[0]], "keyboard.next-word")):
        text = CliRunner().invoke(app, ["tasks", *command, *config])
        assert text.exit_code == 0, text.output
        assert words in text.output
    missing = "-" + ("A" if ids[0].startswith("-B") else "B") + ids[0][2:]
    for odd in ("-A" * 22, "--x", missing):  # an id may begin with a dash
        none = CliRunner().invoke(app, ["tasks", "show", odd, *config])
        assert none.exit_code == 2
        assert "0 tasks have an id that starts with -" in " ".join(none.output.split())
    ambiguous = CliRunner().invoke(app, ["tasks", "show", "", *config])
    assert ambiguous.exit_code == 2
    assert "5 tasks have an id" in " ".join(ambiguous.output.split())


def test_tasks_have_reasons_from_both_sides(tmp_path: Path) -> None:
    """Reports that each side refuses, and a helper that does not answer: operators see why."""
    operators = Operators(tmp_path)
    recipe = operators.recipe("ages", SystemClock().now())
    shown = {}
    for role, settings in (("leader", operators.leader()), ("helper", operators.helper())):
        core = open_core(settings, SystemClock(), migrate=True)
        core.tasks.accept([SignedRecipe.parse(body_of(operators.entry(recipe)).jws)])
        (task,) = core.tasks.all()
        key = {"task_id": task.task_id}
        reasons = [("upload:outdated_config", 2), ("helper:vdaf_verify_error", 1)]
        reasons += [("disputed:vdaf_verify_error", 3)] if role == "leader" else []
        said = "the helper: https://helper.example can't be reached: ConnectError"
        with core.database.write() as connection:
            for name, value in reasons:
                connection.execute(insert(counters).values(**key, name=name, shard=0, value=value))
            if role == "leader":
                job = {"job_id": bytes(16), "created": 1, "reports": 1, "attempts": 2}
                connection.execute(insert(aggregation_jobs).values(**key, **job, failure=said))
        core.database.close()
        options = ["--config", str(operators.settings(role)), "--json"]
        result = CliRunner().invoke(app, ["tasks", "show", b64url_encode(task.task_id), *options])
        shown[role] = json.loads(result.stdout)
    assert shown["leader"]["rejected"] == {
        "upload": {"outdated_config": 2},
        "leader": {},
        "helper": {"vdaf_verify_error": 1},
        "disputed": {"vdaf_verify_error": 3},
    }
    assert said in shown["leader"]["waiting_for"]
    assert shown["helper"]["rejected"] == {"helper": {"vdaf_verify_error": 1}}
    listed = CliRunner().invoke(
        app, ["tasks", "list", "--config", str(operators.settings("leader"))]
    )
    assert said in listed.output


# --- What can be wrong, each with a message that says what to do ---------------------------------


def refused(operators: Operators, role: str, *options: str) -> str:
    arguments = ["serve", role, "--config", str(operators.settings(role)), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "does not know what it signed last"),
        ({"role": "helper", "helper_token": None}, "leader_token_digests"),
        ({"tls_certificate": "policy.toml", "tls_key": "log.key"}, "not a certificate and its key"),
        ({"host": "203.0.113.1"}, "can't listen on 203.0.113.1"),
        ({"at_rest_key": "policy.toml"}, "others can read"),
        ({"at_rest_key": "env:NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"verify_key": "leader.key", **ALONE}, "not 32 bytes in base64url"),
        ({"cosigning_key": "helper.key"}, "does not list this aggregator's cosigning key"),
        ({"url": "https://other.example/"}, "has no aggregator at https://other.example/"),
        ({"policies": ["none.toml"]}, "none.toml"),
        ({"database": "mysql://x/y", **ALONE}, "SQLite or PostgreSQL"),
        ({"ca_bundle": "policy.toml"}, "authorities"),
        ({"upload_credential": "no_such_app:check", **ALONE}, "can't load no_such_app:check"),
    ],
)
def test_wrong_settings(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    operators = Operators(tmp_path, settings={"leader": {"port": 0, **changes}})
    assert message in refused(operators, "leader")


def test_the_other_role(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    arguments = ["serve", "leader", "--config", str(operators.settings("helper"))]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "chorister serve helper" in " ".join(result.output.split())
