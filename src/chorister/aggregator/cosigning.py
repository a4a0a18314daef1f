"""An aggregator's part in the public log: it cosigns checkpoints and publishes its own HPKE keys.

Each run does three things. When a new key is due, it is generated, stored, and only then submitted
to the log under our cosigning key; it counts as published once a checkpoint that we cosigned covers
it. The log's newest tree is checked and cosigned (`transparency.Cosigner`), which first passes all
new recipes to the task store. And keys that no report can be sealed to any more are destroyed.

A cosigner that does not know what it signed last refuses to start: whether the log is new to it
(`begin`) or its head is to be restored from a checkpoint (`adopt`) is the operator's decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.aggregator.operations.logs import get_logger, log_failure
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.canonical import b64url_decode
from chorister.clock import Clock
from chorister.errors import ChoristerError, DecodeError, InvalidInput, ServiceError, StorageDamaged
from chorister.policy import Policy
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import MAX_SKEW, Checkpoint, SignedCheckpoint
from chorister.transparency.client import CANDIDATE, HTTPSource, RegistryClient
from chorister.transparency.cosigner import (
    Cosigner,
    CosignerIdentity,
    Head,
    adopt_head,
    create_head,
)
from chorister.transparency.entries import HPKEConfigEntry, RecipeEntry, parse_entry
from chorister.transparency.note import MAX_NOTE, SignatureLine, key_name

_RESUBMIT_SECONDS: Final = 600
_TIMEOUT_SECONDS: Final = 30.0


def cosigner_identity(
    url: str, key: Ed25519PrivateKey, policies: Sequence[Policy]
) -> CosignerIdentity:
    """Return who cosigns which log; the served policies must agree about it."""
    origins = sorted({policy.log.origin for policy in policies})
    if len(origins) != 1:
        raise ServiceError(f"the policies name different logs: {', '.join(origins)}")
    own = key.public_key().public_bytes_raw()
    for policy in policies:
        sides = [side for pair in policy.aggregators for side in (pair.leader, pair.helper)]
        keys = [each for side in sides if side.url == url for each in side.cosigning_keys]
        if not keys:
            raise ServiceError(f"policy {policy.name} has no aggregator at {url}")
        if own not in {b64url_decode(each) for each in keys}:
            raise ServiceError(
                f"policy {policy.name} does not list this aggregator's cosigning key for {url}"
            )
    log_keys = dict.fromkeys(each for policy in policies for each in policy.log_keys)
    return CosignerIdentity(
        name=key_name(url),
        key=key,
        origin=origins[0],
        log_keys=tuple(b64url_decode(each) for each in log_keys),
    )


def open_head(
    folder: Path,
    identity: CosignerIdentity,
    clock: Clock,
    *,
    registry: str,
    ca_bundle: Path | None = None,
    transport: httpx2.BaseTransport | None = None,
    begin: bool = False,
    adopt: Path | None = None,
) -> Head:
    """Open what was cosigned last; `begin` and `adopt` are the operator's decisions."""
    if begin and adopt is not None:
        raise InvalidInput("begin a log or adopt a checkpoint, not both")
    if begin:
        return create_head(folder, identity, clock)
    if adopt is not None:
        try:
            checkpoint = SignedCheckpoint.parse(adopt.read_bytes()[: MAX_NOTE + 1])
        except OSError as error:
            raise ServiceError(f"can't read {adopt}: {error.strerror}") from error
        except DecodeError as error:
            raise ServiceError(f"{adopt} is not a checkpoint: {error}") from error
        with HTTPSource(registry, ca_bundle=ca_bundle, transport=transport) as source:
            return adopt_head(folder, identity, checkpoint=checkpoint, source=source)
    return Head.open(folder)


class Cosigning:
    """One aggregator's part in its log. One thread calls `run` again and again."""

    def __init__(
        self,
        *,
        identity: CosignerIdentity,
        head: Head,
        keys: KeyRing,
        accept: Callable[[Sequence[SignedRecipe]], None],
        registry: str,
        clock: Clock,
        metrics: Metrics,
        hpke_lifetime: int,
        max_new_entries: int,
        max_new_bytes: int,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._identity = identity
        self._head = head
        self._keys = keys
        self._accept = accept
        self._clock = clock
        self._metrics = metrics
        self._lifetime = hpke_lifetime
        self._source = HTTPSource(
            registry, timeout=_TIMEOUT_SECONDS, ca_bundle=ca_bundle, transport=transport
        )
        # For requests, which come in another thread.
        self._asked = HTTPSource(
            registry, timeout=_TIMEOUT_SECONDS, ca_bundle=ca_bundle, transport=transport
        )
        self._registry = RegistryClient(
            registry, timeout=_TIMEOUT_SECONDS, ca_bundle=ca_bundle, transport=transport
        )
        self._cosigner = Cosigner(
            identity=identity,
            head=head,
            clock=clock,
            own_configs=keys.own_configs,
            accept=accept,
            max_new_entries=max_new_entries,
            max_new_bytes=max_new_bytes,
        )
        self._submitted: dict[bytes, int] = {}
        self._log = get_logger()

    def accept_open_recipes(self) -> None:
        """Pass on the open recipes again: a policy or the database may be newer than they are."""
        state, now = self._head.state, self._clock.now()
        if state.last_list is not None:
            now = max(now, state.last_list.entry.time)
        open_now = {entry.recipe_digest for entry in state.open_entries(now)}
        found = []
        for submission in self._head.entries():
            entry = parse_entry(submission.entry)
            if isinstance(entry, RecipeEntry) and entry.recipe_digest in open_now:
                found.append(entry.open_body(submission.body))
        if found:
            self._accept(found)

    def close(self) -> None:
        """Release the head for another process."""
        self._source.close()
        self._asked.close()
        self._registry.close()
        self._head.close()

    # --- As a witness that is asked -----------------------------------------------------------

    @property
    def origin(self) -> str:
        """The log's name."""
        return self._identity.origin

    @property
    def last(self) -> Checkpoint:
        """The checkpoint that was cosigned last."""
        return self._cosigner.last

    def newest(self) -> SignedCheckpoint | None:
        """Return it with the log's signature and ours; None if the log is still empty here."""
        newest = self._head.last
        return newest if newest.checkpoint.size else None

    def check_log(self, signed: SignedCheckpoint) -> None:
        """Require the log's signature."""
        signed.check_log(self._identity.origin, self._identity.log_keys)

    def cosign(self, signed: SignedCheckpoint) -> SignatureLine:
        """Check a checkpoint that somebody sent, with the log's own files, and cosign it."""
        return self._cosigner.cosign(self._asked, signed)

    # --- By itself ----------------------------------------------------------------------------

    def run(self) -> bool:
        """Run once. Returns False if something went wrong, which is logged."""
        succeeded = True
        for step in (self._submit_keys, self._cosign, self._record_published):
            try:
                step()
            except ChoristerError as error:
                succeeded = False
                self._metrics.cosigning_failures.labels(type(error).__name__).inc()
                log_failure("cosigning failed", error, level=logging.WARNING)
        return succeeded

    def _submit_keys(self) -> None:
        now = self._clock.now()
        self._keys.destroy_due()
        # A key that did not reach the log while its entry was valid is replaced by a new one.
        entries = {config: self._entry(config, now) for config in self._keys.unpublished()}
        waiting = [
            config
            for config, entry in entries.items()
            if entry is not None and now < entry.not_after
        ]
        since = self._keys.current_since()
        # A log that was started again has none of our keys.
        due = since is None or now >= since + self._lifetime or not self._entries()
        if not waiting and due:
            waiting = [self._keys.generate()]
            self._log.info("generated an HPKE key", config_id=waiting[0][0])
        logged = {each.config for each in self._entries()}
        for config in waiting:
            # The registry may lose a submission; an entry that reached the log is visible.
            if (
                config not in logged
                and now >= self._submitted.get(config, -_RESUBMIT_SECONDS) + _RESUBMIT_SECONDS
            ):
                self._submit(config, now)

    def _entry(self, config: bytes, now: int) -> HPKEConfigEntry | None:
        """Return a key's entry; None if an earlier version signed it, in another format."""

        def sign() -> bytes:
            entry = HPKEConfigEntry(
                aggregator=self._identity.name,
                not_before=max(0, now - MAX_SKEW),
                # Twice the lifetime: it lasts if the log can't be reached when the next is due.
                not_after=now + 2 * self._lifetime,
                config=config,
            )
            return entry.signed(self._identity.key).encode()

        try:
            entry = parse_entry(self._keys.entry(config, sign))
        except DecodeError:
            return None
        if not isinstance(entry, HPKEConfigEntry):
            raise StorageDamaged("the stored log entry of an HPKE key is an entry of another kind")
        return entry

    def _submit(self, config: bytes, now: int) -> None:
        entry = self._entry(config, now)
        if entry is None:
            raise StorageDamaged("the stored log entry of an HPKE key can't be read")
        index = self._registry.submit(entry)
        self._submitted[config] = now
        self._log.info("submitted an HPKE key", config_id=config[0], entry=index)

    def _cosign(self) -> None:
        candidate = SignedCheckpoint.parse(self._source.read(CANDIDATE, limit=MAX_NOTE))
        own = self._identity.key.public_key().public_bytes_raw()
        if candidate.note.cosignature(self._identity.name, [own]) is not None:
            return  # until the registry asks for a new time
        line = self._cosigner.cosign(self._source, candidate)
        self._metrics.cosigned.set(self._clock.now())
        waiting_for = self._registry.cosign(line)
        self._log.info(
            "cosigned",
            checkpoint_size=self._cosigner.last.size,
            waiting_for=", ".join(waiting_for),
        )

    def _record_published(self) -> None:
        """Record which keys are in use: those that a checkpoint we cosigned covers."""
        entries = self._entries()
        logged = {each.config for each in entries}
        for config in self._keys.unpublished():
            if config in logged:
                self._keys.publish(config)
                self._submitted.pop(config, None)
                self._log.info("an HPKE key is in use", config_id=config[0])
        if entries:
            self._metrics.key_expires.set(entries[-1].not_after)

    def _entries(self) -> tuple[HPKEConfigEntry, ...]:
        return self._head.state.hpke_entries(self._identity.name)
