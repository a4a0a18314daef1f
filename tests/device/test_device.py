"""The facade: what a host app sees of a device, alone and a thousand times in one process."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import chorister.device
from chorister.clock import SettableClock
from chorister.device import Device, GivenKey, HeadKeyring, Run
from chorister.device.keys import SecretKey
from chorister.device.ledger.ledger_entries import Chain
from chorister.device.run import RunStep
from chorister.device.status import Status
from chorister.errors import DeviceBusy, InvalidInput, LedgerError, StoreError
from chorister.recipe import SignedRecipe
from tests.device.home import Home, at_home, the_sandbox
from tests.device.world import (
    DAY,
    NOW,
    REGISTRY,
    Network,
    a_generous_policy,
    a_policy,
    a_recipe,
    an_entry,
)
from tests.logworld import body_of


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


def test_the_public_names_are_these() -> None:
    assert chorister.device.__all__ == [
        *("Device", "GivenKey", "HTTPTransport", "HeadFile", "HeadKeyring", "KeyFile"),
        *("KeyringKey", "Run", "Sandbox", "Status", "Timing", "Transport"),
    ]
    for name in chorister.device.__all__:
        assert getattr(chorister.device, name).__doc__
    assert set(chorister.device.__all__) <= set(dir(chorister.device))
    with pytest.raises(AttributeError, match="no attribute"):
        _ = chorister.device.Nothing


def test_a_closed_device_opens_again_when_it_is_needed(home: Home) -> None:
    home.device.close()
    home.device.close()
    assert home.device.donate("keyboard", {"ngram": "x", "perplexity": 1.0})
    assert "keyboard" in repr(home.device)


def test_a_device_that_was_never_made_is_not_made_by_looking(tmp_path: Path) -> None:
    device = Device(tmp_path / "none", a_policy(), GivenKey(bytes(32)), registry=REGISTRY)
    with pytest.raises(StoreError, match="device init"):
        device.status()
    assert not (tmp_path / "none").exists()


def test_a_registry_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="https"):
        Device(tmp_path, a_policy(), GivenKey(bytes(32)), registry="http://registry.example/")


def test_explain_names_every_check_and_charges_nothing(home: Home) -> None:
    home.ask()
    checks = home.device.explain(a_recipe("one"))
    assert all(check.passed for check in checks)
    assert {"query-class", "ledger", "amplification"} <= {check.name for check in checks}
    home.ask(a_recipe("one"))
    after = {c.name: c for c in home.device.explain(a_recipe("two", {"study": "other"}))}
    assert not after["ledger"].passed
    assert "budget" in after["ledger"].why
    again = {c.name: c for c in home.device.explain(a_recipe("one"))}
    assert "at most once" in again["ledger"].why
    stranger = {c.name: c for c in home.device.explain(_signed("stranger"))}
    assert not stranger["author"].passed
    bad = {c.name: c for c in home.device.explain(a_recipe("x", {"query": "DROP TABLE keyboard"}))}
    assert not bad["query-class"].passed
    unknown = home.device.explain(a_recipe("x", {"analysis": "none"}))
    assert [check.name for check in unknown] == ["analysis"]
    assert home.charges() == 1


def _signed(author: str) -> SignedRecipe:
    return SignedRecipe.parse(body_of(an_entry(a_recipe("x"), author)).jws)


def test_status_tells_what_is_left(home: Home) -> None:
    home.ask(a_recipe("one"))
    status = home.device.status()
    left = {each.limit: each.remaining for each in status.budgets}
    assert str(left["device"].epsilon) == "0.8"
    assert status.checkpoint_time == NOW
    assert status.silent is None
    assert status.as_json()["outbox"]
    assert [each.recipe for each in status.outbox] == ["one"]


def test_two_threads_run_one_device_one_after_the_other(home: Home) -> None:
    home.network.log.publish([a_recipe("one")])
    runs: list[Run] = []
    threads = [
        threading.Thread(target=lambda: runs.append(home.device.run_once())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.answered for run in runs].count(("one",)) == 1
    assert home.charges() == 1


@pytest.mark.parametrize("look", ["verify", "status", "explain"])
def test_looking_beside_a_run_finds_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    home = Home(tmp_path, a_generous_policy())
    home.donate()
    home.ask(a_recipe("one"))
    home.restart()
    looks: dict[str, Callable[[], object]] = {
        "verify": home.device.verify,
        "status": home.device.status,
        "explain": lambda: home.device.explain(a_recipe("three")),
    }
    looking, has_run = threading.Event(), threading.Event()
    found: list[object] = []
    extend = Chain.extend

    def slowly(chain: Chain, sequence: object, data: object) -> None:
        if threading.current_thread() is looker:
            looking.set()
            has_run.wait(0.1)
        extend(chain, sequence, data)

    def watch() -> None:
        try:
            found.append(looks[look]())
        except LedgerError as error:
            found.append(error)

    looker = threading.Thread(target=watch)
    monkeypatch.setattr(Chain, "extend", slowly)
    looker.start()
    assert looking.wait(10)
    run = home.ask(a_recipe("two"))
    has_run.set()
    looker.join()
    assert (run.silent, run.answered) == (None, ("two",))
    (seen,) = found
    assert not isinstance(seen, LedgerError)
    home.device.close()
    if isinstance(seen, Status):
        assert seen.silent is None
    if isinstance(seen, list):
        assert {each.name: each.why for each in seen}["ledger"] == "every budget has room for it"


def test_a_second_object_finds_the_device_busy(home: Home) -> None:
    other = home.build()
    found: list[str] = []

    def hook(step: RunStep) -> None:
        if step is RunStep.RECIPE_ARRIVED:
            with pytest.raises(DeviceBusy) as caught:
                other.run_once()
            found.append(str(caught.value))
        if step is RunStep.QUERIED:  # whether it still runs is not for others to see
            found.append(str(other.run_once().silent))

    home.restart(hook=hook)
    home.ask(a_recipe("one"))
    busy, quiet = found
    assert "another process runs this device" in busy
    assert "data may be touched" in quiet
    assert other.donate("keyboard", {"ngram": "x", "perplexity": 1.0})
    other.close()


def test_a_head_in_the_keyring_is_opened_with_the_device_s_key(tmp_path: Path) -> None:
    head = HeadKeyring("phone").open(SecretKey(bytes(32)), tmp_path)
    assert head.kind == "keyring"


# --- Running on ---


# --- A fleet ---


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a thousand devices sync their disks often."""
    place = Path("/dev/shm")  # noqa: S108
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def test_a_thousand_devices_fit_into_one_process(memory_folder: Path) -> None:
    """Each with databases, a key and data of its own; they share the sandbox and the network.

    Closed devices hold no file and little memory, so that no limit on open files is in the way.
    """
    policy, network, clock = a_policy(), Network(), SettableClock(NOW - DAY)
    network.log.publish([], time=clock.now())
    before = _memory()
    devices = []
    for i in range(1000):
        device = Device(
            memory_folder / str(i),
            policy,
            GivenKey(i.to_bytes(32)),
            registry=REGISTRY,
            create=True,
            clock=clock,
            transport=network,
            sandbox=the_sandbox(),
        )
        device.opt_in()
        assert device.donate("keyboard", {"ngram": "hello world you", "perplexity": 1.0})
        device.close()
        devices.append(device)
    assert (_memory() - before) / len(devices) < 50_000
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    at_work = devices[::40]
    for device in at_work:
        device.run_once()  # the ledger is made, and grows old enough to answer
        device.close()
    clock.set(NOW)
    network.log.publish([a_recipe("one")])
    for device in at_work:
        assert device.run_once().answered == ("one",)
    for device in at_work:  # all of them open at once
        assert len(device.status().outbox) == 1
        device.verify()
        device.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def _memory() -> int:
    """Bytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
