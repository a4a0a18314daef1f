"""Registry, leader and helper on this machine, in one folder, each a process of its own.

    policy.toml                      what every device of this deployment allows
    registry/ leader/ helper/        settings, keys, databases; each what one operator would have
    analyst/profile.toml             for `chorister.connect`, with keys, token and studies
    console/                         the console's settings, and the token to sign in with
    run/                             what the processes write: their logs, a lock

Made whole or not at all: the file `deployment.json` is written last, and a folder without it is no
deployment. Ports are chosen once, for the URLs of both aggregators are part of the policy.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final, Self

from chorister.clock import SystemClock
from chorister.errors import ChoristerError, InvalidInput, ServiceError
from chorister.fleet.deployment_files import DeploymentFiles
from chorister.fleet.sample_policy import PolicyTerms
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.transparency.entries import open_recipe
from chorister.transparency.reader import Current, read_current
from chorister.transparency.sources import HTTPSource
from chorister.transparency.trust import Trust

__all__ = ["COMMAND", "Deployment", "Server"]

COMMAND: Final = (sys.executable, "-m", "chorister.cli")
_MARKER: Final = "deployment.json"
_ROLES: Final = ("registry", "leader", "helper")
_PATIENCE: Final = 240.0
"""Seconds; only for a process that lives and says nothing, for one that ended is noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A folder with everything that one machine needs; `create` makes it, `open` finds it."""

    folder: Path
    ports: Mapping[str, int]
    policy: Policy

    # --- Made and found -------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        folder: Path,
        terms: PolicyTerms,
        *,
        devices: int | None = None,
        margin: str = "0.8",
    ) -> Self:
        """Make keys, tokens, a policy and everybody's settings.

        `devices` and `margin` go into the analyst's profile, for planning.
        """
        if (folder / _MARKER).exists():
            raise InvalidInput(f"{folder} holds a deployment already: open it, or choose another")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise InvalidInput(
                f"{folder} can't be made: {error.strerror}; choose another folder"
            ) from None
        # Left from a start that was interrupted: nothing was ever signed or sealed with it.
        for name in (*_ROLES, "analyst", "console", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(mode=0o700)
        ports = dict(zip((*_ROLES, "console"), _free_ports(len(_ROLES) + 1), strict=True))
        DeploymentFiles(folder, ports, terms, devices=devices, margin=margin).write()
        marker = {"version": 1, "ports": ports}
        (folder / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The deployment in a folder."""
        path = folder / _MARKER
        try:
            marker = json.loads(path.read_bytes())
            ports = {str(name): int(port) for name, port in marker["ports"].items()}
            complete = marker["version"] == 1 and {*_ROLES, "console"} <= ports.keys()
        except FileNotFoundError:
            raise InvalidInput(
                f"there is no deployment in {folder}: make one with `chorister up {folder}`"
            ) from None
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            complete = False
        if not complete:
            raise InvalidInput(f"{path} is damaged: restore it, or begin anew in another folder")
        return cls(folder=folder, ports=ports, policy=Policy.load(folder / "policy.toml"))

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds one."""
        return (folder / _MARKER).exists()

    def check_ports(self) -> None:
        """Before a start: raise if another program listens where a server of ours has to."""
        for name, port in self.ports.items():
            if _is_taken(port):
                raise ServiceError(
                    f"another program uses port {port}, which is the {name}'s for good (devices "
                    "and settings name it): stop that program, or begin anew in another folder"
                )

    # --- Where everything is --------------------------------------------------------------------

    @property
    def registry(self) -> str:
        """The public log's URL."""
        return f"http://127.0.0.1:{self.ports['registry']}/"

    @property
    def profile(self) -> Path:
        """What an analyst connects with."""
        return self.folder / "analyst" / "profile.toml"

    def settings(self, role: str) -> Path:
        """A server's settings file."""
        return self.folder / role / f"{role}.toml"

    def log(self, name: str) -> Path:
        """What a process writes about itself."""
        return self.folder / "run" / f"{name}.log"

    # --- At work --------------------------------------------------------------------------------

    def servers(self) -> list[Server]:
        """The three servers, not started."""
        registry = ["--port", str(self.ports["registry"])]
        if not (self.folder / "registry" / "log").exists():
            registry.append("--create")
        found = [self._server("registry", registry)]
        for role in ("leader", "helper"):
            begun = (self.folder / role / "head").exists()
            found.append(self._server(role, [] if begun else ["--begin-log"]))
        return found

    def console(self) -> Server:
        """The analysts' web pages, not started."""
        arguments = ("serve", "console", "--config", str(self.settings("console")))
        return Server(name="console", arguments=arguments, log=self.log("console"))

    @property
    def console_url(self) -> str:
        """Where a browser finds the console."""
        return f"http://127.0.0.1:{self.ports['console']}"

    def expect_devices(self, devices: int) -> None:
        """Tell the analyst's profile how many devices there are, for planning."""
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
    def running(self, tell: Callable[[str], None] = lambda _: None) -> Iterator[list[Server]]:
        """Start all servers, wait until devices can use them, and stop them at the end."""
        servers = self.servers()
        try:
            tell(f"starting {', '.join(server.name for server in servers)}")
            for server in servers:
                server.start()
            for server in servers:
                self.await_health(server.name, server)
            tell("waiting for both aggregators to cosign the log")
            self.await_checkpoint(servers)
            yield servers
        finally:
            for server in reversed(servers):
                server.stop()

    def healthy(self, role: str) -> bool:
        """Whether a server answers."""
        # Not httpx, which loads all certificate authorities first, to look at this machine.
        connection = HTTPConnection("127.0.0.1", self.ports[role], timeout=5.0)
        try:
            path = {"registry": "/status", "console": "/"}.get(role, "/healthz")
            connection.request("GET", path)
            # Pages send a browser without a session to where it signs in.
            return connection.getresponse().status < HTTPStatus.BAD_REQUEST
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def await_health(self, role: str, server: Server) -> None:
        """Until it answers; raises with the end of its log if it ended instead."""
        deadline = time.monotonic() + _PATIENCE
        while not self.healthy(role):
            server.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"the {role} does not answer; see {server.log}")
            time.sleep(0.1)

    def await_checkpoint(self, servers: Sequence[Server] = ()) -> None:
        """Until a checkpoint has both cosignatures and both aggregators' keys."""
        deadline = time.monotonic() + _PATIENCE
        while (why := self.unready()) is not None:
            for server in servers:
                server.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"the log is not ready for devices: {why}")
            time.sleep(0.5)

    def unready(self) -> str | None:
        """Why devices can't use the log yet; None if they can."""
        try:
            self.current([])
        except ChoristerError as error:
            return str(error)
        return None

    def current(self, analyses: Collection[str]) -> Current:
        """What is open now to these analyses, checked as a device checks it."""
        (pair,) = self.policy.aggregators
        with HTTPSource(self.registry, timeout=5.0) as source:
            return read_current(
                source,
                trust=Trust.of(self.policy, pair),
                clock=SystemClock(),
                analyses=analyses,
            )

    def await_recipe(self, recipe: Recipe) -> None:
        """Until a checkpoint with both cosignatures lists a recipe."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            entries = self.current([recipe.analysis]).recipes
            if any(open_recipe(entry).digest == recipe.digest for entry in entries):
                return
            time.sleep(0.25)
        raise ServiceError(f"recipe {recipe.id} did not become public; see {self.log('registry')}")


@dataclass(kw_only=True, slots=True)
class Server:
    """One process of the deployment."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin; what it writes goes into its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 (our own command)
                [*COMMAND, *self.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def check(self) -> None:
        """Raise if it ended by itself, with what it said last."""
        if self.process is not None and self.process.poll() is not None:
            raise ServiceError(f"the {self.name} ended at once: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of its log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix("error: ")[:500]
        return f"it said nothing; see {self.log}"

    def stop(self, patience: float = 40.0) -> None:
        """End it as an operator would: what it was doing is finished."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.process = None


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what was closed a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now; all are held at once, so that no two are the same."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found
