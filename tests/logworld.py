"""A small world around a log: a policy, its keys, an honest registry, cosigners, and a forger."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.canonical import b64url_encode, sha256
from chorister.clock import SettableClock
from chorister.errors import ChoristerError
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, Window, sign
from chorister.registry.folder import LogFolder
from chorister.registry.registry import Receipt, Registry
from chorister.transparency.checkpoint import Checkpoint, ListProof, SignedCheckpoint
from chorister.transparency.client import PROOF, FolderSource, body_path, list_path
from chorister.transparency.cosigner import Cosigner, CosignerIdentity, Head, create_head
from chorister.transparency.disk import Disk
from chorister.transparency.entries import (
    EndReason,
    Entry,
    HPKEConfigEntry,
    KeyRevocation,
    ListEntry,
    RecipeBody,
    RecipeEnd,
    RecipeEntry,
    SignedEntry,
    Submission,
    parse_entry,
)
from chorister.transparency.note import COSIGNATURE, LOG_SIGNATURE, key_name, verifier_key
from chorister.transparency.state import LogState
from chorister.transparency.tiles import Source, TileTree, bundle_path, encode_bundle
from chorister.transparency.tree import inclusion_proof, leaf_hash, root_hash
from chorister.transparency.trust import Authority, Trust

ORIGIN = "registry.example/log"
LEADER = "https://leader.example.org/dap/"
HELPER = "https://helper.example.net/dap/"
LEADER_NAME, HELPER_NAME = key_name(LEADER), key_name(HELPER)
ANALYSIS = "keyboard.next-word"
OTHER_ANALYSIS = "keyboard.perplexity"
EXAMPLES = Path(__file__).parent.parent / "examples" / "keyboard"
NOW = 1_794_787_200  # The example recipe's answer period opens.
DAY = 86_400


def key(name: str) -> Ed25519PrivateKey:
    """A key for tests, the same in every run."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public(name: str) -> bytes:
    return key(name).public_key().public_bytes_raw()


def vkey(name: str, of: str, kind: int = COSIGNATURE) -> str:
    """A verifier key as c2sp.org/signed-note writes it, of a cosigner unless `kind` says else."""
    return verifier_key(name, kind, public(of))


LOG_VKEY = vkey(ORIGIN, "log", LOG_SIGNATURE)


def policy_text(origin: str = ORIGIN) -> str:
    """The example policy with the keys of this world, and a second analysis by another author."""
    text = (EXAMPLES / "policy.toml").read_text()
    text, count = re.subn(r'(\[log\]\n(?:.*\n)*?origin = ")[^"]*', rf"\g<1>{origin}", text, count=1)
    assert count == 1
    for name, pattern in {
        "log": r"(?s)(\[log\]\nkeys = \[\")[^\"]*",
        "leader": r"(?s)(\[aggregators.leader\].*?cosigning_keys = \[\")[^\"]*",
        "helper": r"(?s)(\[aggregators.helper\].*?cosigning_keys = \[\")[^\"]*",
        "author": r"(author_keys = \[\")[^\"]*",
    }.items():
        text, count = re.subn(pattern, rf"\g<1>{b64url_encode(public(name))}", text, count=1)
        assert count == 1
    start = text.index(f'[analyses."{ANALYSIS}"]')
    second = text[start:].replace(ANALYSIS, OTHER_ANALYSIS)
    second = second.replace(b64url_encode(public("author")), b64url_encode(public("other author")))
    # Two keys for the first analysis: the second one can revoke the first.
    two = f'{b64url_encode(public("author"))}", "{b64url_encode(public("second author"))}'
    return text.replace(b64url_encode(public("author")), two) + "\n" + second


def policy(origin: str = ORIGIN) -> Policy:
    return Policy.load(policy_text(origin).encode())


def authority(origin: str = ORIGIN) -> Authority:
    return Authority.of([policy(origin)])


def trust(origin: str = ORIGIN) -> Trust:
    return Trust.of(policy(origin), policy(origin).aggregators[0])


def recipe(name: str, *, analysis: str = ANALYSIS, closes: int = NOW + 7 * DAY) -> Recipe:
    draft = Recipe.draft((EXAMPLES / "recipe.json").read_bytes())
    window = Window(opens=min(NOW, closes) - DAY, closes=closes, ends=closes + DAY)
    return draft.model_copy(update={"id": name, "analysis": analysis, "window": window})


# The body of every recipe entry that a test made, by its digest.
BODIES: dict[bytes, bytes] = {}


def entry_of(asked: Recipe, author: str = "author") -> RecipeEntry:
    return entry_with(sign(asked, key(author)), author)


def entry_with(jws: bytes, author: str = "author") -> RecipeEntry:
    entry = RecipeEntry.of(jws, key(author))
    BODIES[entry.body_digest] = jws
    return entry


def recipe_entry(
    name: str, *, author: str = "author", analysis: str = ANALYSIS, closes: int = NOW + 7 * DAY
) -> RecipeEntry:
    return entry_of(recipe(name, analysis=analysis, closes=closes), author)


def with_body(entry: RecipeEntry, body: bytes) -> RecipeEntry:
    """The same entry with another body, whatever that is."""
    BODIES[sha256(body)] = body
    return replace(entry, body_digest=sha256(body), body_size=len(body)).signed(key("author"))


def submission(entry: Entry) -> Submission:
    """An entry with its body."""
    body = BODIES[entry.body_digest] if isinstance(entry, RecipeEntry) else b""
    return Submission(entry.encode(), body)


def body_of(entry: RecipeEntry) -> RecipeBody:
    """What a device gets of a recipe."""
    return RecipeBody(author_key=entry.author_key, jws=BODIES[entry.body_digest])


def body_files(entries: Sequence[bytes]) -> dict[str, bytes]:
    """The bodies of those among these entries that have one, by path."""
    files = {}
    for data in entries:
        try:
            entry = parse_entry(data)
        except ChoristerError:
            continue
        if isinstance(entry, RecipeEntry):
            files[body_path(entry.body_digest)] = BODIES[entry.body_digest]
        elif isinstance(entry, HPKEConfigEntry):
            files[body_path(entry.address)] = data
    return files


def end_entry(
    of: RecipeEntry, *, author: str = "author", reason: EndReason = EndReason.WITHDRAWN
) -> RecipeEnd:
    return RecipeEnd(recipe_digest=of.recipe_digest, reason=reason).signed(key(author))


def revocation(of: str, *, by: str | None = None) -> KeyRevocation:
    return KeyRevocation(key=public(of)).signed(key(by or of))


def hpke_entry(
    aggregator: str,
    config: bytes = b"config",
    *,
    by: str | None = None,
    not_before: int = NOW - DAY,
    not_after: int = NOW + 30 * DAY,
) -> HPKEConfigEntry:
    signer = by or ("leader" if aggregator == LEADER else "helper")
    return HPKEConfigEntry(
        aggregator=key_name(aggregator), not_before=not_before, not_after=not_after, config=config
    ).signed(key(signer))


def identity(side: str, origin: str = ORIGIN) -> CosignerIdentity:
    return CosignerIdentity(
        name=LEADER_NAME if side == "leader" else HELPER_NAME,
        key=key(side),
        origin=origin,
        log_keys=(public("log"),),
    )


@dataclass
class CosigningAggregator:
    """One cosigner and what it was handed."""

    side: str
    folder: Path
    clock: SettableClock
    accepted: list[SignedRecipe] = field(default_factory=list)
    configs: set[bytes] = field(default_factory=lambda: {b"config"})
    disk: Disk = field(default_factory=Disk)
    origin: str = ORIGIN

    def __post_init__(self) -> None:
        self.identity = identity(self.side, self.origin)
        head = create_head(self.folder, self.identity, self.clock, disk=self.disk)
        self.cosigner = self._cosigner(head)

    def _cosigner(self, head: Head) -> Cosigner:
        self.head = head
        return Cosigner(
            identity=self.identity,
            head=head,
            clock=self.clock,
            own_configs=lambda: self.configs,
            accept=self.accepted.extend,
        )

    def restart(self) -> None:
        self.head.close()
        self.cosigner = self._cosigner(Head.open(self.folder, disk=self.disk))

    def cosign(self, source: Source) -> bytes:
        return self.cosigner.cosign(source).encode().encode()


class World:
    """An honest registry with its two cosigners, in a folder."""

    def __init__(self, folder: Path, *, disk: Disk | None = None, origin: str = ORIGIN) -> None:
        self.origin = origin
        self.clock = SettableClock(NOW)
        self.folder = folder / "registry"
        self.public = self.folder / "public"
        self.source = FolderSource(self.public)
        self.disk = disk or Disk()
        self._log = LogFolder.create(self.folder, disk=self.disk)
        self.registry = self._registry()
        self.leader = CosigningAggregator("leader", folder / "leader", self.clock, origin=origin)
        self.helper = CosigningAggregator("helper", folder / "helper", self.clock, origin=origin)

    def _registry(self) -> Registry:
        return Registry(
            self._log,
            origin=self.origin,
            key=key("log"),
            authority=authority(self.origin),
            clock=self.clock,
        )

    def restart(self) -> None:
        self._log.close()
        self._log = LogFolder.open(self.folder, disk=self.disk)
        self.registry = self._registry()

    def submit(self, *entries: SignedEntry) -> list[Receipt]:
        return [self.registry.submit(submission(entry).encode()) for entry in entries]

    def publish(self, *entries: SignedEntry, wait: int = 1) -> SignedCheckpoint:
        """Submit, let both cosign, publish."""
        self.submit(*entries)
        self.clock.advance(wait)
        self.registry.issue()
        for side in (self.leader, self.helper):
            self.registry.add_cosignature(side.cosign(self.source))
        return self.checkpoint()

    def checkpoint(self) -> SignedCheckpoint:
        return SignedCheckpoint.parse((self.public / "checkpoint").read_bytes())

    def proof(self) -> ListProof:
        return ListProof.parse((self.public / PROOF).read_bytes())


def a_world(folder: Path) -> World:
    """A world with keys and two recipes published."""
    world = World(folder)
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER), recipe_entry("first"))
    world.publish(recipe_entry("second"))
    return world


def forge(
    folder: Path,
    entries: Sequence[bytes],
    *,
    time: int,
    served_list: bytes | None = None,
    list_digest: bytes | None = None,
    closed: bool = True,
    cosigned: bool = False,
    cosigned_at: int | None = None,
    index: int | None = None,
    name: str = "candidate",
) -> Source:
    """Write what a dishonest registry serves, signed with the log's own key.

    `entries` need obey no rule. They are followed by a list of `time`, the honest one unless told
    otherwise, or by none if not `closed`. `index`: of the entry that devices get as the list.
    """
    state = LogState()
    try:
        for entry in entries:
            state.append(entry)
    except Exception as error:  # the forger does not care, unless a list is then missing
        if list_digest is None and closed:
            raise AssertionError("give a list_digest with entries that break the rules") from error
    files = body_files(entries)
    every = list(entries)
    if closed:
        earliest = state.last_list.entry.time if state.last_list else 0
        honest = state.current(max(time, earliest))
        digest = list_digest or honest.digest
        every.append(ListEntry(time=time, digest=digest).encode())
        files[list_path(digest)] = honest.encode() if served_list is None else served_list
    leaves = [leaf_hash(entry) for entry in every]
    checkpoint = Checkpoint(origin=ORIGIN, size=len(leaves), root=root_hash(leaves))
    tree = TileTree()
    tree.extend(leaves)
    files |= dict(tree.files())
    for at in range(0, len(every), 256):
        bundle = every[at : at + 256]
        files[bundle_path(at // 256, len(bundle))] = encode_bundle(bundle)
    signed = checkpoint.sign(key("log"))
    if cosigned:
        at = time if cosigned_at is None else cosigned_at
        for side in ("leader", "helper"):
            signed = signed.with_cosigner(identity(side).sign(checkpoint, at))
    files[name] = signed.encode()
    shown = len(leaves) - 1 if index is None else index
    last = parse_entry(every[shown]) if every else None
    if isinstance(last, ListEntry):
        files[PROOF] = ListProof(
            entry=last, index=shown, path=inclusion_proof(shown, leaves), signed=signed
        ).encode()
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return FolderSource(folder)
