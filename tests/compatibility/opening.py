"""How a fixture's folders are opened: by the script that wrote them, and by every later version.

What is asked of today's code here is what an app, an operator or an analyst asks of it: classes and
settings files, never a table's name or a file's layout.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.applications import Starlette

from chorister._native import HPKEKeypair
from chorister.aggregator.config import load_config
from chorister.aggregator.inprocess import InProcessNetwork
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.service import Service
from chorister.aggregator.storage.counters import task_status
from chorister.analyst.live_fleet import LiveFleet, Profile
from chorister.canonical import b64url_decode, b64url_encode
from chorister.clock import SettableClock
from chorister.device import Device, HeadFile, KeyFile, Sandbox, Timing
from chorister.device.run import Hook, no_hook
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.registry.app import build_app
from chorister.registry.server import RegistryConfig, open_registry
from tests.device.world import REGISTRY, ForgedLog, Network, hpke_entry
from tests.logworld import HELPER, LEADER

FIXTURES: Final = Path(__file__).parent.parent / "fixtures"
PARTS: Final = ("device", "servers", "console")
TIMING: Final = Timing(query=20, slack=5, spread=600, poll=600)


def unpack(fixture: Path, part: str, folder: Path) -> Any:
    """Put a fixture's part into `folder`; what its writer noted about it."""
    with tarfile.open(fixture / f"{part}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return json.loads((fixture / f"{part}.json").read_bytes())


# --- A device ------------------------------------------------------------------------------------


def open_device(
    folder: Path,
    clock: SettableClock,
    network: Network,
    *,
    sandbox: Sandbox | None = None,
    hook: Hook = no_hook,
) -> Device:
    """The device of a fixture, as its host app opens it."""
    return Device(
        folder / "device",
        Policy.load(folder / "device" / "policy.toml"),
        KeyFile(folder / "elsewhere" / "key", store=folder / "device"),
        registry=REGISTRY,
        head=HeadFile(folder / "elsewhere" / "head"),
        clock=clock,
        transport=network,
        sandbox=sandbox,
        timing=TIMING,
        hook=hook,
    )


def a_network(keys: Sequence[HPKEKeypair]) -> Network:
    """A log whose aggregators have these keys, and a leader that keeps what it gets."""
    log = ForgedLog()
    log.hpke = [
        hpke_entry(url, pair.config) for url, pair in zip((LEADER, HELPER), keys, strict=True)
    ]
    return Network(log=log)


def keys_to_json(keys: Sequence[HPKEKeypair]) -> list[dict[str, Any]]:
    return [
        {
            "config_id": pair.config_id,
            "public_key": b64url_encode(pair.public_key),
            "private_key": b64url_encode(pair.private_key()),
        }
        for pair in keys
    ]


def keys_from_json(tree: Sequence[Mapping[str, Any]]) -> list[HPKEKeypair]:
    return [
        HPKEKeypair.from_bytes(
            each["config_id"], b64url_decode(each["public_key"]), b64url_decode(each["private_key"])
        )
        for each in tree
    ]


# --- Registry, leader, helper and analyst --------------------------------------------------------


def start_log_again(folder: Path) -> None:
    """What docs/howto/upgrade-the-log.md tells operators whose log has the former format."""
    for name in ("log", "leader-head", "helper-head"):
        (folder / name).rename(folder / f"{name}-former")


class Servers:
    """Everybody's servers in one process. Nothing runs by itself: the caller does each step."""

    def __init__(self, folder: Path, clock: SettableClock, *, begin: bool = False) -> None:
        self.folder = folder
        self.clock = clock
        self.stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.network = stack.enter_context(InProcessNetwork())
            config = RegistryConfig.load(folder / "registry.toml")
            self.registry, log = stack.enter_context(open_registry(config, clock, create=begin))
            self.public = log.public
            url = Profile.load(folder / "profile.toml").registry
            self.network.serve(url, build_app(self.registry, log.public, interval=3600))
            self.leader = self._start("leader", stack, begin)
            self.helper = self._start("helper", stack, begin)
            self.stack = stack.pop_all()

    def _start(self, role: str, stack: contextlib.ExitStack, begin: bool) -> Service:
        config = load_config(self.folder / f"{role}.toml", {})
        service = Service(config, self.clock, begin_log=begin, transport=self.network)
        stack.callback(service.close)
        self.network.serve(config.url, _without_loops(service.app))
        stack.callback(self.network.withdraw, config.url)
        return service

    def close(self) -> None:
        self.stack.close()

    def publish(self) -> None:
        """A checkpoint with what was submitted, cosigned by both; keys that are due follow."""
        self.clock.advance(1)
        self.registry.issue()
        for service in (self.leader, self.helper):
            assert service.cosigning is not None
            assert service.cosigning.run(), "a cosigner found something wrong; its log says what"

    def work(self) -> None:
        """Run all jobs of the leader once."""
        leader = self.leader.leader
        while leader.aggregation.create_jobs(16):
            pass
        for job in leader.aggregation.unfinished():
            leader.aggregation.step(job)
        for collection in leader.collection.pending():
            leader.collection.step(collection)

    def task(self, recipe: Recipe) -> KnownTask:
        """The one task of a recipe, as the leader knows it."""
        (task,) = self.leader.core.tasks.of_recipe(recipe.digest)
        return task

    def upload(self, recipe: Recipe, bins: Sequence[int]) -> None:
        """Reports without noise, one for each bin."""
        task = self.task(recipe)
        bits = np.zeros((len(bins), task.configuration.vdaf.length), np.uint8)
        bits[np.arange(len(bins)), list(bins)] = 1
        reports = task.binding.seal_reports(
            bits,
            report_ids=secrets.token_bytes(16 * len(bins)),
            time=task.interval.start,
            leader_config=self.leader.core.keys.published()[0],
            helper_config=self.helper.core.keys.published()[0],
            threads=1,
        )
        leader = self.leader.leader
        (refused,) = leader.writer.store([leader.writer.check(task, b"".join(reports))])
        assert not refused.encode(), refused

    def figures(self) -> dict[str, dict[str, list[object]]]:
        """Of each task at each aggregator: its batch's state, reports uploaded and verified."""
        found: dict[str, dict[str, list[object]]] = {}
        for role, core in (("leader", self.leader.core), ("helper", self.helper.core)):
            found[role] = {
                each.task.task_id.hex(): [each.state.name, each.uploaded, each.verified]
                for each in task_status(core.database, core.tasks.all())
            }
        return found

    def connection(self, pause: Callable[[float], None]) -> LiveFleet:
        """The analyst's, from the profile on disk."""
        profile = Profile.load(self.folder / "profile.toml")
        return LiveFleet(
            profile.access(),
            folder=Path(profile.folder),
            transport=self.network,
            clock=self.clock,
            pause=pause,
            finish_seconds=300,
        )


def _without_loops(app: Starlette) -> Starlette:
    """The application without what runs beside its requests: the caller does each step."""
    return Starlette(routes=app.routes, exception_handlers=app.exception_handlers)
