"""An aggregator's HPKE keys: generated, published in the log, retired, destroyed.

Devices use a key once it is in the log (`publish`), which retires the key before it. A retired key
still opens reports that were sealed to it: a device may hold a checkpoint as old as its policy
permits, and a report may wait until its window ends. Once neither is possible, the private key is
destroyed. The public half stays, because the log is checked against every key ever generated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, exists, select, update

from chorister._native import HPKEKeypair
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.schema import hpke_keys, tasks
from chorister.clock import Clock
from chorister.errors import InvalidInput, ServiceError

_PUBLIC_KEY_AT: Final = 9  # HpkeConfig: id, KEM, KDF, AEAD, length of the key, the key
_TABLE: Final = "hpke_keys"
_USABLE: Final = hpke_keys.c.private_key.is_not(None)
_CURRENT: Final = hpke_keys.c.published.is_not(None) & hpke_keys.c.retired.is_(None)
_RELOAD_SECONDS: Final = 60  # by then, another process's changes are visible in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyStatus:
    """One key's state, for operators; times in POSIX seconds."""

    config: bytes
    created: int
    published: int | None  # when devices began to use it
    retired: int | None  # when they switched to the next one
    alive: bool  # whether its private half still exists

    @property
    def state(self) -> str:
        """waiting, in use, retired or destroyed."""
        if not self.alive:
            return "destroyed"
        if self.published is None:
            return "waiting"
        return "in use" if self.retired is None else "retired"


class KeyRing:
    """All keys of one aggregator. Private keys are stored encrypted. Threads share it."""

    def __init__(self, database: Database, clock: Clock, *, checkpoint_max_age: int) -> None:
        """`checkpoint_max_age`: the longest time for which a served policy accepts a checkpoint."""
        self._database = database
        self._clock = clock
        self._checkpoint_max_age = checkpoint_max_age
        self._lock = threading.Lock()
        self._keypairs: dict[bytes, HPKEKeypair] = {}
        self._usable: frozenset[int] = frozenset()
        self._loaded: int | None = None

    def generate(self) -> bytes:
        """Generate a key pair and return its config, to be published in the log, then here."""
        with self._database.write() as tx:
            taken = {
                bytes(row.config)[0]
                for row in tx.execute(select(hpke_keys.c.config).where(_USABLE))
            }
            free = [number for number in range(256) if number not in taken]
            if not free:
                raise ServiceError(
                    "all 256 HPKE key ids are in use: wait until retired keys are destroyed"
                )
            # The next id in turn, so that an id is reused as late as possible.
            turn = len(tx.execute(select(hpke_keys.c.config)).all()) % 256
            keypair = HPKEKeypair.generate(min(free, key=lambda number: (number - turn) % 256))
            sealed = self._database.sealer.seal(keypair.private_key(), _TABLE, keypair.config)
            tx.execute(
                hpke_keys.insert().values(
                    config=keypair.config, created=self._clock.now(), private_key=sealed
                )
            )
        self._invalidate()
        return keypair.config

    def _invalidate(self) -> None:
        with self._lock:
            self._loaded = None

    def publish(self, config: bytes) -> None:
        """Record that a config is in the log: devices use it from now on, and the others retire."""
        now = self._clock.now()
        with self._database.write() as tx:
            published = tx.execute(
                update(hpke_keys)
                .where(hpke_keys.c.config == config, _USABLE)
                .where(hpke_keys.c.published.is_(None))
                .values(published=now)
            )
            if not published.rowcount:
                query = select(hpke_keys.c.created).where(hpke_keys.c.config == config, _USABLE)
                if tx.scalar(query) is None:
                    raise InvalidInput("publish() takes a config that generate() returned")
                return
            tx.execute(
                update(hpke_keys)
                .where(hpke_keys.c.config != config, hpke_keys.c.published.is_not(None))
                .where(hpke_keys.c.retired.is_(None))
                .values(retired=now)
            )

    def entry(self, config: bytes, sign: Callable[[], bytes]) -> bytes:
        """Return a key's log entry: signed once, and the same bytes every time.

        A second entry, with other times, could be logged after the next key's and revive this one.
        """
        own = hpke_keys.c.config == config
        with self._database.write() as tx:
            query = select(hpke_keys.c.entry).where(own).with_for_update()
            known = tx.scalar(query)
            if known is None:
                known = sign()
                tx.execute(update(hpke_keys).where(own).values(entry=known))
        return bytes(known)

    def own_configs(self) -> list[bytes]:
        """List the encoded configs of all keys ever generated, destroyed ones too."""
        return self._configs(order=hpke_keys.c.created)

    def unpublished(self) -> list[bytes]:
        """List configs that are not known to be in the log; after a crash these are submitted."""
        return self._configs(hpke_keys.c.published.is_(None), _USABLE, order=hpke_keys.c.created)

    def published(self) -> list[bytes]:
        """List the configs that `hpke_config` serves, the newest first."""
        return self._configs(_CURRENT, _USABLE, order=hpke_keys.c.published.desc())

    def _configs(self, *which: ColumnElement[bool], order: ColumnElement[Any]) -> list[bytes]:
        query = select(hpke_keys.c.config).where(*which).order_by(order, hpke_keys.c.config)
        with self._database.read() as tx:
            return [bytes(config) for config in tx.scalars(query)]

    def list_keys(self) -> list[KeyStatus]:
        """List every key ever generated, the newest first."""
        alive = _USABLE.label("alive")
        times = (hpke_keys.c.created, hpke_keys.c.published, hpke_keys.c.retired)
        query = select(hpke_keys.c.config, *times, alive).order_by(hpke_keys.c.created.desc())
        with self._database.read() as tx:
            return [
                KeyStatus(
                    config=bytes(row.config),
                    created=row.created,
                    published=row.published,
                    retired=row.retired,
                    alive=bool(row.alive),
                )
                for row in tx.execute(query)
            ]

    def current_since(self) -> int | None:
        """Return when the current key was published; None without one."""
        with self._database.read() as tx:
            return tx.scalar(
                select(hpke_keys.c.published)
                .where(_CURRENT)
                .order_by(hpke_keys.c.published.desc())
                .limit(1)
            )

    def keypairs(self) -> list[HPKEKeypair]:
        """Return the key pairs that still open reports."""
        with self._lock:
            self._refresh(1)
            return list(self._keypairs.values())

    def usable_ids(self, config_ids: bytes) -> frozenset[int]:
        """Return the ids of usable key pairs, read again if one of `config_ids` is unknown."""
        with self._lock:
            self._refresh(_RELOAD_SECONDS)
            if not self._usable.issuperset(config_ids):
                # At most once a second: a made-up id must not cost a query each time.
                self._refresh(1)
            return self._usable

    def _refresh(self, seconds: int) -> None:
        now = self._clock.now()
        if self._loaded is None or abs(now - self._loaded) >= seconds:
            self._load()
            self._loaded = now

    def _load(self) -> None:
        with self._database.read() as tx:
            rows: Mapping[bytes, bytes] = {
                bytes(row.config): bytes(row.private_key)
                for row in tx.execute(
                    select(hpke_keys.c.config, hpke_keys.c.private_key).where(_USABLE)
                )
            }
        self._keypairs = {
            config: self._keypairs.get(config) or self._open(config, sealed)
            for config, sealed in rows.items()
        }
        self._usable = frozenset(each.config_id for each in self._keypairs.values())

    def _open(self, config: bytes, sealed: bytes) -> HPKEKeypair:
        private = self._database.sealer.open(sealed, _TABLE, config)
        return HPKEKeypair.from_bytes(config[0], config[_PUBLIC_KEY_AT:], private)

    def destroy_due(self) -> int:
        """Destroy private keys that no report can be sealed to any more. Returns how many."""
        now, margin = self._clock.now(), self._checkpoint_max_age
        needed = exists().where(
            tasks.c.opens < hpke_keys.c.retired + margin,
            tasks.c.ends > now,
        )
        with self._database.write() as tx:
            destroyed = tx.execute(
                update(hpke_keys)
                .where(_USABLE)
                .where(hpke_keys.c.retired <= now - margin)
                .where(~needed)
                .values(private_key=None)
            ).rowcount
            if destroyed and self._database.is_sqlite:
                self._database.log_holds_deleted = True  # the garbage collector empties it
        if destroyed:
            with self._lock:
                self._keypairs.clear()  # what is deleted on disk must not stay in memory
                self._loaded = None
        return destroyed
