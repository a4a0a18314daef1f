"""The keyboard example, as tests use it: its policy, its recipe, and ways to change them."""

from __future__ import annotations

import copy
import json
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.canonical import WIRE, b64url_decode
from chorister.policy import Policy
from chorister.recipe import Recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "keyboard"
POLICY_FILE = EXAMPLE / "policy.toml"
POLICY = Policy.load(POLICY_FILE)
RECIPE = Recipe.draft((EXAMPLE / "recipe.json").read_bytes())
ANALYSIS = "keyboard.next-word"
# RFC 8037, appendix A.1: a published key, which the example policy lists as author.
AUTHOR = Ed25519PrivateKey.from_private_bytes(
    b64url_decode("nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A")
)
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))

_REMOVE = object()
REMOVE: Any = _REMOVE
"""As a value: take the key away."""


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with the values at slash-separated paths replaced."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *parents, last = path.split("/")
        node: Any = tree
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if value is REMOVE:
            del node[last]
        elif isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    return tree


def recipe_tree() -> dict[str, Any]:
    """The example recipe as JSON values."""
    tree: dict[str, Any] = json.loads(RECIPE.canonical())
    return tree


def recipe_with(**changes: Any) -> Recipe:
    """The example recipe with some top-level fields replaced, validated as if it came in."""
    return Recipe.model_validate(changed(recipe_tree(), changes), context=WIRE)


def recipe_at(changes: dict[str, Any]) -> Recipe:
    """The example recipe with values at paths replaced."""
    return Recipe.model_validate(changed(recipe_tree(), changes), context=WIRE)


def policy_tree() -> dict[str, Any]:
    """The example policy as TOML values."""
    return tomllib.loads(POLICY_FILE.read_text(), parse_float=Decimal)


def policy_at(changes: dict[str, Any]) -> Policy:
    """The example policy with values at paths replaced."""
    return Policy.model_validate(changed(policy_tree(), changes))


def analysis_at(changes: dict[str, Any]) -> Policy:
    """The example policy with values below its analysis replaced."""
    return policy_at({f"analyses/{ANALYSIS}/{path}": value for path, value in changes.items()})
