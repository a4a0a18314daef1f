"""A world around one device: a log that can lie, a leader that can misbehave, a clock."""

from __future__ import annotations

import secrets
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister._native import HPKEKeypair, scan_reports
from chorister.canonical import WIRE, sha256
from chorister.dap.task import Task, task_binding, task_configurations
from chorister.device.transport import Answer
from chorister.errors import Unreachable
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.transparency.checkpoint import Checkpoint, ListProof
from chorister.transparency.client import PROOF, list_path
from chorister.transparency.entries import HPKEConfigEntry, ListEntry, RecipeEntry, SignedEntry
from chorister.transparency.note import key_name
from chorister.transparency.state import CurrentList, ListedRecipe
from chorister.transparency.tree import Frontier, leaf_hash
from tests.keyboard import changed, recipe_tree
from tests.logworld import ANALYSIS as ANALYSIS
from tests.logworld import DAY as DAY
from tests.logworld import (
    HELPER,
    LEADER,
    ORIGIN,
    body_files,
    entry_of,
    key,
    policy_text,
    public,
)
from tests.logworld import NOW as NOW

REGISTRY = "https://registry.example/log/"
LEADER_KEYS, HELPER_KEYS = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
EVERYBODY = {"participation/probability": "1", "participation/once_per_study": False}


def a_policy(changes: Mapping[str, Any] | None = None) -> Policy:
    """The keyboard's policy with this world's keys; a ledger that may answer at once."""
    tree = tomllib.loads(policy_text(), parse_float=Decimal)
    quick = {"device/min_ledger_age": "1s"}
    return Policy.model_validate(changed(tree, {**quick, **(changes or {})}))


def a_generous_policy(changes: Mapping[str, Any] | None = None) -> Policy:
    """One that lets a device answer a hundred times."""
    many = {"epsilon": 100, "delta": Decimal("0.01"), "reports": 100}
    tables = ["device", f"analyses/{ANALYSIS}/budget"]
    tables += [f"analyses/{ANALYSIS}/fields/{ref}" for ref in ("keyboard.ngram", "user.age")]
    raised = {f"{table}/{name}": value for table in tables for name, value in many.items()}
    return a_policy({**raised, **(changes or {})})


def a_recipe(id_: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The keyboard's recipe, open now to every device, with values at paths replaced."""
    tree = changed(
        recipe_tree(),
        {
            "id": id_,
            "window": {"opens": NOW - DAY, "closes": NOW + 6 * DAY, "ends": NOW + 7 * DAY},
            **EVERYBODY,
            **(changes or {}),
        },
    )
    return Recipe.model_validate(tree, context=WIRE)


def an_entry(recipe: Recipe, author: str = "author") -> RecipeEntry:
    return entry_of(recipe, author)


def hpke_entry(aggregator: str, config: bytes, *, by: str | None = None) -> HPKEConfigEntry:
    signer = by or ("leader" if aggregator == LEADER else "helper")
    entry = HPKEConfigEntry(
        aggregator=key_name(aggregator), not_before=0, not_after=NOW + 1000 * DAY, config=config
    )
    return entry.signed(key(signer))


class ForgedLog:
    """The files of a log, signed with whatever keys the test says."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.leader = LEADER
        self.size = 0
        self.hpke = [hpke_entry(LEADER, LEADER_KEYS.config), hpke_entry(HELPER, HELPER_KEYS.config)]

    def rename_leader(self, url: str) -> None:
        """The leader is found, publishes its key and cosigns under another URL."""
        self.leader = url
        self.hpke[0] = hpke_entry(url, LEADER_KEYS.config, by="leader")

    def publish(
        self,
        recipes: Iterable[Recipe | RecipeEntry],
        *,
        time: int = NOW,
        log: Ed25519PrivateKey | None = None,
        cosigners: Mapping[str, str] | None = None,
        cosigned_at: int | Mapping[str, int] | None = None,
        origin: str = ORIGIN,
    ) -> None:
        """A checkpoint whose current list holds these recipes."""
        named: dict[str, list[RecipeEntry]] = {}
        for each in recipes:
            entry = each if isinstance(each, RecipeEntry) else an_entry(each)
            named.setdefault(entry.analysis, []).append(entry)
        self.publish_raw(
            named,
            time=time,
            log=log,
            cosigners=cosigners,
            cosigned_at=cosigned_at,
            origin=origin,
        )

    def publish_raw(
        self,
        named: Mapping[str, Sequence[SignedEntry]],
        *,
        time: int,
        log: Ed25519PrivateKey | None = None,
        cosigners: Mapping[str, str] | None = None,
        cosigned_at: int | Mapping[str, int] | None = None,
        size: int | None = None,
        origin: str = ORIGIN,
    ) -> None:
        """The same with any entries, under any analysis' name."""
        listing = CurrentList.of(
            hpke_configs=[(entry.aggregator, entry.address) for entry in self.hpke],
            recipes=[_listed(name, entry) for name, each in named.items() for entry in each],
        )
        every: list[SignedEntry] = [
            *self.hpke,
            *(entry for each in named.values() for entry in each),
        ]
        encoded = [entry.encode() for entry in every]
        # A log only grows: the list itself, and whatever else is needed, come after the entries.
        self.size = max(self.size + 1, len(encoded) + 1) if size is None else size
        leaves = [leaf_hash(entry) for entry in encoded]
        leaves += [leaf_hash(b"more")] * (self.size - 1 - len(leaves))
        last = ListEntry(time=time, digest=listing.digest)
        before = Frontier().extend(leaves[: self.size - 1])
        root = before.extend([leaf_hash(last.encode())]).root
        checkpoint = Checkpoint(origin=origin, size=self.size, root=root)
        signed = checkpoint.sign(log or key("log"))
        who = {self.leader: "leader", HELPER: "helper"} if cosigners is None else cosigners
        for name, signer in who.items():
            at = cosigned_at.get(name, time) if isinstance(cosigned_at, Mapping) else cosigned_at
            line = checkpoint.cosign(
                name=key_name(name), key=key(signer), time=time if at is None else at
            )
            signed = signed.with_cosigner(line)
        proof = ListProof(entry=last, index=self.size - 1, path=before.next_path, signed=signed)
        self.files = {PROOF: proof.encode(), list_path(listing.digest): listing.encode()}
        self.files |= body_files(encoded)


def _listed(name: str, entry: SignedEntry) -> ListedRecipe:
    if isinstance(entry, RecipeEntry):
        return ListedRecipe.of(entry)._replace(analysis=name)
    data = entry.encode()
    return ListedRecipe(name, public("author"), sha256(data), len(data))


STORED = Answer(status=200, content_type="", body=b"")


@dataclass
class Network:
    """The transport of tests: the log's files, and a leader that keeps what it gets."""

    log: ForgedLog = field(default_factory=ForgedLog)
    gets: list[str] = field(default_factory=list)
    posts: list[tuple[str, Mapping[str, str], bytes]] = field(default_factory=list)
    answers: deque[Answer | Exception] = field(default_factory=deque)
    down: bool = False
    requested: Callable[[], None] = lambda: None

    def get(self, url: str, *, limit: int) -> Answer:
        self.requested()
        self.gets.append(url)
        if self.down:
            raise Unreachable(f"{url} can't be reached")
        data = self.log.files.get(url.removeprefix(REGISTRY))
        if data is None or len(data) > limit:
            return Answer(status=404, content_type="", body=b"")
        return Answer(status=200, content_type="", body=data)

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        self.requested()
        assert limit >= 17
        if self.down:
            raise Unreachable(f"{url} can't be reached")
        self.posts.append((url, dict(headers), body))
        answer = self.answers.popleft() if self.answers else STORED
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def reports(self) -> list[bytes]:
        """The different reports that arrived, in their order."""
        return list(dict.fromkeys(body for _, _, body in self.posts))


def bits_of(
    policy: Policy,
    recipe: Recipe,
    report: bytes,
    keys: Sequence[HPKEKeypair] = (LEADER_KEYS, HELPER_KEYS),
) -> tuple[Task, list[int]]:
    """What both aggregators find in a report together: its task and its bits."""
    leader, helper = keys
    for task in task_configurations(policy, recipe):
        binding, verify_key = task_binding(task.configuration), secrets.token_bytes(32)
        job = binding.leader_initialize(verify_key, [leader], report)
        if any(job.errors):
            continue
        answers, helped = binding.helper_initialize(verify_key, [helper], job.verify_inits)
        led = job.finish(answers)
        assert (led.count, helped.count) == (1, 1)
        vdaf = task.configuration.vdaf.native()
        entries = vdaf.unshard(led.share, helped.share, count=1)
        return task, np.frombuffer(entries, dtype=np.uint64).tolist()
    raise AssertionError("the report opens under no task of the recipe")


def ids(reports: bytes) -> bytes:
    return scan_reports(reports).ids
