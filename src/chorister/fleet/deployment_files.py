"""The files of a new local deployment: keys and tokens, a policy, everybody's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from chorister._native import HPKEKeypair
from chorister.aggregator.secret_files import new_secret, token_digest, write_private
from chorister.canonical import b64url_encode, sha256
from chorister.fleet.sample_policy import PolicyKeys, PolicyTerms, sample_policy

__all__ = ["DeploymentFiles"]


class DeploymentFiles:
    """Writes a new deployment's files."""

    def __init__(
        self,
        folder: Path,
        ports: Mapping[str, int],
        terms: PolicyTerms,
        *,
        devices: int | None,
        margin: str,
    ) -> None:
        self._folder = folder
        self._ports = ports
        self._terms = terms
        self._devices = devices
        self._margin = margin

    def write(self) -> None:
        """Write all of them; secrets are for their owner alone."""
        names = ("registry/log", "leader/cosigning", "helper/cosigning", "analyst/author")
        public = {name: self._signing_key(name) for name in names}
        collector = HPKEKeypair.generate(1)
        self._private(
            "analyst/collector.json",
            json.dumps(
                {
                    "config": b64url_encode(collector.config),
                    "config_id": 1,
                    "public_key": b64url_encode(collector.public_key),
                    "private_key": b64url_encode(collector.private_key()),
                },
                indent=1,
            ),
        )
        keys = PolicyKeys(
            log=public["registry/log"],
            leader=public["leader/cosigning"],
            helper=public["helper/cosigning"],
            author=public["analyst/author"],
            collector=sha256(collector.config).hex(),
            leader_url=self._url("leader"),
            helper_url=self._url("helper"),
        )
        self._text("policy.toml", sample_policy(keys, self._terms))
        shared, to_helper, to_leader = new_secret(), new_secret(), new_secret()
        for role in ("leader", "helper"):
            self._private(f"{role}/at-rest.key", new_secret())
            self._private(f"{role}/verify.key", shared)
        self._private("leader/helper.token", to_helper)
        self._private("analyst/token", to_leader)
        self._registry()
        self._aggregator(
            "leader",
            b64url_encode(collector.config),
            token_digest(to_leader.encode()).hex(),
            'helper_token = "helper.token"\nlinger_milliseconds = 100',
        )
        digest = token_digest(to_helper.encode()).hex()
        self._aggregator(
            "helper",
            b64url_encode(collector.config),
            None,
            f'leader_token_digests = ["{digest}"]',
        )
        self._profile()
        self._console()

    def _signing_key(self, name: str) -> str:
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._private(f"{name}.key", pem.decode().strip())
        return b64url_encode(key.public_key().public_bytes_raw())

    def _private(self, name: str, text: str) -> None:
        write_private(self._folder / name, f"{text}\n".encode())

    def _text(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")

    def _url(self, role: str) -> str:
        return f"http://127.0.0.1:{self._ports[role]}/dap/"

    def _registry(self) -> None:
        self._text(
            "registry/registry.toml",
            'origin = "chorister.local/log"\n'
            'folder = "log"\n'
            'key = "log.key"\n'
            'policies = ["../policy.toml"]\n'
            "interval = 1   # seconds between checkpoints; a minute is usual\n",
        )

    def _aggregator(self, role: str, config: str, token: str | None, own: str) -> None:
        tokens = "" if token is None else f'\ntoken_digests = ["{token}"]'
        self._text(
            f"{role}/{role}.toml",
            f'role = "{role}"\n'
            f'url = "{self._url(role)}"\n'
            f"port = {self._ports[role]}\n"
            f'database = "sqlite:///{role}.db"\n'
            'at_rest_key = "at-rest.key"\n'
            'verify_key = "verify.key"\n'
            'policies = ["../policy.toml"]\n'
            f'registry = "http://127.0.0.1:{self._ports["registry"]}/"\n'
            'cosigning_key = "cosigning.key"\n'
            'head = "head"\n'
            'cosign_every = "1s"\n'
            f"{own}\n\n"
            "[[collectors]]\n"
            'name = "analyst"\n'
            f'hpke_config = "{config}"{tokens}\n',
        )

    def _profile(self) -> None:
        known = "" if self._devices is None else f"devices = {self._devices}\n"
        self._text(
            "analyst/profile.toml",
            '# How an analyst reaches this machine\'s fleet: chorister.connect("profile.toml")\n'
            'policy = "../policy.toml"\n'
            f'registry = "http://127.0.0.1:{self._ports["registry"]}/"\n'
            'author_key = "author.key"\n'
            'collector_key = "collector.json"\n'
            'token = "token"\n'
            'folder = "studies"\n'
            f"margin = {self._margin}\n{known}",
        )

    def _console(self) -> None:
        token = new_secret()
        self._private("console/token", token)
        self._text(
            "console/console.toml",
            f"port = {self._ports['console']}\n"
            'folder = "state"\n\n'
            "[[analysts]]\n"
            'name = "you"\n'
            f'token_digest = "{token_digest(token.encode()).hex()}"\n\n'
            "[[connections]]\n"
            'name = "local"\n'
            'title = "The fleet of this machine"\n'
            'profile = "../analyst/profile.toml"\n\n'
            "[fleet]\n"
            'folder = "../fleet"\n'
            'policy = "../policy.toml"\n',
        )
