"""Small policies, charges and ledgers on real encrypted files, as tests of the budget use them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw

from chorister.clock import Clock, SettableClock
from chorister.device.database import open_database, transaction
from chorister.device.keys import SecretKey
from chorister.device.ledger import Ledger
from chorister.device.ledger.budget import Charge, Standing
from chorister.device.ledger.head_store import FileHeadStore, HeadStore
from chorister.device.ledger.ledger_entries import Charged
from chorister.policy import Policy
from chorister.recipe import Privacy
from tests.keyboard import ANALYSIS, policy_tree

DAY = 86_400
START = 1_800_000_000
AGE = 7 * DAY
KEY = SecretKey(bytes(range(32)))
SLOW = SettableClock(0)
"""A clock that is behind every checkpoint, so that these alone date what is written."""
NGRAM, AGE_FIELD, PERPLEXITY = "keyboard.ngram", "user.age", "keyboard.perplexity"

_ROOMY = {"local_epsilon": 8, "epsilon": 100, "delta": Decimal("0.1"), "reports": 1000}


def budget(**changes: Any) -> dict[str, Any]:
    """An analysis' budget that is never the reason, but for what is changed."""
    return {**_ROOMY, **changes}


def analysis(
    *, fields: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    """An analysis; its fields' budgets are roomy, too."""
    tree: dict[str, Any] = copy.deepcopy(policy_tree()["analyses"][ANALYSIS])
    tree["budget"] = budget(**changes)
    tree["fields"] = {ref: {**_ROOMY, **its} for ref, its in (fields or {NGRAM: {}}).items()}
    return tree


def policy(
    analyses: Mapping[str, Mapping[str, Any]] | None = None, *, age: str = "7d", **device: Any
) -> Policy:
    """A policy; the device's own limits are roomy and never renew, but for what is changed."""
    tree = policy_tree()
    tree["log"] = {**tree["log"], "checkpoint_max_age": "1d"}
    roomy = {key: value for key, value in _ROOMY.items() if key != "local_epsilon"}
    tree["device"] = {**roomy, "min_ledger_age": age, **device}
    tree["analyses"] = dict(analyses or {"a": analysis()})
    return Policy.model_validate(tree)


def charge(
    name: object,
    *,
    to: str = "a",
    fields: tuple[str, ...] = (NGRAM,),
    epsilon: str = "0.1",
    delta: str = "0.0000001",
    **privacy: Any,
) -> Charge:
    """The charge of a made-up recipe."""
    return Charge(
        recipe=hashlib.sha256(str(name).encode()).hexdigest(),
        study="study",
        analysis=to,
        fields=fields,
        privacy=Privacy.model_validate(
            {
                "mechanism": "asymmetric",
                "local_epsilon": "1",
                "epsilon": epsilon,
                "delta": delta,
                "min_cohort": 1000,
                "crowd": "noised",
                "report": "bounded",
                **privacy,
            }
        ),
    )


@dataclass
class Place:
    """A device's folder, and another one for its head."""

    store: Path
    elsewhere: Path

    @classmethod
    def make(cls, folder: Path) -> Place:
        place = cls(store=folder / "store", elsewhere=folder / "elsewhere")
        place.store.mkdir()
        place.elsewhere.mkdir()
        return place

    @property
    def database(self) -> Path:
        return self.store / "ledger.db"

    @property
    def head_file(self) -> Path:
        return self.elsewhere / "head"

    def connect(self) -> apsw.Connection:
        return open_database(self.database, KEY.derive("ledger"))

    def head(self) -> FileHeadStore:
        return FileHeadStore(self.head_file, key=KEY, store=self.store)

    def ledger(
        self,
        its: Policy,
        head: HeadStore | None = None,
        *,
        offset: int = 0,
        clock: Clock = SLOW,
    ) -> Ledger:
        """An open ledger with a head in a file."""
        return Ledger(
            self.connect(),
            its,
            head or self.head(),
            clock=clock,
            randbelow=lambda limit: offset % limit,
        )

    def copy_database(self) -> dict[str, bytes]:
        """A backup: the database's files as they are."""
        return {path.name: path.read_bytes() for path in self.store.iterdir()}

    def restore_database(self, files: Mapping[str, bytes]) -> None:
        for path in self.store.iterdir():
            path.unlink()
        for name, data in files.items():
            (self.store / name).write_bytes(data)


def grown(place: Place, its: Policy, *, offset: int = 0) -> Ledger:
    """A ledger that was created so long before START that it answers from START on."""
    ledger = place.ledger(its, offset=offset)
    ledger.settle(START - AGE)
    return ledger


def spend(ledger: Ledger, what: Charge, now: int = START) -> Charged:
    """Append in a transaction of its own, as a device does."""
    with transaction(ledger._connection):
        return ledger.append(what, now)


def standing(ledger: Ledger, limit: str, now: int = START) -> Standing:
    (found,) = [each for each in ledger.remaining(now) if each.limit == limit]
    return found


def spent(ledger: Ledger, limit: str = "device", now: int = START) -> Decimal:
    return standing(ledger, limit, now).spent.epsilon
