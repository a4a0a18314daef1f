"""A registry, a leader and a helper in this process, as real as in the field, with keys of its own.

For rehearsals with real reports: the same applications, databases and messages, without sockets.
Needs the extra `server`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_encode, sha256
from chorister.clock import Clock, SettableClock
from chorister.errors import InvalidInput, ServiceError
from chorister.policy import Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.aggregator.service import Service

__all__ = ["Servers"]

REGISTRY: Final = "https://registry.rehearsal.invalid/"
_PATIENCE: Final = 60.0  # seconds
_CHECKPOINTS: Final = 0.05  # seconds between two


class Servers:
    """All servers of one policy's first pair, open until `close`."""

    def __init__(self, policy: Policy, folder: Path, clock: SettableClock) -> None:
        try:
            from chorister.aggregator.inprocess import InProcessNetwork
            from chorister.registry.app import build_app
            from chorister.registry.config import RegistryConfig
            from chorister.registry.server import open_registry
        except ModuleNotFoundError as error:
            raise InvalidInput(
                f"real reports need {error.name}, which is not installed: "
                'pip install "chorister[analyst,server]"'
            ) from None
        self._folder = folder
        self._clock = clock
        self._keys = {name: Ed25519PrivateKey.generate() for name in ("log", "leader", "helper")}
        self.author = Ed25519PrivateKey.generate()
        self.keypair = HPKEKeypair.generate(1)
        self.token = secrets.token_urlsafe(32)
        self.policy = self._own_policy(policy)
        self._pair = self.policy.aggregators[0]
        self._write_files()
        with contextlib.ExitStack() as stack:
            self.network = stack.enter_context(InProcessNetwork())
            settings = RegistryConfig.load(folder / "registry.toml")
            registry, log = stack.enter_context(open_registry(settings, clock, create=True))
            self.network.serve(REGISTRY, build_app(registry, log.public, interval=_CHECKPOINTS))
            self._services = [self._start(role, clock, stack) for role in ("leader", "helper")]
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop all servers."""
        self._stack.close()

    def await_recipe(self, recipe: Recipe) -> None:
        """Until both aggregators cosigned the recipe, and devices can know their keys."""
        from chorister.dap.task import task_configurations

        wanted = [task.task_id for task in task_configurations(self.policy, recipe)]
        deadline = time.monotonic() + _PATIENCE
        while not all(self._knows(service, wanted) for service in self._services):
            if time.monotonic() > deadline:
                raise ServiceError("the aggregators did not cosign the recipe in time")
            time.sleep(0.05)
            self._clock.advance(1)  # two checkpoints are a second apart

    @staticmethod
    def _knows(service: Service, tasks: list[bytes]) -> bool:
        if service.cosigning is not None:
            service.cosigning.look()
        known = all(service.core.tasks.find(task) is not None for task in tasks)
        return known and bool(service.core.keys.published())

    def _own_policy(self, policy: Policy) -> Policy:
        """The same rules with this world's keys, and one pair of aggregators."""
        tree = policy.model_dump(mode="json", exclude_none=True)
        pair = tree["aggregators"][0]
        tree["log"]["keys"] = [self._public("log")]
        pair["leader"]["cosigning_keys"] = [self._public("leader")]
        pair["helper"]["cosigning_keys"] = [self._public("helper")]
        tree["aggregators"] = [pair]
        tree["device"]["min_ledger_age"] = 1
        author = b64url_encode(self.author.public_key().public_bytes_raw())
        for analysis in tree["analyses"].values():
            analysis.pop("aggregators", None)
            analysis["author_keys"] = [author]
            analysis["collectors"] = [sha256(self.keypair.config).hex()]
        return Policy.load(_toml(_toml_values(tree)).encode())

    def _public(self, name: str) -> str:
        return b64url_encode(self._keys[name].public_key().public_bytes_raw())

    def _write_files(self) -> None:
        tree = _toml_values(self.policy.model_dump(mode="json", exclude_none=True))
        (self._folder / "policy.toml").write_text(_toml(tree), encoding="utf-8")
        for name, key in self._keys.items():
            pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            self._private(f"{name}.key", pem)
        for name in ("at-rest.key", "verify.key", "helper.token"):
            self._private(name, b64url_encode(secrets.token_bytes(32)).encode())
        registry = {
            "origin": self.policy.log.origin,
            "folder": "log",
            "key": "log.key",
            "policies": ["policy.toml"],
        }
        (self._folder / "registry.toml").write_text(_toml(registry), encoding="utf-8")
        for role, url in (("leader", self._pair.leader.url), ("helper", self._pair.helper.url)):
            text = _toml(self._settings(role, url))
            (self._folder / f"{role}.toml").write_text(text, encoding="utf-8")

    def _settings(self, role: str, url: str) -> dict[str, Any]:
        token = (self._folder / "helper.token").read_bytes()
        collector = {
            "name": "analyst",
            "hpke_config": b64url_encode(self.keypair.config),
            "token_digests": [sha256(self.token.encode()).hex()],
        }
        own: dict[str, Any] = (
            {"helper_token": "helper.token", "linger_milliseconds": 20}
            if role == "leader"
            else {"leader_token_digests": [sha256(token).hex()]}
        )
        return {
            "role": role,
            "url": url,
            "database": f"sqlite:///{role}.db",
            "at_rest_key": "at-rest.key",
            "verify_key": "verify.key",
            "policies": ["policy.toml"],
            "registry": REGISTRY,
            "cosigning_key": f"{role}.key",
            "head": f"{role}-head",
            "cosign_every": "1s",
            "collectors": [collector],
            **own,
        }

    def _private(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_bytes(data)

    def _start(self, role: str, clock: Clock, stack: contextlib.ExitStack) -> Service:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.service import Service

        config = load_config(self._folder / f"{role}.toml", {})
        service = Service(config, clock, begin_log=True, transport=self.network)
        stack.callback(service.close)
        self.network.serve(config.url, service.app)
        stack.callback(self.network.withdraw, config.url)
        return service


def _toml_values(tree: dict[str, Any]) -> dict[str, Any]:
    """A policy's JSON as TOML has it: decimals as numbers, durations as text."""

    def walk(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: walk(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        if key in ("epsilon", "delta", "local_epsilon") and isinstance(value, str):
            return Decimal(value)
        if key in _DURATIONS and isinstance(value, int):
            return f"{value}s"
        return value

    found = walk(tree)
    return dict(found) if isinstance(found, dict) else {}


_DURATIONS: Final = frozenset(
    ("period", "min_ledger_age", "checkpoint_max_age", "retention", "shortest", "longest",
     "longest_grace")
)  # fmt: skip


def _toml(tree: Mapping[str, Any]) -> str:
    """As much of TOML as settings and policies need."""
    lines = [f"{json.dumps(key)} = {_toml_value(value)}" for key, value in tree.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Decimal):
        text = f"{value:f}"
        return text if "." in text else f"{text}.0"
    return json.dumps(value)
