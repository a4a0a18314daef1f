"""The files of a local deployment: keys and tokens, a policy, and the settings of every server.

    policy.toml                 what every device of this deployment allows
    registry/ leader/ helper/   settings and keys: each folder is what one operator would have
    analyst/                    a profile for `chorister.connect`, with its keys and token
    console/                    the console's settings, and the token to sign in with

`chorister up` and the demo write them for servers on this machine, `rehearse(mode="reports")` for
servers in its own process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from chorister.canonical import b64url_encode, sha256
from chorister.fleet.people import AREAS, COMMUTES, VOCABULARY
from chorister.key_files import (
    new_secret,
    token_digest,
    write_collector_key,
    write_private,
    write_signing_key,
)
from chorister.policy import Policy
from chorister.policy.model import DURATION_FIELDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where the servers of a deployment are reached."""

    registry: str
    leader: str
    helper: str
    ports: Mapping[str, int] | None = None  # to listen on; None where nothing listens

    @classmethod
    def on_this_machine(cls, ports: Mapping[str, int]) -> Addresses:
        urls = {role: f"http://127.0.0.1:{port}/" for role, port in ports.items()}
        return cls(
            registry=urls["registry"],
            leader=f"{urls['leader']}dap/",
            helper=f"{urls['helper']}dap/",
            ports=ports,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyKeys:
    """The public keys that a policy lists, in base64url or hex, and both aggregators' URLs."""

    log: str
    leader: str
    helper: str
    author: str
    collector: str
    leader_url: str
    helper_url: str


class DeploymentFiles:
    """Writes the files of a new deployment: first the keys, then the policy and all settings."""

    def __init__(self, folder: Path, addresses: Addresses) -> None:
        self._folder = folder
        self._addresses = addresses
        self._collector_config = ""
        for name in ("registry", "leader", "helper", "analyst"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    def write_keys(self) -> PolicyKeys:
        """Create all keys and tokens; return what the policy has to list."""
        shared = new_secret()
        for role in ("leader", "helper"):
            self._secret(f"{role}/at-rest.key", new_secret())
            self._secret(f"{role}/verify.key", shared)
        self._secret("leader/helper.token", new_secret())
        self._secret("analyst/token", new_secret())
        collector = write_collector_key(self._folder / "analyst" / "collector.json")
        self._collector_config = b64url_encode(collector)
        return PolicyKeys(
            log=write_signing_key(self._folder / "registry" / "log.key"),
            leader=write_signing_key(self._folder / "leader" / "cosigning.key"),
            helper=write_signing_key(self._folder / "helper" / "cosigning.key"),
            author=write_signing_key(self._folder / "analyst" / "author.key"),
            collector=sha256(collector).hex(),
            leader_url=self._addresses.leader,
            helper_url=self._addresses.helper,
        )

    def write_settings(
        self,
        policy: str,
        *,
        batch_delay_milliseconds: int = 100,
        devices: int | None = None,
        margin: str = "0.8",
    ) -> None:
        """Write the policy, and the settings of everybody but the console.

        `devices` and `margin` go into the analyst's profile, for planning.
        """
        self._text("policy.toml", policy)
        origin = Policy.load(policy.encode()).log.origin
        self._text(
            "registry/registry.toml",
            f'origin = "{origin}"\n'
            'folder = "log"\n'
            'key = "log.key"\n'
            'policies = ["../policy.toml"]\n'
            "interval = 1   # seconds between checkpoints; a minute is usual\n",
        )
        self._aggregator(
            "leader",
            self._addresses.leader,
            f'helper_token = "helper.token"\nbatch_delay_milliseconds = {batch_delay_milliseconds}',
            f'\ntoken_digests = ["{self._digest("analyst/token")}"]',
        )
        self._aggregator(
            "helper",
            self._addresses.helper,
            f'leader_token_digests = ["{self._digest("leader/helper.token")}"]',
            "",
        )
        known = "" if devices is None else f"devices = {devices}\n"
        self._text(
            "analyst/profile.toml",
            '# How an analyst connects to this fleet: chorister.connect("profile.toml")\n'
            'policy = "../policy.toml"\n'
            f'registry = "{self._addresses.registry}"\n'
            'author_key = "author.key"\n'
            'collector_key = "collector.json"\n'
            'token = "token"\n'
            'folder = "studies"\n'
            f"margin = {margin}\n{known}",
        )

    def write_console(self, port: int) -> None:
        """Write the console's settings, and the token to sign in with."""
        (self._folder / "console").mkdir(mode=0o700, exist_ok=True)
        self._secret("console/token", new_secret())
        self._text(
            "console/console.toml",
            f"port = {port}\n"
            'folder = "state"\n\n'
            "[[analysts]]\n"
            'name = "you"\n'
            f'token_digest = "{self._digest("console/token")}"\n\n'
            "[[connections]]\n"
            'name = "local"\n'
            'title = "Devices on this machine"\n'
            'profile = "../analyst/profile.toml"\n\n'
            "# Initial values of the console's forms, for the people of this sample.\n"
            f"[connections.suggestions]\n{_suggestions()}\n"
            "[fleet]\n"
            'folder = "../fleet"\n'
            'policy = "../policy.toml"\n',
        )

    def _aggregator(self, role: str, url: str, own: str, tokens: str) -> None:
        ports = self._addresses.ports
        self._text(
            f"{role}/{role}.toml",
            f'role = "{role}"\n'
            f'url = "{url}"\n'
            + ("" if ports is None else f"port = {ports[role]}\n")
            + f'database = "sqlite:///{role}.db"\n'
            'at_rest_key = "at-rest.key"\n'
            'verify_key = "verify.key"\n'
            'policies = ["../policy.toml"]\n'
            f'registry = "{self._addresses.registry}"\n'
            'cosigning_key = "cosigning.key"\n'
            'head = "head"\n'
            'cosign_every = "1s"\n'
            f"{own}\n\n"
            "[[collectors]]\n"
            'name = "analyst"\n'
            f'hpke_config = "{self._collector_config}"{tokens}\n',
        )

    def _digest(self, token: str) -> str:
        return token_digest((self._folder / token).read_bytes().strip()).hex()

    def _secret(self, name: str, text: str) -> None:
        write_private(self._folder / name, f"{text}\n".encode())

    def _text(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")


def _suggestions() -> str:
    """What to ask the sample's people, so that the first answer shows something."""
    words = {
        "user.age": "10 to 90 by 10",
        "user.score": "0 to 100 by 10",
        "user.area": "\n".join(AREAS),
        "user.commute": "\n".join(COMMUTES),
        "visits.latitude": "42 to 52 by 1",
        "visits.longitude": "-5 to 9 by 1",
        "keyboard.text": "\n".join(VOCABULARY),
        "map": "-5, 42, 9, 52",
    }
    return "".join(f'"{name}" = {json.dumps(text)}\n' for name, text in words.items())


# --- Policies -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTerms:
    """What differs between the sample policies of the demo and of `chorister up`."""

    reports: int
    """Reports of one device per analysis."""
    epsilon: str
    """Their total epsilon per analysis."""
    device_epsilon: str
    device_reports: int
    longest_window: str
    period: str | None = None
    """After which budgets renew; None: never."""


_HEAD: Final = """\
# What the devices of this machine allow. It ships with each of them; no server can change it.
#
# One person runs both aggregators here: there is NO protection against whoever runs this machine.
# In production, leader and helper belong to two different operators.

version = 1
name = "local"

[log]
keys = ["{keys.log}"]
origin = "chorister.local/log"
checkpoint_max_age = "1h"

[[aggregators]]
name = "local"
one_operator = true

[aggregators.leader]
url = "{keys.leader_url}"
cosigning_keys = ["{keys.leader}"]

[aggregators.helper]
url = "{keys.helper_url}"
cosigning_keys = ["{keys.helper}"]

# What all analyses together may cost one device.
[device]
epsilon = {terms.device_epsilon}
delta = 1e-4
reports = {terms.device_reports}
{period}# In production this is days: a new ledger must not mean a new budget.
min_ledger_age = "1s"

[streams.keyboard]
retention = "30d"

[streams.keyboard.fields]
text = {{ type = "text" }}
recipient = {{ type = "text" }}   # no analysis may read it

[streams.visits]
retention = "30d"

[streams.visits.fields]
latitude = {{ type = "real" }}
longitude = {{ type = "real" }}

[profiles.user]
retention = "400d"

[profiles.user.fields]
age = {{ type = "integer" }}
score = {{ type = "real" }}
area = {{ type = "text", group_values = ["city", "suburb", "village"] }}
commute = {{ type = "text" }}
"""

_ANALYSIS: Final = """
[analyses."{name}"]
purpose = "{purpose}"
author_keys = ["{keys.author}"]
collectors = ["{keys.collector}"]
query_class = "fields"
functions = [{functions}]
max_bins = 20_000
{groups}
[analyses."{name}".window]
shortest = "5s"
longest = "{terms.longest_window}"
longest_grace = "1d"

# The same question in many windows; a device answers some of them, each from its budget.
[analyses."{name}".series]
windows = 100
longest = "1d"
answers = {terms.reports}
cells = 400

[analyses."{name}".cohort]
smallest = 20
largest = 1_000_000

[analyses."{name}".budget]
local_epsilon = 8
epsilon = {terms.epsilon}
delta = 1e-5
reports = {terms.reports}
{period}
[analyses."{name}".fields]
"""

_FIELD: Final = (
    '"{field}" = {{ local_epsilon = 8, epsilon = {epsilon}, delta = 1e-5, reports = {reports} }}\n'
)

_ANALYSES: Final[Sequence[tuple[str, str, tuple[str, ...], tuple[str, ...], bool]]] = (
    (
        "keyboard.phrases",
        "Find phrases that many people type, to suggest the next word",
        ("keyboard.text",),
        ("length", "lower", "ngrams", "random", "substr", "words"),
        False,
    ),
    (
        "visits.map",
        "See where many people are, to plan where a service is needed",
        ("visits.latitude", "visits.longitude"),
        ("random",),
        False,
    ),
    (
        "user.profile",
        "Learn how scores, ages and commutes are distributed",
        ("user.age", "user.score", "user.area", "user.commute"),
        ("lower",),
        True,
    ),
)


def sample_policy(keys: PolicyKeys, terms: SampleTerms) -> str:
    """A policy to try everything with, and to change: TOML with comments."""
    period = "" if terms.period is None else f'period = "{terms.period}"\n'
    text = _HEAD.format(keys=keys, terms=terms, period=period)
    for name, purpose, fields, functions, grouped in _ANALYSES:
        text += _ANALYSIS.format(
            name=name,
            purpose=purpose,
            keys=keys,
            terms=terms,
            period=period,
            functions=", ".join(f'"{function}"' for function in functions),
            groups='group_by = ["user.area"]\nmax_cells = 4\n' if grouped else "",
        )
        text += "".join(
            _FIELD.format(field=field, epsilon=terms.epsilon, reports=terms.reports)
            for field in fields
        )
    return text


def with_keys(policy: Policy, keys: PolicyKeys) -> str:
    """The same rules with a deployment's own keys and its one pair of aggregators, as TOML.

    A new ledger may answer after a second.
    """
    tree = policy.model_dump(mode="json", exclude_none=True)
    pair = tree["aggregators"][0]
    tree["log"]["keys"] = [keys.log]
    pair["leader"] |= {"url": keys.leader_url, "cosigning_keys": [keys.leader]}
    pair["helper"] |= {"url": keys.helper_url, "cosigning_keys": [keys.helper]}
    tree["aggregators"] = [pair]
    tree["device"]["min_ledger_age"] = 1
    for analysis in tree["analyses"].values():
        analysis.pop("aggregators", None)
        analysis["author_keys"] = [keys.author]
        analysis["collectors"] = [keys.collector]
    lines = [f"{json.dumps(key)} = {_toml(value, key)}" for key, value in tree.items()]
    return "\n".join(lines) + "\n"


_DECIMALS: Final = frozenset(("epsilon", "delta", "local_epsilon"))


def _toml(value: Any, key: str = "") -> str:  # noqa: ANN401 (any JSON)
    """A policy's JSON value as TOML: decimals become numbers, durations text."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v, k)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if key in _DECIMALS and isinstance(value, str):
        text = f"{Decimal(value):f}"
        return text if "." in text else f"{text}.0"
    if key in DURATION_FIELDS and isinstance(value, int):
        return f'"{value}s"'
    return json.dumps(value)
