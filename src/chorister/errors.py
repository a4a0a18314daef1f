"""Every error that Chorister raises on purpose.

Each message says what is wrong and what to do; attributes carry the values for programs.

    ChoristerError
    ├── InvalidInput        a value from the caller is not allowed
    │   ├── MissingInput        something that is needed was not given yet
    │   └── PolicyError         a policy document is malformed
    ├── BudgetExceeded      a charge that a privacy budget does not allow
    ├── DecodeError         bytes from outside are not what they claim to be
    │   └── RecipeError         a recipe is malformed, or not in canonical form
    │       └── SignatureInvalid    its signature, or the key that made it, is not accepted
    ├── QueryRefused        a policy does not allow this recipe
    ├── StudyError          a study can't continue; nothing more was asked
    │   ├── CohortTooSmall      fewer reports than the minimum cohort: nothing is released
    │   ├── QuestionWithdrawn   the analyst withdrew the question
    │   ├── StudyBusy           another process is asking, or waiting for the same round
    │   ├── ResultPending       the aggregators have not released the result yet: try again
    │   └── WindowOver          too late: the question's window is over
    ├── StoreError          the device's encrypted store can't be opened, read or written
    │   ├── EventRefused        an event does not fit its stream or profile
    │   └── KeyUnavailable      the device's key is missing or unusable
    ├── LedgerError         the budget ledger can't decide now, so the device is silent
    │   ├── HeadUnavailable     the ledger's head can't be read or written
    │   ├── LedgerBehind        entries are missing: a backup was restored, or the ledger deleted
    │   ├── LedgerStale         the newest checkpoint is too old to date a charge
    │   ├── LedgerTampered      an entry of the ledger or the audit log was changed
    │   └── LedgerYoung         the ledger is too new: charges before it may still count
    ├── SandboxFailed       a query has no result; the same words whatever the data
    ├── SandboxUnavailable  no sandbox can be started; nothing was charged
    ├── HPKEError           sealing or opening failed
    │   └── UnsupportedSuite    an HPKE algorithm that Chorister does not support
    ├── LogError            the public log, or a copy of it, is wrong
    │   ├── ProofInvalid        a Merkle proof does not prove what it should
    │   ├── LogSignatureInvalid a signature is missing or wrong
    │   ├── LogForked           two histories: the log does not extend what was seen before
    │   │   └── LogRewound          smaller or earlier than what was seen before
    │   ├── LogWithheld         a file that the checkpoint covers is not available
    │   ├── CheckpointTime      a checkpoint from the future, or too old
    │   ├── WrongList           the current list does not follow from the entries
    │   ├── EntryRefused        an entry that the log's rules do not allow
    │   │   ├── DuplicateEntry      it is already in the log
    │   │   ├── RecipeUnknown       it ends a recipe that is not in the log
    │   │   └── ForeignHPKEConfig   a key under an aggregator's name that is not the aggregator's
    │   ├── QuotaExceeded       too many recipes are open at once, by one author or in all
    │   ├── NotAuthorized       signed by a key that no policy lists for it
    │   ├── HeadLost            a cosigner does not know what it signed last
    │   ├── StorageDamaged      files of a registry or cosigner were changed
    │   └── LogOutdated         written by an earlier version, in another format
    ├── SubmissionRefused   a registry refuses an entry or a cosignature
    ├── ServiceError        a server can't start, continue or be reached
    ├── DeviceBusy          another process is running this device
    ├── Unreachable         a server can't be reached, or its answer can't be understood
    ├── UploadFailed        a leader did not accept a report
    ├── ProblemError        an aggregator refuses a request, with an RFC 9457 problem document
    ├── CollectionInvalid   what a leader returns to a collector is not the task's result
    └── InternalError       a bug in Chorister; nothing was released
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from chorister.clock import utc_text


class ChoristerError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(ChoristerError, ValueError):
    """A value that is not allowed; the message says what is. `field` names it, if it has a name."""

    field: str | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class MissingInput(InvalidInput):
    """Something that is needed was not given yet; a form that is being filled in is not wrong."""


class BudgetExceeded(ChoristerError):
    """A charge that a privacy budget does not allow; nothing was charged."""

    def __init__(self, *, spent: Decimal, asked: Decimal, allowed: Decimal, field: str) -> None:
        super().__init__(_budget_words(spent=spent, asked=asked, allowed=allowed, field=field))
        self.spent = spent  # before this charge
        self.asked = asked  # by this charge
        self.allowed = allowed  # in total
        self.field = field  # which limit: epsilon, delta, …


def _budget_words(*, spent: Decimal, asked: Decimal, allowed: Decimal, field: str) -> str:
    """Name a limit such as "analyses.NAME.fields.FIELD.epsilon" as people do."""
    path, _, what = field.rpartition(".")
    if path == "device":
        whose = "the whole device "
    elif ".fields." in path:
        whose = f"the field {path.partition('.fields.')[2]} "
    elif path.startswith("analyses."):
        whose = f"the analysis {path.removeprefix('analyses.').removesuffix('.budget')} "
    else:
        whose = f"{path} " if path else ""
    if what == "local_epsilon":
        return (
            f"the policy allows {whose}local epsilon {_figure(allowed)} in a report, and this asks "
            f"for {_figure(asked)}: ask with a smaller local epsilon"
        )
    limit = f"{_figure(allowed)} reports" if what == "reports" else f"{what} {_figure(allowed)}"
    return (
        f"the budget allows {whose}{limit} in total, {_figure(spent)} is spent, and this asks for "
        f"{_figure(asked)}: ask for less, or wait until the budget renews"
    )


def _figure(value: Decimal) -> str:
    """A decimal for people, tiny ones as powers of ten."""
    if 0 < value < Decimal("0.0001"):
        return f"{value.normalize():e}"
    return f"{value.normalize():f}"


class PolicyError(InvalidInput):
    """A malformed policy document; `field` is the dotted path of what to correct first.

    `problems` has everything that was found: paths and messages.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        problems: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.why = message
        self.field = field
        self.problems = problems or ((field or "", message),)


class DecodeError(ChoristerError, ValueError):
    """Bytes from outside that do not decode; the message says where."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.why = message
        self.field = field


class RecipeError(DecodeError):
    """A malformed or non-canonical recipe; `field` is the dotted path of what to correct."""


class SignatureInvalid(RecipeError):
    """A recipe without a valid signature by an accepted author key."""


class QueryRefused(ChoristerError):
    """A recipe that a policy does not allow; `check` names the rule, `why` explains it."""

    def __init__(self, *, check: str, why: str, field: str | None = None) -> None:
        super().__init__(f"refused ({check}): {why}")
        self.check = check
        self.why = why
        self.field = field


class StudyError(ChoristerError):
    """A study can't continue. The message says what to do; nothing more was asked."""


class CohortTooSmall(StudyError):
    """Fewer reports than the minimum cohort, or none expected: nothing is released."""

    def __init__(self, message: str, *, reports: int | None, needed: int) -> None:
        super().__init__(message)
        self.reports = reports  # expected or received; None if only the aggregators know
        self.needed = needed


class QuestionWithdrawn(StudyError):
    """The analyst withdrew the question before there was a result: ask another."""


class StudyBusy(StudyError):
    """Another process is asking, or waiting for the same round: let it finish, or stop it."""


class ResultPending(StudyError):
    """The aggregators have not released the result yet, but still can: collect it again later."""


class WindowOver(StudyError):
    """The question's window is over without a result: ask again, with another window."""


class StoreError(ChoristerError):
    """The device's encrypted store can't be opened, read or written; the message says why."""


class EventRefused(StoreError, ValueError):
    """An event that does not fit its stream; nothing was stored. `field` is "stream.field"."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.why = message
        self.field = field


class KeyUnavailable(StoreError):
    """The device's key is missing or unusable; messages never contain the key."""


class LedgerError(ChoristerError):
    """The budget ledger can't decide now: the device stays silent, nothing was charged."""


class HeadUnavailable(LedgerError):
    """The ledger's head can't be read or written, so a restored backup would go unnoticed."""


class LedgerBehind(LedgerError):
    """The ledger lacks entries that it once had; `until` is None if they count forever."""

    def __init__(self, *, missing: str, until: int | None) -> None:
        wait = (
            "ever again, as some budgets never renew"
            if until is None
            else f"until {utc_text(until)}"
        )
        super().__init__(
            f"{missing}: a backup was restored or the ledger deleted, and what was charged since "
            f"is unknown. The device does not answer {wait}: restore the newest ledger"
        )
        self.missing = missing
        self.until = until


class LedgerStale(LedgerError):
    """The newest checkpoint is older than the policy allows, so it can't date a charge."""

    def __init__(self, *, checkpoint: int, now: int) -> None:
        super().__init__(
            f"the newest checkpoint is {now - checkpoint} s behind this device's clock, more than "
            "the policy allows: poll the registry, and check the clock"
        )
        self.checkpoint = checkpoint  # its time
        self.now = now


class LedgerTampered(LedgerError):
    """An entry of the ledger or the audit log was changed after it was written."""

    def __init__(self, message: str, *, sequence: int) -> None:
        super().__init__(f"entry {sequence}: {message}; restore the newest copy of the ledger")
        self.why = message
        self.sequence = sequence


class LedgerYoung(LedgerError):
    """A new ledger is silent for the policy's `min_ledger_age`, which ends at `until`."""

    def __init__(self, *, until: int) -> None:
        super().__init__(
            "the ledger is new, and charges to an earlier one may still count: the device does not "
            f"answer until {utc_text(until)}"
        )
        self.until = until


class SandboxFailed(ChoristerError):
    """A query has no result. The cause stays hidden: what depends on data stays in the sandbox.

    The agent reports OOV, at the time drawn before the query ran.
    """

    def __init__(self) -> None:
        super().__init__("the query has no result in the sandbox; the device reports OOV")


class SandboxUnavailable(ChoristerError):
    """No sandbox can be started on this system; noticed before a recipe is charged."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no sandbox can be started ({why}): a device needs a Python interpreter that it can "
            "run as a separate process"
        )
        self.why = why


class HPKEError(ChoristerError):
    """HPKE sealing or opening failed: the key is wrong, or the bytes were altered."""


class UnsupportedSuite(HPKEError, ValueError):
    """An HPKE suite other than X25519, HKDF-SHA256, AES-128-GCM."""


class LogError(ChoristerError):
    """The public log is wrong; nothing that depends on it may continue."""


class ProofInvalid(LogError):
    """A Merkle proof does not prove what it should: fetch it again, from another mirror."""


class LogSignatureInvalid(LogError):
    """A required signature is missing or does not verify; the message says whose."""


class LogForked(LogError):
    """The log shows a history that does not extend the one seen before.

    `evidence` has the two checkpoints, each signed by the log, which prove the fork.
    """

    def __init__(self, message: str, *, evidence: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.evidence = evidence


class LogRewound(LogForked):
    """A checkpoint that is smaller or earlier than one already accepted."""


class LogWithheld(LogError):
    """A file that the checkpoint covers is missing, or is not the right file."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CheckpointTime(LogError):
    """A checkpoint too old to rely on, or from the future: compare clocks, then retry."""

    def __init__(self, message: str, *, time: int, now: int) -> None:
        super().__init__(message)
        self.time = time
        self.now = now


class WrongList(LogError):
    """The current list is not the checkpoint's, or does not follow from the entries."""


class EntryRefused(LogError):
    """An entry that the log's rules do not allow at its position."""


class DuplicateEntry(EntryRefused):
    """The same statement is already in the log, at `index`."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class RecipeUnknown(EntryRefused):
    """The end of a recipe that is not in the log."""


class ForeignHPKEConfig(EntryRefused):
    """An HPKE config under an aggregator's name that is not its own: don't cosign, alert."""


class QuotaExceeded(LogError):
    """Too many recipes are open at once: end some, or wait until they close."""


class NotAuthorized(LogError):
    """A valid signature by a key that no policy lists for what it signed."""


class HeadLost(LogError):
    """A cosigner does not know what it signed last, and therefore signs nothing.

    The operator decides: create a new head for a log that was never cosigned before, or adopt the
    newest checkpoint that is known to carry the cosignature.
    """


class StorageDamaged(LogError):
    """Files of a registry or a cosigner were changed or lost: restore them."""


class LogOutdated(LogError):
    """A log, or a cosigner's head, that an earlier version of Chorister wrote in another format."""


class SubmissionRefused(ChoristerError):
    """A registry refuses an entry or a cosignature; `problem` is the RFC 9457 type."""

    def __init__(self, message: str, *, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


class ServiceError(ChoristerError):
    """A server can't start, continue or be reached; the message says what to change."""


class DeviceBusy(ChoristerError):
    """Another process is running this device: let it finish, or stop it."""


class Unreachable(ChoristerError):
    """A server can't be reached, or its answer can't be understood: try again later."""


class UploadFailed(ChoristerError):
    """A leader did not accept a report; unless `final`, the same bytes are sent again later."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class ProblemError(ChoristerError):
    """An aggregator, this one or a peer, refuses a request.

    `problem` is one of DAP's error types (`dap.draft.Problem`), or None if DAP does not define the
    refusal, as with a missing credential: then the HTTP `status` says it all.
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
    """What a leader returned to a collector is not the task's result: don't use any of it."""


class InternalError(ChoristerError, RuntimeError):
    """A bug in Chorister: please report it. The computation was discarded."""
