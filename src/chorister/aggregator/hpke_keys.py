"""An aggregator's HPKE keys: made, published in the log, replaced, destroyed.

A key is used by devices once it is in the log (`publish`), which retires the one before. A retired
key still opens what was sealed to it: a device may hold a checkpoint as old as its policy permits,
and a report waits until its window ends. When neither is possible any more the private key is
destroyed; its public half stays, because the log is checked against all that were ever made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import exists, select, update

from chorister._native import HPKEKeypair
from chorister.aggregator.database import Database
from chorister.aggregator.schema import hpke_keys, tasks
from chorister.clock import Clock
from chorister.errors import InvalidInput, ServiceError

__all__ = ["KeyRing", "KeyStanding"]

_PUBLIC_KEY_AT: Final = 9  # HpkeConfig: id, kem, kdf, aead, length of the key, the key
_TABLE: Final = "hpke_keys"
_RELOAD: Final = 60  # seconds after which another process' changes are seen in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyStanding:
    """How far one key is; times in POSIX seconds."""

    config: bytes
    created: int
    published: int | None  # since when devices use it
    retired: int | None  # since when they use the next one
    alive: bool  # whether its private half still exists

    @property
    def state(self) -> str:
        """In a word."""
        if not self.alive:
            return "destroyed"
        if self.published is None:
            return "waiting"
        return "in use" if self.retired is None else "retired"


class KeyRing:
    """All keys of one aggregator. Private keys lie sealed in the database."""

    def __init__(self, database: Database, clock: Clock, *, checkpoint_max_age: int) -> None:
        """`checkpoint_max_age`: the longest that a served policy lets devices rely on a list."""
        self._database = database
        self._clock = clock
        self._checkpoint_max_age = checkpoint_max_age
        self._lock = threading.Lock()
        self._keypairs: dict[bytes, HPKEKeypair] = {}
        self._living: frozenset[int] = frozenset()
        self._loaded: int | None = None

    def generate(self) -> bytes:
        """Make a key pair; its config is to be published in the log, then here (`publish`)."""
        with self._database.write() as connection:
            taken = {
                bytes(row.config)[0]
                for row in connection.execute(
                    select(hpke_keys.c.config).where(hpke_keys.c.private_key.is_not(None))
                )
            }
            free = [number for number in range(256) if number not in taken]
            if not free:
                raise ServiceError("256 HPKE keys are alive: publish and retire before making more")
            # The next one in turn, so that an id comes back as late as possible.
            made = connection.execute(select(hpke_keys.c.config)).all()
            turn = len(made) % 256
            keypair = HPKEKeypair.generate(min(free, key=lambda number: (number - turn) % 256))
            sealed = self._database.sealer.seal(keypair.private_key(), _TABLE, keypair.config)
            connection.execute(
                hpke_keys.insert().values(
                    config=keypair.config, created=self._clock.now(), private_key=sealed
                )
            )
        self._forget()
        return keypair.config

    def _forget(self) -> None:
        with self._lock:
            self._loaded = None

    def publish(self, config: bytes) -> None:
        """The config is in the log: devices use it from now on, and the others retire."""
        now = self._clock.now()
        with self._database.write() as connection:
            published = connection.execute(
                update(hpke_keys)
                .where(hpke_keys.c.config == config, hpke_keys.c.private_key.is_not(None))
                .where(hpke_keys.c.published.is_(None))
                .values(published=now)
            )
            if not published.rowcount:
                alive = hpke_keys.c.private_key.is_not(None)
                query = select(hpke_keys.c.created).where(hpke_keys.c.config == config, alive)
                if connection.scalar(query) is None:
                    raise InvalidInput("publish() takes a config that generate() made")
                return
            connection.execute(
                update(hpke_keys)
                .where(hpke_keys.c.config != config, hpke_keys.c.published.is_not(None))
                .where(hpke_keys.c.retired.is_(None))
                .values(retired=now)
            )

    def entry(self, config: bytes, sign: Callable[[], bytes]) -> bytes:
        """The log entry of a key: signed the first time, and the same bytes ever after.

        A second one, with other times, could be logged after the next key's and bring this back.
        """
        own = hpke_keys.c.config == config
        with self._database.write() as connection:
            query = select(hpke_keys.c.entry).where(own).with_for_update()
            known = connection.scalar(query)
            if known is None:
                known = sign()
                connection.execute(update(hpke_keys).where(own).values(entry=known))
        return bytes(known)

    def own_configs(self) -> Collection[bytes]:
        """The encoded configs of all keys ever made, destroyed ones too."""
        query = select(hpke_keys.c.config).order_by(hpke_keys.c.created)
        with self._database.read() as connection:
            return [bytes(row.config) for row in connection.execute(query)]

    def unpublished(self) -> list[bytes]:
        """Made, but not known to be in the log: a start after a crash goes on with these."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(hpke_keys.c.config)
                .where(hpke_keys.c.published.is_(None), hpke_keys.c.private_key.is_not(None))
                .order_by(hpke_keys.c.created)
            )
            return [bytes(row.config) for row in rows]

    def published(self) -> list[bytes]:
        """What `hpke_config` shows: the current config, the newest first."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(hpke_keys.c.config)
                .where(hpke_keys.c.published.is_not(None), hpke_keys.c.retired.is_(None))
                .where(hpke_keys.c.private_key.is_not(None))
                .order_by(hpke_keys.c.published.desc(), hpke_keys.c.config)
            )
            return [bytes(row.config) for row in rows]

    def listing(self) -> list[KeyStanding]:
        """Every key ever made, the newest first; for operators."""
        alive = hpke_keys.c.private_key.is_not(None).label("alive")
        times = (hpke_keys.c.created, hpke_keys.c.published, hpke_keys.c.retired)
        query = select(hpke_keys.c.config, *times, alive).order_by(hpke_keys.c.created.desc())
        with self._database.read() as connection:
            return [
                KeyStanding(
                    config=bytes(row.config),
                    created=row.created,
                    published=row.published,
                    retired=row.retired,
                    alive=bool(row.alive),
                )
                for row in connection.execute(query)
            ]

    def current_since(self) -> int | None:
        """Since when the current key is in use; None without one. For whoever rotates."""
        with self._database.read() as connection:
            return connection.scalar(
                select(hpke_keys.c.published)
                .where(hpke_keys.c.published.is_not(None), hpke_keys.c.retired.is_(None))
                .order_by(hpke_keys.c.published.desc())
                .limit(1)
            )

    def keypairs(self) -> list[HPKEKeypair]:
        """The living key pairs."""
        with self._lock:
            self._refresh(1)
            return list(self._keypairs.values())

    def living(self, config_ids: bytes) -> frozenset[int]:
        """The ids of living key pairs, looked up anew if any of those given is not among them."""
        with self._lock:
            self._refresh(_RELOAD)
            if not self._living.issuperset(config_ids):
                # At most once a second: an invented id must not cost a look each time.
                self._refresh(1)
            return self._living

    def _refresh(self, seconds: int) -> None:
        now = self._clock.now()
        if self._loaded is None or abs(now - self._loaded) >= seconds:
            self._load()
            self._loaded = now

    def _load(self) -> None:
        with self._database.read() as connection:
            rows: Mapping[bytes, bytes] = {
                bytes(row.config): bytes(row.private_key)
                for row in connection.execute(
                    select(hpke_keys.c.config, hpke_keys.c.private_key).where(
                        hpke_keys.c.private_key.is_not(None)
                    )
                )
            }
        self._keypairs = {
            config: self._keypairs.get(config) or self._open(config, sealed)
            for config, sealed in rows.items()
        }
        self._living = frozenset(each.config_id for each in self._keypairs.values())

    def _open(self, config: bytes, sealed: bytes) -> HPKEKeypair:
        private = self._database.sealer.open(sealed, _TABLE, config)
        return HPKEKeypair.from_bytes(config[0], config[_PUBLIC_KEY_AT:], private)

    def destroy_due(self) -> int:
        """Destroy the private keys that nothing can be sealed to any more; how many."""
        now, margin = self._clock.now(), self._checkpoint_max_age
        needed = exists().where(
            tasks.c.opens < hpke_keys.c.retired + margin,
            tasks.c.ends > now,
        )
        with self._database.write() as connection:
            destroyed = connection.execute(
                update(hpke_keys)
                .where(hpke_keys.c.private_key.is_not(None))
                .where(hpke_keys.c.retired <= now - margin)
                .where(~needed)
                .values(private_key=None)
            ).rowcount
        if destroyed:
            with self._lock:
                self._keypairs.clear()  # what is gone from the disk does not stay in memory
                self._loaded = None
        return destroyed
