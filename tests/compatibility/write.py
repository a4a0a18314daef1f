"""Write a fixture: what this version of Chorister leaves on disk, for later versions to open.

    python -m tests.compatibility.write tests/fixtures/NAME

Run by hand, once, before a format changes, and name the folder after the day. Fixtures are never
written again: they are what was on people's disks. All keys and tokens in them are for tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx2
import numpy as np

import chorister as ch
from chorister._native import HPKEKeypair
from chorister.canonical import WIRE, b64url_encode, sha256
from chorister.cli.device import DeviceSettings, InFile, create_device
from chorister.clock import SettableClock
from chorister.console.algorithms import ALGORITHMS, plan_run
from chorister.console.config import ConsoleConfig
from chorister.console.workspace import Workspace
from chorister.device import Device, Run, Sandbox
from chorister.device.audit import Event
from chorister.device.run import RunStep
from chorister.device.transport import Answer
from chorister.recipe import Recipe
from tests.aggregator.operators import Operators
from tests.analyst.test_live_fleet import write_profile
from tests.cli.toml import dumps
from tests.compatibility.opening import (
    PARTS,
    Servers,
    a_network,
    keys_to_json,
    open_device,
)
from tests.console.world import TOKENS, people
from tests.device.world import EVERYBODY, REGISTRY, Network, an_entry
from tests.keyboard import changed, policy_tree, recipe_tree
from tests.logworld import ANALYSIS, DAY, NOW, body_of, policy_text, revocation

YEARS: Final = 3600 * DAY  # A recipe's window is at most ten years long.


class _Killed(BaseException):
    """The process ends here."""


# --- A device ------------------------------------------------------------------------------------

AGES: Final[dict[str, Any]] = {
    "query": "SELECT user.age AS age FROM user",
    "reads": {"user": ["age"]},
    "features": [{"kind": "intervals", "column": "age", "edges": ["10", "20", "30", "40"]}],
    "group_by": ["user.locale"],
}
NGRAMS: Final = ["hello world you", "hello world all", "how are you"] * 13 + ["i got it"]


def _device_policy() -> str:
    """The keyboard's policy with room for many answers, and for questions that stay open."""
    many = {"epsilon": 100, "delta": Decimal("0.01"), "reports": 100}
    analysis = f"analyses/{ANALYSIS}"
    tables = ["device", f"{analysis}/budget"]
    tables += [f"{analysis}/fields/{ref}" for ref in ("keyboard.ngram", "user.age")]
    changes: dict[str, Any] = {
        f"{table}/{name}": each for table in tables for name, each in many.items()
    }
    changes |= {"device/min_ledger_age": "1s", f"{analysis}/window/longest": "3650d"}
    return dumps(changed(tomllib.loads(policy_text(), parse_float=Decimal), changes))


def _recipe(name: str, **changes: Any) -> Recipe:
    window = {"opens": NOW - DAY, "closes": NOW + YEARS, "ends": NOW + YEARS + DAY}
    tree = changed(recipe_tree(), {"id": name, "window": window, **EVERYBODY, **changes})
    return Recipe.model_validate(tree, context=WIRE)


def _recipes() -> dict[str, Recipe]:
    """By what becomes of them."""
    return {
        "sent": _recipe("sent"),
        "dropped": _recipe("dropped", **AGES),
        "declined": _recipe("declined", **AGES, **{"participation/probability": "0.000001"}),
        "refused": _recipe("refused", **AGES, **{"privacy/local_epsilon": "7"}),
        "queued": _recipe("queued"),
        "interrupted": _recipe("interrupted", **AGES),
        # Never asked: a later version answers it.
        "next": _recipe("next"),
    }


def write_device(folder: Path, copy: Path) -> dict[str, Any]:
    """A device in mid-life; its last run ended between the charge and the query."""
    recipes = _recipes()
    keys = [HPKEKeypair.generate(1), HPKEKeypair.generate(2)]
    network = a_network(keys)
    clock = SettableClock(NOW - DAY)
    (folder / "elsewhere").mkdir()
    (folder / "policy.toml").write_text(_device_policy())
    # Relative, so that no path of this machine is in `device.json`.
    settings = DeviceSettings(
        registry=REGISTRY, key=InFile(path="elsewhere/key"), head=InFile(path="elsewhere/head")
    )
    with contextlib.chdir(folder):
        create_device(Path("device"), Path("policy.toml"), settings).close()
        Path("policy.toml").unlink()  # the device has its own copy
    with Sandbox() as sandbox:
        with open_device(folder, clock, network, sandbox=sandbox) as device:
            _live(device, network, clock, recipes)

        def kill(step: RunStep) -> None:
            if step is RunStep.CHARGED:
                raise _Killed

        device = open_device(folder, clock, network, sandbox=sandbox, hook=kill)
        assert device.donate("keyboard", {"ngram": NGRAMS[-1], "perplexity": 4.5})
        clock.advance(1)
        with contextlib.suppress(_Killed):
            _ask(device, network, clock, recipes["interrupted"])
        # While it is open, as a killed process leaves it: the write-ahead log is part of it.
        _copy(folder, copy)
        expected = {
            "time": clock.now(),
            "keys": keys_to_json(keys),
            "recipes": {
                name: body_of(an_entry(recipe)).jws.decode() for name, recipe in recipes.items()
            },
            "states": {state.name: count for state, count in device.status().recipes.items()},
            "ngrams": NGRAMS,
            "budgets": {
                each.limit: [str(each.spent.epsilon), str(each.spent.delta), each.reports]
                for each in device.status().budgets
            },
            "audit": [
                [record.digest, record.entry.event.name] for record in device.audit.records()
            ],
            "uploaded_before": [sha256(body).hex() for _, _, body in network.posts],
        }
        (queued,) = [
            record.entry.sent
            for record in device.audit.records()
            if record.entry.event is Event.REPORTED
            and record.entry.question is not None
            and record.entry.question.id == "queued"
        ]
        device.close()
        assert queued is not None
    # What it will send, sent from here: later versions have to send the same bytes.
    clock.advance(DAY)
    with open_device(folder, clock, network) as device:
        device.upload_due()
    (sent,) = [each for each in network.posts if sha256(each[2]).hex() == queued.digest]
    expected["queued"] = {
        "url": sent[0],
        "headers": dict(sent[1]),
        "body": b64url_encode(sent[2]),
        "bits": queued.length,
        "ones": list(queued.ones),
    }
    return expected


def _ask(device: Device, network: Network, clock: SettableClock, *recipes: Recipe) -> Run:
    network.log.publish(recipes, time=clock.now())
    return device.run_once()


def _live(
    device: Device, network: Network, clock: SettableClock, recipes: dict[str, Recipe]
) -> None:
    device.opt_in()
    _ask(device, network, clock)  # the ledger is made
    clock.set(NOW)
    assert device.set_profile("user", {"age": 33, "locale": "de_DE"})
    for number, text in enumerate(NGRAMS[:-1]):
        assert device.donate("keyboard", {"ngram": text, "perplexity": 1.5 + number})
    assert _ask(device, network, clock, recipes["sent"]).answered == ("sent",)
    clock.advance(2000)
    assert device.upload_due().uploaded == 1
    assert _ask(device, network, clock, recipes["dropped"]).answered == ("dropped",)
    network.answers.append(
        Answer(
            status=400,
            content_type="application/problem+json",
            body=b'{"type": "urn:ietf:params:ppm:dap:error:invalidMessage"}',
        )
    )
    clock.advance(2000)
    assert device.upload_due().dropped == 1
    done = _ask(device, network, clock, recipes["declined"], recipes["refused"])
    assert (done.declined, done.refused) == (("declined",), ("refused",))
    assert _ask(device, network, clock, recipes["queued"]).answered == ("queued",)


# --- Registry, leader, helper and analyst --------------------------------------------------------

# The bins of the reports of the three rounds; of the third, by how far each report is.
FIRST, SECOND = [0, 2, 2, 3], [1, 1, 2]
VERIFIED, UNANSWERED, UNSENT, WAITING = [0, 3, 3], [1], [3, 2], [2, 0]


def write_servers(folder: Path, copy: Path) -> dict[str, Any]:
    """A deployment in mid-life, with an analyst's study in it."""
    own = {"run_jobs": False, "hpke_lifetime": "1d"}
    operators = Operators(
        folder,
        settings={"leader": own, "helper": own},
        policy={"crowds": ["noised", "honest"], "honest_fraction": "1/1"},
    )
    write_profile(operators)
    clock = SettableClock(NOW)
    servers = Servers(folder, clock, begin=True)
    for _ in range(2):  # both make a key; then a checkpoint covers it
        servers.publish()

    def wait(seconds: float) -> None:
        servers.work()
        clock.advance(max(1, int(seconds)))

    def killed(seconds: float) -> None:
        del seconds
        raise _Killed

    study = servers.connection(wait).study("ages", analysis=ANALYSIS)
    _collect(servers, study)
    clock.advance(DAY)  # the keys are replaced
    for _ in range(2):
        servers.publish()
    second = _post(servers, study, repeat=1, target=3)
    servers.upload(second.recipe, SECOND)
    servers.work()
    with contextlib.suppress(_Killed):
        _again(servers.connection(killed)).wait(second)
    servers.work()  # the leader has the result; nobody fetched it
    third = _post(servers, study, repeat=2)
    servers.upload(third.recipe, VERIFIED)
    servers.work()
    _post(servers, study, repeat=3)
    study.cancel()
    servers.registry.submit(revocation("second author").encode())
    servers.publish()
    checkpoint = (servers.public / "checkpoint").read_text()
    servers.registry.submit(operators.entry(operators.recipe("later", clock.now())).encode())
    servers.close()
    servers = Servers(folder, clock)
    servers.upload(third.recipe, UNANSWERED)
    (job,) = servers.leader.leader.aggregation.create_jobs(16)
    with mock.patch.object(servers.network, "handle_request", _deaf(servers)):
        assert not servers.leader.leader.aggregation.step(job).done  # the helper has counted them
    servers.upload(third.recipe, UNSENT)
    assert len(servers.leader.leader.aggregation.create_jobs(16)) == 1
    servers.upload(third.recipe, WAITING)
    expected = {
        "time": clock.now(),
        "checkpoint": checkpoint,
        "size": servers.registry.status().size,
        "figures": servers.figures(),
        "sums": [
            np.bincount(bins, minlength=4).tolist()
            for bins in (FIRST, SECOND, VERIFIED + UNANSWERED + UNSENT + WAITING)
        ],
        "new_recipe": body_of(operators.entry(operators.recipe("new", clock.now()))).jws.decode(),
    }
    _copy(folder, copy)
    servers.close()
    return expected


def _post(servers: Servers, study: ch.Study, *, repeat: int, target: int | None = None) -> Any:
    question = study.histogram(
        ch.intervals("age", [10, 20, 30, 40]), reads={"user": ["age"]}, local_epsilon=8, epsilon=8,
        delta="1e-6", min_cohort=3, crowd="honest", window=10 * DAY, grace=DAY, repeat=repeat,
    )  # fmt: skip
    round_ = study.post(question, target=target)
    servers.publish()
    return round_


def _collect(servers: Servers, study: ch.Study) -> None:
    first = _post(servers, study, repeat=0, target=3)
    servers.upload(first.recipe, FIRST)
    servers.work()
    assert study.wait(first).n_reports == len(FIRST)


def _deaf(servers: Servers) -> Callable[[httpx2.Request], httpx2.Response]:
    """A network on which requests arrive and answers are lost."""
    arrives = servers.network.handle_request

    def handle_request(request: httpx2.Request) -> httpx2.Response:
        arrives(request)
        raise httpx2.ReadError("the answer was lost", request=request)

    return handle_request


def _again(connection: Any) -> ch.Study:
    study: ch.Study = connection.study("ages", analysis=ANALYSIS)
    return study


# --- A console -----------------------------------------------------------------------------------


def write_console(folder: Path, copy: Path) -> dict[str, Any]:
    """A workspace over a rehearsal: a result, a run of an algorithm, and an open question."""
    limits = {"local_epsilon": 8, "epsilon": 20, "delta": Decimal("1e-4"), "reports": 20}
    fields = dict.fromkeys(("keyboard.ngram", "keyboard.perplexity", "user.age"), limits)
    rest = {name: limits[name] for name in ("epsilon", "delta", "reports")}
    changes: dict[str, Any] = {f"device/{name}": value for name, value in rest.items()}
    changes |= {f"analyses/{ANALYSIS}/budget/{name}": value for name, value in rest.items()}
    changes |= {f"analyses/{ANALYSIS}/fields": fields, f"analyses/{ANALYSIS}/cohort/smallest": 50}
    (folder / "policy.toml").write_text(dumps(changed(policy_tree(), changes)))
    rows = people()
    lines = [f"{age},{count}" for age, count in zip(rows["age"], rows["count"], strict=True)]
    (folder / "people.csv").write_text("\n".join(["age,count", *lines]) + "\n")
    analysts = [
        {"name": name, "token_digest": hashlib.sha256(token.encode()).hexdigest()}
        for name, token in TOKENS.items()
    ]
    fleet = {
        "name": "rehearsal", "policy": "policy.toml", "population": "people.csv",
        "folder": "studies", "fill_seconds": 0,
    }  # fmt: skip
    settings = {"port": 0, "folder": "console", "analysts": analysts, "connections": [fleet]}
    (folder / "console.toml").write_text(dumps(settings))
    with Workspace.open(ConsoleConfig.load(folder / "console.toml")) as workspace:
        view = workspace.create("ada", "rehearsal", "ages", ANALYSIS)
        workspace.share(view, "ben", "look")
        study = view.study
        ages = ch.intervals("age", range(10, 90, 10))
        result = study.histogram(ages, epsilon=1).run()
        values = {"field": "user.age", "from": "0", "to": "100", "epsilon": "4", "delta": "1e-5"}
        values = {each.name: each.value for each in ALGORITHMS["distribution"].inputs} | values
        run = plan_run(ALGORITHMS["distribution"], study, values)
        workspace.runs.start(view.key, algorithm="distribution", values=values, by="ada", run=run)
        while (record := workspace.runs.of(view.key)[0]).running:
            time.sleep(0.05)
        assert record.state == "finished", record
        study.post(study.histogram(ages, epsilon=1, repeat=1))
        view = workspace.find("ada", "rehearsal", "ada", "ages")
        expected = {
            "reports": result.n_reports,
            "sums": result.parts[0].sums.tolist(),
            "states": [round_.state.name for round_ in view.study.rounds],
            "run": [record.state, list(record.rounds), record.words],
            "budget": {
                each.limit: [str(each.spent.epsilon), str(each.spent.delta), each.reports]
                for each in view.study.budget.limits
            },
        }
        _copy(folder, copy)
    return expected


# --- Archives ------------------------------------------------------------------------------------


def _copy(folder: Path, copy: Path) -> None:
    """The files as they are now. SQLite's shared memory is not one of them: it is made again."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))


def _pack(folder: Path, archive: Path) -> None:
    """The same bytes wherever it is packed: no owner, no time."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            member = packed.gettarinfo(path, str(path.relative_to(folder)))
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            data = path.read_bytes() if member.isfile() else b""
            packed.addfile(member, io.BytesIO(data))


def main(target: Path) -> None:
    if target.exists():
        sys.exit(f"{target} is there already: fixtures are never written again, choose a new name")
    target.mkdir(parents=True)
    os.umask(0o077)
    for part in PARTS:
        with tempfile.TemporaryDirectory() as work:
            folder, copy = Path(work) / part, Path(work) / "copy"
            folder.mkdir()
            expected = globals()[f"write_{part}"](folder, copy)
            _pack(copy, target / f"{part}.tar.xz")
        (target / f"{part}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
