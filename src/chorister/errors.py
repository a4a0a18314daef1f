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
    ├── HPKEError           sealing or opening failed
    │   └── UnsupportedSuite    an HPKE algorithm that Chorister does not speak
    └── InternalError       a bug in Chorister; nothing was released
"""

from __future__ import annotations

from decimal import Decimal

__all__ = [
    "BudgetExceeded",
    "ChoristerError",
    "DecodeError",
    "HPKEError",
    "InternalError",
    "InvalidInput",
    "PolicyError",
    "QueryRefused",
    "RecipeError",
    "SignatureInvalid",
    "UnsupportedSuite",
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


class HPKEError(ChoristerError):
    """HPKE sealing or opening failed: wrong key, or altered bytes."""


class UnsupportedSuite(HPKEError, ValueError):
    """An HPKE suite other than X25519, HKDF-SHA256, AES-128-GCM."""


class InternalError(ChoristerError, RuntimeError):
    """A bug in Chorister. Whatever was being computed was thrown away; please report it."""
