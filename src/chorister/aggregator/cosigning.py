"""An aggregator's part in the public log: it cosigns checkpoints and publishes its own HPKE keys.

Each look does three things. A key that is due is made, written down, and only then submitted to
the log under our cosigning key; it counts as published once a checkpoint that we cosigned covers
it. The log's candidate is checked and cosigned (`transparency.Cosigner`), which first hands all new
recipes to the task register. And keys that nothing can be sealed to any more are destroyed.

A cosigner that does not know what it signed last refuses to begin: whether the log is new to it
(`begin`) or its memory is to be restored from a checkpoint (`adopt`) is the operator's decision.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.aggregator.logs import get_logger
from chorister.aggregator.metrics import Metrics
from chorister.canonical import b64url_decode
from chorister.clock import Clock
from chorister.errors import ChoristerError, DecodeError, InvalidInput, ServiceError, StorageDamaged
from chorister.policy import Policy
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.client import RegistryClient
from chorister.transparency.cosigner import (
    MAX_SKEW,
    Cosigner,
    CosignerIdentity,
    adopt_head,
    create_head,
)
from chorister.transparency.entries import (
    HPKEConfigEntry,
    RecipeEntry,
    open_recipe,
    parse_entry,
)
from chorister.transparency.head import Head
from chorister.transparency.note import MAX_NOTE
from chorister.transparency.sources import HTTPSource

__all__ = ["Cosigning", "Keys", "cosigner_identity", "network", "open_head"]

_RESUBMIT: Final = 600
_SECONDS: Final = 30.0


class Keys(Protocol):
    """An aggregator's HPKE keys, as far as publishing them goes (`hpke_keys.KeyRing`)."""

    def generate(self) -> bytes:
        """Make a key and write it down; its config."""
        ...

    def entry(self, config: bytes, sign: Callable[[], bytes]) -> bytes:
        """Its log entry: signed once, the same bytes ever after."""
        ...

    def publish(self, config: bytes) -> None:
        """The config is in the log."""
        ...

    def unpublished(self) -> list[bytes]:
        """Made, but not known to be in the log."""
        ...

    def current_since(self) -> int | None:
        """Since when the current key is in use."""
        ...

    def own_configs(self) -> Collection[bytes]:
        """All that were ever made."""
        ...

    def destroy_due(self) -> int:
        """Destroy what nothing can be sealed to any more."""
        ...


def network(ca_bundle: Path | None) -> httpx2.BaseTransport | None:
    """How the registry is reached: None for the system's authorities."""
    if ca_bundle is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(ca_bundle))
    except OSError as error:
        raise ServiceError(f"{ca_bundle} holds no certificates of authorities: {error}") from error
    return httpx2.HTTPTransport(verify=context, trust_env=False)


def cosigner_identity(
    url: str, key: Ed25519PrivateKey, policies: Sequence[Policy]
) -> CosignerIdentity:
    """Who cosigns which log, by the policies that are served; they have to agree about it."""
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
            raise ServiceError(f"policy {policy.name} does not list our cosigning key for {url}")
    log_keys = dict.fromkeys(each for policy in policies for each in policy.log_keys)
    return CosignerIdentity(
        name=url,
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
    transport: httpx2.BaseTransport | None = None,
    begin: bool = False,
    adopt: Path | None = None,
) -> Head:
    """What was cosigned last; `begin` and `adopt` are the operator's decisions."""
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
            raise ServiceError(f"{adopt} is no checkpoint: {error}") from error
        with HTTPSource(registry, transport=transport) as source:
            return adopt_head(folder, identity, checkpoint=checkpoint, source=source)
    return Head.open(folder)


class Cosigning:
    """One aggregator at its log. `look` is called again and again, by one thread."""

    def __init__(
        self,
        *,
        identity: CosignerIdentity,
        head: Head,
        keys: Keys,
        accept: Callable[[Sequence[SignedRecipe]], None],
        registry: str,
        clock: Clock,
        metrics: Metrics,
        hpke_lifetime: int,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._identity = identity
        self._head = head
        self._keys = keys
        self._accept = accept
        self._clock = clock
        self._metrics = metrics
        self._lifetime = hpke_lifetime
        self._source = HTTPSource(registry, timeout=_SECONDS, transport=transport)
        self._registry = RegistryClient(registry, timeout=_SECONDS, transport=transport)
        self._cosigner = Cosigner(
            identity=identity,
            head=head,
            clock=clock,
            own_configs=keys.own_configs,
            accept=accept,
        )
        self._delivered: Checkpoint | None = None
        self._submitted: dict[bytes, int] = {}
        self._log = get_logger()

    def enumerate_open(self) -> None:
        """Hand over the open recipes once more: a policy or the database may be newer than they."""
        listed = self._head.state.open_recipes(self._clock.now())
        entries = (parse_entry(entry) for entry in self._head.entries())
        found = [
            open_recipe(entry)
            for entry in entries
            if isinstance(entry, RecipeEntry) and entry.address in listed
        ]
        if found:
            self._accept(found)

    def close(self) -> None:
        """Let another process have the head."""
        self._source.close()
        self._registry.close()
        self._head.close()

    def look(self) -> bool:
        """One look at the log; False if something went wrong, which is logged."""
        good = True
        for step in (self._see_to_keys, self._cosign, self._note_published):
            try:
                step()
            except ChoristerError as error:
                good = False
                name = type(error).__name__
                self._metrics.cosigning_failures.labels(name).inc()
                self._log.warning("cosigning failed", kind=name, error=str(error))
        return good

    def _see_to_keys(self) -> None:
        now = self._clock.now()
        self._keys.destroy_due()
        # One that never came through while it was valid is given up, and another key made.
        entries = {config: self._entry(config, now) for config in self._keys.unpublished()}
        waiting = [config for config, entry in entries.items() if now < entry.not_after]
        since = self._keys.current_since()
        if not waiting and (since is None or now >= since + self._lifetime):
            waiting = [self._keys.generate()]
            self._log.info("made an HPKE key", config_id=waiting[0][0])
        logged = {each.config for each in self._entries()}
        for config in waiting:
            # A submission may be lost with the registry; an entry that came through is seen.
            if config not in logged and now >= self._submitted.get(config, -_RESUBMIT) + _RESUBMIT:
                self._submit(config, now)

    def _entry(self, config: bytes, now: int) -> HPKEConfigEntry:
        def sign() -> bytes:
            entry = HPKEConfigEntry(
                aggregator=self._identity.name,
                not_before=max(0, now - MAX_SKEW),
                # Twice: if the log can't be reached when the next is due, devices still have this.
                not_after=now + 2 * self._lifetime,
                config=config,
            )
            return entry.signed(self._identity.key).encode()

        entry = parse_entry(self._keys.entry(config, sign))
        if not isinstance(entry, HPKEConfigEntry):
            raise StorageDamaged("the stored entry of an HPKE key is of another kind")
        return entry

    def _submit(self, config: bytes, now: int) -> None:
        index = self._registry.submit(self._entry(config, now))
        self._submitted[config] = now
        self._log.info("submitted an HPKE key", config_id=config[0], entry=index)

    def _cosign(self) -> None:
        line = self._cosigner.cosign(self._source)
        checkpoint = self._cosigner.last
        self._metrics.cosigned.set(checkpoint.time)
        if checkpoint == self._delivered:
            return
        waiting_for = self._registry.cosign(line)
        self._delivered = checkpoint
        self._log.info(
            "cosigned", checkpoint_size=checkpoint.size, waiting_for=", ".join(waiting_for)
        )

    def _note_published(self) -> None:
        """A key is in use once we have cosigned a checkpoint that covers it."""
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
