"""A leader and a helper in one process, over the native byte interface."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chorister._native import Aggregated, HPKEKeypair, LeaderJob, Prio3, TaskBinding

LEADER_INFO = b"dap-18 input share\x01\x02"
HELPER_INFO = b"dap-18 input share\x01\x03"


def opaque16(content: bytes) -> bytes:
    return len(content).to_bytes(2, "big") + content


def opaque32(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def header(
    report_id: bytes, public_share: bytes, *, time: int = 7, extensions: bytes = b""
) -> bytes:
    """ReportMetadata and public share."""
    return report_id + time.to_bytes(8, "big") + opaque16(extensions) + opaque32(public_share)


@dataclass(frozen=True)
class NativePair:
    vdaf: Prio3
    context: bytes = b"dap-18" + bytes(32)
    aad: bytes = bytes(32) + b"a task configuration"
    verify_key: bytes = field(default_factory=lambda: os.urandom(32))
    leader: HPKEKeypair = field(default_factory=lambda: HPKEKeypair.generate(1))
    helper: HPKEKeypair = field(default_factory=lambda: HPKEKeypair.generate(2))

    @property
    def task(self) -> TaskBinding:
        return TaskBinding(
            self.vdaf,
            context=self.context,
            aad=self.aad,
            leader_info=LEADER_INFO,
            helper_info=HELPER_INFO,
        )

    def reports(self, measurements: npt.NDArray[np.uint8], *, threads: int = 1) -> list[bytes]:
        return self.task.seal_reports(
            measurements,
            report_ids=os.urandom(16 * len(measurements)),
            time=7,
            leader_config=self.leader.config,
            helper_config=self.helper.config,
            threads=threads,
        )

    def lead(
        self, reports: bytes | list[bytes], *, rejected: bytes | None = None, threads: int = 1
    ) -> LeaderJob:
        return self.task.leader_initialize(
            self.verify_key, [self.leader], reports, rejected=rejected, threads=threads
        )

    def help(
        self, verify_inits: bytes, *, rejected: bytes | None = None, threads: int = 1
    ) -> tuple[bytes, Aggregated]:
        return self.task.helper_initialize(
            self.verify_key, [self.helper], verify_inits, rejected=rejected, threads=threads
        )

    def run(self, reports: bytes, *, threads: int = 1) -> tuple[Aggregated, Aggregated]:
        """One whole job: what the leader and what the helper added up."""
        job = self.lead(reports, threads=threads)
        verify_resps, helped = self.help(job.verify_inits, threads=threads)
        led = job.finish(verify_resps, threads=threads)
        return led, helped

    def result(self, led: Aggregated, helped: Aggregated) -> npt.NDArray[np.uint64]:
        return np.frombuffer(
            self.vdaf.unshard(led.share, helped.share, count=led.count), dtype=np.uint64
        )


def one_hots(length: int, n: int, *, weight: int = 1) -> npt.NDArray[np.uint8]:
    """n measurements with `weight` ones each, at moving places."""
    vectors = np.zeros((n, length), dtype=np.uint8)
    for i in range(n):
        vectors[i, [(i + j) % length for j in range(weight)]] = 1
    return vectors
