"""The log's further witnesses: each is shown the newest checkpoint at its own interval.

They vouch that the log is append-only, and for nothing else. A witness that saw a larger log than
ours, or that refuses ours although we sent the proof that it asked for, has seen another log with
our signature: that is an alarm, in the registry's own log and in `/status`, until the process ends.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import anyio

from chorister.errors import ChoristerError, LogForked, ServiceError
from chorister.registry.registry import Registry
from chorister.transparency.witness import Conflict, Witness, WitnessRequest

_log = logging.getLogger("chorister.registry")


@dataclass(kw_only=True, eq=False, slots=True)
class Witnessing:
    """What a registry has to do with one of its witnesses."""

    witness: Witness
    # Seconds.
    interval: float
    # The size that it cosigned last, as far as we know.
    _size: int = field(default=0, init=False)
    alarm: str | None = field(default=None, init=False)

    def ask(self, registry: Registry) -> None:
        """Have the newest checkpoint cosigned; raises if that fails."""
        # Twice: the first answer may be the size from which the proof has to start.
        for _ in range(2):
            signed, proof = registry.to_witness(self._size)
            checkpoint = signed.checkpoint
            if self._size > checkpoint.size:
                # It may have been a mistake: ask again next time, rather than never.
                size, self._size = self._size, 0
                raise LogForked(
                    f"the witness {self.witness.key.name} cosigned a log of {size} entries; "
                    f"ours has {checkpoint.size}"
                )
            found = self.witness.add_checkpoint(WitnessRequest(self._size, proof, signed))
            if not isinstance(found, Conflict):
                self._size = checkpoint.size
                registry.add_witness(checkpoint, found, self.witness.key)
                return
            self._size = found.size
        raise ServiceError(
            f"the witness {self.witness.key.name} cosigned yet another size in the meantime: "
            f"{self._size}"
        )

    def ask_or_report(self, registry: Registry) -> None:
        """The same; failures are logged, and a fork is remembered."""
        try:
            self.ask(registry)
        except LogForked as error:
            self.alarm = str(error)
            _log.critical("the log is forked: %s", error)
        except ChoristerError as error:
            _log.warning("a witness did not cosign: %s", error)
        except Exception:
            # Otherwise the witness would silently never be asked again.
            _log.exception("a witness did not cosign, because of a bug in Chorister")

    async def run(self, registry: Registry) -> None:
        limiter = anyio.CapacityLimiter(1)
        while True:
            await anyio.to_thread.run_sync(self.ask_or_report, registry, limiter=limiter)
            await asyncio.sleep(self.interval)
