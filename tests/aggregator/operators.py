"""Two operators, a registry and an analyst, each with a folder of files: settings, keys, tokens."""

from __future__ import annotations

import socket
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from chorister._native import HPKEKeypair
from chorister.aggregator.config import HelperConfig, LeaderConfig, load_config
from chorister.canonical import WIRE, b64url_encode, sha256
from chorister.dap.task import Task, task_configurations
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.transparency.entries import RecipeEntry
from tests.cli.toml import dumps
from tests.keyboard import changed, recipe_tree
from tests.logworld import ANALYSIS, HELPER, LEADER, entry_of, key, policy_text

REGISTRY = "https://registry.example/"
TOKENS = {name: f"{name}-token-{'0' * 20}" for name in ("leader", "collector", "stranger")}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that this process keeps: nobody gets it by chance before its server listens.

    The descriptor stays open. Its socket does not listen, so that a server may use the same address
    (Linux allows that); until one does, whoever connects is refused.
    """
    with socket.socket() as probe:
        if sys.platform == "linux":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port = int(probe.getsockname()[1])
        if sys.platform == "linux":
            probe.detach()
        return port


@dataclass(frozen=True, kw_only=True)
class OperatorAddresses:
    """Where everybody is found."""

    leader: str = LEADER
    helper: str = HELPER
    registry: str = REGISTRY

    @classmethod
    def local(cls) -> OperatorAddresses:
        """On this machine."""
        leader, helper, registry = (free_port() for _ in range(3))
        return cls(
            leader=f"http://127.0.0.1:{leader}/dap/",
            helper=f"http://127.0.0.1:{helper}/dap/",
            registry=f"http://127.0.0.1:{registry}",
        )


class Operators:
    """Everybody's files, below one folder."""

    def __init__(
        self,
        folder: Path,
        addresses: OperatorAddresses | None = None,
        *,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        """`policy`: changes of the analysis' rules."""
        self.folder = folder
        self.at = addresses or OperatorAddresses()
        self.collector = HPKEKeypair.generate(9)
        self.policy_file = folder / "policy.toml"
        self.policy_file.write_text(self._policy(policy or {}))
        self.policy = Policy.load(self.policy_file)
        for name in ("log", "leader", "helper"):
            pem = key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            self._private(f"{name}.key", pem)
        self._private("at-rest.key", f"{b64url_encode(bytes(range(32)))}\n".encode())
        self._private("verify.key", f"{b64url_encode(bytes(32))}\n".encode())
        self._private("helper.token", f"{TOKENS['leader']}\n".encode())
        changes = settings or {}
        for role in ("leader", "helper"):
            self._write_settings(role, changes.get(role, {}))
        self._write_registry(changes.get("registry", {}))

    def _private(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(data)

    def _policy(self, changes: Mapping[str, Any]) -> str:
        """The keyboard's policy for these URLs and this analyst, with room for small cohorts."""
        text = policy_text().replace(LEADER, self.at.leader).replace(HELPER, self.at.helper)
        tree = tomllib.loads(text, parse_float=Decimal)
        many = {"epsilon": 100, "delta": Decimal("0.01"), "reports": 100}
        analysis = f"analyses/{ANALYSIS}"
        tables = ["device", f"{analysis}/budget"]
        tables += [f"{analysis}/fields/{ref}" for ref in ("keyboard.ngram", "user.age")]
        raised = {f"{table}/{name}": value for table in tables for name, value in many.items()}
        local = {
            f"{analysis}/budget/local_epsilon": 8,
            f"{analysis}/fields/user.age/local_epsilon": 8,
            f"{analysis}/cohort/smallest": 2,
            f"{analysis}/collectors": [self.digest.hex()],
            "device/min_ledger_age": "1s",
        }
        own = {f"{analysis}/{name}": value for name, value in changes.items()}
        return dumps(changed(tree, raised | local | own))

    @property
    def digest(self) -> bytes:
        """The analyst's name in recipes."""
        return sha256(self.collector.config)

    def _write_settings(self, role: str, changes: Mapping[str, Any]) -> None:
        url = getattr(self.at, role)
        collector = {
            "name": "analyst",
            "hpke_config": b64url_encode(self.collector.config),
            "token_digests": [sha256(TOKENS["collector"].encode()).hex()],
        }
        values: dict[str, Any] = {
            "role": role,
            "url": url,
            "database": f"sqlite:///{role}.db",
            "at_rest_key": "at-rest.key",
            "verify_key": "verify.key",
            "policies": ["policy.toml"],
            "registry": self.at.registry,
            "cosigning_key": f"{role}.key",
            "head": f"{role}-head",
            "cosign_every": "1s",
            "collectors": [collector],
        }
        if (port := urlsplit(url).port) is not None:
            values["port"] = port
        if role == "leader":
            values["helper_token"] = "helper.token"  # noqa: S105 (a file)
        else:
            values["leader_token_digests"] = [sha256(TOKENS["leader"].encode()).hex()]
        values |= changes
        self.settings(role).write_text(dumps({k: v for k, v in values.items() if v is not None}))

    def _write_registry(self, changes: Mapping[str, Any]) -> None:
        values = {
            "origin": self.policy.log.origin,
            "folder": "log",
            "key": "log.key",
            "policies": ["policy.toml"],
            "interval": 1,
        }
        (self.folder / "registry.toml").write_text(dumps({**values, **changes}))

    def settings(self, role: str) -> Path:
        return self.folder / f"{role}.toml"

    def leader(self) -> LeaderConfig:
        config = load_config(self.settings("leader"), {})
        assert isinstance(config, LeaderConfig)
        return config

    def helper(self) -> HelperConfig:
        config = load_config(self.settings("helper"), {})
        assert isinstance(config, HelperConfig)
        return config

    def recipe(self, name: str, now: int, changes: Mapping[str, Any] | None = None) -> Recipe:
        """A question about ages to everybody, with little noise, open since an hour."""
        tree = changed(
            recipe_tree(),
            {
                "id": name,
                "collector": self.digest.hex(),
                "query": "SELECT user.age AS age FROM user",
                "reads": {"user": ["age"]},
                "group_by": [],
                "features": [
                    {"kind": "intervals", "column": "age", "edges": ["10", "20", "30", "40"]}
                ],
                "privacy/local_epsilon": "8",
                "privacy/epsilon": "8",
                "privacy/min_cohort": 3,
                "window": {"opens": now - 3600, "closes": now + 43_200, "ends": now + 86_400},
                "participation/probability": "1",
                "participation/once_per_study": False,
                "aggregators": {"leader": self.at.leader, "helper": self.at.helper},
                **(changes or {}),
            },
        )
        return Recipe.model_validate(tree, context=WIRE)

    def entry(self, recipe: Recipe) -> RecipeEntry:
        return entry_of(recipe)

    def task(self, recipe: Recipe, number: int = 0) -> Task:
        """The only task of an ungrouped recipe, in one window."""
        (task,) = task_configurations(self.policy, recipe, [number])
        return task
