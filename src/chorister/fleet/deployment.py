"""Registry, leader and helper on this machine: one folder, one process each.

`deployment_files` lists what is in the folder; `run/` holds the logs of the processes and a lock.
The file `deployment.json` is written last, so that a folder without it is not a deployment yet.
Ports never change, because the URLs of both aggregators are part of the policy.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

from chorister.clock import SystemClock
from chorister.errors import (
    CheckpointTime,
    ChoristerError,
    InvalidInput,
    LogOutdated,
    LogWithheld,
    ServiceError,
    Unreachable,
)
from chorister.fleet.deployment_files import (
    Addresses,
    DeploymentFiles,
    SampleTerms,
    sample_policy,
)
from chorister.http_client import WebClient
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.registry.folder import is_outdated
from chorister.transparency.client import HTTPSource
from chorister.transparency.entries import open_recipe
from chorister.transparency.reader import Current, read_current
from chorister.transparency.trust import Trust

COMMAND: Final = (sys.executable, "-m", "chorister.cli")
_MARKER: Final = "deployment.json"
_MAX_PAGE_BYTES: Final = 1 << 20
_ROLES: Final = ("registry", "leader", "helper")
_START_TIMEOUT_SECONDS: Final = 240.0
"""For a process that runs but does not answer; one that ended is noticed at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A folder with everything for one machine: `create` writes it, `open` reads it."""

    folder: Path
    ports: Mapping[str, int]
    policy: Policy

    @classmethod
    def create(
        cls,
        folder: Path,
        terms: SampleTerms,
        *,
        devices: int | None = None,
        margin: str = "0.8",
    ) -> Self:
        """Create keys, tokens, a policy and all settings.

        `devices` and `margin` go into the analyst's profile, for planning.
        """
        if (folder / _MARKER).exists():
            raise InvalidInput(
                f"{folder} already holds a deployment: open it, or choose another folder"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise InvalidInput(
                f"can't create {folder}: {error.strerror}; choose another folder"
            ) from None
        # Left over from an interrupted start: nothing was ever signed or sealed with these keys.
        for name in (*_ROLES, "analyst", "console", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(mode=0o700)
        ports = dict(zip((*_ROLES, "console"), _free_ports(len(_ROLES) + 1), strict=True))
        files = DeploymentFiles(folder, Addresses.on_this_machine(ports))
        policy = sample_policy(files.write_keys(), terms)
        files.write_settings(policy, devices=devices, margin=margin)
        files.write_console(ports["console"])
        marker = {"version": 1, "ports": ports}
        (folder / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        path = folder / _MARKER
        try:
            marker = json.loads(path.read_bytes())
            ports = {str(name): int(port) for name, port in marker["ports"].items()}
            complete = marker["version"] == 1 and {*_ROLES, "console"} <= ports.keys()
        except FileNotFoundError:
            raise InvalidInput(
                f"there is no deployment in {folder}: create one with `chorister up {folder}`"
            ) from None
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            complete = False
        if not complete:
            raise InvalidInput(f"{path} is damaged: restore it, or start over in another folder")
        return cls(folder=folder, ports=ports, policy=Policy.load(folder / "policy.toml"))

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / _MARKER).exists()

    def check_format(self) -> None:
        """Raise if the log is of a former format, before any server is started on such files."""
        if is_outdated(self.folder / "registry" / "log"):
            raise LogOutdated(
                f"{self.folder} was created by an earlier version of Chorister, and its log has a "
                "format that this version can't continue. Nothing was changed. Start over in "
                "another folder, or delete this one; to keep its devices and results, follow "
                "docs/howto/upgrade-the-log.md"
            )

    def check_ports(self) -> None:
        """Raise if another program listens on the port of one of our servers."""
        for name, port in self.ports.items():
            if _is_taken(port):
                raise ServiceError(
                    f"another program uses port {port}, which belongs to the {name} (devices and "
                    "settings refer to it): stop that program, or start over in another folder"
                )

    @property
    def registry(self) -> str:
        return f"http://127.0.0.1:{self.ports['registry']}/"

    @property
    def profile(self) -> Path:
        return self.folder / "analyst" / "profile.toml"

    def settings(self, role: str) -> Path:
        return self.folder / role / f"{role}.toml"

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / "run" / f"{name}.log"

    # --- Running --------------------------------------------------------------------------------

    def servers(self) -> list[Server]:
        """The three servers, not yet started."""
        registry = ["--port", str(self.ports["registry"])]
        if not (self.folder / "registry" / "log").exists():
            registry.append("--create")
        found = [self._server("registry", registry)]
        for role in ("leader", "helper"):
            begun = (self.folder / role / "head").exists()
            found.append(self._server(role, [] if begun else ["--begin-log"]))
        return found

    def console(self) -> Server:
        """The console, not yet started."""
        arguments = ("serve", "console", "--config", str(self.settings("console")))
        return Server(name="console", arguments=arguments, log=self.log("console"))

    @property
    def console_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['console']}"

    def expect_devices(self, devices: int) -> None:
        """Write the number of devices into the analyst's profile, for planning."""
        text = self.profile.read_text(encoding="utf-8")
        line = f"devices = {devices}"
        if re.search(r"^devices *=.*$", text, flags=re.MULTILINE):
            text = re.sub(r"^devices *=.*$", line, text, flags=re.MULTILINE)
        else:
            text = f"{text.rstrip()}\n{line}\n"
        self.profile.write_text(text, encoding="utf-8")

    def _server(self, role: str, options: Sequence[str]) -> Server:
        arguments = ("serve", role, "--config", str(self.settings(role)), *options)
        return Server(name=role, arguments=arguments, log=self.log(role))

    @contextlib.contextmanager
    def running(self, say: Callable[[str], object] = lambda _: None) -> Iterator[list[Server]]:
        """Start all servers, wait until devices can use them, and stop them at the end."""
        servers = self.servers()
        try:
            say(f"starting {', '.join(server.name for server in servers)}")
            for server in servers:
                server.start()
            for server in servers:
                self.await_health(server.name, server)
            say("waiting for both aggregators to cosign the log")
            self.await_checkpoint(servers)
            yield servers
        finally:
            for server in reversed(servers):
                server.stop()

    def healthy(self, role: str) -> bool:
        path = {"registry": "/status", "console": "/"}.get(role, "/healthz")
        url = f"http://127.0.0.1:{self.ports[role]}{path}"
        try:
            answer = WebClient(timeout=5.0).exchange("GET", url, limit=_MAX_PAGE_BYTES)
        except Unreachable:
            return False
        # The console redirects a browser without a session to the sign-in page.
        return answer.status < HTTPStatus.BAD_REQUEST

    def await_health(self, role: str, server: Server) -> None:
        """Wait until a server answers; raise with the end of its log if it ends instead."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while not self.healthy(role):
            server.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"the {role} does not answer; see {server.log}")
            time.sleep(0.1)

    def await_checkpoint(self, servers: Sequence[Server] = ()) -> None:
        """Wait until a checkpoint has both cosignatures and both aggregators' keys."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while (why := self.why_not_ready()) is not None:
            for server in servers:
                server.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"the log is not ready for devices: {why}")
            time.sleep(0.5)

    def why_not_ready(self) -> str | None:
        """Return why devices can't use the log yet, or None if they can."""
        try:
            self.current()
        except ChoristerError as error:
            return str(error)
        return None

    def current(self) -> Current:
        """Read the current list from the log, with the checks of a device."""
        (pair,) = self.policy.aggregators
        with HTTPSource(self.registry, timeout=5.0) as source:
            return read_current(source, trust=Trust.of(self.policy, pair), clock=SystemClock())

    def await_recipe(self, recipe: Recipe) -> None:
        """Wait until a checkpoint with both cosignatures lists a recipe."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        why = ""
        while time.monotonic() < deadline:
            try:
                entries, why = self.current().recipes, ""
            except (LogWithheld, CheckpointTime) as error:  # a busy machine may be late once
                entries, why = (), f" ({error})"
            if any(open_recipe(entry).digest == recipe.digest for entry in entries):
                return
            time.sleep(0.25)
        log = self.log("registry")
        raise ServiceError(f"the recipe {recipe.id} was not published{why}; see {log}")


@dataclass(kw_only=True, slots=True)
class Server:
    """One process of the deployment."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 (our own command)
                [*COMMAND, *self.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check(self) -> None:
        """Raise with the last line of its log if it has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise ServiceError(f"the {self.name} stopped after its start: {self.last_line()}")

    def last_line(self) -> str:
        """The last line of its log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix("error: ")[:500]
        return f"it wrote nothing; see {self.log}"

    def stop(self, timeout: float = 40.0) -> None:
        """Stop it as an operator would, letting it finish what it is doing."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.process = None


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # Like servers: a port that was closed a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _free_ports(count: int) -> list[int]:
    """Find unused ports; all are held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found
