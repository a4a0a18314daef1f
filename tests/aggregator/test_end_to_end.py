"""From an event on a device to an estimate: three processes, two databases, real sockets.

The devices are those that an app embeds, with the transport that they have in the field. The log
is cosigned, keys are published and recipes enumerated by the servers themselves.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from chorister.clock import SystemClock
from chorister.dap.collector import Collected, Collector
from chorister.device import Device, GivenKey, HeadFile, Sandbox, Timing
from chorister.recipe import Recipe
from chorister.transparency.note import key_name
from tests.aggregator.inprocess_pair import wait_until
from tests.aggregator.operators import TOKENS, OperatorAddresses, Operators
from tests.aggregator.server_processes import (
    COMMAND,
    ServerProcesses,
    environment,
    server_processes,
    stop,
)
from tests.logworld import body_of

DEVICES = 24
AGE = 33
CREDENTIAL = "keyboard-app-2026"


def is_of_the_app(credential: str) -> bool:
    """The host app's hook, which the leader loads by its name."""
    return credential == CREDENTIAL


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ServerProcesses]:
    settings = {"leader": {"upload_credential": f"{__name__}:is_of_the_app"}}
    operators = Operators(tmp_path, OperatorAddresses.local(), settings=settings)
    with server_processes(operators) as processes:
        yield processes


def a_device(operators: Operators, number: int, sandbox: Sandbox, **options: Any) -> Device:
    """Of somebody aged `AGE`; `options` are the device's."""
    folder = operators.folder / f"device-{number}"
    folder.mkdir()
    device = Device(
        folder / "store",
        operators.policy,
        GivenKey(number.to_bytes(32)),
        registry=operators.at.registry,
        head=HeadFile(folder / "head"),
        timing=Timing(query=1, slack=1, housekeeping=1, settle=0, spread=1, poll=1),
        sandbox=sandbox,
        create=True,
        **options,
    )
    device.opt_in()
    assert device.set_profile("user", {"age": AGE, "locale": "de_DE"})
    return device


def tasks(servers: ServerProcesses, role: str) -> list[dict[str, object]]:
    settings = str(servers.operators.settings(role))
    run = subprocess.run(
        [*COMMAND, "tasks", "list", "--config", settings, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, object]] = json.loads(run.stdout)["tasks"]
    return found


def polled(device: Device) -> bool:
    """Whether a device found a log that it believes."""
    time.sleep(device.quiet_seconds())
    return device.run_once().problems == ()


def test_from_an_event_to_an_estimate(servers: ServerProcesses) -> None:
    operators = servers.operators
    recipe = operators.recipe(
        "ages", SystemClock().now(), {"privacy/min_cohort": DEVICES, "privacy/epsilon": "8"}
    )
    with ExitStack() as stack:
        sandbox = stack.enter_context(Sandbox())
        *devices, stranger = [
            stack.enter_context(
                a_device(operators, number, sandbox, upload_credential=partial(str, credential))
            )
            for number, credential in enumerate([CREDENTIAL] * DEVICES + ["of another app"])
        ]
        # Their ledgers begin with the first checkpoint that they see.
        wait_until(lambda: polled(devices[0]), "a published checkpoint")
        for device in [*devices[1:], stranger]:
            device.run_once()
        with servers.registry() as registry:
            entry = operators.entry(recipe)
            registry.submit(entry, body_of(entry).jws)
        for device in [*devices, stranger]:
            wait_until(lambda: device.run_once().answered, "an answer")  # noqa: B023
        for device in [stranger, *devices]:
            due = device.next_upload()
            assert due is not None
            while SystemClock().now() < due:
                time.sleep(0.05)
            done = device.upload_due()
            expected = (0, 1) if device is stranger else (1, 0)
            assert (done.uploaded, done.postponed) == expected
    found = collect(servers, recipe)
    assert found.report_count == DEVICES
    check_estimate(recipe, found)
    for role in ("leader", "helper"):
        (task,) = tasks(servers, role)
        assert (task["state"], task["verified"]) == ("collected", DEVICES)
    for role in ("leader", "helper", "registry"):
        assert stop(servers.running[role]) in (0, -15), servers.log(role).read_text()
    for role in ("leader", "helper"):
        check_log(servers, role)


def check_log(servers: ServerProcesses, role: str) -> None:
    """Nobody is in it: no address of a client, no token; and it does tell what was done."""
    text = servers.log(role).read_text()
    assert "an HPKE key is in use" in text
    assert "cosigned" in text
    for url in (servers.operators.at.leader, servers.operators.at.helper):
        text = text.replace(url, "").replace(key_name(url), "")
    assert not re.search(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+", text)
    assert not any(token in text for token in [*TOKENS.values(), CREDENTIAL, "of another app"])


def collect(servers: ServerProcesses, recipe: Recipe) -> Collected:
    operators = servers.operators
    collector = Collector(operators.at.leader, TOKENS["collector"], operators.collector)
    handle = collector.create(operators.task(recipe))
    trials = recipe.privacy.min_cohort - 1

    def result() -> Collected | None:
        found = collector.poll(handle, noise_trials=trials)
        return found if isinstance(found, Collected) else None

    return wait_until(result, "the result")


def check_estimate(recipe: Recipe, found: Collected) -> None:
    """All devices are in one bin. By the exact law of each count, a false alarm is below 1e-6."""
    randomizer = recipe.randomizer
    n, trials = found.report_count, recipe.privacy.min_cohort - 1
    (their_bin,) = recipe.encoding.find({"age": [AGE]})
    counts = found.counts.tolist()
    true = stats.binom(n, randomizer.h)
    others = stats.binom(n + 2 * trials, randomizer.q)
    rate = 1e-7 / len(counts)
    assert true.ppf(rate) <= counts.pop(their_bin) <= true.isf(rate) + others.isf(rate)
    assert max(counts) <= others.isf(rate)
    estimates = randomizer.debias(found.counts, n, trials)
    assert int(estimates.argmax()) == their_bin
