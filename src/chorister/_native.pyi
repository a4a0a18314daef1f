"""The native module: Prio3 and HPKE for whole batches, random bits, and the certified bound.

Every call releases the GIL. `threads` is the number of threads to use, 0 for all cores. Messages
are `bytes`; columns of numbers come back as `bytes` of native 64-bit unsigned integers, for
`numpy.frombuffer`. Codes of reports are `ReportError`s, one byte per report, 0 where there is none.
Errors are those of `chorister.errors`.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = bytes | array[int] | NDArray[np.uint8] | NDArray[np.uint64]

class ReportError(IntEnum):
    """DAP, section "Report Errors Registry": what became of one report. Rust has the numbers."""

    BATCH_COLLECTED = ...
    REPORT_REPLAYED = ...
    REPORT_DROPPED = ...
    HPKE_UNKNOWN_CONFIG_ID = ...
    HPKE_DECRYPT_ERROR = ...
    VDAF_VERIFY_ERROR = ...
    TASK_EXPIRED = ...
    INVALID_MESSAGE = ...
    REPORT_TOO_EARLY = ...
    TASK_NOT_STARTED = ...
    OUTDATED_CONFIG = ...

@final
class Prio3:
    """A Prio3 instance for two aggregators (crate `prio`)."""

    @staticmethod
    def multihot_count_vec(
        length: int, max_weight: int, *, chunk_length: int | None = None
    ) -> Prio3:
        """Bounded reports: `length` bits of which at most `max_weight` are one, verified."""
    @staticmethod
    def sum_vec(length: int, max_measurement: int, *, chunk_length: int | None = None) -> Prio3:
        """Plain reports: `length` numbers of 0 to `max_measurement`, verified."""
    @staticmethod
    def histogram(length: int, *, chunk_length: int | None = None) -> Prio3: ...
    @staticmethod
    def count() -> Prio3: ...
    @staticmethod
    def sum(max_measurement: int) -> Prio3: ...
    @property
    def algorithm_id(self) -> int: ...
    @property
    def chunk_length(self) -> int:
        """The crate's optimum, unless another was asked for."""
    @property
    def length(self) -> int:
        """The number of entries of a result."""
    def shard(self, ctx: bytes, measurement: Numbers, nonce: bytes) -> tuple[bytes, bytes, bytes]:
        """Public share, leader's and helper's input share. The measurement is uint8 or uint64."""
    def zero(self) -> bytes:
        """The aggregate share of no report."""
    def merge(self, shares: Sequence[bytes]) -> bytes:
        """The sum of aggregate shares of one aggregator."""
    def add_counts(self, share: bytes, counts: Numbers) -> bytes:
        """Adds public numbers to an aggregate share: noise, drawn by `sample_binomials`."""
    def unshard(
        self, leader_share: bytes, helper_share: bytes, *, count: int, noise_trials: int = 0
    ) -> bytes:
        """The entries of the result as uint64.

        Raises DecodeError where an entry exceeds what `count` reports and twice `noise_trials` can
        add up to: the shares are then of different batches.
        """

@final
class HPKEKeypair:
    """A recipient's keys for X25519, HKDF-SHA256, AES-128-GCM. Never prints the private one."""

    @staticmethod
    def generate(config_id: int) -> HPKEKeypair: ...
    @staticmethod
    def from_bytes(config_id: int, public_key: bytes, private_key: bytes) -> HPKEKeypair:
        """Raises HPKEError where the keys are not a pair."""
    @property
    def config_id(self) -> int: ...
    @property
    def config(self) -> bytes:
        """The encoded `HpkeConfig`, to publish."""
    @property
    def public_key(self) -> bytes: ...
    def private_key(self) -> bytes:
        """The secret itself, to be stored encrypted."""
    def open(self, ciphertext: bytes, info: bytes, aad: bytes) -> bytes:
        """Opens an encoded `HpkeCiphertext`."""

@final
class TaskBinding:
    """What binds reports to one DAP task."""

    def __init__(
        self, vdaf: Prio3, *, context: bytes, aad: bytes, leader_info: bytes, helper_info: bytes
    ) -> None:
        """Takes the VDAF's application context, the start of the associated data, HPKE infos."""
    def seal_reports(
        self,
        measurements: Numbers,
        *,
        report_ids: bytes,
        time: int,
        leader_config: bytes,
        helper_config: bytes,
        threads: int = 0,
    ) -> list[bytes]:
        """Shards and seals one `Report` for each 16-byte id; measurements one behind the other."""
    def leader_initialize(
        self,
        verify_key: bytes,
        keys: Sequence[HPKEKeypair],
        reports: bytes | list[bytes],
        *,
        rejected: bytes | None = None,
        threads: int = 0,
    ) -> LeaderJob:
        """Begins a job with encoded `Report`s; `rejected` holds codes of those to leave out.

        A list has whole reports in each of its pieces.
        """
    def helper_initialize(
        self,
        verify_key: bytes,
        keys: Sequence[HPKEKeypair],
        verify_inits: bytes,
        *,
        rejected: bytes | None = None,
        threads: int = 0,
    ) -> tuple[bytes, Aggregated]:
        """Verifies encoded `VerifyInit`s; returns the `VerifyResp`s and what was added up."""

@final
class LeaderJob:
    """A leader's job that waits for the helper. Kept in memory: after a crash it starts again."""

    @property
    def verify_inits(self) -> bytes: ...
    @property
    def errors(self) -> bytes: ...
    def finish(self, verify_resps: bytes, *, threads: int = 0) -> Aggregated:
        """Adds up what both found valid, once.

        Raises DecodeError, and waits on, where the answer is not to this job.
        """

@final
class Aggregated:
    """The sum of a job's verified reports at one aggregator."""

    @property
    def share(self) -> bytes:
        """The aggregate share."""
    @property
    def count(self) -> int: ...
    @property
    def checksum(self) -> bytes:
        """XOR of the SHA-256 hashes of the report ids that were added."""
    @property
    def errors(self) -> bytes: ...

@final
class Headers:
    """What the headers of a batch say, in its order."""

    @property
    def count(self) -> int: ...
    @property
    def ids(self) -> bytes:
        """16 bytes a report."""
    @property
    def times(self) -> bytes:
        """uint64 a report, in units of the task's time precision."""
    @property
    def extensions(self) -> bytes:
        """1 where a report has public extensions; none is known, so it will be left out."""
    @property
    def config_ids(self) -> bytes:
        """The HPKE configuration that the reading aggregator's share was sealed to."""
    @property
    def ends(self) -> bytes:
        """uint64 a report: where it ends in the batch."""

def scan_reports(reports: bytes) -> Headers:
    """Checks the framing of encoded `Report`s and returns their headers."""

def scan_verify_inits(verify_inits: bytes) -> Headers:
    """As `scan_reports`, for `VerifyInit`s; also refuses two shares of one report."""

def hpke_seal(config: bytes, info: bytes, aad: bytes, plaintext: bytes) -> bytes:
    """Seals to an encoded `HpkeConfig`; returns an encoded `HpkeCiphertext`."""

def randomize_one_hot(
    indices: Numbers,
    length: int,
    *,
    q_threshold: int,
    h_threshold: int,
    max_weight: int,
    threads: int = 0,
) -> bytes:
    """One randomized one-hot vector for each index (uint8 or uint64), a byte a bit.

    A bit is one with probability `q_threshold` / 2^64, the index's own with `h_threshold` / 2^64,
    all from the operating system's generator; the whole vector is drawn again while its weight
    exceeds `max_weight`.
    """

def random_order(first: int, count: int) -> bytes:
    """The numbers `first` to `first + count - 1` as int64, in an order drawn by the system."""

def sample_binomials(count: int, trials: int, *, threshold: int, threads: int = 0) -> bytes:
    """`count` exact draws of Bin(`trials`, `threshold` / 2^64) as uint64.

    From ChaCha20 with a key of the operating system's generator.
    """

@final
class Chances:
    """The chances of a 1 and a 0 at a device's own and other coordinates: a mechanism's law."""

    def __init__(
        self, *, q: float, not_q: float, h: float, not_h: float, gap: float, replacement: float
    ) -> None:
        """Raises InvalidInput where they contradict each other."""

def exact_epsilon(
    cohort: int, chances: Chances, *, noised: bool, delta: float
) -> tuple[float, float]:
    """Epsilon of one release at `delta`: a witness's lower bound, and the certified upper bound.

    The work is bounded whatever the arguments (`MAX_WORK` in `src/rust/src/bound`), here and below.
    """

def exact_delta(
    cohort: int, chances: Chances, *, noised: bool, epsilon: float
) -> tuple[float, float]:
    """Delta of one release at `epsilon`: a witness's lower bound, and the certified upper bound."""

def witness_delta(cohort: int, chances: Chances, *, noised: bool, epsilon: float) -> float:
    """Delta of the witness's composition: no bound, but for rounding a value that occurs."""

def composition_delta(
    cohort: int,
    chances: Chances,
    *,
    held: int,
    instead: int,
    epsilon: float,
) -> float:
    """Delta of one composition: so many others hold the device's value, and the other one."""

def exact_envelope(
    cohort: int, chances: Chances, *, noised: bool, delta: float
) -> tuple[bytes, bytes]:
    """A curve above every divergence of one coordinate: knots g - 1 and the excess over (1-g)+.

    Both as native doubles.
    """

def renyi_divergence(
    cohort: int,
    chances: Chances,
    *,
    noised: bool,
    order: int,
    witness: bool = False,
) -> float:
    """Certified Renyi divergence of one release, or with `witness` that of one composition."""
