"""Reports made by hand from the draft's structures, with what an honest device never puts in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from chorister._native import hpke_seal
from chorister.aggregator.known_tasks import KnownTask
from chorister.codec import Reader, uint16, uint64, vector
from chorister.dap.draft import VERSION_TAG, Role, input_share_info
from tests.aggregator.apps import Apps

Extensions = Sequence[tuple[int, bytes]]


def _extensions(extensions: Extensions) -> bytes:
    encoded = (uint16(kind) + vector(data, prefix=2) for kind, data in extensions)
    return vector(b"".join(encoded), prefix=2)


@dataclass(frozen=True, kw_only=True)
class Crafted:
    """A report in parts."""

    metadata: bytes
    public_share: bytes
    leader: bytes  # sealed
    helper: bytes

    @property
    def report_id(self) -> bytes:
        return self.metadata[:16]

    @property
    def report(self) -> bytes:
        """As a device uploads it."""
        return self.metadata + vector(self.public_share, prefix=4) + self.leader + self.helper

    def verify_init(self, payload: bytes) -> bytes:
        """As a leader sends it on; the payload is its message to the helper."""
        share = self.metadata + vector(self.public_share, prefix=4) + self.helper
        return share + vector(payload, prefix=4)


def craft(
    apps: Apps,
    task: KnownTask,
    *,
    report_id: bytes | None = None,
    time: int | None = None,
    public: Extensions = (),
    leader_private: Extensions = (),
    helper_private: Extensions = (),
    cut: int = 0,
) -> Crafted:
    """Seal a report; `cut` bytes are missing at the end of both input shares."""
    report_id = os.urandom(16) if report_id is None else report_id
    measurement = bytes([1]) + bytes(task.vdaf.length - 1)
    public_share, *shares = task.vdaf.shard(VERSION_TAG + task.task_id, measurement, report_id)
    start = task.interval.start if time is None else time
    metadata = report_id + uint64(start) + _extensions(public)
    aad = b"".join(
        (task.task_id, task.configuration.encode(), metadata, vector(public_share, prefix=4))
    )
    sealed = []
    for role, service, private, share in (
        (Role.LEADER, apps.leader, leader_private, shares[0]),
        (Role.HELPER, apps.helper, helper_private, shares[1]),
    ):
        plaintext = _extensions(private) + vector(share[: len(share) - cut], prefix=4)
        config = service.core.keys.published()[0]
        sealed.append(hpke_seal(config, input_share_info(role), aad, plaintext))
    return Crafted(metadata=metadata, public_share=public_share, leader=sealed[0], helper=sealed[1])


def payload_of(verify_init: bytes) -> bytes:
    """The leader's message in an encoded `VerifyInit`."""
    with Reader(verify_init, "VerifyInit") as reader:
        reader.opaque(24)
        reader.vector(prefix=2)
        reader.vector(prefix=4)
        reader.uint8()
        reader.vector(prefix=2)
        reader.vector(prefix=4)
        return reader.vector(prefix=4)
