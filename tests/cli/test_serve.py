"""`chorister serve registry` as a process of its own: start, use, stop, and every way not to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from typer.testing import CliRunner

from chorister.cli import app
from chorister.clock import SystemClock
from chorister.transparency.client import HTTPSource, RegistryClient
from chorister.transparency.cosigner import Cosigner, create_head
from tests.logworld import (
    HELPER,
    LEADER,
    body_of,
    hpke_entry,
    identity,
    key,
    policy_text,
    recipe_entry,
)

SETTINGS = """\
origin = "registry.example/log"
folder = "log"
key = "log.key"
policies = ["policy.toml"]
interval = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "registry.toml").write_text(SETTINGS)
    (tmp_path / "policy.toml").write_text(policy_text())
    write_key(tmp_path / "log.key")
    return tmp_path


def write_key(path: Path, name: str = "log") -> None:
    pem = key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.touch(mode=0o600)
    path.write_bytes(pem)


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", "from chorister.cli import app; app()"]
    command += ["serve", "registry", "--config", str(folder / "registry.toml"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    process = subprocess.Popen(
        [*command, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise AssertionError(line + process.communicate(timeout=10)[1])
        yield found[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def test_start_use_and_stop(folder: Path) -> None:
    now = SystemClock().now()
    cosigners = {
        side: Cosigner(
            identity=identity(side),
            head=create_head(folder / side, identity(side), SystemClock()),
            clock=SystemClock(),
            own_configs=lambda: {b"config"},
            accept=lambda _: None,
        )
        for side in ("leader", "helper")
    }
    with serving(folder, "--create") as (url, process):
        with RegistryClient(url) as client, HTTPSource(url) as source:
            one = recipe_entry("one", closes=now + 86_400)
            client.submit(one, body_of(one).jws)
            client.submit(hpke_entry(LEADER, not_before=0, not_after=now + 86_400))
            client.submit(hpke_entry(HELPER, not_before=0, not_after=now + 86_400))
            deadline = time.monotonic() + 20
            missing: tuple[str, ...] = ("all",)
            while missing:
                assert time.monotonic() < deadline
                for cosigner in cosigners.values():
                    missing = client.cosign(cosigner.cosign(source))
        # The first candidate may have been older than the entries; the folder holds it all anyway.
        result = CliRunner().invoke(app, ["log", "verify", url, "--json"])
        assert result.exit_code == 0, result.output
        assert '"keys_from": "log"' in result.output
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) in (0, -signal.SIGTERM)
    with serving(folder) as (url, process):
        with HTTPSource(url) as source:
            assert b"registry.example/log" in source.read("checkpoint", limit=4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) in (0, 130, -signal.SIGINT)


# --- What can be wrong, each with a message that says what to do ---------------------------------


def refused(folder: Path, *options: str) -> str:
    arguments = ["serve", "registry", "--config", str(folder / "registry.toml"), "--port", "0"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_no_log_yet(folder: Path) -> None:
    assert "If this is the first start, create one" in refused(folder)
    assert not (folder / "log").exists()


def test_no_settings(tmp_path: Path) -> None:
    assert "can't read" in refused(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("interval = 1", "interval = 0", "interval"),
        ("interval = 1", "colour = 1", "colour: unknown field"),
        ('origin = "registry.example/log"', "", "origin: this field is missing"),
        ("registry.example/log", "registry example", "can't name a log"),
        ("interval = 1", "interval =", "registry.toml"),
        ("policy.toml", "missing.toml", "missing.toml"),
        ("log.key", "missing.key", "chorister keygen"),
        (
            "registry.example/log",
            "staging.example/log",
            "policy keyboard names the log registry.example/log, not staging.example/log",
        ),
        ('"log"', '"no/such/folder"', "create it first"),
    ],
)
def test_wrong_settings(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "registry.toml").write_text(SETTINGS.replace(old, new))
    assert message in refused(folder, "--create")


def test_wrong_keys(folder: Path) -> None:
    path = folder / "log.key"
    write_key(path, "stranger")
    assert "does not list this log's key" in refused(folder, "--create")
    path.write_bytes(b"noise")
    assert "is not an unencrypted private key" in refused(folder, "--create")
    path.write_bytes(
        X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    assert "is not an Ed25519 key" in refused(folder, "--create")
    path.chmod(0o644)
    assert "others can read" in refused(folder, "--create")


def test_wrong_policy(folder: Path) -> None:
    (folder / "policy.toml").write_text("version = 1")
    assert "policy.toml" in refused(folder, "--create")


def test_wrong_address(folder: Path) -> None:
    assert "can't listen" in refused(folder, "--create", "--host", "203.0.113.1")
    assert not (folder / "log").exists()
