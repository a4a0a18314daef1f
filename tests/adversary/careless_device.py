"""A device with secrets, and an analyst who may read one field: `keyboard.ngram`.

Its policy is as careless as a policy can be: every function that a device has is listed. What may
not be read: the other field of the same stream (`perplexity`), a profile whose fields are open to
the analysis but not declared (`user.age`), and one that is not open at all (`user.locale`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorister.clock import SettableClock
from chorister.device.keys import SecretKey
from chorister.device.sandbox import Sandbox
from chorister.device.sandbox.functions import known_functions
from chorister.device.store import EventStore, Snapshot
from chorister.device.verifier import permitted_functions, verify_query
from chorister.errors import QueryRefused, SandboxFailed
from tests.device.asking import ask, choose
from tests.keyboard import ANALYSIS, analysis_at, recipe_with

NAMED = sorted(name for name in known_functions() if name.isidentifier())
POLICY = analysis_at({"functions": NAMED})
READS = {"keyboard": ["ngram"]}
NGRAMS = [f"how are you {i}" for i in range(20)]
PERPLEXITY = 424242.125
AGE = 7777
LOCALE = "zz_hidden"
SECRETS = (str(PERPLEXITY), str(AGE), LOCALE, "perplexity", "age", "locale", "user", "donated")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of an attack."""

    refused: str | None  # by the verifier, before any data, in these words
    rows: list[tuple[Any, ...]] | None  # from the sandbox; None if it failed


class Victim:
    """Answers as a device would, and then once more without its verifier."""

    def __init__(self, folder: Path, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.store = EventStore(
            folder / "events.db", SecretKey(bytes(32)), POLICY, SettableClock(1_794_800_000)
        )
        self.store.opt_in()
        self.store.donate_many(
            "keyboard", [{"ngram": ngram, "perplexity": PERPLEXITY} for ngram in NGRAMS]
        )
        self.store.set_profile("user", {"age": AGE, "locale": LOCALE})

    def snapshot(self) -> Snapshot:
        return self.store.snapshot(READS)

    def choose(self, query: str, *, deadline: float = 20) -> int:
        """What a device would report, were there no verifier."""
        functions = permitted_functions(POLICY.analyses[ANALYSIS])
        return choose(self.sandbox, query, self.snapshot(), functions=functions, deadline=deadline)

    def attack(self, query: str, *, deadline: float = 20) -> Outcome:
        """Let the verifier judge a query; run it whatever it says; no secret may come back."""
        recipe = recipe_with(
            query=query,
            reads=READS,
            group_by=[],
            features=[{"kind": "categories", "column": "x", "values": ["a"]}],
        )
        refused = None
        try:
            verify_query(POLICY, recipe, self.sandbox)
        except QueryRefused as error:
            refused = error.why
        functions = permitted_functions(POLICY.analyses[ANALYSIS])
        try:
            answer = ask(query, self.snapshot(), functions=functions, deadline=deadline)
        except SandboxFailed as error:
            assert error.__cause__ is error.__context__ is None
            return Outcome(refused=refused, rows=None)
        for secret in SECRETS:
            assert secret not in repr(answer.rows), secret
        return Outcome(refused=refused, rows=answer.rows)
