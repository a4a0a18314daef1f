"""Every error that Chorister raises on purpose.

Each message says what was wrong and what to do; fields carry the values for programs.

    ChoristerError
    ├── InvalidInput        a caller's value is outside the permitted range
    │   └── PolicyError         a policy document is malformed
    ├── BudgetExceeded      a charge that a privacy budget does not allow
    ├── DecodeError         bytes from outside are not what they claim to be
    │   └── RecipeError         a recipe is malformed, or not in its one canonical form
    │       └── SignatureInvalid    its signature, or the key that made it, is not accepted
    ├── QueryRefused        a policy does not allow this recipe
    ├── StudyError          a study can't go on; nothing more was asked
    │   ├── CohortTooSmall      fewer reports than the minimum cohort: nothing is released
    │   ├── QuestionWithdrawn   the analyst took the question back
    │   └── WindowOver          too late: a question's window has passed
    ├── StoreError          the device's encrypted store can't be opened, read or written
    │   ├── EventRefused        an event that does not fit its stream or profile
    │   └── KeyUnavailable      the device's key can't be had, or is not fit to be used
    ├── LedgerError         the budget ledger can't decide now, so the device is silent
    │   ├── HeadUnavailable     where the ledger's head is kept can't be read or written
    │   ├── LedgerBehind        entries are missing: a backup was restored, or the ledger deleted
    │   ├── LedgerTampered      entries, or those of the audit log, are not as they were written
    │   └── LedgerYoung         the ledger is too new: whatever was before it may still count
    ├── SandboxFailed       a query gave no result; always the same words, whatever the data
    ├── SandboxUnavailable  no sandbox can be started; nothing was charged
    ├── HPKEError           sealing or opening failed
    │   └── UnsupportedSuite    an HPKE algorithm that Chorister does not speak
    ├── LogError            the public log, or someone's copy of it, is not what it must be
    │   ├── ProofInvalid        a Merkle proof does not show what it claims
    │   ├── LogSignatureInvalid a signature is missing or wrong
    │   ├── LogForked           two histories: the log does not extend what was seen before
    │   │   └── LogRewound          smaller or earlier than what was seen before
    │   ├── LogWithheld         a file that the checkpoint covers can't be had
    │   ├── CheckpointTime      a checkpoint from the future, or too old
    │   ├── WrongList           the current list is not the one that follows from the entries
    │   ├── EntryRefused        an entry that the log's rules do not permit
    │   │   ├── DuplicateEntry      it is in the log already
    │   │   └── ForeignHPKEConfig   a key in an aggregator's name that is not the aggregator's
    │   ├── NotAuthorized       signed, but by a key that no policy lists for it
    │   ├── HeadLost            a cosigner does not know what it signed last
    │   └── StorageDamaged      files of a registry or cosigner are not as they were written
    ├── SubmissionRefused   a registry does not take an entry or a cosignature
    ├── ServiceError        a server can't start or go on, or can't be reached
    ├── DeviceBusy          another process runs this device at the moment
    ├── Unreachable         a server can't be reached, or does not answer as it must
    ├── UploadFailed        a leader did not take a report
    ├── ProblemError        an aggregator refuses a request: RFC 9457's problem document
    ├── CollectionInvalid   what a leader hands a collector is not the task's result
    └── InternalError       a bug in Chorister; nothing was released
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

__all__ = [
    "BudgetExceeded",
    "CheckpointTime",
    "ChoristerError",
    "CohortTooSmall",
    "CollectionInvalid",
    "DecodeError",
    "DeviceBusy",
    "DuplicateEntry",
    "EntryRefused",
    "EventRefused",
    "ForeignHPKEConfig",
    "HPKEError",
    "HeadLost",
    "HeadUnavailable",
    "InternalError",
    "InvalidInput",
    "KeyUnavailable",
    "LedgerBehind",
    "LedgerError",
    "LedgerTampered",
    "LedgerYoung",
    "LogError",
    "LogForked",
    "LogRewound",
    "LogSignatureInvalid",
    "LogWithheld",
    "NotAuthorized",
    "PolicyError",
    "ProblemError",
    "ProofInvalid",
    "QueryRefused",
    "QuestionWithdrawn",
    "RecipeError",
    "SandboxFailed",
    "SandboxUnavailable",
    "ServiceError",
    "SignatureInvalid",
    "StorageDamaged",
    "StoreError",
    "StudyError",
    "SubmissionRefused",
    "Unreachable",
    "UnsupportedSuite",
    "UploadFailed",
    "WindowOver",
    "WrongList",
]


class ChoristerError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(ChoristerError, ValueError):
    """A value outside the permitted range; the message names the range."""


class BudgetExceeded(ChoristerError):
    """A charge that a privacy budget does not allow; nothing was charged."""

    def __init__(self, *, spent: Decimal, asked: Decimal, allowed: Decimal, field: str) -> None:
        super().__init__(
            f"the budget allows {field} {allowed:f} in all, {spent:f} is spent, and this asks for "
            f"{asked:f}: wait until the budget renews, or ask for less"
        )
        self.spent = spent  # before this charge
        self.asked = asked  # by this charge
        self.allowed = allowed  # in all
        self.field = field  # which limit: epsilon, delta, …


class PolicyError(InvalidInput):
    """A policy document that is malformed; `field` is the dotted path of the culprit."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.why = message
        self.field = field


class DecodeError(ChoristerError, ValueError):
    """Bytes from outside that do not decode; the message names the place."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.why = message
        self.field = field


class RecipeError(DecodeError):
    """A recipe that is malformed or not canonical; `field` is the dotted path of the culprit."""


class SignatureInvalid(RecipeError):
    """A recipe whose signature does not verify under any accepted author key."""


class QueryRefused(ChoristerError):
    """A recipe that a policy does not allow; `check` names the rule, `why` says it in words."""

    def __init__(self, *, check: str, why: str, field: str | None = None) -> None:
        super().__init__(f"refused ({check}): {why}")
        self.check = check
        self.why = why
        self.field = field


class StudyError(ChoristerError):
    """A study can't go on: the message says what to do; nothing more was asked."""


class CohortTooSmall(StudyError):
    """Fewer reports than the minimum cohort, or none to be expected: nothing is released."""

    def __init__(self, message: str, *, reports: int | None, needed: int) -> None:
        super().__init__(message)
        self.reports = reports  # expected, or that came; None where only the aggregators know
        self.needed = needed


class QuestionWithdrawn(StudyError):
    """The analyst took the question back before there was a result; ask another."""


class WindowOver(StudyError):
    """A question's window has passed without a result: ask it again, with another window."""


class StoreError(ChoristerError):
    """The device's encrypted store can't be opened, read or written; the message says why."""


class EventRefused(StoreError, ValueError):
    """An event that does not fit; nothing was stored. `field` is its path, "stream.field"."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.why = message
        self.field = field


class KeyUnavailable(StoreError):
    """The device's key can't be had, or is not fit to be used; it never appears in the message."""


class LedgerError(ChoristerError):
    """The budget ledger can't decide now. The device stays silent; nothing was charged."""


class HeadUnavailable(LedgerError):
    """The ledger's head can't be read or written; silence, since a backup could be restored."""


class LedgerBehind(LedgerError):
    """Entries that the ledger once had are missing; `until` is None if they count for ever."""

    def __init__(self, *, missing: str, until: int | None) -> None:
        wait = f"until {until}" if until is not None else "for good, as budgets do not all renew"
        super().__init__(
            f"{missing}: a backup was restored or the ledger deleted, and what was charged since "
            f"is unknown. Nothing is answered {wait} (POSIX seconds); restore the newest ledger"
        )
        self.missing = missing
        self.until = until


class LedgerTampered(LedgerError):
    """An entry of the ledger or of the audit log is not the one that was written there."""

    def __init__(self, message: str, *, sequence: int) -> None:
        super().__init__(f"entry {sequence}: {message}; restore the newest copy of the ledger")
        self.why = message
        self.sequence = sequence


class LedgerYoung(LedgerError):
    """A new ledger is silent for the policy's `min_ledger_age`; `until` is when that ends."""

    def __init__(self, *, until: int) -> None:
        super().__init__(
            f"the ledger is new, and what an earlier one was charged may still count: nothing is "
            f"answered until {until} (POSIX seconds)"
        )
        self.until = until


class SandboxFailed(ChoristerError):
    """A query gave no result. It carries no cause: whatever depends on data stays in the sandbox.

    The agent reports OOV, at the time drawn before the query ran.
    """

    def __init__(self) -> None:
        super().__init__("the query gave no result in the sandbox; the device reports OOV")


class SandboxUnavailable(ChoristerError):
    """No sandbox can be started on this system; found before a recipe is charged."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no sandbox can be started ({why}): a device needs a Python interpreter that it can "
            "run as a process of its own"
        )
        self.why = why


class HPKEError(ChoristerError):
    """HPKE sealing or opening failed: wrong key, or altered bytes."""


class UnsupportedSuite(HPKEError, ValueError):
    """An HPKE suite other than X25519, HKDF-SHA256, AES-128-GCM."""


class LogError(ChoristerError):
    """The public log is not what it must be; nothing that depends on it may go on."""


class ProofInvalid(LogError):
    """A Merkle proof does not show what it claims: ask for another, from another mirror."""


class LogSignatureInvalid(LogError):
    """A signature that has to be there is missing or does not verify; the message says whose."""


class LogForked(LogError):
    """The log shows a history that is not an extension of one seen before.

    `evidence` holds the two checkpoints, each with the log's signature: proof of what it did.
    """

    def __init__(self, message: str, *, evidence: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.evidence = evidence


class LogRewound(LogForked):
    """A checkpoint that is smaller, or earlier, than one already accepted."""


class LogWithheld(LogError):
    """A file that the checkpoint covers is missing, or is not the file of that name."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CheckpointTime(LogError):
    """A checkpoint too old to rely on, or from the future: compare the clocks, then ask again."""

    def __init__(self, message: str, *, time: int, now: int) -> None:
        super().__init__(message)
        self.time = time
        self.now = now


class WrongList(LogError):
    """The current list is not the one that the checkpoint names or that the entries give."""


class EntryRefused(LogError):
    """An entry that the log's rules do not permit where it stands."""


class DuplicateEntry(EntryRefused):
    """What the entry says is in the log already, at `index`."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class ForeignHPKEConfig(EntryRefused):
    """An HPKE config in an aggregator's name that is not its own: do not cosign, raise alarm."""


class NotAuthorized(LogError):
    """A good signature by a key that no policy lists for what it signed."""


class HeadLost(LogError):
    """A cosigner that does not know what it signed last, and therefore signs nothing.

    Its operator decides: create a new head for a log never cosigned before, or adopt the newest
    checkpoint that is known to carry its cosignature.
    """


class StorageDamaged(LogError):
    """Files of a registry or a cosigner are not as they were written: restore them."""


class SubmissionRefused(ChoristerError):
    """A registry does not take an entry or a cosignature; `problem` is its RFC 9457 type."""

    def __init__(self, message: str, *, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


class ServiceError(ChoristerError):
    """A server can't start, go on or be reached; the message says what to change."""


class DeviceBusy(ChoristerError):
    """Another process runs this device at the moment: let it finish, or stop it."""


class Unreachable(ChoristerError):
    """A server that can't be reached, or whose answer can't be read: try again later."""


class UploadFailed(ChoristerError):
    """A leader did not take a report; unless `final`, the same bytes are sent again later."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class ProblemError(ChoristerError):
    """An aggregator refuses a request, this one or a peer.

    `problem` is a token of DAP's error types (`dap.draft.Problem`), or None where the refusal is
    none of DAP's, such as a missing credential: then the HTTP `status` says it all.
    """

    def __init__(
        self,
        problem: str | None,
        detail: str,
        *,
        status: int = 400,
        task_id: bytes | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(f"{problem or f'HTTP status {status}'}: {detail}")
        self.problem = problem
        self.detail = detail  # for people
        self.status = status  # 400 to 599
        self.task_id = task_id
        self.extra = dict(extra or {})  # further members of the problem document


class CollectionInvalid(ChoristerError):
    """What a leader handed a collector is not the task's result; nothing of it may be used."""


class InternalError(ChoristerError, RuntimeError):
    """A bug in Chorister. Whatever was being computed was thrown away; please report it."""
