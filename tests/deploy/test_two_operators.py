"""The guide for two operators, followed: two databases, workers, TLS, keys made by `keygen`.

What the guide's settings name (certificates, the database in the environment, authorities of one's
own) is put there; addresses are two of this machine, and the log is cosigned every second so that
nobody waits. Everything else stands as it is printed.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from chorister.canonical import b64url_encode, sha256
from chorister.cli import app
from chorister.clock import SystemClock
from chorister.dap.collector import Collected, Collector
from chorister.device import HTTPTransport, Sandbox
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.transparency.client import RegistryClient
from tests.aggregator.inprocess_pair import wait_until
from tests.aggregator.operators import TOKENS, OperatorAddresses, Operators, free_port
from tests.aggregator.server_processes import COMMAND, environment, process
from tests.aggregator.test_end_to_end import a_device, check_estimate, polled
from tests.certificates import a_certificate
from tests.cli.toml import dumps
from tests.deploy.test_deploy import blocks
from tests.faults.postgres_servers import MortalPostgres, mortal_servers
from tests.logworld import body_of, public

DEVICES = 24  # with fewer, too often one bin has no more ones than another
HOSTS = {"leader": "127.0.0.1", "helper": "127.0.0.2"}


class Operator:
    """One host: a folder that stands for `/etc/chorister`, and a database."""

    def __init__(self, role: str, folder: Path, database: MortalPostgres) -> None:
        self.role = role
        self.folder = folder
        self.surroundings = {f"CHORISTER_{role.upper()}__DATABASE": database.url}
        folder.mkdir()
        a_certificate(folder, HOSTS[role])
        self.keygen("secret", "at-rest.key")
        self.cosigning_key = self.keygen("cosigning", "cosigning.key")["public_key"]

    def keygen(self, kind: str, name: str) -> dict[str, Any]:
        made = CliRunner().invoke(app, ["keygen", kind, str(self.folder / name), "--json"])
        assert made.exit_code == 0, made.output
        printed: dict[str, Any] = json.loads(made.stdout)
        return printed

    @property
    def settings(self) -> Path:
        return self.folder / f"{self.role}.toml"

    def configure(self, printed: str, own: dict[str, Any]) -> None:
        """The guide's settings with one's own values, and what it says about authorities."""
        settings = tomllib.loads(printed)
        assert set(own) <= set(settings), "the guide leaves something out"
        also = {"ca_bundle": "authorities.pem", "cosign_every": "1s"}
        self.settings.write_text(dumps({**settings, **own, **also}))

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments, "--config", str(self.settings)],
            env=environment(**self.surroundings),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    @contextmanager
    def serving(self, *options: str) -> Iterator[str]:
        log = self.folder / "log"
        with process(self.role, self.settings, log, *options, **self.surroundings) as (url, _):
            yield url

    @contextmanager
    def working(self) -> Iterator[None]:
        with (self.folder / "worker.log").open("w") as log:
            worker = subprocess.Popen(
                [*COMMAND, "worker", "--config", str(self.settings)],
                env=environment(**self.surroundings),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert worker.stdout is not None
            assert "started" in worker.stdout.readline()
            yield
        finally:
            worker.kill()
            worker.communicate(timeout=10)


class Hosts:
    """Both operators with their settings, and the policy that names them."""

    def __init__(self, folder: Path, databases: list[MortalPostgres]) -> None:
        self.ports = {role: free_port(host) for role, host in HOSTS.items()}
        at = {role: f"https://{HOSTS[role]}:{self.ports[role]}/dap/" for role in HOSTS}
        registry = f"http://127.0.0.1:{free_port()}"
        self.world = Operators(folder, OperatorAddresses(**at, registry=registry))
        self.leader, self.helper = (
            Operator(role, folder / role, database)
            for role, database in zip(HOSTS, databases, strict=True)
        )
        self._exchange()
        for operator, printed in zip((self.leader, self.helper), blocks("toml")[:2], strict=True):
            operator.configure(printed, self._own(operator))

    def _exchange(self) -> None:
        """What the two give each other, and the policy's author."""
        self.leader.keygen("secret", "verify.key")
        token = self.leader.keygen("token", "helper.token")
        self.token_digest = token["digest"]
        shared = self.helper.folder / "verify.key"
        shared.touch(mode=0o600)
        shared.write_bytes((self.leader.folder / "verify.key").read_bytes())
        text = self.world.policy_file.read_text()
        for operator in (self.leader, self.helper):
            text = text.replace(b64url_encode(public(operator.role)), operator.cosigning_key)
        self.world.policy_file.write_text(text)
        self.world.policy = Policy.load(self.world.policy_file)
        both = [each.folder / "fullchain.pem" for each in (self.leader, self.helper)]
        self.authorities = self.world.folder / "authorities.pem"
        self.authorities.write_text("".join(each.read_text() for each in both))
        for operator in (self.leader, self.helper):
            (operator.folder / "policy.toml").write_text(text)
            (operator.folder / "authorities.pem").write_text(self.authorities.read_text())

    def _own(self, operator: Operator) -> dict[str, Any]:
        role = operator.role
        collector: dict[str, Any] = {
            "name": "keyboard team",
            "hpke_config": self._collectors_config,
        }
        own: dict[str, Any] = {
            "url": getattr(self.world.at, role),
            "host": HOSTS[role],
            "port": self.ports[role],
            "tls_certificate": "fullchain.pem",
            "tls_key": "privkey.pem",
            "registry": self.world.at.registry,
            "head": "head",
            "metrics_port": free_port(),
        }
        if role == "leader":
            collector["token_digests"] = [sha256(TOKENS["collector"].encode()).hex()]
        else:
            own["leader_token_digests"] = [self.token_digest]
            own["collected_file"] = "collected"
        return {**own, "collectors": [collector]}

    @property
    def _collectors_config(self) -> str:
        return b64url_encode(self.world.collector.config)

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authorities))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with mortal_servers(2) as databases, ExitStack() as stack:
        hosts = Hosts(tmp_path, databases)
        registry = ["--create", "--port", hosts.world.at.registry.rpartition(":")[2]]
        log = tmp_path / "registry.log"
        stack.enter_context(process("registry", tmp_path / "registry.toml", log, *registry))
        for operator in (hosts.leader, hosts.helper):
            stack.enter_context(operator.serving("--begin-log"))
            stack.enter_context(operator.working())
        yield hosts


def answer(hosts: Hosts, recipe: Recipe) -> None:
    """Devices see the log, answer the recipe, and upload when they said they would."""
    with ExitStack() as stack:
        sandbox = stack.enter_context(Sandbox())
        transport = HTTPTransport(tls=hosts.trusting)
        devices = [
            stack.enter_context(a_device(hosts.world, number, sandbox, transport=transport))
            for number in range(DEVICES)
        ]
        for device in devices:  # a ledger begins with the first checkpoint that a device sees
            wait_until(lambda: polled(device), "a published checkpoint")  # noqa: B023
        with RegistryClient(hosts.world.at.registry) as registry:
            entry = hosts.world.entry(recipe)
            registry.submit(entry, body_of(entry).jws)
        for device in devices:
            wait_until(lambda: device.run_once().answered, "an answer")  # noqa: B023
        for device in devices:
            due = device.next_upload()
            assert due is not None
            while SystemClock().now() < due:
                time.sleep(0.05)
            assert device.upload_due().uploaded == 1


def test_the_guide_ends_with_a_pair_that_works(hosts: Hosts) -> None:
    recipe = hosts.world.recipe("ages", SystemClock().now(), {"privacy/min_cohort": DEVICES})
    for role in HOSTS:
        url = getattr(hosts.world.at, role).removesuffix("dap/") + "healthz"
        with httpx2.Client(verify=hosts.trusting()) as visitor:
            assert visitor.get(url).json() == {"ok": True, "role": role}
        with httpx2.Client() as stranger, pytest.raises(httpx2.ConnectError):
            stranger.get(url)  # whose authorities do not know this certificate
    answer(hosts, recipe)
    at = f"{hosts.world.at.registry}/status"
    wait_until(lambda: httpx2.get(at).json()["waiting_for"] == [], "both cosignatures")
    collector = Collector(
        hosts.world.at.leader,
        TOKENS["collector"],
        hosts.world.collector,
        ca_bundle=hosts.authorities,
    )
    handle = collector.create(hosts.world.task(recipe))

    def result() -> Collected | None:
        found = collector.poll(handle, noise_trials=DEVICES - 1)
        return found if isinstance(found, Collected) else None

    found = wait_until(result, "the result")
    assert found.report_count == DEVICES
    check_estimate(recipe, found)
    for operator in (hosts.leader, hosts.helper):
        (task,) = json.loads(operator.run("tasks", "list", "--json"))["tasks"]
        assert (task["state"], task["verified"]) == ("collected", DEVICES)
    assert json.loads(hosts.leader.run("jobs", "list", "--json")) == {"dead": []}
    more = {"CHORISTER_LEADER__COSIGN": "false", "CHORISTER_LEADER__METRICS_PORT": "0"}
    hosts.leader.surroundings |= more
    with hosts.leader.serving("--port", str(free_port())) as second:  # as many as one likes
        assert second.startswith("https://")
