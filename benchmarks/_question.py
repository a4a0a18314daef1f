"""A world for one question: keys, a policy, a log that lists one recipe, and no network."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_encode, sha256
from chorister.device.transport import Answer
from chorister.errors import Unreachable
from chorister.policy import Policy
from chorister.recipe import Recipe, Window, sign
from chorister.transparency.checkpoint import Checkpoint, ListProof
from chorister.transparency.client import PROOF, body_path, list_path
from chorister.transparency.entries import HPKEConfigEntry, ListEntry, RecipeEntry
from chorister.transparency.note import key_name
from chorister.transparency.state import CurrentList, ListedRecipe
from chorister.transparency.tree import Frontier, leaf_hash

EXAMPLE = Path(__file__).parent.parent / "examples" / "keyboard"
REGISTRY = "https://registry.example/log/"
NOW = 1_794_787_200
DAY = 86_400


class QuestionLog:
    """As the transport of a device: the files of a log that asks for 1,000 bins."""

    def __init__(self) -> None:
        self.keys = {
            name: Ed25519PrivateKey.generate() for name in ("log", "leader", "helper", "author")
        }
        self.leader, self.helper = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
        self.policy = self._policy()
        self.files: dict[str, bytes] = {}
        self._log = Frontier()

    def _public(self, name: str) -> str:
        return b64url_encode(self.keys[name].public_key().public_bytes_raw())

    def _policy(self) -> Policy:
        """The keyboard's, with these keys and room for many answers."""
        tree: dict[str, Any] = tomllib.loads(
            (EXAMPLE / "policy.toml").read_text(), parse_float=Decimal
        )
        (analysis,) = tree["analyses"].values()
        analysis["author_keys"] = [self._public("author")]
        tree["log"]["keys"] = [self._public("log")]
        for side in ("leader", "helper"):
            tree["aggregators"][0][side]["cosigning_keys"] = [self._public(side)]
        tree["device"]["min_ledger_age"] = "1s"
        for budget in (tree["device"], analysis["budget"], *analysis["fields"].values()):
            budget |= {"epsilon": 100, "delta": Decimal("0.09"), "reports": 10_000}
        return Policy.model_validate(tree)

    def recipe(self, name: str) -> Recipe:
        """8 cells of age times 125 of words: 1,000 bins."""
        draft = Recipe.draft((EXAMPLE / "recipe.json").read_bytes())
        tree = draft.model_dump(mode="json", exclude_none=True)
        tree["id"] = tree["study"] = name
        tree["participation"] = {"probability": "1", "once_per_study": False}
        tree["features"][1]["prefixes"] = ["see you"]
        tree["features"][1]["vocabulary"] = sorted(f"word{i}" for i in range(122))
        recipe = Recipe.model_validate(tree)
        window = Window(opens=NOW - DAY, closes=NOW + 6 * DAY, ends=NOW + 7 * DAY)
        return recipe.model_copy(update={"window": window})

    def ask(self, *recipes: Recipe, time: int = NOW) -> None:
        """A cosigned checkpoint that lists these recipes and both keys."""
        urls = {
            "leader": self.policy.aggregators[0].leader.url,
            "helper": self.policy.aggregators[0].helper.url,
        }
        configs = [
            HPKEConfigEntry(
                aggregator=key_name(urls[side]), not_before=0, not_after=NOW * 2, config=keys.config
            ).signed(self.keys[side])
            for side, keys in (("leader", self.leader), ("helper", self.helper))
        ]
        author = self.keys["author"]
        bodies = [sign(recipe, author) for recipe in recipes]
        asked = [RecipeEntry.of(body, author) for body in bodies]
        listing = CurrentList.of(
            hpke_configs=[(entry.aggregator, entry.address) for entry in configs],
            recipes=[ListedRecipe.of(entry) for entry in asked],
        )
        last = ListEntry(time=time, digest=listing.digest)
        # The log grows: a device refuses two that differ at the same size.
        before = self._log.extend(leaf_hash(entry.encode()) for entry in (*configs, *asked))
        self._log = before.extend([leaf_hash(last.encode())])
        checkpoint = Checkpoint(
            origin=self.policy.log.origin, size=self._log.size, root=self._log.root
        )
        signed = checkpoint.sign(self.keys["log"])
        for side, url in urls.items():
            signed = signed.with_cosigner(
                checkpoint.cosign(name=key_name(url), key=self.keys[side], time=time)
            )
        proof = ListProof(entry=last, index=before.size, path=before.next_path, signed=signed)
        self.files = {PROOF: proof.encode(), list_path(listing.digest): listing.encode()}
        self.files |= {body_path(entry.address): entry.encode() for entry in configs}
        self.files |= {body_path(sha256(body)): body for body in bodies}

    def get(self, url: str, *, limit: int) -> Answer:
        data = self.files[url.removeprefix(REGISTRY)]
        if len(data) > limit:
            raise Unreachable(f"{url} is too long")
        return Answer(status=200, content_type="", body=data)

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        del headers, body, limit
        raise Unreachable(f"nothing is sent to {url} here")
